"""Checks of a run at setup, prefix sharing in its models, and checks of what overrides return and raise.

Most checks run before models are loaded, the others right after. What Lightning, PyTorch or transformers raise by
themselves is not checked here.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch._dynamo import OptimizedModule

from pl_grouprl.attention import shared_prefix
from pl_grouprl.checks import ParityReport
from pl_grouprl.data.loaders import PromptBatch, TrainPromptLoader
from pl_grouprl.distributed.lost_ranks import check_rank_timeout
from pl_grouprl.models.kernels import is_fused, unfuse_layers
from pl_grouprl.models.policy import PolicySource
from pl_grouprl.models.router_replay import RouterReplay
from pl_grouprl.rollout.engine import declares, length_limits, vocabulary
from pl_grouprl.training.ahead import check_max_staleness
from pl_grouprl.training.micro_batches import SharingOptions
from pl_grouprl.training.optimizer import OptimizerConfig
from pl_grouprl.training.run import Run
from pl_grouprl.types import Prompt, SamplingConfig
from pl_grouprl.utilities.checkpoint_files import refuse_unloadable
from pl_grouprl.utilities.distributed import num_ranks, reduce_over_ranks
from pl_grouprl.utilities.modes import naming_memory
from pl_grouprl.utilities.options import check_options
from pl_grouprl.utilities.progress import PROGRESS

_REWARD = re.compile(r"((val|test)/)?(reward|rewards/.+/mean|.+/(mean|best|maj|pass)@\d+)")
"""Names of metrics of which more is better."""

_SPLITS_OF_STAGE = {"fit": ("train", "val"), "validate": ("val",), "test": ("test",)}


@dataclass(frozen=True)
class GuardOptions:
    """When a run that learns nothing or hangs ends, and what may differ from the checkpoint when it is resumed.

    Attributes:
        max_nonfinite_steps: Abort after this many steps in a row whose loss or gradient is NaN or infinite. A single
            one is skipped on all ranks: weights and optimizer state stay as they are.
        rank_timeout: Seconds after which a frozen or hung rank ends the run, see `RankWatchdog`; no limit if None.
        max_generation_batches: How often prompts are sampled for one batch of rollouts under `dynamic_sampling`,
            including the first time. If groups are still missing then, the batch is smaller.
        max_unrewarded_batches: Abort after this many consecutive batches of rollouts in which no rollout on any rank
            has a reward. Each of them logs a warning and trains nothing.
        allow_changed: Options that are meant to differ from the checkpoint's when a run is resumed, by name or dotted
            prefix: `beta`, `rewards`, `sampling.temperature`, `kl.type`, `trainer`, `data`. Others that decide what is
            optimized are warned of, and with `ckpt_path="last"` must be the same.

    Raises:
        ValueError: If an option is out of range.
    """

    max_nonfinite_steps: int = 10
    rank_timeout: float | None = 1500.0
    max_generation_batches: int = 5
    max_unrewarded_batches: int = 10
    allow_changed: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("max_nonfinite_steps", "max_generation_batches", "max_unrewarded_batches"):
            count = getattr(self, name)
            check_options({f"guards.{name}": (count, count >= 1, "at least 1")})
        check_rank_timeout(self.rank_timeout, "guards.rank_timeout")


# Before models are loaded.


def check_before_loading(module: Any, stage: str) -> None:
    """Raise for options of module and Trainer, and for prompts, that cannot work in a stage.

    Args:
        module: The `RLModule`, attached to its Trainer.
        stage: `fit`, `validate`, `test` or `predict`.

    Raises:
        ValueError: Names the option or the prompt, and what it must be.
        TypeError: If hyperparameters could not be loaded from a checkpoint.
    """
    trainer, prompts = module.trainer, prompts_of_stage(module.trainer, stage)
    if trainer.strategy.root_device.type == "mps":
        raise ValueError("trainer.accelerator is 'mps', which lacks float64, needed for sampling; set it to 'cpu'.")
    module.support.check(module)
    check_quantized(module)
    for split, prompts_of_split in prompts.items():
        module.rewarder.check_columns(prompts_of_split, split)
    _check_prompts(module, stage, limits_of_source(module.policy_source))
    if stage == "fit":
        _check_fit(module)
    train_prompts = prompts.get("train", ()) if stage == "fit" else None
    longest = module.tooling.longest_completion(module.sampling.max_new_tokens, module.max_tokens_per_micro_batch)
    module.micro_batcher.check(trainer.world_size, train_prompts, longest)


def _check_fit(module: Any) -> None:
    trainer, objective, engine = module.trainer, module.objective, type(module.engine).__name__
    data = getattr(trainer, "datamodule", None)
    if not module.automatic_optimization:
        raise ValueError(
            f"{type(module).__name__}.automatic_optimization is False, under which the optimizer would never step; "
            "leave it at True and override optimizer_step or configure_optimizers."
        )
    clip = trainer.gradient_clip_val
    # A negative norm would turn gradients around.
    check_options({"trainer.gradient_clip_val": (clip, clip is None or clip >= 0, "0 (off) or larger, or None")})
    for saved in (module, data):  # by save_hyperparameters
        refuse_unloadable({"hyper_parameters": dict(getattr(saved, "hparams", {}))})
    if num_ranks() not in (1, trainer.world_size):
        raise ValueError(
            f"a process group of {num_ranks()} ranks exists, but the Trainer has {trainer.world_size}, so gradients "
            "would not be averaged over it; pass devices and strategy for all ranks, or destroy the group."
        )
    for callback in trainer.callbacks:
        name, monitor = type(callback).__name__, str(getattr(callback, "monitor", ""))
        if getattr(callback, "mode", None) == "min" and _REWARD.fullmatch(monitor):
            raise ValueError(f"{name}(monitor={monitor!r}) has mode='min', under which the lowest is best; pass 'max'.")
    if module.dynamic_sampling and not hasattr(data, "draw_extra"):
        raise ValueError(
            "dynamic_sampling=True needs more prompts than a batch holds; pass a PromptDataModule as datamodule."
        )
    truncates = module.sampling.is_truncated and declares(module.engine, "truncates_logprobs")
    if objective.needs_sampler_logprobs and truncates:
        correction = objective.importance_sampling
        raise ValueError(
            f"importance_sampling (mode {correction.mode!r}, off_policy_mask_threshold "
            f"{correction.off_policy_mask_threshold}, rollout_rs {correction.rollout_rs!r}) needs the policy's "
            f"log-probabilities, but with top_k, top_p or min_p {engine} reports those of the truncated distribution; "
            "drop these filters from sampling, or sample with HFRolloutEngine."
        )
    if module.max_staleness:
        check_max_staleness(module, module.engine, objective.corrects_sampling)
    _check_updates(trainer, module.num_iterations, module.num_mini_batches)
    module.kl_penalty.check_horizon(getattr(data, "batch_size", None), module.max_rollouts)
    budget, ranks = module.max_tokens_per_micro_batch, module.sharing.sequence_parallel_size
    if (budget is not None or ranks > 1) and objective.policy_loss.compares_tokens:
        rank_zero_warn(
            f"policy_loss {objective.policy_loss.name!r} selects tokens by comparing those of one micro-batch, so "
            f"max_tokens_per_micro_batch={budget} and sharing.sequence_parallel_size={ranks} change its selection."
        )


def _check_updates(trainer: Any, num_iterations: int, num_mini_batches: int) -> None:
    """Raise for more mini-batches than prompts, for steps over several passes, and for epochs that end amid updates."""
    data = trainer.fit_loop._data_source.instance
    batch_size = getattr(data, "batch_size", None)
    if batch_size is not None and num_mini_batches > batch_size:
        raise ValueError(
            f"num_mini_batches is {num_mini_batches} with batch_size={batch_size} prompts; groups are not split, so it "
            f"can be at most {batch_size}."
        )
    accumulated = max(accumulation_schedule(trainer).values())
    if num_iterations > 1 and accumulated > num_mini_batches:
        raise ValueError(
            f"accumulate_grad_batches is {accumulated} with num_mini_batches={num_mini_batches} and "
            f"num_iterations={num_iterations}: one optimizer step would add up several passes over the same "
            "rollouts, which is the same as one pass. Set num_iterations to 1, or accumulate less."
        )
    updates, limit = num_iterations * num_mini_batches, trainer.limit_train_batches
    num_batches = len(data) if isinstance(data, TrainPromptLoader) else getattr(data, "num_train_batches", math.inf)
    used = min(num_batches, limit) if isinstance(limit, int) else num_batches * limit
    if used < math.inf and int(used) % updates and not trainer.fast_dev_run:
        name = "overfit_batches" if trainer.overfit_batches else "limit_train_batches"
        raise ValueError(
            f"trainer.{name} is {limit}, which ends each epoch after {int(used)} batches, amid the {updates} updates "
            f"(num_iterations={num_iterations} x num_mini_batches={num_mini_batches}) of a batch of rollouts; make it "
            f"a multiple of {updates}."
        )


def accumulation_schedule(trainer: Any) -> dict[int, int]:
    """Batches per optimizer step, by the epoch in which that number begins."""
    schedulers = [callback for callback in trainer.callbacks if isinstance(callback, GradientAccumulationScheduler)]
    return schedulers[0].scheduling if schedulers else {0: trainer.accumulate_grad_batches}


def check_quantized(module: Any) -> None:
    """Raise for moments and weights in blocks, and for other optimizers, under a strategy that shards weights.

    bitsandbytes stores 8-bit moments and 4-bit weights in blocks of whole tensors. An optimizer that looks at whole
    matrices would compute something else from flat shards.

    Raises:
        ValueError: Names the option and the strategy.
    """
    if module.support.keeps_plain_weights:
        return
    strategy, remedy = type(module.trainer.strategy).__name__, "omit it, or use a single device or ddp"
    for name, value in vars(module).items():
        if isinstance(value, OptimizerConfig) and value.state_bits < 32:
            raise ValueError(f"state_bits is 8 under {strategy}, which shards weights and moments; {remedy}.")
        if isinstance(value, OptimizerConfig) and value.optim != OptimizerConfig.optim:
            if not module.support.keeps_shapes:
                raise ValueError(
                    f"optim is {value.optim} under {strategy}, which flattens weights; use ModelParallelStrategy "
                    "(strategy/fsdp2.yaml), ddp, or AdamW."
                )
        elif name.endswith("_source") and getattr(value, "quantization", None) is not None:
            name = name.removesuffix("_source")
            raise ValueError(f"{name} has a quantization under {strategy}, which shards weights; {remedy}.")


# Prompts against the limits of model and engine.


def prompts_of_stage(trainer: Any, stage: str) -> dict[str, Sequence[Prompt]]:
    """The prompts of a stage, by split, if the data module has them."""
    prompts = getattr(getattr(trainer, "datamodule", None), "prompts", {})
    return {split: prompts[split] for split in _SPLITS_OF_STAGE.get(stage, ()) if split in prompts}


def limits_of_source(source: PolicySource) -> dict[str, int]:
    """The model's maximum sequence length, if its source knows it before loading; see `length_limits`."""
    load_config = getattr(source, "load_config", None)
    if load_config is not None:
        limit = getattr(load_config().get_text_config(decoder=True), "max_position_embeddings", None)
    else:
        architecture = getattr(source, "architecture", None)
        limit = architecture.get("max_position_embeddings") if isinstance(architecture, dict) else None
    return {} if limit is None else {"max_position_embeddings": int(limit)}


