"""Advantage estimators by name, with their options.

There are two kinds. Per-rollout estimators map rewards [B] to advantages [B]. Per-token estimators return [B, T], from
rewards per token, [B, T], or per rollout, [B]. One call gets all rollouts of a group.

`gae` and `group_ppo` need a critic, so they belong to the modules that train one and are not registered here.

Legend: B rollouts, T length of the longest row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from pl_grouprl.functional.advantages.branches import BranchPaths
from pl_grouprl.functional.masked import Reduce
from pl_grouprl.functional.registry import F, RegisteredFunction, build, registering
from pl_grouprl.utilities.annotations import describe_value

OF_ROLLOUTS = ("group_ids", "lengths", "greedy_rewards")
OF_TOKENS = ("group_ids", "mask", "branches", "score_norms", "reduce")


@dataclass(frozen=True, repr=False)
class AdvantageEstimator(RegisteredFunction):
    """A registered estimator bound to its options; all estimators are called the same way, and read what they need.

    Attributes:
        needs: The data that the function takes besides rewards.
        per_token: Whether it returns rows of tokens, [B, T].
        takes_token_rewards: Whether its rewards are rows of tokens, [B, T].
        takes_steps: Whether its rewards may also be those of steps, several per rollout.
        skips_rollouts: Whether the rollouts whose advantages are all 0 are not meant to be trained.
    """

    needs: tuple[str, ...] = ("group_ids",)
    per_token: bool = False
    takes_token_rewards: bool = False
    takes_steps: bool = False
    skips_rollouts: bool = False

    argument: ClassVar[str] = "advantage_estimator"
    data: ClassVar[tuple[str, ...]] = tuple(dict.fromkeys(OF_ROLLOUTS + OF_TOKENS))

    @property
    def takes(self) -> tuple[str, ...]:
        """Same as `needs`."""
        return self.needs

    @property
    def needs_greedy(self) -> bool:
        """Whether it needs the reward of a greedy rollout of each prompt."""
        return "greedy_rewards" in self.needs

    @property
    def needs_score_norms(self) -> bool:
        """Whether it needs a forward of the policy before the updates, for the norm of each token's score."""
        return "score_norms" in self.needs

    @property
    def compares_rollouts(self) -> bool:
        """Whether it compares the rollouts of a prompt with each other."""
        return "group_ids" in self.needs

    def __call__(
        self,
        rewards: Tensor,
        group_ids: Tensor | Sequence[int],
        *,
        lengths: Tensor | None = None,
        greedy_rewards: Tensor | None = None,
        mask: Tensor | None = None,
        branches: BranchPaths | None = None,
        score_norms: Tensor | None = None,
        reduce: Reduce | None = None,
    ) -> Tensor:
        """Return advantages, shape [B], or [B, T] if `per_token`.

        Raises:
            ValueError: If data that the function needs is missing.
        """
        available = {
            "group_ids": group_ids,
            "lengths": lengths,
            "greedy_rewards": greedy_rewards,
            "mask": mask,
            "branches": branches,
            "score_norms": score_norms,
            "reduce": reduce,
        }
        data = {name: available[name] for name in self.needs}
        for name, value in data.items():
            if value is None and name != "reduce":
                raise ValueError(f"{name} is None, but the estimator {self.name!r} needs it; pass it by name.")
        advantages: Tensor = self.function(rewards, **data, **self.options)
        return advantages

    def try_out(self) -> None:
        """Call the function on a group of two rollouts of one token each.

        Raises:
            TypeError: If it returns anything but advantages of the right shape.
        """
        zeros_B = torch.zeros(2, device="cpu")
        zeros_BT, ids_B = zeros_B[:, None], zeros_B.long()
        advantages = self(
            zeros_BT if self.takes_token_rewards else zeros_B,
            ids_B,
            lengths=ids_B + 1,
            greedy_rewards=zeros_B,
            mask=zeros_BT == 0,
            branches=BranchPaths([(), ()], [(), ()]),
            score_norms=zeros_BT,
        )
        expected = (zeros_BT if self.per_token else zeros_B).shape
        if not isinstance(advantages, Tensor) or advantages.shape != expected:
            found = f"shape {tuple(advantages.shape)}" if isinstance(advantages, Tensor) else describe_value(advantages)
            raise TypeError(
                f"advantage_estimator={self.name!r} returned {found} for two rollouts of one token; return advantages "
                f"of shape {'[B, T]' if self.per_token else '[B]'}."
            )


