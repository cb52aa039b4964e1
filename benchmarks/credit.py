"""Bias and variance of policy gradients from branched rollouts, on a policy that is a table of logits.

The policy has one row of logits for each beginning of a sequence, so its gradient is known exactly. For each row of the
output, the benchmark samples many groups of one kind and estimates the gradient from each with one estimator. It prints
how far the mean estimate is from the exact gradient, and the variance (summed over all logits) times the number of
sampled tokens, which compares estimators at equal cost of sampling. docs/trees.md shows the table.
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.options import positive, write_json
from pl_grouprl.functional.advantages import ADVANTAGE_ESTIMATORS, BranchPaths
from pl_grouprl.functional.masked import to_rows
from pl_grouprl.types import Rollout

END = 0
"""The token that ends a sequence."""

Widths = Callable[[tuple[int, ...]], int]
"""How many continuations are sampled after these tokens; of the prompt, after none."""


class TabularPolicy:
    """Sequences of a few tokens, from a row of logits for each beginning; each has a fixed reward.

    Args:
        vocabulary: Number of tokens, the end token included.
        length: Longest sequence.
        seed: Draws the logits and the rewards: a sequence's reward is a sum of one normal number per beginning.
        end_logit: Added to the logits of the end token.
        gain_from: Tokens before this place do not change the reward by themselves.
    """

    def __init__(
        self, vocabulary: int, length: int, seed: int = 0, *, end_logit: float = 0.0, gain_from: int = 0
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        words = range(1, vocabulary)
        states = [state for size in range(length) for state in itertools.product(words, repeat=size)]
        self.length = length
        self.states = {state: number for number, state in enumerate(states)}
        self.logits_SV = torch.randn(len(states), vocabulary, generator=generator, dtype=torch.float64)
        self.logits_SV[:, END] += end_logit
        self.probs_SV = self.logits_SV.softmax(dim=-1)
        self._probs = self.probs_SV.tolist()
        gains_SV = torch.randn(len(states), vocabulary, generator=generator, dtype=torch.float64)
        gains_SV[: sum(len(state) < gain_from for state in states)] = 0
        self._gains = gains_SV.tolist()

    def probs(self, tokens: tuple[int, ...]) -> list[float]:
        """Probabilities of the next token."""
        return self._probs[self.states[tokens]]

    def ends(self, tokens: Sequence[int]) -> bool:
        """Whether a sequence is complete."""
        return len(tokens) == self.length or tokens[-1] == END

    def rollout(self, tokens: tuple[int, ...], points: tuple[int, ...], path: tuple[int, ...]) -> Rollout:
        """A complete sequence, with its reward."""
        reward = sum(self._gains[self.states[tokens[:place]]][token] for place, token in enumerate(tokens))
        return Rollout(list(tokens), reward=reward, branch_points=points, branch_path=path)

    def sequences(self, tokens: tuple[int, ...] = ()) -> Iterator[tuple[float, tuple[int, ...]]]:
        """All sequences with their probabilities."""
        for token, prob in enumerate(self.probs(tokens)):
            longer = (*tokens, token)
            rest = iter([(1.0, longer)]) if self.ends(longer) else self.sequences(longer)
            yield from ((prob * other, sequence) for other, sequence in rest)

    def gradient(self) -> Tensor:
        """Gradient of the expected reward by the logits, shape [S, V]."""
        pairs = [(prob, self.rollout(tokens, (), ())) for prob, tokens in self.sequences()]
        advantages = [[prob * (rollout.reward or 0.0)] * len(rollout.token_ids) for prob, rollout in pairs]
        return self.score_sums(
            [[rollout for _, rollout in pairs]], [torch.tensor([a for row in advantages for a in row])]
        )[0]

    def score_sums(self, groups: Sequence[Sequence[Rollout]], weights: Sequence[Tensor]) -> Tensor:
        """Sum the gradients of log-probabilities, weighted per token, shape [groups, S, V]."""
        num_states, vocabulary = self.probs_SV.shape
        places = [
            (number * num_states + self.states[tuple(rollout.token_ids[:place])]) * vocabulary + token
            for number, group in enumerate(groups)
            for rollout in group
            for place, token in enumerate(rollout.token_ids)
        ]
        total = torch.zeros(len(groups) * num_states * vocabulary, dtype=torch.float64)
        total = total.index_add(0, torch.tensor(places), torch.cat(list(weights)).double())
        total = total.view(len(groups), num_states, vocabulary)
        return total - total.sum(dim=-1, keepdim=True) * self.probs_SV


class Sampler(NamedTuple):
    """Samples groups whose rollouts branch."""

    policy: TabularPolicy
    widths: Widths
    rng: random.Random

    def group(self) -> list[Rollout]:
        """The rollouts of one prompt."""
        return [rollout for number in range(self.widths(())) for rollout in self._continue((), (), (number,))]

    def _continue(self, tokens: tuple[int, ...], points: tuple[int, ...], path: tuple[int, ...]) -> list[Rollout]:
        while True:
            probs = self.policy.probs(tokens)
            tokens = (*tokens, *self.rng.choices(range(len(probs)), probs))
            if self.policy.ends(tokens):
                return [self.policy.rollout(tokens, points, path)]
            if (width := self.widths(tokens)) > 1:
                here = (*points, len(tokens))
                return [r for number in range(width) for r in self._continue(tokens, here, (*path, number))]


def all_groups(policy: TabularPolicy, widths: Widths) -> Iterator[tuple[float, list[Rollout]]]:
    """All groups that can be sampled, with their probabilities."""

    def children(
        tokens: tuple[int, ...], points: tuple[int, ...], path: tuple[int, ...], width: int
    ) -> Iterator[tuple[float, list[Rollout]]]:
        each = [list(outcomes(tokens, points, (*path, number))) for number in range(width)]
        for chosen in itertools.product(*each):
            prob = 1.0
            for factor, _ in chosen:
                prob *= factor
            yield prob, [rollout for _, rollouts in chosen for rollout in rollouts]

    def outcomes(
        tokens: tuple[int, ...], points: tuple[int, ...], path: tuple[int, ...]
    ) -> Iterator[tuple[float, list[Rollout]]]:
        for token, prob in enumerate(policy.probs(tokens)):
            longer = (*tokens, token)
            if policy.ends(longer):
                yield prob, [policy.rollout(longer, points, path)]
            elif (width := widths(longer)) > 1:
                yield from ((prob * p, rs) for p, rs in children(longer, (*points, len(longer)), path, width))
            else:
                yield from ((prob * p, rollouts) for p, rollouts in outcomes(longer, points, path))

    return children((), (), (), widths(()))


def estimates(policy: TabularPolicy, groups: Sequence[Sequence[Rollout]], estimator: str, **options: Any) -> Tensor:
    """Gradient estimate of each group, shape [groups, S, V]; their mean is what `seq-mean-token-sum` gives."""
    rollouts = [rollout for group in groups for rollout in group]
    lengths_B = torch.tensor([len(rollout.token_ids) for rollout in rollouts])
    ids_B = torch.arange(len(groups)).repeat_interleave(torch.tensor([len(group) for group in groups]))
    rewards_B = torch.tensor([rollout.reward for rollout in rollouts], dtype=torch.float64)
    mask_BT = to_rows(torch.ones(int(lengths_B.sum()), dtype=torch.bool), lengths_B)
    branches = BranchPaths([r.branch_points for r in rollouts], [r.branch_path for r in rollouts])
    entry = ADVANTAGE_ESTIMATORS[estimator].with_options(options)
    advantages = entry(rewards_B, ids_B, lengths=lengths_B, mask=mask_BT, branches=branches)
    advantages_BT = advantages if advantages.dim() == 2 else advantages[:, None].expand(mask_BT.shape)
    return policy.score_sums(groups, [advantages_BT[mask_BT]]) * len(groups) / len(rollouts)


def sampled_tokens(group: Sequence[Rollout]) -> int:
    """Tokens of a group, those of shared segments once."""
    segments = {}
    for rollout in group:
        ends = (*rollout.branch_points, len(rollout.token_ids))
        for depth, (start, end) in enumerate(zip((0, *ends), ends, strict=False)):
            segments[rollout.branch_path[: depth + 1]] = end - start
    return sum(segments.values())


def regular(root: int, *splits: int, width: int = 2) -> Widths:
    """`root` continuations of the prompt, and `width` after so many tokens each."""
    return lambda tokens: root if not tokens else width if len(tokens) in splits else 1


KINDS: dict[str, tuple[Widths, tuple[str, ...]]] = {
    "8 rollouts": (regular(8), ("rloo",)),
    "16 rollouts": (regular(16), ("rloo",)),
    "8, each split in 2 after 4 tokens": (regular(8, 4), ("tree", "vine", "rloo")),
    "8, each split in 4 after 6 tokens": (regular(8, 6, width=4), ("tree", "vine", "rloo")),
    "4, each split in 4 after 4 tokens": (regular(4, 4, width=4), ("tree", "vine", "rloo")),
    "2, each split in 2 after 2 and after 4 tokens": (regular(2, 2, 4), ("tree", "vine", "rloo")),
}
"""Kinds of groups and the estimators that they are measured with."""


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Parse the command line, sample, print the table, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=positive, default=4000, help="of each kind (default: 4000)")
    parser.add_argument("--vocabulary", type=positive, default=3, help="with the end token (default: 3)")
    parser.add_argument("--length", type=positive, default=8, help="longest sequence (default: 8)")
    parser.add_argument("--end-logit", type=float, default=-3.0, help="added to the end token's (default: -3)")
    parser.add_argument("--gain-from", type=int, default=0, help="tokens before this place gain nothing (default: 0)")
    parser.add_argument("--policies", type=positive, default=3, help="random policies, averaged (default: 3)")
    parser.add_argument("--output", type=Path, help="write OUTPUT.json")
    options = parser.parse_args(arguments)
    rows = [row for seed in range(options.policies) for row in measure(options, seed)]
    kinds = list(dict.fromkeys((row["kind"], row["estimator"]) for row in rows))
    result = []
    print(f"{'rollouts of a prompt':46} {'estimator':9} {'leaves':>6} {'tokens':>6} {'bias':>14} {'variance':>8}")
    for kind, estimator in kinds:
        same = [row for row in rows if (row["kind"], row["estimator"]) == (kind, estimator)]
        means = {name: sum(row[name] for row in same) / len(same) for name in ("leaves", "tokens", "bias", "noise")}
        variance = sum(row["variance"] for row in same) / len(same)
        result.append({"kind": kind, "estimator": estimator, "variance": variance, **means})
        print(
            f"{kind:46} {estimator:9} {means['leaves']:6.2f} {means['tokens']:6.1f} "
            f"{means['bias']:6.3f} ({means['noise']:.3f}) {variance:8.2f}"
        )
    content = {"options": {name: str(value) for name, value in vars(options).items()}, "rows": result}
    write_json(options.output, None, content)
    return content


def measure(options: argparse.Namespace, seed: int) -> list[dict[str, Any]]:
    """Bias and variance of each kind and estimator for one policy; the first kind's variance is 1."""
    policy = TabularPolicy(
        options.vocabulary, options.length, seed, end_logit=options.end_logit, gain_from=options.gain_from
    )
    exact = policy.gradient()
    rows: list[dict[str, Any]] = []
    for kind, (widths, estimators) in KINDS.items():
        sampler = Sampler(policy, widths, random.Random(seed))
        groups = [sampler.group() for _ in range(options.groups)]
        tokens = sum(map(sampled_tokens, groups)) / len(groups)
        for estimator in estimators:
            found = estimates(policy, groups, estimator).flatten(1)
            mean, variance = found.mean(dim=0), float(found.var(dim=0).sum())
            rows.append(
                {
                    "kind": kind,
                    "estimator": estimator,
                    "leaves": sum(map(len, groups)) / len(groups),
                    "tokens": tokens,
                    "bias": float((mean - exact.flatten()).norm() / exact.norm()),
                    "noise": (variance / len(groups)) ** 0.5 / float(exact.norm()),
                    "variance": variance * tokens,
                }
            )
    return [{**row, "variance": row["variance"] / rows[0]["variance"]} for row in rows]