def check_prompts_of_model(module: Any) -> None:
    """Raise for prompts that the loaded policy cannot take; nothing is checked without a running Trainer.

    Raises:
        ValueError: Names the prompt and the limit.
    """
    trainer = module._trainer
    if trainer is not None and trainer.state.fn is not None:
        _check_prompts(module, trainer.state.fn.value, length_limits(module.policy), vocabulary(module.policy))


def _check_prompts(module: Any, stage: str, limits: Mapping[str, int], vocab_size: int | None = None) -> None:
    for split, prompts in prompts_of_stage(module.trainer, stage).items():
        sampling = module.sampling if split == "train" else module.evaluation_sampling
        option = "sampling" if sampling is module.sampling else "evaluation.sampling"
        check_prompts(prompts, split, sampling, option, module.engine, dict(limits), vocab_size)


def check_prompts(
    prompts: Sequence[Prompt],
    split: str,
    sampling: SamplingConfig,
    option: str,
    engine: Any,
    limits: dict[str, int],
    vocab_size: int | None = None,
) -> None:
    """Raise for prompts that leave no room for a completion, or contain tokens outside the vocabulary.

    Unprocessed images and videos count as one token each; the sampler checks those prompts again.

    Args:
        prompts: The prompts of a split.
        split: Name of the split.
        sampling: Its `max_new_tokens` is the longest completion.
        option: Name of the option that sets `sampling`, for the error.
        engine: The rollout engine. Unless it reserves room for all of `max_new_tokens`, room for one token is enough.
        limits: Maximum length of prompt plus completion, by the name of what sets it.
        vocab_size: Size of the vocabulary; None if unknown.

    Raises:
        ValueError: Names the first such prompt's row and length, the limit, the number of such prompts and the remedy.
    """
    new_tokens = sampling.max_new_tokens if declares(engine, "reserves_max_new_tokens") else 1
    if (served := getattr(engine, "max_model_len", None)) is not None:
        limits = limits | {"max_model_len": served}
    for name, limit in limits.items():
        room = limit - new_tokens
        longer = [prompt for prompt in prompts if prompt.num_tokens > room]
        if longer:
            longest, remedy = max(prompt.num_tokens for prompt in longer), f"lower {option}.max_new_tokens"
            if room > 0:
                remedy = f"set max_prompt_length={room} of PromptDataModule (and overlong_prompts), or {remedy}"
            raise ValueError(
                f"{longer[0].where or split}: the prompt has {longer[0].num_tokens} tokens, which with {new_tokens} "
                f"new ones exceeds the model's {name}={limit}, as {len(longer)} of {len(prompts)} prompts of "
                f"`{split}` do (the longest has {longest}); {remedy}."
            )
    for prompt in prompts:
        if vocab_size is not None and max(prompt.token_ids) >= vocab_size:
            raise ValueError(
                f"{prompt.where or split}: the prompt has token id {max(prompt.token_ids)}, but the model has "
                f"vocab_size={vocab_size}; use the tokenizer that belongs to the model."
            )


