"""Scores rollouts before an update, and runs its micro-batches forward and backward.

`Scorer` runs without gradient, `Updater` with; `Optimization` divides losses by the denominators of the whole step and
prepares the gradients for the optimizer.

Legend: B rollouts, N response tokens of all rollouts, concatenated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from pl_grouprl.distributed.strategies import StrategySupport
from pl_grouprl.models.router_replay import open_replay
from pl_grouprl.models.score import PrefixPass
from pl_grouprl.packing import ScoringBatch
from pl_grouprl.training.buffer import RolloutBuffer
from pl_grouprl.training.micro_batches import MicroBatch, MicroBatcher, dummy_tokens
from pl_grouprl.training.objective import LossAccumulator, LossSums
from pl_grouprl.training.run import Accumulation, Run
from pl_grouprl.types import RolloutGroup
from pl_grouprl.utilities.distributed import num_ranks, reduce_over_ranks, sum_over_ranks
from pl_grouprl.utilities.modes import evaluating, nonfinite_parameters
from pl_grouprl.utilities.text import first_names

ScoringFunction = Callable[[ScoringBatch], Sequence[Tensor | None]]
"""Takes the rollouts of one decoder call; returns tensors of shape [N, ...] or [B, ...], or None."""

ComputeLoss = Callable[[MicroBatch], LossSums]
Denominators = Callable[[dict[str, Tensor], dict[str, Any]], Mapping[str, Tensor]]
Parts = Mapping[str, Sequence[nn.Parameter]]
"""Trained parameters by the name of their part, such as `policy` and `critic`."""


class Scorer:
    """Calls functions on all rollouts of a buffer, in micro-batches like those of an update.

    Args:
        run: The run; its strategy wraps the forward.
        micro_batcher: Packs the micro-batches.
    """

    def __init__(self, run: Run, micro_batcher: MicroBatcher) -> None:
        self._run, self._micro_batcher = run, micro_batcher

    def map(
        self, model: nn.Module, buffer: RolloutBuffer, function: ScoringFunction, *, per_rollout: Sequence[int] = ()
    ) -> list[Any]:
        """Call a function on all rollouts, without gradient. Collective.

        Args:
            model: The model that the function runs; in evaluation mode during the call.
            buffer: The rollouts.
            function: Called once per micro-batch.
            per_rollout: Indices of the returned tensors that are per rollout rather than per token.

        Returns:
            Each tensor for all rollouts, in buffer order, on the CPU; None if the function returned None.
        """
        numbers: list[int] = []
        results: list[list[Tensor | None]] = []

        def run() -> None:
            for micro_batch in self._micro_batcher.for_scoring(buffer):
                if isinstance(micro_batch, PrefixPass):
                    continue  # it ran with the first slice that continues it
                values = [None if value is None else value.cpu() for value in function(micro_batch.scoring)]
                if micro_batch.rollout_numbers:  # not a dummy
                    numbers.extend(micro_batch.rollout_numbers)
                    results.append(values)

        support = self._run.support
        with self._micro_batcher.naming_memory("scoring, "), evaluating(model), support.forward_context():
            support.call(self._run, "call", run)  # type: ignore[arg-type]
        return [
            None if parts[0] is None else buffer.in_order(parts, numbers, per_token=place not in per_rollout)
            for place, parts in enumerate(zip(*results, strict=True))
        ]


class Updater:
    """Runs the micro-batches of an update.

    Args:
        run: The run.
        micro_batcher: Packs the micro-batches.
        optimization: Divides their losses.
        count: Called with the groups of each update, reduced to the rollouts that it encodes.
    """

    def __init__(
        self,
        run: Run,
        micro_batcher: MicroBatcher,
        optimization: Optimization,
        count: Callable[[Sequence[RolloutGroup]], None] = lambda groups: None,
    ) -> None:
        self._run, self._micro_batcher, self._optimization, self._count = run, micro_batcher, optimization, count

    def update(
        self,
        buffer: RolloutBuffer,
        members: Sequence[int],
        accumulation: Accumulation,
        compute_loss: ComputeLoss,
        loss_denominators: Denominators,
        *,
        skips_idle: bool = False,
        skips_zero_advantages: bool = False,
        whole_episodes: bool = True,
    ) -> tuple[Tensor, dict[str, float]]:
        """Run all micro-batches forward and, except for the last one, backward. All ranks call it together.

        Args:
            buffer: The rollouts with their per-token quantities.
            members: Indices of the groups that are trained.
            accumulation: How this update adds up to an optimizer step.
            compute_loss: Loss sums of a micro-batch.
            loss_denominators: Their denominators, from per-token quantities alone; see `RLModule`.
            skips_idle: Whether rollouts without a trained token need not be encoded, since their loss is 0.
            skips_zero_advantages: With `skips_idle`, whether a token whose advantage is 0 is not trained.
            whole_episodes: Whether the loss needs all rows of an episode in one micro-batch.

        Returns:
            The loss of the last micro-batch, to be differentiated by the caller, and the metrics of the update.

        Raises:
            RuntimeError: If the loss sums have other denominators than `loss_denominators`.
        """
        device, support, optimization = self._run.device, self._run.support, self._optimization

        def denominators(part: RolloutBuffer) -> dict[str, Tensor]:
            if part.rollouts:
                tokens, lengths_E = {name: part.joined(name) for name in part.values}, part.episode_lengths
            else:
                tokens, lengths_E = dummy_tokens(part.values), torch.tensor([1])
            index_N = torch.arange(len(lengths_E)).repeat_interleave(lengths_E)
            return dict(loss_denominators(tokens, {"rollout_index_N": index_N, "num_rollouts": len(lengths_E)}))

        mini_batch = buffer.only(members)
        trained, idle = buffer, None
        if skips_idle:
            trained, idle = mini_batch.trained_and_idle(by_advantages=skips_zero_advantages)
        members = [index for index in members if trained.groups[index].rollouts]
        self._count([trained.groups[index] for index in members])
        schedule = self._micro_batcher.for_update(trained, members, whole_episodes=whole_episodes)
        expected = None
        if schedule.number > 1 or skips_idle:  # otherwise the only micro-batch gives the denominators
            expected = denominators(mini_batch)
            optimization.add_denominators(expected, device)
        sums = LossAccumulator()
        with self._micro_batcher.naming_memory():
            for number, micro_batch in enumerate(schedule, start=1):
                last = number == schedule.number
                with support.accumulating(self._run, last=last and accumulation.is_last):  # type: ignore[arg-type]
                    if isinstance(micro_batch, PrefixPass):
                        # The gradients that its slices left are already divided by the denominators.
                        scaler = accumulation.scaler
                        loss = micro_batch.loss(loss_scale=1.0 if scaler is None else float(scaler.get_scale()))
                    else:
                        loss = self._loss(micro_batch, compute_loss, sums, is_whole=expected is None)
                    if not last:  # Lightning runs the last backward, and divides the loss by accumulate_grad_batches
                        if isinstance(micro_batch, MicroBatch):
                            loss = loss / accumulation.mini_batches
                        with torch.autocast(device.type, enabled=False):
                            support.backward(loss)
                        del loss, micro_batch  # free the activations before the next forward
        if idle is not None:
            sums.add_denominators(denominators(idle))
        # With sequence parallelism, the sums include rows of peers.
        if expected is not None and self._micro_batcher.sharing.sequence_parallel_size == 1:
            for name, count in sums.denominators().items():
                wanted = float(expected.get(name, math.nan))
                if not math.isclose(count, wanted, rel_tol=1e-4, abs_tol=1e-6):
                    raise RuntimeError(
                        f"compute_loss divides {name!r} by {count:g}, but loss_denominators returned {wanted:g}; "
                        "override both consistently."
                    )
        metrics = sums.reduced(
            lambda values: sum_over_ranks(values, device), lambda values: reduce_over_ranks(values, device, "max")
        )
        return loss, metrics

    def _loss(
        self, micro_batch: MicroBatch, compute_loss: ComputeLoss, sums: LossAccumulator, *, is_whole: bool
    ) -> Tensor:
        """The divided loss of a micro-batch; keeps no other reference to its graph.

        Args:
            micro_batch: The micro-batch.
            compute_loss: Computes its loss sums.
            sums: They are added here.
            is_whole: Whether it is the whole mini-batch, so that it has the denominators.
        """
        loss_sums, scoring, device = compute_loss(micro_batch), micro_batch.scoring, self._run.device
        if not isinstance(loss_sums, LossSums):
            raise TypeError(f"compute_loss returned {type(loss_sums).__name__}, not LossSums.")
        num_tokens = (0, 0)
        if micro_batch.rollout_numbers:  # not a dummy
            num_tokens = scoring.num_tokens_repeated, scoring.num_tokens_run + scoring.num_prefix_tokens_run
        loss_sums.metrics["prefix/token_ratio"] = torch.tensor(num_tokens[0]), torch.tensor(num_tokens[1])
        if (replay := open_replay(self._run.policy)) is not None:
            loss_sums.metrics["sampling/routing_differs"] = replay.take_differing()
        if is_whole:
            counts = {name: count for name, (_, count) in loss_sums.losses.items()}
            self._optimization.add_denominators(counts, device)
        sums.add(loss_sums, micro_batch.weight)
        return self._optimization.divide(loss_sums.losses, device, micro_batch.weight)


class Optimization:
    """Divides losses by the denominators of the whole step, and prepares the gradients for the optimizer.

    Args:
        max_nonfinite_steps: Abort after this many consecutive steps with a NaN or infinite gradient.

    Attributes:
        nonfinite_steps: Consecutive steps skipped so far.

    """

    def __init__(self, max_nonfinite_steps: int = 10) -> None:
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
        if unknown := losses.keys() - self._denominators.keys():
            raise ValueError(
                f"compute_loss returned a loss for {', '.join(map(repr, sorted(unknown)))}, but loss_denominators "
                "returned no denominator for it; override both for the same parts."
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
        (broken_ranks,) = sum_over_ranks([~norm.isfinite()], device)
        self.nonfinite_steps = self.nonfinite_steps + 1 if broken_ranks else 0
        if broken_ranks:
            for parameters in parts.values():
                support.skip_in_next_step(parameters)
            rank_zero_warn(f"gradient norm is {float(norm)} at step {step}; the step is skipped.")
        if self.nonfinite_steps >= self.max_nonfinite_steps:
            raise RuntimeError(
                f"{self.nonfinite_steps} steps in a row had a loss or gradient that is not finite "
                f"(guards.max_nonfinite_steps={self.max_nonfinite_steps}); lower the learning rate or clip the "
                "gradient (trainer.gradient_clip_val), and look at the rewards."
            )
        return {"grad_norm": norm} | ({f"grad_norm/{name}": n for name, n in norms.items()} if len(norms) > 1 else {})


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
        limits: `max_grad_norm` of each part; defaults to the Trainer's options.
        support: Access to the gradients.
        clip_val: `gradient_clip_val` of the Trainer.
        algorithm: `gradient_clip_algorithm`: `value` clamps entries, anything else clips the norm.
    """
    clipped: list[tuple[Sequence[nn.Parameter], float]] = [
        (parts[name], limit) for name, limit in limits.items() if limit is not None
    ]
    rest = [parameter for name, limit in limits.items() if limit is None for parameter in parts[name]]
    if rest and clip_val and algorithm == "value":
        support.clamp(rest, float(clip_val))
    elif rest and clip_val:
        clipped.append((rest, float(clip_val)))
    for parameters, limit in clipped:
        support.scale(parameters, (limit / (support.norm(parameters) + 1e-6)).clamp(max=1.0))


