"""Prompts to sample from, and rollouts compared with each other and with transformers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from helpers.sampling_oracle import penalized

from pl_grouprl.rollout import HFRolloutEngine
from pl_grouprl.training.buffer import RolloutBuffer
from pl_grouprl.training.metrics import count_sampled
from pl_grouprl.types import Rollout, RolloutGroup, SamplingConfig

PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8], [9, 10], [11, 12, 13, 14, 15, 16, 17, 18, 19], [3], [20, 1, 5, 9, 2, 2, 7, 8]]

Groups = list[list[Rollout]]


def ids(groups: Groups) -> list[list[list[int]]]:
    """The tokens alone."""
    return [[rollout.token_ids for rollout in group] for group in groups]


def assert_same(left: Groups, right: Groups, atol: float = 1e-5) -> None:
    """The same tokens and finish reasons, and the same log-probabilities up to rounding."""
    assert ids(left) == ids(right)
    for a, b in zip(itertools.chain(*left), itertools.chain(*right), strict=True):
        torch.testing.assert_close(torch.tensor(a.logprobs), torch.tensor(b.logprobs), atol=atol, rtol=0)
        assert a.finish_reason == b.finish_reason


def greedily(model: Any, prompt: list[int], max_new_tokens: int) -> list[int]:
    """What transformers generates behind a prompt."""
    inputs = torch.tensor([prompt])
    attention = torch.ones_like(inputs)
    output = model.generate(
        inputs, attention_mask=attention, do_sample=False, max_new_tokens=max_new_tokens, pad_token_id=0
    )
    return output[0, len(prompt) :].tolist()


def mini_batch(buffer: RolloutBuffer, update: int) -> tuple[list[RolloutGroup], dict[str, torch.Tensor]]:
    """The groups of an update and their per-token quantities."""
    return buffer.select([(index, range(len(buffer.groups[index].rollouts))) for index in buffer.members(update)])[:2]


def per_rollout_means(buffer: RolloutBuffer, name: str) -> list[list[float]]:
    """Mean of a per-token quantity of each rollout, by group; 0 for an empty rollout."""
    means = []
    for group, values in zip(buffer.groups, buffer.tokens[name], strict=True):
        parts = values.split([len(rollout.token_ids) for rollout in group.rollouts])
        means.append([float(part.float().mean()) if len(part) else 0.0 for part in parts])
    return means


@torch.no_grad()
def reference_logprobs(
    model: Any, prompt: list[int], rollout: Rollout, sampling: SamplingConfig, *, min_p_first: bool = False
) -> torch.Tensor:
    """A fresh forward over prompt and completion, then transformers' own processors.

    Args:
        model: A transformers model.
        prompt: Its tokens.
        rollout: Its completion.
        sampling: How it was sampled; greedy ones have no filters.
        min_p_first: Whether min-p is applied before top-k and top-p.
    """
    from transformers.generation import logits_process as lp

    inputs = torch.tensor([prompt + rollout.token_ids])
    scores = model(inputs).logits[0, len(prompt) - 1 : -1].float()
    if sampling.repetition_penalty != 1:
        scores = penalized(scores, prompt, rollout, sampling)
    filtered = sampling.temperature > 0
    processors = [
        (sampling.temperature not in (0.0, 1.0), lambda: lp.TemperatureLogitsWarper(sampling.temperature)),
        (filtered and sampling.top_k > 0, lambda: lp.TopKLogitsWarper(sampling.top_k)),
        (filtered and sampling.top_p < 1, lambda: lp.TopPLogitsWarper(sampling.top_p)),
        (filtered and sampling.min_p > 0, lambda: lp.MinPLogitsWarper(sampling.min_p)),
    ]
    if min_p_first:
        processors.insert(1, processors.pop())
    for wanted, make in processors:
        if wanted:
            scores = make()(None, scores)
    return scores.log_softmax(dim=-1).gather(-1, torch.tensor(rollout.token_ids)[:, None])[:, 0]


class WithoutCaches(HFRolloutEngine):
    """Encodes the whole conversation again in every turn."""

    keeps_caches = False


def num_turns(rollout: Rollout) -> int:
    return sum(message["role"] == "assistant" for message in rollout.messages)


@torch.no_grad()
def worst_logprob_error(model: Any, groups: list[RolloutGroup]) -> float:
    """Largest difference of log-probabilities to a forward over each whole sequence; tokens not sampled have 0."""
    worst = 0.0
    for prompt, rollout in ((group.prompt_ids, rollout) for group in groups for rollout in group.rollouts):
        start, sequence = len(prompt), torch.tensor([prompt + rollout.token_ids])
        logprobs = model(sequence).logits[0, start - 1 : -1].log_softmax(-1)
        mask = torch.tensor(rollout.loss_mask or [1] * len(rollout.token_ids))
        expected = logprobs.gather(1, sequence[0, start:, None])[:, 0] * mask
        worst = max(worst, (torch.tensor(rollout.logprobs) - expected).abs().max().item())
    return worst


def plain_leaves(groups: list[RolloutGroup]) -> list[list[tuple[Any, ...]]]:
    """What branching decides."""
    return [[(r.token_ids, r.branch_path, r.branch_points, r.finish_reason) for r in g.rollouts] for g in groups]


def segments(rollout: Rollout, values: list[Any]) -> dict[tuple[int, ...], list[Any]]:
    """The values of each segment by its path."""
    bounds = [0, *rollout.branch_points, len(values)]
    return {rollout.branch_path[: k + 1]: values[bounds[k] : bounds[k + 1]] for k in range(len(bounds) - 1)}


def check_tree(group: RolloutGroup) -> dict[tuple[int, ...], list[int]]:
    """Leaves share exactly the segments that their paths say, each of which was sampled once; returns its segments."""
    tokens: dict[tuple[int, ...], list[int]] = {}
    masks: dict[tuple[int, ...], list[int]] = {}
    for rollout in group.rollouts:
        mask = rollout.loss_mask or [1] * len(rollout.token_ids)
        for found, values in ((tokens, rollout.token_ids), (masks, mask)):
            for path, segment in segments(rollout, values).items():
                assert found.setdefault(path, segment) == segment
    assert count_sampled(group.rollouts) == sum(map(sum, masks.values()))
    paths = [rollout.branch_path for rollout in group.rollouts]
    assert paths == sorted(paths)
    assert not [(a, b) for a, b in itertools.combinations(paths, 2) if a == b[: len(a)]]
    return tokens


def shortened(groups: Groups, limits: list[int]) -> Groups:
    """Rollouts as they would be with a limit for each prompt."""
    return [
        [
            own
            if len(own.token_ids) <= limit
            else Rollout(own.token_ids[:limit], own.logprobs[:limit], finish_reason="length")
            for own in group
        ]
        for group, limit in zip(groups, limits, strict=True)
    ]


@contextmanager
def changed(weight: torch.Tensor, change: Callable[[torch.Tensor], Any], sync: Callable[[], None]) -> Iterator[None]:
    """Inside, an engine has another weight."""
    kept = weight.detach().clone()
    try:
        with torch.no_grad():
            change(weight)
        sync()
        yield
    finally:
        with torch.no_grad():
            weight.copy_(kept)
        sync()