# Once models are loaded.


def check_groups_fit(module: Any) -> None:
    """Raise if a model with dense masks, for which no group is split, could get a group above the token budget.

    Args:
        module: An `RLModule` whose models share prefixes, attached to its Trainer.

    Raises:
        ValueError: Names the models, the budget, the size of a group and the remedy.
    """
    budget, names = module.max_tokens_per_micro_batch, module.prefix_sharing.dense
    if budget is None or not names or (lengths := _longest_lengths(module)) is None:
        return
    prompt, completion = lengths
    largest = prompt + module.max_rollouts * completion
    if largest > budget:
        raise ValueError(
            f"max_tokens_per_micro_batch is {budget}, but a group may have {largest} tokens (a prompt of {prompt} and "
            f"{module.max_rollouts} rollouts of {completion}), and {' and '.join(names)} cannot be run on a part of a "
            "group: the layers compute with the attention mask themselves. Raise it, lower num_generations or "
            "sampling.max_new_tokens, or set sharing.mode to 'repeated'."
        )


def check_lengths_of_teacher(module: Any) -> None:
    """Raise for training prompts whose rollouts may become longer than the teacher reads.

    Args:
        module: An `RLModule` with a loaded `policy` and `teacher`, attached to its Trainer.

    Raises:
        ValueError: Names the limit, the longest sequence and the remedy.
    """
    if (lengths := _longest_lengths(module)) is None:
        return
    prompt, completion = lengths
    longest = min([prompt + completion, *length_limits(module.policy).values()])
    for name, limit in length_limits(module.teacher).items():
        if longest > limit:
            raise ValueError(
                f"teacher has {name}={limit}, but sequences may have {longest} tokens (a prompt of {prompt} and a "
                f"completion of {completion}); lower PromptDataModule's max_prompt_length or "
                "sampling.max_new_tokens, or use another teacher."
            )