ADVANTAGE_ESTIMATORS: dict[str, AdvantageEstimator] = {}
"""The registered estimators."""


def register_advantage_estimator(
    name: str,
    *,
    needs: Sequence[str] = ("group_ids",),
    per_token: bool = False,
    takes_token_rewards: bool = False,
    takes_steps: bool = False,
    skips_rollouts: bool = False,
) -> Callable[[F], F]:
    """Register a function as an advantage estimator; a decorator, `@register_advantage_estimator("name")`.

    The function takes rewards first (NaN for a rollout without one), then by name what it needs. Its other keyword-only
    arguments are the estimator's options, with their types and defaults; it should raise a ValueError for values out of
    range. It is called on two rollouts whenever it is chosen, as a check.

    Args:
        name: Its name as a value of the option `advantage_estimator`.
        needs: Names of the data that the function takes besides rewards: `group_ids`, the prompt of each rollout, shape
            [B]; `lengths`, generated tokens, shape [B]; `greedy_rewards`, the reward of the prompt's greedy rollout,
            shape [B]. With `per_token`: `group_ids`; `mask`, trained tokens, bool, shape [B, T]; `branches`, how they
            branch, a `BranchPaths`; `score_norms`, the squared norm of the gradient of each token's log-probability by
            the logits, shape [B, T]; `reduce`, which sums over ranks, or None on one rank. Per-token estimators get the
            rollouts of their rank, per-rollout estimators those of all ranks.
        per_token: The function returns advantages [B, T], not [B].
        takes_token_rewards: With `per_token`: rewards are per token, [B, T], not per rollout, [B].
        takes_steps: The function also works on rewards per step, several per rollout (process supervision); it may
            only need `group_ids`.
        skips_rollouts: The rollouts whose advantages are all 0 are not meant to be trained. If no other loss trains
            them, updates leave them out, and so do metrics of the update.

    Raises:
        ValueError: If the name belongs to another function, or `needs` has unknown names.
        TypeError: If the function's arguments do not fit what is declared.
    """
    if isinstance(needs, str):
        raise TypeError(f"advantage_estimator {name!r}: needs is the string {needs!r}; pass a tuple, ({needs!r},).")
    available = OF_TOKENS if per_token else OF_ROLLOUTS
    missing = [need for need in needs if need not in available]
    if missing or (takes_token_rewards and not per_token):
        what = ", ".join(missing) or "takes_token_rewards"
        raise ValueError(
            f"advantage_estimator {name!r} needs {what}; with per_token={per_token} there are {', '.join(available)}."
        )
    if takes_steps and (per_token or set(needs) != {"group_ids"}):
        raise ValueError(f"advantage_estimator {name!r} takes steps, for which it may only need group_ids.")
    return registering(
        ADVANTAGE_ESTIMATORS,
        AdvantageEstimator,
        name,
        needs=tuple(needs),
        per_token=per_token,
        takes_token_rewards=takes_token_rewards,
        takes_steps=takes_steps,
        skips_rollouts=skips_rollouts,
    )


def make_advantage_estimator(name: str, /, **options: Any) -> AdvantageEstimator:
    """Return the estimator registered as `name`, bound to options.

    Raises:
        ValueError: If the name is not registered, or an option is unknown, of the wrong type or out of range.
    """
    return build(ADVANTAGE_ESTIMATORS, "advantage_estimator", name, options)
