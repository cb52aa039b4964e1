"""Entropy of the policy: the tokens that have most of it, and the coefficient of its bonus, fixed or adaptive.

Legend: N response tokens of all rollouts, concatenated (flat, no padding).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pl_grouprl.functional.masked import check_flat
from pl_grouprl.utilities.options import as_options, check_options


@dataclass(frozen=True)
class EntropyOptions:
    """The entropy bonus, and which tokens are trained, by TRL's names without `entropy_`.

    Attributes:
        coef: Weight of the entropy bonus; the initial one if it adapts.
        target: Entropy per token, in nats, below which there is a bonus; its weight then adapts (`EntropyController`).
            The weight is fixed if None.
        coef_min: Lower bound of an adaptive weight.
        coef_max: Its upper bound.
        coef_delta: Its change in each optimizer step.
        top_quantile: Fraction of the tokens, those of highest entropy before the updates, that policy loss and bonus
            train (TRL's `top_entropy_quantile`); see `high_entropy_mask`. Below 1, needs a forward before the updates.

    Raises:
        ValueError: If an option is out of range, or one of an adaptive weight is set without a target.
    """

    coef: float = 0.0
    target: float | None = None
    coef_min: float = 0.0
    coef_max: float = 1.0
    coef_delta: float = 0.005
    top_quantile: float = 1.0

    def __post_init__(self) -> None:
        coef, target, low, high, delta = self.coef, self.target, self.coef_min, self.coef_max, self.coef_delta
        check_options(
            {
                "entropy_coef": (coef, 0 <= coef < math.inf, "0 (off) or a larger finite number"),
                "entropy_coef.target": (target, target is None or target > 0, "larger than 0, or None"),
                "entropy_coef.coef_min": (low, low >= 0, "0 or larger"),
                "entropy_coef.coef_max": (high, high >= low, f"at least coef_min ({low})"),
                "entropy_coef.coef_delta": (delta, delta > 0, "larger than 0"),
                "entropy_coef.top_quantile": (self.top_quantile, 0 < self.top_quantile <= 1, "in (0, 1]"),
            }
        )
        if target is None and (low, high, delta) != (0.0, 1.0, 0.005):
            raise ValueError(
                f"entropy_coef has coef_min {low}, coef_max {high} and coef_delta {delta}, but no target, so it would "
                "ignore them."
            )

    @classmethod
    def of(cls, value: float | EntropyOptions | Mapping[str, Any]) -> EntropyOptions:
        """Make options from a number, the weight of the bonus, or a mapping."""
        return cls(float(value)) if isinstance(value, (int, float)) else as_options(cls, value, "entropy_coef")


class EntropyController:
    """The weight of the entropy bonus: fixed, or rising while the entropy is at most its target and falling above.

    From "Skywork Open Reasoner 1 Technical Report", arXiv:2505.22312, adaptive entropy control: with the entropy e of a
    step, the next one has the bonus c H if e <= target and none otherwise, where c grows by delta if e <= target and
    shrinks by delta otherwise, within its bounds. As in TRL, e is the last step's entropy, and the first has no bonus.

    Args:
        options: Its target, bounds and step.
    """

    def __init__(self, options: EntropyOptions) -> None:
        self.options = options
        self.coef, self.entropy = options.coef, math.inf
        self._measured: list[float] = []

    @property
    def adapts(self) -> bool:
        """Whether there is a target."""
        return self.options.target is not None

    @property
    def is_used(self) -> bool:
        """Whether there is or may be a bonus."""
        return self.adapts or self.coef > 0

    @property
    def applied(self) -> float:
        """The weight in the current step."""
        target = self.options.target
        return self.coef if target is None or self.entropy <= target else 0.0

    def measure(self, entropy: float) -> None:
        """Add the mean entropy per token of a mini-batch, over all ranks and in nats, to those of the current step."""
        self._measured.append(entropy)

    def step(self) -> None:
        """Adapt after the mini-batches of an optimizer step, to the mean of their entropies; without any, stay."""
        options, measured = self.options, self._measured
        if options.target is not None and measured:
            self.entropy = sum(measured) / len(measured)
            if self.entropy <= options.target:
                self.coef = min(self.coef + options.coef_delta, options.coef_max)
            else:
                self.coef = max(self.coef - options.coef_delta, options.coef_min)
        measured.clear()

    def state_dict(self) -> dict[str, float]:
        """Return weight and entropy if it adapts; a fixed one always comes from the configuration."""
        return {"coef": self.coef, "entropy": self.entropy} if self.adapts else {}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from a saved state if it adapts; start from the configuration's if it was fixed before."""
        if self.adapts and state:
            self.coef, self.entropy = state["coef"], state["entropy"]


@torch.no_grad()
def high_entropy_mask(
    entropy_N: Tensor, mask_N: Tensor, top_quantile: float, *, gather: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """Find the tokens of highest entropy ("Beyond the 80/20 Rule", arXiv:2506.01939, the objective of section 5).

    A token is found if its entropy is at least the quantile 1 - `top_quantile` of all trained tokens (linear between
    two tokens, as `torch.quantile`). Multiply the policy loss by the mask; the other tokens still count in its
    denominator. TRL's `top_entropy_quantile` takes the quantile of each micro-batch; here it is taken over the whole
    call and all ranks.

    Args:
        entropy_N: Entropy of each token's distribution, in nats, shape [N].
        mask_N: True for trained tokens, bool, shape [N]; values elsewhere may be NaN.
        top_quantile: Fraction of the trained tokens to find (0.2 in the paper).
        gather: Concatenates a 1-D tensor of any length over all ranks; defaults to this rank alone.

    Returns:
        True for the tokens found, bool, shape [N]; False outside the mask.

    Raises:
        ValueError: If the shapes differ.
    """
    check_flat(entropy_N=entropy_N, mask_N=mask_N)
    trained = entropy_N[mask_N]
    ordered = (trained if gather is None else gather(trained)).sort().values
    if not len(ordered):
        return torch.zeros_like(mask_N)
    place = (1 - top_quantile) * (len(ordered) - 1)
    below, above = ordered[math.floor(place)], ordered[math.ceil(place)]
    return mask_N & (entropy_N >= torch.lerp(below, above, place - math.floor(place)))