def _longest_lengths(module: Any) -> tuple[int, int] | None:
    """Tokens of the longest training prompt, and of the longest completion; None without training prompts."""
    prompts = prompts_of_stage(module.trainer, module.trainer.state.fn.value).get("train", ())
    if not prompts:
        return None
    budget = module.max_tokens_per_micro_batch
    longest = module.tooling.longest_completion(module.sampling.max_new_tokens, budget)
    return max(prompt.num_tokens for prompt in prompts), longest


def refuse_compiled(modules: Mapping[str, Any]) -> None:
    """Raise for compiled modules.

    Args:
        modules: Modules by name, for the error.

    Raises:
        ValueError: Says what to compile instead.
    """
    for name, part in modules.items():
        compiled = isinstance(part, OptimizedModule) or part._compiled_call_impl is not None
        if compiled or getattr(part, "_compiler_ctx", None) is not None:
            raise ValueError(
                f"{name} is compiled, which is not supported; omit torch.compile({name}) and {name}.compile(). The "
                "policy's decoder layers can be compiled: kernels='compile' of its source."
            )


def refuse_dropout(owner: str, model: Any) -> None:
    """Raise for dropout: old and reference scores are without, so ratios would differ from 1 by chance alone.

    Raises:
        ValueError: If the model is in training mode and has dropout.
    """
    for name, module in model.named_modules() if model.training else ():
        for option, rate in vars(module).items():
            if type(rate) not in (int, float) or not 0 < rate <= 1:
                continue
            if "drop" in option or (option == "p" and "Drop" in type(module).__name__):
                raise ValueError(
                    f"{owner} has dropout ({name}.{option}={rate}), and what it computes with it cannot be compared "
                    "with old values and log-probabilities, computed without; set it to 0 in the model's config "
                    "(disable_dropout=True of PretrainedPolicy does that) or in the module."
                )


