"""The threshold of the variance rule: fixed, or adapted after each step towards a target compression."""

from __future__ import annotations

import math

from pl_grouprl.functional.token_groups.checks import check_max_size
from pl_grouprl.utilities.options import check_finite


class ThresholdController:
    """Adapts the threshold to save a given fraction of the advantage positions.

    With c = 1 - groups / tokens of the whole step, over all ranks,

        log tau <- clip(log tau + threshold_lr * (target_compression - c),
                        log max(min_threshold, 1), log max_threshold).

    A group of k equally informative tokens has compression 1 - 1/k, so no threshold gives a compression between 0 and
    1/2: the target must be 0 or in [1/2, 1 - 1/max_size].

    Args:
        group_variance_threshold: Initial tau; if adaptive, within the clips (below 1 it acts as 1). None is 1 if fixed;
            if adaptive, the clipped 1 / (1 - target_compression), which reaches the target if delta is constant.
        adaptive_threshold: Whether to adapt it; otherwise `update` does nothing.
        threshold_lr: Change of log tau per step for a compression that is off by 1. At tau = 1 nothing is compressed;
            from there, a rate of 0.01 and a target of 0.75 would take at least log(4) / (0.01 * 0.75) = 185 steps to
            tau = 4, which is why tau does not start there.
        min_threshold: Lower clip; below 1 it acts as 1, since a smaller tau changes nothing.
        max_threshold: Upper clip.
        target_compression: Target fraction of tokens that are not endpoints. Ignored if tau is fixed.
        max_size: Maximum number of tokens per group, the `group_max_size` of `GroupPPO`; it limits the compression.

    Raises:
        ValueError: If an option is out of range.
    """

    def __init__(
        self,
        group_variance_threshold: float | None = None,
        *,
        adaptive_threshold: bool = True,
        threshold_lr: float = 0.01,
        min_threshold: float = 0.1,
        max_threshold: float = 10.0,
        target_compression: float = 0.75,
        max_size: int = 16,
    ) -> None:
        if group_variance_threshold is not None and not 0 < group_variance_threshold < math.inf:
            raise ValueError(
                f"group_variance_threshold is {group_variance_threshold}; it must be a finite number above 0, or None."
            )
        check_max_size("group_max_size (max_size)", max_size)
        _check_clips(threshold_lr, min_threshold, max_threshold)
        self.adaptive_threshold = adaptive_threshold
        self.threshold_lr = threshold_lr
        self.target_compression = target_compression
        if not adaptive_threshold:
            check_finite(target_compression=target_compression)
            self._threshold = 1.0 if group_variance_threshold is None else group_variance_threshold
            return
        _check_target(target_compression, max_size)
        self._low, self._high = max(min_threshold, 1.0), max_threshold
        if group_variance_threshold is None:
            group_variance_threshold = 1 / (1 - target_compression)
        elif not self._low <= max(group_variance_threshold, 1.0) <= self._high:
            raise ValueError(
                f"group_variance_threshold is {group_variance_threshold}, outside min_threshold ({min_threshold}) "
                f"and max_threshold ({max_threshold}), between which an adaptive threshold moves. Change one of them, "
                "or set adaptive_threshold to false."
            )
        self._threshold = self._clip(group_variance_threshold)

    @property
    def threshold(self) -> float:
        """The current tau; constant within a step."""
        return self._threshold

    def update(self, compression: float) -> None:
        """Adapt the threshold after a step.

        Args:
            compression: 1 - groups / tokens of the step, over all ranks. NaN (no tokens) changes nothing.
        """
        if not self.adaptive_threshold or math.isnan(compression):
            return
        error = self.target_compression - compression
        self._threshold = self._clip(self._threshold * math.exp(self.threshold_lr * error))

    def _clip(self, threshold: float) -> float:
        return min(max(threshold, self._low), self._high)

    def state_dict(self) -> dict[str, float]:
        """Return the state for a checkpoint."""
        return {"threshold": self._threshold}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore the state. A fixed threshold always comes from the options."""
        if self.adaptive_threshold:
            self._threshold = self._clip(float(state["threshold"]))


def _check_clips(threshold_lr: float, min_threshold: float, max_threshold: float) -> None:
    if not 0 <= threshold_lr < math.inf:
        raise ValueError(f"threshold_lr is {threshold_lr}; it must be a finite number, 0 or larger.")
    if not 0 < min_threshold < math.inf:
        raise ValueError(f"min_threshold is {min_threshold}; it must be above 0 (below 1 it acts as 1).")
    if not max(min_threshold, 1.0) <= max_threshold < math.inf:
        raise ValueError(
            f"max_threshold is {max_threshold}; it must be finite, and at least 1 and min_threshold ({min_threshold})."
        )


def _check_target(target: float, max_size: int) -> None:
    largest = 1 - 1 / max_size
    if target == 0 or 0.5 <= target <= largest + 1e-9:
        return
    remedy = f"Set it to 0 or between 0.5 and {largest:.4g}, or change group_max_size (max_size)."
    if max_size == 1:
        reason = "groups of one token (group_max_size is 1) compress nothing"
        remedy = "Set it to 0, or set adaptive_threshold to false."
    elif not 0 <= target <= 1:
        reason = "it is a fraction of the tokens, from 0 to 1"
    elif target < 0.5:
        reason = "no threshold reaches a compression between 0 (a threshold of 1) and 1/2 (groups of two tokens)"
    else:
        reason = f"groups of at most {max_size} tokens compress by at most {largest:.4g}"
    raise ValueError(f"target_compression is {target}; {reason}. {remedy}")
