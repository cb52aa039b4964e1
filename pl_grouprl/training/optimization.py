"""Optimizer steps: exact denominators, gradient norms, clipping per part, and no step with NaN."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from pl_grouprl.strategies import StrategySupport
from pl_grouprl.utilities.distributed import num_ranks, sum_over_ranks
from pl_grouprl.utilities.options import check_options

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