class PrefixSharing:
    """Patches models to encode shared tokens once, until closed.

    Args:
        run: The run.
        options: How prefixes are shared; `repeated` patches nothing.

    Attributes:
        dense: Names of the open models that get dense masks, so that their groups cannot be split.
    """

    def __init__(self, run: Run, options: SharingOptions) -> None:
        self._run, self._options = run, options
        self.dense: list[str] = []
        self._contexts = contextlib.ExitStack()

    def open(
        self, models: Mapping[str, Any], reports: Callable[[], list[ParityReport]], *, router_replay: bool = False
    ) -> None:
        """Patch the models of a fit.

        Args:
            models: The transformers models to patch, by name.
            reports: Compares shared with repeated prefixes.
            router_replay: Whether the policy replays the experts that the sampler chose.

        Raises:
            ValueError: If they are to be replayed, but the policy has no experts.
        """
        if router_replay:
            self._contexts.enter_context(RouterReplay(models["policy"]))
        if self._options.mode == "repeated":
            rank_zero_info("sharing.mode is 'repeated': every rollout is encoded with its own copy of the prompt.")
            return
        if self._options.verify:
            memory = naming_memory("the check of shared prefixes before training", "sharing.verify=False skips it")
            with PROGRESS.during("Checking shared prefixes"), memory, self._run.support.forward_context():
                found = reports()
                failed = torch.tensor(float(not all(report.passed for report in found)))
                if any(map(is_fused, models.values())) and reduce_over_ranks(failed, self._run.device, "max"):
                    for model in models.values():
                        unfuse_layers(model)
                    rank_zero_info("All layers run without liger-kernel: sharing prefixes is not exact with it.")
                    found = reports()
            for report in found:
                report.raise_if_failed()
                rank_zero_info(str(report))
        named: dict[str, list[str]] = {}
        for name, model in models.items():
            # Patched for the whole fit, because activation checkpointing repeats the forward during the backward.
            with self._run.support.whole_weights(model):  # entering runs a short forward
                patch = self._contexts.enter_context(shared_prefix(model, self._options.backend))
            if patch.dense:
                self.dense.append(name)
            how = f"{type(model).__name__}, attention backend {self._options.backend!r}: {patch.describe()}"
            named.setdefault(how, []).append(name)
        for how, names in named.items():
            rank_zero_info(f"sharing.mode is 'shared': each prompt is encoded once by {' and '.join(names)} ({how}).")

    def close(self) -> None:
        """Restore the models."""
        self._contexts.close()
        self.dense.clear()


