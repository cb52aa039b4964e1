"""Options of branching rollouts: where rollouts branch, how often, and within how many tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pl_grouprl.types import SamplingConfig
from pl_grouprl.utilities.arguments import checked_arguments
from pl_grouprl.utilities.options import check_options

MAX_ROLLOUTS = 2**16
"""Most rollouts of a group: their numbers, together with the prompt's, identify 32-bit random streams."""


@checked_arguments
@dataclass(frozen=True)
class Branching:
    """How the rollouts of a prompt branch into a tree.

    `num_generations` counts the roots, sampled from the prompt as without branching. At a branch point, a rollout
    continues `width` times; what came before it is sampled once. The leaves of the tree are the group's rollouts. A
    rollout that ends before a branch point does not branch, so groups differ in size.

    - `every_n`: a rollout branches after every `every_n` tokens, `depth` times. A group has at most
      `num_generations * width**depth` rollouts.
    - `turn`: it branches between turns, after its tools were called, the first `depth` times. As many rollouts.
    - `entropy`: a root that has ended branches before its `depth` most uncertain tokens. At most
      `num_generations * (1 + depth * (width - 1))` rollouts.

    With `every_n` and `turn`, whether a rollout branches depends only on the tokens before the branch point: each leaf
    is a sample from the policy, and the continuations of a branch point are independent. But leaves have tokens in
    common, and a root that reaches more branch points has more leaves, so where the reward depends on the length, the
    mean over leaves is not that over independent rollouts.

    `entropy` follows EPTree (TreeRL, arXiv:2506.11902): a token's uncertainty is -log p of the sampled token, as the
    sampler reports it, and a branch continues from the tokens before it. EPTree's M trees and N tokens per tree are
    `num_generations` and `depth`, in a single iteration; no tokens are excluded by their text. The choice is biased: it
    looks at the root's own token, so at a branch point the root took an unlikely token while its siblings are fresh
    samples, and prefixes before unlikely tokens count several times in the group.

    Attributes:
        points: Where rollouts branch.
        width: Continuations at each branch point.
        depth: Branch points along a rollout, at most.
        every_n: Tokens from one branch point to the next; only for `every_n`.
        budget: Most tokens sampled for a group, each counted once. A branch point opens with all of its continuations,
            or not at all if these and all unfinished rollouts, each at its longest, could exceed the budget; the
            rollout then continues once. Earlier roots come first, for `entropy` the most uncertain tokens. At least
            `num_generations * max_new_tokens`. None: no limit.

    Raises:
        ValueError: If an option is out of range, missing, or has no effect.
    """

    points: Literal["every_n", "turn", "entropy"]
    width: int = 2
    depth: int = 1
    every_n: int | None = None
    budget: int | None = None

    def __post_init__(self) -> None:
        check_options(
            {
                "Branching.width": (self.width, self.width >= 2, "at least 2 (leave branching out for none)"),
                "Branching.depth": (self.depth, self.depth >= 1, "at least 1 (leave branching out for none)"),
                "Branching.every_n": (self.every_n, self.every_n is None or self.every_n >= 1, "at least 1"),
            }
        )
        if (self.points == "every_n") != (self.every_n is not None):
            remedy = "pass the number of tokens" if self.every_n is None else "leave it out"
            raise ValueError(f"Branching.every_n is {self.every_n} with points={self.points!r}; {remedy}.")

    def max_rollouts(self, num_generations: int) -> int:
        """Most rollouts of a group."""
        if self.points == "entropy":
            return num_generations * (1 + self.depth * (self.width - 1))
        return int(num_generations * self.width**self.depth)

    def check(self, num_generations: int, sampling: SamplingConfig) -> None:
        """Refuse options that do not go together.

        Raises:
            ValueError: Names the option, its value and the remedy.
        """
        most, new_tokens = self.max_rollouts(num_generations), sampling.max_new_tokens
        if most > MAX_ROLLOUTS:
            raise ValueError(
                f"branching has width={self.width} and depth={self.depth}, which with num_generations="
                f"{num_generations} allows {most} rollouts per group; lower them to at most {MAX_ROLLOUTS}."
            )
        if self.every_n is not None and self.every_n >= new_tokens:
            raise ValueError(
                f"Branching.every_n is {self.every_n}, but rollouts end after sampling.max_new_tokens={new_tokens}, so "
                "none would branch; lower it."
            )
        if self.points == "entropy" and new_tokens < 2:
            raise ValueError(
                f"Branching.points is 'entropy', but with sampling.max_new_tokens={new_tokens} no token has another "
                "before it, so none would branch; raise it, or leave branching out."
            )
        if self.budget is not None and self.budget < num_generations * new_tokens:
            raise ValueError(
                f"Branching.budget is {self.budget}, but the {num_generations} roots alone may take "
                f"{num_generations * new_tokens} tokens; raise it, or lower num_generations or sampling.max_new_tokens."
            )

    def continuations(
        self, groups: Sequence[int], remaining: Sequence[int], sampled: Mapping[int, int] | None = None
    ) -> list[int]:
        """How often each unfinished rollout continues at a branch point.

        Args:
            groups: The group of each; all unfinished rollouts of a group are listed.
            remaining: Most tokens that each may still sample.
            sampled: Tokens sampled so far, by group; read only if there is a budget.

        Returns:
            `width`, or 1 where the budget has no room.
        """
        reserved = Counter(dict(sampled or {}))
        for group, tokens in zip(groups, remaining, strict=True):
            reserved[group] += tokens
        opens = self.open_points(groups, remaining, reserved)
        return [self.width if opened else 1 for opened in opens]

    def open_points(self, groups: Sequence[int], remaining: Sequence[int], reserved: Mapping[int, int]) -> list[bool]:
        """Which branch points open within the budget, the first ones first.

        Args:
            groups: The group of each branch point.
            remaining: Most tokens that a continuation of each may sample.
            reserved: Tokens that each group has sampled, or will sample without these branches.
        """
        if self.budget is None:
            return [True] * len(groups)
        spare = {group: self.budget - reserved[group] for group in set(groups)}
        opens = []
        for group, tokens in zip(groups, remaining, strict=True):
            cost = (self.width - 1) * tokens
            opens.append(cost <= spare[group])
            spare[group] -= cost * opens[-1]
        return opens
