"""Scores rollouts before an update, and runs its micro-batches forward and backward."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from pl_grouprl.distributed.strategies import StrategySupport
from pl_grouprl.models.score import PrefixPass
from pl_grouprl.packing import ScoringBatch
from pl_grouprl.training.buffer import RolloutBuffer
from pl_grouprl.training.checks import check_denominators, check_loss_sums
from pl_grouprl.training.micro_batches import MicroBatch, MicroBatcher, MicroBatchSchedule, dummy_tokens
from pl_grouprl.training.objective import LossAccumulator, LossSums
from pl_grouprl.training.run import Accumulation, Run
from pl_grouprl.utilities.distributed import num_ranks, reduce_over_ranks, sum_over_ranks
from pl_grouprl.utilities.modes import evaluating, nonfinite_parameters
from pl_grouprl.utilities.options import check_options
from pl_grouprl.utilities.text import first_names

# Scores rollouts without gradient: old and reference log-probabilities, values.
#
# Legend: B rollouts, N response tokens of all rollouts, concatenated.

ScoringFunction = Callable[[ScoringBatch], Sequence[Tensor | None]]
"""Takes the rollouts of one decoder call; returns tensors of shape [N, ...] or [B, ...], or None."""


class Scorer:
    """Calls functions on all rollouts of a buffer, in micro-batches like those of an update.

    Args:
        run: The run.
        micro_batcher: Packs the micro-batches.
    """

    def __init__(self, run: Run, micro_batcher: MicroBatcher) -> None:
        self._run = run
        self._micro_batcher = micro_batcher

    def map(
        self, model: nn.Module, buffer: RolloutBuffer, function: ScoringFunction, *, per_rollout: Sequence[int] = ()
    ) -> list[Any]:
        """Call a function on all rollouts. Collective.

        Args:
            model: The model that the function runs; in evaluation mode during the call.
            buffer: The rollouts.
            function: Called once per micro-batch.
            per_rollout: Indices of the returned tensors that are per rollout rather than per token.

        Returns:
            Each tensor for all rollouts, in buffer order, on the CPU; None if the function returned None.
        """
        with self._micro_batcher.naming_memory("scoring, "), evaluating(model), self._run.support.forward_context():
            parts = self._run.call_wrapped(partial(self._map, buffer, function))
        numbers = [number for part_numbers, _ in parts for number in part_numbers]
        columns = enumerate(zip(*(values for _, values in parts), strict=True))
        return [
            None if column[0] is None else buffer.in_order(column, numbers, per_token=place not in per_rollout)
            for place, column in columns
        ]

    def _map(
        self, buffer: RolloutBuffer, function: ScoringFunction
    ) -> list[tuple[tuple[int, ...], list[Tensor | None]]]:
        """The results and rollout numbers of each micro-batch; dummies run and are dropped."""
        results = []
        for micro_batch in self._micro_batcher.for_scoring(buffer):
            if isinstance(micro_batch, MicroBatch):
                values = [None if value is None else value.cpu() for value in function(micro_batch.scoring)]
                if micro_batch.rollout_numbers:
                    results.append((micro_batch.rollout_numbers, values))
        return results


# Runs the micro-batches of one update forward and backward, with the denominators of the whole step.

ComputeLoss = Callable[[MicroBatch], LossSums]
Denominators = Callable[[dict[str, Tensor], dict[str, Any]], Mapping[str, Tensor]]


class Updater:
    """Runs the micro-batches of an update.

    Args:
        run: The run.
        micro_batcher: Packs the micro-batches.
        optimization: Divides their losses.
        compute_loss: Loss sums of a micro-batch.
        loss_denominators: Their denominators, from per-token quantities alone; see `RLModule`.
        owner: Class that has these methods, for errors.
        split_idle: Splits a buffer into rollouts to encode, and those whose loss is 0; returns None, on all ranks
            alike, if `compute_loss` may need all of them.
    """

    def __init__(
        self,
        run: Run,
        micro_batcher: MicroBatcher,
        optimization: Optimization,
        compute_loss: ComputeLoss,
        loss_denominators: Denominators,
        owner: str,
        split_idle: Callable[[RolloutBuffer], tuple[RolloutBuffer, RolloutBuffer] | None] = lambda buffer: None,
    ) -> None:
        self._run = run
        self._micro_batcher = micro_batcher
        self._optimization = optimization
        self._compute_loss, self._loss_denominators, self._owner = compute_loss, loss_denominators, owner
        self._split_idle = split_idle

    def update(
        self, buffer: RolloutBuffer, members: Sequence[int], accumulation: Accumulation
    ) -> tuple[Tensor, dict[str, float]]:
        """Run all micro-batches forward and, except for the last one, backward. All ranks call it together.

        Args:
            buffer: The rollouts with their per-token quantities.
            members: Indices of the groups that are trained.
            accumulation: How this update adds up to an optimizer step.

        Returns:
            The loss of the last micro-batch, to be differentiated by the caller, and the metrics of the update.
        """
        mini_batch = buffer.only(members)
        trained_and_idle = self._split_idle(mini_batch)
        trained = buffer if trained_and_idle is None else trained_and_idle[0]
        schedule = self._micro_batcher.for_update(trained, [i for i in members if trained.groups[i].rollouts])
        has_all = (
            schedule.number == 1 and trained_and_idle is None
        )  # the micro-batch itself then gives the denominators
        expected = None if has_all else self._denominators(mini_batch)
        if expected is not None:
            self._optimization.add_denominators(expected, self._run.device)
        sums = LossAccumulator()
        with self._micro_batcher.naming_memory():
            loss = self._run_schedule(schedule, sums, accumulation, has_all=has_all)
        if trained_and_idle is not None:
            sums.add_denominators(self._denominators(trained_and_idle[1]))
        if expected is not None:
            self._check_denominators(sums, expected)
        device = self._run.device
        metrics = sums.reduced(
            lambda values: sum_over_ranks(values, device), lambda values: reduce_over_ranks(values, device, "max")
        )
        return loss, metrics

    def _run_schedule(
        self, schedule: MicroBatchSchedule, sums: LossAccumulator, accumulation: Accumulation, *, has_all: bool
    ) -> Tensor:
        support = self._run.support
        for number, micro_batch in enumerate(schedule, start=1):
            last = number == schedule.number
            with support.accumulating(self._run, last=last and accumulation.is_last):  # type: ignore[arg-type]
                if isinstance(micro_batch, PrefixPass):
                    # The gradients that its slices left are already divided by the denominators.
                    loss = micro_batch.loss(loss_scale=accumulation.loss_scale)
                else:
                    loss = self._loss(micro_batch, sums, has_all=has_all)
                if last:
                    return loss  # Lightning divides it by accumulate_grad_batches
                if isinstance(micro_batch, MicroBatch):
                    loss = loss / accumulation.mini_batches
                with torch.autocast(self._run.device.type, enabled=False):
                    support.backward(loss)
                del loss, micro_batch  # free the activations before the next forward
        raise AssertionError("unreachable: a schedule has at least one micro-batch")

    def _loss(self, micro_batch: MicroBatch, sums: LossAccumulator, *, has_all: bool) -> Tensor:
        loss_sums = check_loss_sums(self._compute_loss(micro_batch), self._owner)
        scoring, num_tokens = micro_batch.scoring, (0, 0)
        if micro_batch.rollout_numbers:  # not a dummy
            num_tokens = scoring.num_tokens_repeated, scoring.num_tokens_run + scoring.num_prefix_tokens_run
        loss_sums.metrics["prefix/token_ratio"] = torch.tensor(num_tokens[0]), torch.tensor(num_tokens[1])
        device = self._run.device
        if has_all:
            denominators = {name: count for name, (_, count) in loss_sums.losses.items()}
            self._optimization.add_denominators(denominators, device)
        sums.add(loss_sums, micro_batch.weight)
        return self._optimization.divide(loss_sums.losses, device, micro_batch.weight)

    def _denominators(self, buffer: RolloutBuffer) -> dict[str, Tensor]:
        """The denominators of a buffer's rollouts, or of the dummy if there are none."""
        if buffer.rollouts:
            tokens, lengths_E = {name: buffer.joined(name) for name in buffer.values}, buffer.episode_lengths
        else:
            tokens, lengths_E = dummy_tokens(buffer.values), torch.tensor([1])
        index_N = torch.arange(len(lengths_E)).repeat_interleave(lengths_E)
        rollouts = {"rollout_index_N": index_N, "num_rollouts": len(lengths_E)}
        return check_denominators(self._loss_denominators(tokens, rollouts), self._owner)

    def _check_denominators(self, sums: LossAccumulator, expected: Mapping[str, Tensor]) -> None:
        """Refuse a `compute_loss` whose denominators differ from those of `loss_denominators`."""
        if self._micro_batcher.sequence_parallel_size > 1:  # the sums include rows of peers
            return
        for name, count in sums.denominators().items():
            if name not in expected or not math.isclose(
                float(count), float(expected[name]), rel_tol=1e-4, abs_tol=1e-6
            ):
                raise RuntimeError(
                    f"compute_loss of {self._owner} divides {name!r} by {float(count):g}, but "
                    f"loss_denominators returned {expected.get(name)}; override both consistently."
                )