def check_weights(module: Any) -> None:
    """Check every trained weight for NaN and infinity after an optimizer step. Collective; all ranks fail together.

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
    if not broken:
        return
    trainer = module.trainer
    configs = {part: config for part, (_, config) in module.optimized_parts().items()}
    affected = {part: config for part, config in configs.items() if any(name.startswith(f"{part}.") for name in broken)}
    options = [
        f"learning_rate={config.learning_rate}, weight_decay={config.weight_decay}, eps={config.eps}, "
        f"max_grad_norm={config.max_grad_norm} of {part}"
        for part, config in (affected or configs).items()
    ]
    if module.optimization.nonfinite_steps:
        cause = "The step was skipped: check the model or checkpoint the run started from."
    elif trainer.precision == "16-true":
        cause = "Use trainer.precision='bf16-mixed' or 'bf16-true', since an eps below 6e-8 is 0 in float16"
    else:
        cause = "The gradient was finite, so clipping or the step itself caused them: lower the learning rate"
    raise RuntimeError(
        f"NaN or infinity in {len(broken)} parameters after optimizer step {module.global_step + 1}: "
        f"{first_names(broken)}. {cause} ({'; '.join(options)}; trainer.gradient_clip_val={trainer.gradient_clip_val}, "
        f"trainer.precision={trainer.precision!r})."
    )
