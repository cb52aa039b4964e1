"""The side of a module that Lightning sees: policy, tokenizer, prefix sharing, one optimizer, exact loss division."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch._dynamo import OptimizedModule
from torch.optim import Optimizer

from pl_grouprl.algorithms.finite_weights import check_weights
from pl_grouprl.algorithms.optimizer import OptimizerConfig, build_optimizer, parameters_by_part
from pl_grouprl.algorithms.resume import compare_adapters, compare_optimizers
from pl_grouprl.algorithms.saved_state import Attributes, Check, SavedStateModule, Stateful
from pl_grouprl.algorithms.trainer_options import check_trainer
from pl_grouprl.attention.backends.choice import get_backend
from pl_grouprl.models.adapter_layers import adapters_off, has_adapters, leave_parameters_out_of_checkpoints
from pl_grouprl.models.adapters import adapter_options
from pl_grouprl.models.policy import PolicySource, as_policy_source
from pl_grouprl.models.reference import fingerprint, frozen_copy, leave_out_of_checkpoints
from pl_grouprl.packing import Sharing
from pl_grouprl.strategies import StrategySupport, support_of
from pl_grouprl.utilities.arguments import checked_arguments
from pl_grouprl.utilities.garbage import FreezeLoadedObjects
from pl_grouprl.utilities.loggers import prepare_loggers
from pl_grouprl.utilities.memory import naming_memory
from pl_grouprl.utilities.options import check_options
from pl_grouprl.utilities.rank_watchdog import RankWatchdog, check_rank_timeout
from pl_grouprl.utilities.step_log import log_numbers

if TYPE_CHECKING:
    from pl_grouprl.checks import ParityReport

DEFAULT_OPTIMIZER = OptimizerConfig()


@checked_arguments
class PolicyModule(SavedStateModule):
    """Holds the policy and steps its optimizer; knows nothing of rollouts.

    Args:
        policy: Path or hub name of a Hugging Face model, or another source of the initial policy.
        optimizer: AdamW and its schedule.
        sharing: `shared` encodes the prompt of a group once, `repeated` once per rollout.
        attention_backend: Attention over shared prefixes; see `pl_grouprl.attention.shared_prefix`.
        verify: Compare the shared with the repeated prefix once before the first step; a mismatch is an error.
        max_nonfinite_steps: Abort after so many steps in a row whose loss or gradient is NaN or infinite. A single one
            is skipped on all ranks: weights and optimizer state stay as they are.
        rank_timeout: Seconds after which a frozen or hung rank ends the run, see `RankWatchdog`; None waits forever.
        allow_changed: Options that may differ from the checkpoint's when a run is resumed, by name or dotted prefix:
            `beta`, `rewards`, `sampling.temperature`, `trainer`, `data`. All others that decide what is optimised must
            be the same.

    Attributes:
        policy: The model, once `configure_model` has run.
        reference: A frozen copy of the initial policy, where a subclass sets `uses_reference`. It is made again from
            the source on every start and never part of a checkpoint. A policy with an adapter needs none, see
            `reference_policy`; its frozen weights are no part of a checkpoint either.

    Raises:
        ValueError: If an option is out of range.
    """

    uses_reference: bool = False

    def __init__(
        self,
        policy: str | PolicySource,
        *,
        optimizer: OptimizerConfig = DEFAULT_OPTIMIZER,
        sharing: Sharing = "shared",
        attention_backend: str = "auto",
        verify: bool = True,
        max_nonfinite_steps: int = 10,
        rank_timeout: float | None = 1500.0,
        allow_changed: Sequence[str] = (),
    ) -> None:
        super().__init__(allow_changed)
        if sharing not in ("shared", "repeated"):
            raise ValueError(f"sharing is {sharing!r}; pass 'shared' (each prompt encoded once) or 'repeated'.")
        get_backend(attention_backend, "attention_backend")  # an unknown name is an error here
        check_options({"max_nonfinite_steps": (max_nonfinite_steps, max_nonfinite_steps >= 1, "at least 1")})
        check_rank_timeout(rank_timeout)
        self.policy_source: PolicySource = as_policy_source(policy)
        self.rank_timeout = rank_timeout
        self.optimizer_config = optimizer
        self.sharing: Sharing = sharing
        self.attention_backend = attention_backend
        self.verify = verify
        self.max_nonfinite_steps = max_nonfinite_steps
        self.policy: Any = None
        self.reference: Any = None
        self.nonfinite_steps = 0
        leave_out_of_checkpoints(self, "reference")
        self._tokenizer: Any = None
        self._reference_fingerprint: float | None = None
        self._denominators: dict[str, list[float]] = {}
        self._contexts = contextlib.ExitStack()
        self._support: StrategySupport | None = None

    @property
    def support(self) -> StrategySupport:
        """What the run's strategy does its own way: how weights and gradients are reached."""
        if self._support is None or not self._support.serves(self._trainer):
            self._support = support_of(self._trainer)
        return self._support

    @property
    def tokenizer(self) -> Any:
        """The policy's tokenizer, loaded when it is first asked for."""
        if self._tokenizer is None:
            self._tokenizer = self.policy_source.load_tokenizer()
        return self._tokenizer

    def setup(self, stage: str) -> None:
        """Refuse what the strategy cannot honour, before anything is loaded."""
        super().setup(stage)
        check_trainer(self.trainer, stage)
        self.support.check(self)

    def configure_model(self) -> None:
        """Load the models, and shard them where the strategy leaves that to the module. Does nothing again."""
        if self.policy is None:
            self.load_models()
        self.support.shard(self)

    def load_models(self) -> None:
        """Load the policy, and its frozen copy where one is used. A subclass adds models of its own."""
        self.policy = self.policy_source.load().train()
        if has_adapters(self.policy):
            own = self.policy.named_parameters(remove_duplicate=False)
            frozen = [f"policy.{name}" for name, parameter in own if not parameter.requires_grad]
            leave_parameters_out_of_checkpoints(self, frozen)
            self._reference_fingerprint = fingerprint(self.policy, frozen_only=True)
            if self.uses_reference:
                with self.reference_policy():  # refuses what is no base with the adapters off
                    pass
        elif self.uses_reference:
            self.reference = frozen_copy(self.policy)
            self._reference_fingerprint = fingerprint(self.reference)

    def on_fit_start(self) -> None:
        """Check that sharing changes nothing but time, then share prefixes until the end of the fit.

        Raises:
            ValueError: If the module or a part that it trains is compiled, or the Trainer is to clip what nothing is
                left of.
        """
        self._refuse_compiled()
        limits = [config.max_grad_norm for _, config in self.optimized_parts().values()]
        if self.trainer.gradient_clip_val and None not in limits:
            raise ValueError(
                f"trainer.gradient_clip_val is {self.trainer.gradient_clip_val}, but every part has a max_grad_norm of "
                "its own, so it would clip nothing; leave out one of them."
            )
        self._denominators.clear()
        self._contexts.close()  # of a fit that an exception has ended
        if self.sharing == "repeated":
            rank_zero_info("sharing='repeated': every rollout is encoded with its own copy of the prompt.")
            return
        from pl_grouprl.attention import shared_prefix

        if self.verify:
            memory = naming_memory("the check of shared prefixes before training", "verify=False leaves it out")
            with memory, self.trainer.precision_plugin.forward_context():
                reports = self.parity_reports()
            for report in reports:
                report.raise_if_failed()
                rank_zero_info(str(report))
        for model in self.scored_models():
            # In force for the whole fit: activation checkpointing runs the forward again in the backward pass.
            with self.support.whole_weights(model):  # it runs a few tokens
                patch = self._contexts.enter_context(shared_prefix(model, self.attention_backend))
            rank_zero_info(
                f"sharing='shared': {type(model).__name__} encodes each prompt once; attention backend "
                f"{self.attention_backend!r}: {patch.describe()}. prefix/token_ratio says what that saves."
            )

    def parity_reports(self) -> list[ParityReport]:
        """Compare the shared with the repeated prefix on each model that is trained."""
        from pl_grouprl.checks import check_parity

        with self.support.whole_weights(self.policy):
            return [check_parity(self.policy, backend=self.attention_backend, padded_rows=False)]

    def scored_models(self) -> list[Any]:
        """Transformers models that read rollouts in training, each with shared prefixes. A subclass adds its own."""
        return [model for model in (self.policy, self.reference) if model is not None]

    @contextlib.contextmanager
    def reference_policy(self) -> Iterator[Any]:
        """The model to score with as the reference, without gradient: the copy, or the policy with its adapters off.

        The latter is the base, whatever adapter the run began with.
        """
        if self.reference is not None:
            yield self.reference
            return
        with adapters_off(self.policy):
            yield self.policy

    def _refuse_compiled(self) -> None:
        parts = {f"module.{name}": part for name, (part, _) in self.optimized_parts().items()}
        for name, part in {"module": self, **parts}.items():
            compiled = isinstance(part, OptimizedModule) or part._compiled_call_impl is not None
            if compiled or getattr(part, "_compiler_ctx", None) is not None:
                raise ValueError(
                    f"{name} is compiled, which is not supported yet; leave out torch.compile({name}) and "
                    f"{name}.compile(). The policy's decoder layers can be compiled: compile_layers of its source."
                )

    def teardown(self, stage: str) -> None:
        """Restore the models."""
        self._contexts.close()

    def configure_callbacks(self) -> list[Callback]:
        """Prepare the loggers; keep loaded objects out of garbage collection, and watch the ranks."""
        prepare_loggers(self.trainer.loggers)
        watchdogs = [] if self.rank_timeout is None else [RankWatchdog(self.rank_timeout)]
        return [FreezeLoadedObjects(), *watchdogs]

    def optimized_parts(self) -> dict[str, tuple[nn.Module, OptimizerConfig]]:
        """What is trained, by the name of its parameter groups. A subclass with a critic adds it here."""
        return {"policy": (self.policy, self.optimizer_config)}

    def configure_optimizers(self) -> Any:
        """Build one AdamW over all parts."""
        return build_optimizer(self.optimized_parts(), lambda: self.trainer.estimated_stepping_batches)

    def sum_over_ranks(self, values: list[Tensor]) -> list[float]:
        """Add up scalars over all ranks, in one exchange. Every rank passes the same quantities in the same order."""
        stacked = torch.stack([value.detach().to(self.device, torch.float32) for value in values])
        return self.reduce_sums(stacked).tolist()

    def reduce_sums(self, sums: Tensor, reduce_op: str = "sum") -> Tensor:
        """Add up a tensor over all ranks (or take its maximum, with the reduce_op `max`), on the sums' own device."""
        return self.trainer.strategy.reduce(sums.to(self.device), reduce_op=reduce_op).to(sums.device)

    def total_denominators(self, denominators: dict[str, Tensor]) -> None:
        """Add up over all ranks what the losses of the coming passes are divided by; once per step, before `divide`."""
        totals = self.sum_over_ranks(list(denominators.values()))
        for name, total in zip(denominators, totals, strict=True):
            self._denominators.setdefault(name, []).append(total)

    def divide(self, losses: dict[str, tuple[Tensor, Tensor]], weight: float = 1.0) -> Tensor:
        """Divide each part's loss by its denominator of the whole step, and add them up.

        With gradient accumulation by the Trainer the denominator is known after the last micro-batch only. Until then
        the first one's is used; `on_before_optimizer_step` corrects the gradient of the part.

        Args:
            losses: As in `LossTerms`.
            weight: This rank's share, where several compute the same.

        Returns:
            What to differentiate. Ranks average their gradients, so it is multiplied by their number.
        """
        factor = self.trainer.world_size * weight
        parts = [total * (factor / (self._denominators[name][0] or 1.0)) for name, (total, _) in losses.items()]
        return torch.stack([part.to(self.device) for part in parts]).sum()

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Finish the division of accumulated gradients.

        A part is not moved where no token of any rank trains it: momentum would move its weights all the same. The step
        is skipped where a gradient is not finite.
        """
        parts = parameters_by_part(self.optimized_parts())
        for name, denominators in self._denominators.items():
            total, first = sum(denominators), denominators[0] or 1.0
            # Lightning has divided each loss by the number of micro-batches.
            factor = self.trainer.accumulate_grad_batches * first / (total or 1.0)
            if factor != 1:
                self.support.scale(parts[name], factor)
            if total == 0:
                self.support.drop(parts[name])
        self._denominators.clear()
        norms = {name: self.support.norm(own) for name, own in parts.items()}
        norm = self._joint_norm(norms.values())
        of_parts = {f"grad_norm/{name}": value for name, value in norms.items()} if len(norms) > 1 else {}
        log_numbers(self, {"grad_norm": norm, **of_parts})
        (broken_ranks,) = self.sum_over_ranks([~norm.isfinite()])
        if not broken_ranks:
            self.nonfinite_steps = 0
            return
        self.nonfinite_steps += 1
        for own in parts.values():
            self.support.drop(own)
        rank_zero_warn(f"gradient norm is {float(norm)} at step {self.global_step}; the step is skipped.")
        if self.nonfinite_steps >= self.max_nonfinite_steps:
            raise RuntimeError(
                f"{self.nonfinite_steps} steps in a row had a loss or gradient that is not finite "
                f"(max_nonfinite_steps={self.max_nonfinite_steps}); lower the learning rate or clip the gradient "
                "(trainer.gradient_clip_val), and look at the rewards."
            )

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Make the step, and end the run if it leaves NaN or infinity in a weight."""
        super().optimizer_step(*args, **kwargs)
        check_weights(self)

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip parts that have a `max_grad_norm` of their own by it; the others together as the Trainer is told.

        Norms are those of whole gradients, over all ranks' shards of them.
        """
        own_limits = {name: config.max_grad_norm for name, (_, config) in self.optimized_parts().items()}
        rest = []
        for name, parameters in parameters_by_part(self.optimized_parts()).items():
            limit = own_limits[name]
            if limit is None:
                rest += parameters
            else:
                self._clip_norm(parameters, limit)
        if rest and gradient_clip_val:
            clip = self.support.clamp if gradient_clip_algorithm == "value" else self._clip_norm
            clip(rest, float(gradient_clip_val))

    def _clip_norm(self, parameters: Sequence[nn.Parameter], limit: float) -> None:
        norm = self.support.norm(parameters)
        self.support.scale(parameters, (limit / (norm + 1e-6)).clamp(max=1.0))

    def _joint_norm(self, norms: Iterable[Tensor]) -> Tensor:
        return torch.linalg.vector_norm(torch.stack([norm.to(self.device) for norm in norms]))

    def saved_state(self) -> dict[str, Stateful]:
        """Add the count of skipped steps, and what must be as it was: the base, the adapters, the optimizer."""
        return super().saved_state() | {
            "reference_fingerprint": Check(lambda: self._reference_fingerprint, self._compare_reference),
            "adapters": Check(self._adapter_options, compare_adapters),
            "optimizer": Check(self._optimizer_options, self._compare_optimizer),
            "steps": Attributes(self, "nonfinite_steps"),
        }

    def _compare_reference(self, then: float | None, now: float | None) -> None:
        if then is not None and now is not None and abs(then - now) > 1e-6 * abs(then):
            raise ValueError(
                f"policy={self.policy_source!r} gives another model (sum of absolute weights {now}) than the "
                f"checkpoint was trained with ({then}), so the reference, or the base of its adapter, would differ; "
                "restore it or start a new run."
            )

    def _optimizer_options(self) -> dict[str, Any]:
        """Options that an optimizer's state brings along, by part."""
        names = ("learning_rate", "weight_decay", "betas", "eps")
        parts = {} if self.policy is None else self.optimized_parts()
        return {
            f"{part}.{name}": list(value) if isinstance(value := getattr(config, name), tuple) else value
            for part, (_, config) in parts.items()
            for name in names
        }

    def _compare_optimizer(self, then: dict[str, Any], now: dict[str, Any]) -> None:
        if self.is_resumed:
            compare_optimizers(then, now)

    def _adapter_options(self) -> dict[str, dict[str, Any]]:
        """Those of each part that is trained; none before the models are loaded."""
        parts = {} if self.policy is None else self.optimized_parts()
        return {name: adapter_options(part) for name, (part, _) in parts.items()}
