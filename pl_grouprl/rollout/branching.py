"""Branching rollouts: where they branch, and how they are sampled in rounds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from pl_grouprl.packing.batch import concat_media
from pl_grouprl.rollout.engine import StopStrings
from pl_grouprl.types import Media, Prompt, Rollout, SamplingConfig
from pl_grouprl.utilities.options import check_options

# Options of branching rollouts: where rollouts branch, how often, and within how many tokens.

MAX_ROLLOUTS = 2**16
"""Most rollouts per group; random streams are numbered over all prompts and rollouts, in 32 bits."""


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
        budget: Maximum number of tokens sampled for a group; shared tokens count once. A rollout branches only if the
            group stays within the budget even if all continuations and unfinished rollouts reach their maximum length;
            otherwise it continues once. Earlier roots come first; with `entropy`, the most uncertain tokens. Must be at
            least `num_generations * max_new_tokens`. No limit if None.

    Raises:
        ValueError: If an option is out of range, missing, or has no effect.
    """

    points: Literal["every_n", "turn", "entropy"]
    width: int = 2
    depth: int = 1
    every_n: int | None = None
    budget: int | None = None

    def __post_init__(self) -> None:
        kinds = ("every_n", "turn", "entropy")
        check_options(
            {
                "Branching.points": (self.points, self.points in kinds, f"one of {', '.join(kinds)}"),
                "Branching.width": (self.width, self.width >= 2, "at least 2 (leave out branching to turn it off)"),
                "Branching.depth": (self.depth, self.depth >= 1, "at least 1 (leave out branching to turn it off)"),
                "Branching.every_n": (self.every_n, self.every_n is None or self.every_n >= 1, "at least 1"),
            }
        )
        if (self.points == "every_n") != (self.every_n is not None):
            remedy = "pass the number of tokens" if self.every_n is None else "leave it out"
            raise ValueError(f"Branching.every_n is {self.every_n} with points={self.points!r}; {remedy}.")

    def max_rollouts(self, num_generations: int) -> int:
        """Maximum number of rollouts of a group."""
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
            raise ValueError(f"branching (width, depth) allows {most} rollouts per group, more than {MAX_ROLLOUTS}.")
        if self.every_n is not None and self.every_n >= new_tokens:
            raise ValueError(f"Branching.every_n is {self.every_n}, not below sampling.max_new_tokens={new_tokens}.")
        if self.points == "entropy" and new_tokens < 2:
            raise ValueError("Branching.points is 'entropy', which needs sampling.max_new_tokens of at least 2.")
        least = num_generations * new_tokens
        if self.budget is not None and self.budget < least:
            raise ValueError(
                f"Branching.budget is {self.budget}, but the {num_generations} roots alone may take {least} tokens."
            )

    def continuations(
        self, groups: Sequence[int], remaining: Sequence[int], sampled: Mapping[int, int] | None = None
    ) -> list[int]:
        """Number of continuations of each unfinished rollout at a branch point.

        Args:
            groups: Group of each unfinished rollout; all must be listed.
            remaining: Maximum number of tokens that each may still sample.
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
            remaining: Maximum number of tokens that one continuation of each may sample.
            reserved: Maximum number of tokens of each group without these branches.
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


# Samples branching rollouts in rounds: all unfinished rollouts are sampled up to their next branch point, then fork.
#
# The next prompt of a branch is its prompt and its tokens so far; with kept caches, only the last token is encoded
# again.
#
# Legend: P prompts, G roots of each.


class PartialRollout(Protocol):
    """A rollout in progress, sampled in several rounds: an `Episode` or a `BranchingCompletion`."""

    @property
    def prompt_index(self) -> int:
        """Index of its prompt in the batch of all ranks."""

    @property
    def stream(self) -> int:
        """Identifies its random numbers in a round; in the first one, `prompt_index * G` + number in the group."""

    @property
    def media(self) -> Media:
        """Images and videos of `next_prompt`."""

    @property
    def is_open(self) -> bool:
        """Whether it is unfinished."""

    def next_prompt(self) -> list[int]:
        """Its prompt and its tokens so far."""
        ...

    def fork(self, count: int, width: int) -> list[Any]:
        """Its `count` continuations from here on, of at most `width`."""
        ...


U = TypeVar("U", bound=PartialRollout)


class RoundSampler(Protocol):
    """Samples many rollouts in rounds."""

    max_length: int | None
    """Longest sequence that it can sample, prompt included; None if unknown."""

    is_concurrent: bool
    """Whether several threads may call it at once, each with other rollouts."""

    def sample(self, number: int, rollouts: Sequence[PartialRollout], limits: Sequence[int]) -> list[Rollout]:
        """Continue each rollout by at most its limit, in round `number`; also called on ranks without rollouts."""
        ...

    def raise_together(self, run: Callable[[], None]) -> None:
        """Run a step; if sampling is collective, an error on one rank is raised on all."""
        ...

    def any_open(self, is_open: bool) -> bool:
        """Whether a rollout is unfinished on this rank or, if sampling is collective, on any rank."""
        ...


@dataclass
class BranchingCompletion:
    """A completion in progress: a path from a root of the group's tree toward a leaf.

    Attributes:
        prompt: Its open prompt.
        prompt_index: See `PartialRollout`.
        stream: See `PartialRollout`.
        rollout: Its tokens so far, without text; `finish_reason` is None while it is unfinished.
    """

    prompt: Prompt
    prompt_index: int
    stream: int
    rollout: Rollout

    @property
    def media(self) -> Media:
        """Images and videos of `next_prompt`."""
        return concat_media([(self.prompt.media, len(self.prompt.token_ids)), ({}, len(self.rollout.token_ids))])

    @property
    def is_open(self) -> bool:
        """Whether it is unfinished."""
        return self.rollout.finish_reason is None

    def next_prompt(self) -> list[int]:
        """Its prompt and its tokens so far."""
        return [*self.prompt.token_ids, *self.rollout.token_ids]

    def add(self, sampled: Rollout, limit: int, max_new_tokens: int, stop: StopStrings | None) -> int:
        """Append what a round sampled; it stays unfinished only if `limit` cut it short of `max_new_tokens`.

        Returns:
            The number of tokens added.

        Raises:
            ValueError: If the sampler does not say whether the rollout ended at a branch point.
        """
        before, reason = self.rollout, sampled.finish_reason or "stop"
        end = None if stop is None else end_of_stop_string(stop, before.token_ids, sampled.token_ids)
        if end is not None:
            reason = "stop"
        added = len(sampled.token_ids) if end is None else end
        at_branch_point = added == limit and len(before.token_ids) + limit < max_new_tokens
        if at_branch_point and end is None and sampled.finish_reason is None:
            raise ValueError("branching needs Rollout.finish_reason ('stop' or 'length'), which the engine left out.")
        values: dict[str, Any] = {}
        for name in ("token_ids", "logprobs", "weight_versions"):
            old, new = getattr(before, name), getattr(sampled, name)
            values[name] = None if old is None or new is None else [*old, *new[:added]]
        record = sampled.routed_experts
        if record is not None:
            record = record[: len(record) - len(sampled.token_ids) + added]
            values["routed_experts"] = continued_experts(before.routed_experts, record)
        is_open = at_branch_point and reason == "length"
        self.rollout = replace(before, **values, finish_reason=None if is_open else reason)
        return added

    def fork(self, count: int, width: int) -> list[BranchingCompletion]:
        """Its `count` continuations from here on; streams are numbered as if there were `width`."""
        streams = range(self.stream * width, self.stream * width + count)
        if count == 1:
            return [replace(self, stream=streams[0])]
        points = (*self.rollout.branch_points, len(self.rollout.token_ids))
        paths = ((*self.rollout.branch_path, number) for number in range(count))
        forks = [replace(self.rollout, branch_points=points, branch_path=path) for path in paths]
        return [replace(self, stream=stream, rollout=fork) for stream, fork in zip(streams, forks, strict=True)]


class BranchLoop:
    """Samples rollouts that branch at tokens (`every_n`, `entropy`); `episodes` samples rollouts that branch at turns.

    Args:
        branching: Where rollouts branch.
        max_new_tokens: Maximum number of tokens of a rollout.
        stop: Strings that end a rollout; checked here because engines miss strings that span a branch point.
    """

    def __init__(self, branching: Branching, max_new_tokens: int, stop: StopStrings | None = None) -> None:
        self._options, self._longest, self._stop = branching, max_new_tokens, stop or None

    def run(
        self, sampler: RoundSampler, prompts: Sequence[Prompt], prompt_indices: Sequence[int], num_generations: int
    ) -> list[list[Rollout]]:
        """Sample the tree of each prompt.

        Args:
            sampler: Samples the rounds.
            prompts: Open prompts, P of them.
            prompt_indices: Index of each in the batch of all ranks.
            num_generations: G.

        Returns:
            The leaves of each prompt's tree, in the order of their paths.
        """
        roots = [Rollout([], [], weight_versions=[], branch_path=(number,)) for number in range(num_generations)]
        branches = [
            BranchingCompletion(prompt, index, index * num_generations + number, root)
            for prompt, index in zip(prompts, prompt_indices, strict=True)
            for number, root in enumerate(roots)
        ]
        sampled: Counter[int] = Counter()
        options, longest, number = self._options, self._longest, 0

        def advance() -> None:
            """Sample the unfinished branches up to their next branch point, and fork them there."""
            nonlocal number
            unfinished = [branch for branch in branches if branch.is_open]
            left = [longest - len(branch.rollout.token_ids) for branch in unfinished]
            to_point = options.every_n if number < options.depth else None
            limits = left if to_point is None else [min(rest, to_point) for rest in left]
            found = sampler.sample(number, unfinished, limits)
            for branch, rollout, limit in zip(unfinished, found, limits, strict=True):
                sampled[branch.prompt_index] += branch.add(rollout, limit, longest, self._stop)
            if options.points != "entropy":
                branches[:] = fork_unfinished(
                    branches, options, sampled, lambda branch: longest - len(branch.rollout.token_ids)
                )
            elif number == 0:
                branches[:] = self._fork_uncertain(branches, sampled)
            number += 1

        while sampler.any_open(any(branch.is_open for branch in branches)):
            sampler.raise_together(advance)
        leaves = [[b.rollout for b in branches if b.prompt_index == index] for index in prompt_indices]
        return [sorted(own, key=lambda leaf: leaf.branch_path) for own in leaves]

    def _fork_uncertain(self, roots: Sequence[BranchingCompletion], sampled: Counter[int]) -> list[BranchingCompletion]:
        """Fork the finished roots before their most uncertain tokens, within the budget."""
        points = [(root, place) for root in roots for place in uncertain_places(root.rollout, self._options.depth)]
        points.sort(key=lambda point: point[0].rollout.logprobs[point[1]])  # type: ignore[index]  # stable
        remaining = [self._longest - place for _, place in points]
        fit = self._options.fit_budget([root.prompt_index for root, _ in points], remaining, sampled)
        chosen: dict[int, list[int]] = {}
        for (root, place), fits in zip(points, fit, strict=True):
            if fits:
                chosen.setdefault(root.stream, []).append(place)
        others, found = self._options.width - 1, []
        for root in roots:  # as continuation 0 everywhere, then the new branches
            places, whole = sorted(chosen.get(root.stream, ())), root.rollout
            path = (*whole.branch_path, *[0] * len(places))
            found.append(replace(root, rollout=replace(whole, branch_points=tuple(places), branch_path=path)))
            for number, place in enumerate(places):
                first = (root.stream * self._options.depth + number) * others
                for n in range(others):
                    cut = Rollout(
                        whole.token_ids[:place],
                        None if whole.logprobs is None else whole.logprobs[:place],
                        routed_experts=None
                        if whole.routed_experts is None
                        else whole.routed_experts[: len(root.prompt.token_ids) + place],
                        weight_versions=None if whole.weight_versions is None else whole.weight_versions[:place],
                        branch_points=tuple(places[: number + 1]),
                        branch_path=(*path[: len(whole.branch_path) + number], n + 1),
                    )
                    found.append(replace(root, stream=first + n, rollout=cut))
        return found


def continued_experts(before: Tensor | None, record: Tensor) -> Tensor:
    """Join the experts recorded in earlier rounds and in the latest round, whose prompt is all tokens so far.

    Tokens with an earlier record keep it; the latest round adds the tokens that had not run before.
    """
    record = record.clone()
    if before is not None:
        record[: len(before)] = torch.where(before < 0, record[: len(before)], before)
    return record


def fork_unfinished(
    rollouts: Sequence[U], branching: Branching, sampled: Mapping[int, int], remaining: Callable[[U], int]
) -> list[U]:
    """Continue each unfinished rollout `width` times, within the budget.

    Args:
        rollouts: All rollouts of some groups.
        branching: Width and budget.
        sampled: Tokens sampled so far, by group.
        remaining: Returns the maximum number of tokens that an unfinished rollout may still sample.
    """
    unfinished = [rollout for rollout in rollouts if rollout.is_open]
    groups = [rollout.prompt_index for rollout in unfinished]
    counts = iter(branching.continuations(groups, list(map(remaining, unfinished)), sampled))
    return [
        one
        for rollout in rollouts
        for one in (rollout.fork(next(counts), branching.width) if rollout.is_open else [rollout])
    ]


def uncertain_places(rollout: Rollout, count: int) -> list[int]:
    """Positions of the `count` tokens with the highest -log p, earlier ones first. Never the first token.

    Raises:
        ValueError: If the sampler reports no log-probabilities.
    """
    if rollout.logprobs is None:
        raise ValueError("branching has points='entropy', which needs an engine that reports Rollout.logprobs.")
    return sorted(range(1, len(rollout.token_ids)), key=rollout.logprobs.__getitem__)[:count]


def first_own_token(path: Sequence[int], points: Sequence[int]) -> int:
    """Index of a rollout's first token that no earlier leaf has; from there on, leaves have no tokens in common."""
    return max((point for point, number in zip(points, path[1:], strict=True) if number > 0), default=0)


def end_of_stop_string(stop: StopStrings, before: Sequence[int], token_ids: Sequence[int]) -> int | None:
    """Find a stop string that begins before a branch point and ends after it; None if there is none.

    Args:
        stop: The strings.
        before: Tokens up to the branch point.
        token_ids: Tokens after it.

    Returns:
        The number of `token_ids` through the token that completes the string.
    """
    tail, ends = list(before[-stop.window :]), range(1, min(stop.window, len(token_ids)) + 1) if before else range(0)
    tails = [[*tail, *token_ids[:end]][-stop.window :] for end in ends]
    return next((end for end, found in zip(ends, stop.found(tails), strict=True) if found), None)