# Stops a run at the first optimizer step that leaves NaN or infinity in the weights.


def check_weights(module: Any) -> None:
    """Check every trained weight after an optimizer step. Collective; all ranks fail together.

    Norms are cheap but may overflow, so individual weights are inspected only if a norm is not finite.

    Args:
        module: An `RLModule`.

    Raises:
        RuntimeError: Names the parameters and the options that may be the cause.
    """
    weights = module.support.weights([parameter for parameter in module.parameters() if parameter.requires_grad])
    norms = torch._foreach_norm([weight for weight in weights if weight.numel()] or [torch.zeros(1)])
    largest = torch.stack([norm.to(module.device, torch.float32) for norm in norms]).max()
    (suspicious,) = sum_over_ranks([~largest.isfinite()], module.device)
    if not suspicious:
        return
    trained = ((name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad)
    broken = nonfinite_parameters(trained, module.device)
    if broken:
        raise RuntimeError(
            f"NaN or infinity in {len(broken)} parameters after optimizer step {module.global_step + 1}: "
            f"{first_names(broken)}. {_cause(module, broken)}"
        )


def _cause(module: Any, broken: list[str]) -> str:
    if module.optimization.nonfinite_steps:
        return "The step was skipped, so they were there before it: check the model or checkpoint the run started from."
    parts = module.optimized_parts()
    configs = {part: config for part, (_, config) in parts.items()}
    affected = {part: config for part, config in configs.items() if any(name.startswith(f"{part}.") for name in broken)}
    options = [
        f"learning_rate={config.learning_rate}, weight_decay={config.weight_decay}, eps={config.eps}, "
        f"max_grad_norm={config.max_grad_norm} of {part}"
        for part, config in (affected or configs).items()
    ]
    trainer = module.trainer
    first = "lower the learning rate first"
    if trainer.precision == "16-true":
        first = "use trainer.precision='bf16-mixed' or 'bf16-true', since an eps below 6e-8 is 0 in float16"
    return (
        f"The gradient was finite, so clipping or the step itself caused them: {first} "
        f"({'; '.join(options)}; trainer.gradient_clip_val={trainer.gradient_clip_val}, "
        f"trainer.precision={trainer.precision!r}). Resume from a checkpoint of an earlier step."
    )


# Optimizer steps: exact denominators, gradient norms, clipping per part, and no step with NaN.

Parts = Mapping[str, Sequence[nn.Parameter]]
"""Trained parameters by the name of their part, such as `policy` and `critic`."""


class Optimization:
    """Divides losses by the denominators of the whole step, and prepares the gradients for the optimizer.

    Args:
        max_nonfinite_steps: Abort after this many consecutive steps with a NaN or infinite gradient.

    Attributes:
        nonfinite_steps: Consecutive steps skipped so far.

    Raises:
        ValueError: If `max_nonfinite_steps` is less than 1.
    """

    def __init__(self, max_nonfinite_steps: int = 10) -> None:
        check_options({"max_nonfinite_steps": (max_nonfinite_steps, max_nonfinite_steps >= 1, "at least 1")})
        self.max_nonfinite_steps = max_nonfinite_steps
        self.nonfinite_steps = 0
        self._denominators: dict[str, list[float]] = {}

    def reset(self) -> None:
        """Forget the denominators of an unfinished step."""
        self._denominators.clear()

    def add_denominators(self, counts: Mapping[str, Tensor], device: torch.device) -> None:
        """Sum the denominators of the coming losses over ranks; call once per mini-batch, before `divide`.

        Args:
            counts: This rank's share, a scalar per part.
            device: Device for communication.
        """
        totals = sum_over_ranks(list(counts.values()), device)
        for name, total in zip(counts, totals, strict=True):
            self._denominators.setdefault(name, []).append(total)

    def divide(self, losses: Mapping[str, tuple[Tensor, Tensor]], device: torch.device, weight: float = 1.0) -> Tensor:
        """Divide each part's loss by its denominator, and add them up.

        If the Trainer accumulates gradients, the denominator of the step is known only after its last mini-batch.
        Until then the first one's is used, and `before_step` corrects the gradients.

        Args:
            losses: As in `LossSums`.
            device: Device of the result.
            weight: This rank's share, if several ranks compute the same micro-batch.

        Returns:
            The loss to differentiate. Ranks average their gradients, so it is multiplied by their number.

        Raises:
            ValueError: If a part has no denominator.
        """
        unknown = [name for name in losses if name not in self._denominators]
        if unknown:
            raise ValueError(
                f"compute_loss returned a loss for {', '.join(map(repr, unknown))}, but loss_denominators returned no "
                "denominator for it; override both for the same parts."
            )
        factor = num_ranks() * weight
        parts = [total * (factor / (self._denominators[name][0] or 1.0)) for name, (total, _) in losses.items()]
        return torch.stack([part.to(device) for part in parts]).sum()

    def before_step(
        self, parts: Parts, support: StrategySupport, *, accumulated: int, device: torch.device, step: int
    ) -> dict[str, Tensor]:
        """Finish the division of accumulated gradients, and drop all gradients if one is not finite.

        A part without a trained token on any rank is left out of the step, because momentum would move its weights.

        Args:
            parts: What the optimizer trains.
            support: Access to the gradients.
            accumulated: Mini-batches per step; Lightning has divided each loss by it.
            device: Device for communication.
            step: The optimizer step, for the warning.

        Returns:
            `grad_norm` and, if there are several parts, `grad_norm/{part}`, before clipping.

        Raises:
            RuntimeError: After `max_nonfinite_steps` skipped steps in a row.
        """
        for name, denominators in self._denominators.items():
            total, first = sum(denominators), denominators[0] or 1.0
            factor = accumulated * first / (total or 1.0)
            if factor != 1:
                support.scale(parts[name], factor)
            if total == 0:
                support.skip_in_next_step(parts[name])
        self._denominators.clear()
        norms = {name: support.norm(parameters) for name, parameters in parts.items()}
        norm = torch.linalg.vector_norm(torch.stack([n.to(device) for n in norms.values()]))
        self._skip_if_broken(norm, parts, support, device, step)
        return {"grad_norm": norm} | ({f"grad_norm/{name}": n for name, n in norms.items()} if len(norms) > 1 else {})

    def _skip_if_broken(
        self, norm: Tensor, parts: Parts, support: StrategySupport, device: torch.device, step: int
    ) -> None:
        (broken_ranks,) = sum_over_ranks([~norm.isfinite()], device)
        if not broken_ranks:
            self.nonfinite_steps = 0
            return
        self.nonfinite_steps += 1
        for parameters in parts.values():
            support.skip_in_next_step(parameters)
        rank_zero_warn(f"gradient norm is {float(norm)} at step {step}; the step is skipped.")
        if self.nonfinite_steps >= self.max_nonfinite_steps:
            raise RuntimeError(
                f"{self.nonfinite_steps} steps in a row had a loss or gradient that is not finite "
                f"(max_nonfinite_steps={self.max_nonfinite_steps}); lower the learning rate or clip the gradient "
                "(trainer.gradient_clip_val), and look at the rewards."
            )


def clip_gradients(
    parts: Parts,
    limits: Mapping[str, float | None],
    support: StrategySupport,
    clip_val: float | None,
    algorithm: str | None,
) -> None:
    """Clip each part that has a limit by its norm; clip the others together, by the Trainer's options.

    Norms are of whole gradients, over all ranks' shards.

    Args:
        parts: What the optimizer trains.
        limits: `max_grad_norm` of each part; None leaves it to the Trainer's options.
        support: Access to the gradients.
        clip_val: `gradient_clip_val` of the Trainer.
        algorithm: `gradient_clip_algorithm`: `value` clamps entries, anything else clips the norm.
    """
    for name, limit in limits.items():
        if limit is not None:
            _clip_norm(parts[name], limit, support)
    rest = [parameter for name, limit in limits.items() if limit is None for parameter in parts[name]]
    if rest and clip_val:
        if algorithm == "value":
            support.clamp(rest, float(clip_val))
        else:
            _clip_norm(rest, float(clip_val), support)


def refuse_clipping_nothing(clip_val: float | None, limits: Iterable[float | None]) -> None:
    """Refuse a `gradient_clip_val` if every part is clipped separately.

    Raises:
        ValueError: With both options.
    """
    if clip_val and None not in limits:
        raise ValueError(
            f"trainer.gradient_clip_val is {clip_val}, but every part has its own max_grad_norm, so it would clip "
            "nothing; leave one of them out."
        )


def _clip_norm(parameters: Sequence[nn.Parameter], limit: float, support: StrategySupport) -> None:
    norm = support.norm(parameters)
    support.scale(parameters, (limit / (norm + 1e-6)).clamp(max=1.0))