# Overridden methods: what they return and raise.


def check_batch(batch: Any) -> None:
    """Raise for batches that are not prompts for rollouts, such as those of a DataLoader of rows."""
    if not isinstance(batch, PromptBatch):
        raise TypeError(
            f"the loader yields {type(batch).__name__}, not PromptBatch; pass datamodule=PromptDataModule(...), or a "
            "loader of your own that yields each PromptBatch module.updates_per_rollout times in a row."
        )


def is_custom(method: Callable[..., Any]) -> bool:
    """Whether a method, or what replaces it on an instance, is not this package's."""
    return not method.__module__.startswith("pl_grouprl.")


def checked_tensor(value: Any, where: str, *shapes: Sequence[int], boolean: bool = False) -> Tensor:
    """Check a tensor that an override returned; returns it detached and on the CPU.

    Args:
        value: What the override returned.
        where: Class, method and field, for the error.
        *shapes: The shapes it may have.
        boolean: Whether it must be a bool tensor rather than real numbers.

    Raises:
        TypeError: If it is not a tensor, or has the wrong dtype.
        ValueError: If its shape differs, or a value is NaN or infinite.
    """
    kind = "bool" if boolean else "real"
    if not isinstance(value, Tensor) or boolean != (value.dtype == torch.bool) or value.is_complex():
        found = value.dtype if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise TypeError(f"{where} returned {found}; expected a {kind} tensor.")
    if list(value.shape) not in [list(shape) for shape in shapes]:
        expected = " or ".join(str(list(shape)) for shape in shapes)
        raise ValueError(f"{where} returned shape {list(value.shape)}; expected {expected}.")
    value = value.detach().cpu()
    if not value.isfinite().all():
        raise ValueError(f"{where} returned NaN or infinity.")
    return value if boolean or value.is_floating_point() else value.float()


def refuse_stop_iteration(trainer: Any) -> None:
    """Make a StopIteration that a hook raises an error. A second call changes nothing.

    Lightning would take it for the end of the data. It profiles every hook of modules, callbacks, strategies and data
    modules, but not the end of the data.
    """
    profiler = trainer.profiler
    if "profile" in vars(profiler):
        return
    profile = profiler.profile

    def refusing_profile(action: str) -> ExitStack:
        def refuse(kind: Any, error: BaseException | None, traceback: Any) -> None:
            if isinstance(error, StopIteration):
                raise RuntimeError(
                    f"{action} raised StopIteration, as next() does without a default at the end of an iterator."
                ) from error

        # With contextlib's contextmanager, the original StopIteration would be raised again.
        with ExitStack() as stack:
            stack.push(refuse)
            stack.enter_context(profile(action))
            return stack.pop_all()

    profiler.profile = refusing_profile
