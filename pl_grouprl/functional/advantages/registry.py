"""Advantage estimators by name, with their options.

There are two kinds. Those of whole rollouts take a reward per rollout, [B], and return [B]. Those per token return
[B, T], from rewards per token, [B, T], or per rollout, [B]. All rollouts of a group come in one call.

`gae` and `group_ppo` need a critic: they belong to the modules that train one and are not registered here.

Legend: B rollouts, T length of the longest row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from pl_grouprl.functional.masked import Reduce
from pl_grouprl.functional.registry import F, RegisteredFunction, build, registering
from pl_grouprl.utilities.annotations import describe_value

OF_ROLLOUTS = ("group_ids", "lengths", "greedy_rewards")
OF_TOKENS = ("group_ids", "mask", "reduce")


@dataclass(frozen=True, repr=False)
class AdvantageEstimator(RegisteredFunction):
    """A registered estimator with its options; all of them are called alike, and get what they need.

    Attributes:
        needs: The data that the function takes besides rewards.
        per_token: Whether it returns rows of tokens, [B, T].
        takes_token_rewards: Whether its rewards are rows of tokens, [B, T].
        takes_steps: Whether its rewards may also be those of steps, several per rollout.
    """

    needs: tuple[str, ...] = ("group_ids",)
    per_token: bool = False
    takes_token_rewards: bool = False
    takes_steps: bool = False

    argument: ClassVar[str] = "advantage_estimator"
    data: ClassVar[tuple[str, ...]] = tuple(dict.fromkeys(OF_ROLLOUTS + OF_TOKENS))

    @property
    def takes(self) -> tuple[str, ...]:
        """What it needs."""
        return self.needs

    @property
    def needs_greedy(self) -> bool:
        """Whether it needs the reward of a greedy rollout of each prompt."""
        return "greedy_rewards" in self.needs

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
        reduce: Reduce | None = None,
    ) -> Tensor:
        """Return advantages, shape [B], or [B, T] where `per_token`.

        Raises:
            ValueError: If something is missing that the function needs.
        """
        available = {
            "group_ids": group_ids,
            "lengths": lengths,
            "greedy_rewards": greedy_rewards,
            "mask": mask,
            "reduce": reduce,
        }
        data = {name: available[name] for name in self.needs}
        for name, value in data.items():
            if value is None and name != "reduce":
                raise ValueError(f"{name} is None, but the estimator {self.name!r} needs it; pass it by name.")
        advantages: Tensor = self.function(rewards, **data, **self.options)
        return advantages

    def try_out(self) -> None:
        """Call the function on a group of two rollouts of one token.

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
) -> Callable[[F], F]:
    """Make a function known as an advantage estimator: `@register_advantage_estimator("name")` above it.

    The function takes rewards first, NaN for a rollout without one, then by name what it needs. Its other keyword-only
    arguments are the estimator's options; their annotations and defaults hold, and it raises a ValueError for those out
    of range. It is called on two rollouts whenever it is chosen.

    Args:
        name: What `advantage_estimator` calls it.
        needs: What the function takes besides rewards, by the names of its arguments: `group_ids`, the prompt of each
            rollout, shape [B]; `lengths`, tokens that the model wrote, shape [B]; `greedy_rewards`, the reward of the
            prompt's rollout without sampling, shape [B]. With `per_token`: `group_ids`; `mask`, trained tokens, bool,
            shape [B, T]; `reduce`, which adds up sums over ranks, or None for one rank. Per token, each rank passes its
            own rollouts alone; otherwise every rank passes those of all ranks.
        per_token: The function returns advantages [B, T], not [B].
        takes_token_rewards: With `per_token`, its rewards are those of tokens, [B, T], not of rollouts, [B].
        takes_steps: The function also compares the rewards of steps, several per rollout (process supervision); it
            needs `group_ids` alone.

    Raises:
        ValueError: If the name belongs to another function, or what it needs does not exist.
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
        raise ValueError(f"advantage_estimator {name!r} takes steps, for which there are group_ids alone.")
    return registering(
        ADVANTAGE_ESTIMATORS,
        AdvantageEstimator,
        name,
        needs=tuple(needs),
        per_token=per_token,
        takes_token_rewards=takes_token_rewards,
        takes_steps=takes_steps,
    )


def make_advantage_estimator(name: str, /, **options: Any) -> AdvantageEstimator:
    """Return the estimator registered as `name` with options.

    Raises:
        ValueError: If there is none of that name, or an option is unknown, of the wrong type or out of range.
    """
    return build(ADVANTAGE_ESTIMATORS, "advantage_estimator", name, options)
