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
"""Most rollouts per group; random streams are numbered over all prompts and rollouts, in 32 bits."""


@checked_arguments
@dataclass(frozen=True)
class Branching:
    """How the rollouts of a prompt branch into a tree.

    `num_generations` counts the roots, which are sampled from the prompt as without branching. At a branch point, a
    rollout continues `width` times; the tokens before it are sampled once. The leaves of the tree are the group's
    rollouts. A rollout that ends before a branch point does not branch, so groups differ in size.

    - `every_n`: a rollout branches after every `every_n` tokens, `depth` times. A group has at most
      `num_generations * width**depth` rollouts.
    - `turn`: a rollout branches after the tool calls of each of its first `depth` turns. The limit is the same.
    - `entropy`: once a root has ended, it branches before its `depth` most uncertain tokens. A group has at most
      `num_generations * (1 + depth * (width - 1))` rollouts.

    With `every_n` and `turn`, whether a rollout branches depends only on the tokens before the branch point: each leaf
    is a sample from the policy, and the continuations of a branch point are independent. But leaves share tokens, and a
    root that reaches more branch points has more leaves. So if the reward depends on the length, the mean over leaves
    is a biased estimate of the expected reward.

    `entropy` follows EPTree (TreeRL, arXiv:2506.11902): a token's uncertainty is -log p of the sampled token, as the
    sampler reports it, and a branch continues from the tokens before it. `num_generations` is EPTree's M (trees) and
    `depth` its N (tokens per tree); there is one iteration, and no token is excluded because of its text. The choice is
    biased: at a branch point the root took an unlikely token, while its siblings are fresh samples, and prefixes of
    unlikely tokens count several times in the group.

    Attributes:
        points: Where rollouts branch.
        width: Continuations at each branch point.
        depth: Branch points along a rollout, at most.
        every_n: Tokens from one branch point to the next; only for `every_n`.
        budget: Most tokens sampled for a group; shared tokens count once. A rollout branches only if the group stays
            within the budget even if all continuations and unfinished rollouts reach their maximum length; otherwise
            it continues once. Earlier roots come first; with `entropy`, the most uncertain tokens. At least
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
                "Branching.width": (self.width, self.width >= 2, "at least 2 (leave out branching to turn it off)"),
                "Branching.depth": (self.depth, self.depth >= 1, "at least 1 (leave out branching to turn it off)"),
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
        """Check the options against those of the run.

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
        if self.budget is not None and self.budget < num_generations * new_tokens:
            raise ValueError(
                f"Branching.budget is {self.budget}, but the {num_generations} roots alone may take "
                f"{num_generations * new_tokens} tokens; raise it, or lower num_generations or sampling.max_new_tokens."
            )

    def continuations(
        self, groups: Sequence[int], remaining: Sequence[int], sampled: Mapping[int, int] | None = None
    ) -> list[int]:
        """Number of continuations of each unfinished rollout at a branch point.

        Args:
            groups: Group of each unfinished rollout; none may be left out.
            remaining: Most tokens that each may still sample.
            sampled: Tokens sampled so far, by group; needed only with a budget.

        Returns:
            `width`, or 1 if branching could exceed the budget.
        """
        reserved = Counter(dict(sampled or {}))
        for group, tokens in zip(groups, remaining, strict=True):
            reserved[group] += tokens
        return [self.width if fits else 1 for fits in self.fit_budget(groups, remaining, reserved)]

    def fit_budget(self, groups: Sequence[int], remaining: Sequence[int], reserved: Mapping[int, int]) -> list[bool]:
        """Whether each branch point fits into its group's budget; earlier ones in the list take precedence.

        Args:
            groups: Group of each branch point.
            remaining: Most tokens that one continuation of each may sample.
            reserved: Most tokens of each group without these branches.
        """
        if self.budget is None:
            return [True] * len(groups)
        spare = {group: self.budget - reserved[group] for group in set(groups)}
        fit = []
        for group, tokens in zip(groups, remaining, strict=True):
            cost = (self.width - 1) * tokens
            fit.append(cost <= spare[group])
            spare[group] -= cost * fit[-1]
        return fit
