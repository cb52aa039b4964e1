"""Compares the log-probabilities of samplers with those of forward passes.

Configs do not say whether decoding from a padded, copied cache is exact: models may keep extra states, interpret masks
differently, or compute single tokens differently. So `HFRolloutEngine` samples a few tokens and compares. Layers that
select tokens by score select few of them in this check, as its rows are short; not in half precision, where rounding
alone changes which ones.

Nor do equal weights imply equal models. Another program may interpret the config differently (a window one token
longer, rotary embeddings on a part of each head), and its samples would be scored as if they were the policy's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn

from pl_grouprl.attention.support import SmallSelections, find_decoder
from pl_grouprl.checks.parity import token_logprobs
from pl_grouprl.types import Prompt, Rollout, RolloutGroup, SamplingConfig
from pl_grouprl.utilities.modes import is_whole, uncompiled
from pl_grouprl.utilities.tolerances import compare, computing_dtype, tolerance_of

LENGTHS = (3, 8, 9)
"""Prompt lengths. The last two prompts are padded to one batch if the model allows it; all three are decoded in one."""

SAMPLING = SamplingConfig(max_new_tokens=4)
LONGEST = max(LENGTHS) + SAMPLING.max_new_tokens

LONGER = (8, 64)
"""How many times longer the prompts are in further attempts, made while some layer has not selected tokens yet."""

CONTINUED = (1, 2, 5)
"""New tokens of each prompt's second turn."""

LONGEST_CONTINUED = LONGEST + max(CONTINUED) + SAMPLING.max_new_tokens

_CONTINUES: WeakKeyDictionary[nn.Module, dict[torch.dtype, bool]] = WeakKeyDictionary()
_PASSED: WeakKeyDictionary[nn.Module, set[torch.dtype]] = WeakKeyDictionary()
"""Results of the checks, by the dtype that the model computed in."""

Sample = Callable[[list[Prompt], SamplingConfig], list[list[Rollout]]]

SampleTurns = Callable[[list[Prompt], list[list[int]], SamplingConfig], list[tuple[list[int], Rollout]]]


def check_decoding(
    model: Any,
    sample: Sample,
    *,
    limit: int | None = None,
    placeholders: Collection[int] = (),
    scoring: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> None:
    """Compare log-probabilities of a few sampled tokens with those of forwards without a cache.

    Once per model and dtype that it computes in. Skips models whose weights are sharded, on meta, or quantized in
    another way than to 4 bits.

    Args:
        model: A transformers decoder, in evaluation mode, without gradients, that can serve `LONGEST` tokens.
        sample: Samples one rollout per prompt or more, without end tokens.
        limit: Maximum number of tokens that the model can serve; no limit if None.
        placeholders: Tokens that `sample` never draws (image placeholders).
        scoring: Context of the forwards without a cache.

    Raises:
        ValueError: If they differ by more than rounding, the model fails, or a layer selects tokens in long rows only.
    """
    passed = _PASSED.setdefault(model, set())
    if not is_whole(model) or _precision(model) in passed:
        return
    decoder = find_decoder(model)
    factors = [f for f in (1, *LONGER) if limit is None or max(LENGTHS) * f + SAMPLING.max_new_tokens <= limit]
    with _selecting_few(model) as selections:
        untried = selections.untried(decoder)
        for factor in factors:
            prompts = _prompts(model, placeholders, factor)
            try:
                groups = sample(prompts, SAMPLING)
            except (AttributeError, KeyError, IndexError, TypeError, NotImplementedError) as error:
                reason = f"with transformers' cache it fails ({type(error).__name__}: {error})."
                raise _refusal(model, reason) from error
            turns = [(p.token_ids, r) for p, group in zip(prompts, groups, strict=True) for r in group]
            with scoring():
                worst = max(_difference(model, prompt, rollout, placeholders) for prompt, rollout in turns)
            if not worst <= _allowed(model):
                raise _refusal(
                    model,
                    f"with its cache a log-probability differs by {worst:.1e} from that of a forward over the whole "
                    "sequence, so rollouts would not match their scores.",
                )
            untried = selections.untried(decoder)
            if not untried:
                break
    if untried:
        raise _refusal(model, f"its {', '.join(untried)} selects tokens in long rows only, which cannot be tried.")
    passed.add(_precision(model))


def _refusal(model: Any, reason: str) -> ValueError:
    return ValueError(
        f"HFRolloutEngine cannot sample from {type(model).__name__}: {reason} Choose another rollout engine for this "
        "model."
    )


@contextmanager
def _selecting_few(model: Any) -> Iterator[SmallSelections]:
    """Run layers uncompiled; those that select tokens select few, unless rounding would change which ones."""
    few = _precision(model) in (torch.float32, torch.float64)
    selections = SmallSelections() if few else SmallSelections(None)
    with uncompiled(), selections if selections.untried(find_decoder(model)) else nullcontext():
        yield selections


def continues_exactly(
    model: Any,
    sample: SampleTurns,
    *,
    placeholders: Collection[int] = (),
    scoring: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> bool:
    """Whether a second turn can continue from the first one's cache, tested as in `check_decoding`; logs once if not.

    Args:
        model: A transformers decoder that passed `check_decoding` and can serve `LONGEST_CONTINUED` tokens.
        sample: Samples a turn for each prompt, appends the given tokens, and samples a second turn from the kept
            caches. Returns the prompts and the rollouts of the second turn.
        placeholders: Tokens that `sample` never draws (image placeholders).
        scoring: Context of the forwards without a cache.
    """
    results_of_model, precision = _CONTINUES.setdefault(model, {}), _precision(model)
    if precision not in results_of_model:
        prompts, worst = _prompts(model, placeholders), 0.0
        results = [_ordinary_tokens(model, placeholders, LONGEST)[-count:] for count in CONTINUED]
        if is_whole(model):
            with _selecting_few(model):
                turns = sample(prompts, results, SAMPLING)
                with scoring():
                    worst = max(_difference(model, prompt, rollout, placeholders) for prompt, rollout in turns)
        results_of_model[precision] = worst <= _allowed(model)
        if not results_of_model[precision]:
            rank_zero_info(
                f"HFRolloutEngine encodes every turn of an episode from the start: log-probabilities of "
                f"{type(model).__name__} differ by {worst:.1e} if it continues a cache with several tokens."
            )
    return results_of_model[precision]


def _prompts(model: Any, placeholders: Collection[int], factor: int = 1) -> list[Prompt]:
    tokens = _ordinary_tokens(model, placeholders, LONGEST * factor)
    return [Prompt(tokens[start : start + length * factor]) for start, length in enumerate(LENGTHS)]


def _ordinary_tokens(model: Any, placeholders: Collection[int], count: int) -> list[int]:
    size = int(model.get_input_embeddings().weight.shape[0])
    ordinary = sorted(set(range(1, min(size, 500))) - set(placeholders)) or [0]
    return [ordinary[7 * index % len(ordinary)] for index in range(count)]


def _difference(model: Any, prompt: list[int], rollout: Rollout, placeholders: Collection[int]) -> float:
    """Largest difference of a sampled token's log-probability, in nats."""
    tokens = torch.tensor(rollout.token_ids, device=next(model.parameters()).device)
    row = torch.cat([tokens.new_tensor(prompt), tokens])[None]
    logits_TV = model(input_ids=row, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    logits_TV[:, [token for token in placeholders if token < logits_TV.shape[-1]]] = -torch.inf
    return compare(torch.tensor(rollout.logprobs), token_logprobs(logits_TV, tokens).cpu()).largest


def _allowed(model: Any) -> float:
    return tolerance_of(_precision(model)).decoded_logprob


def _precision(model: Any) -> torch.dtype:
    dtype = computing_dtype(model)
    if dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        return torch.float16  # TF32 rounds factors to the precision of float16
    return dtype


_ROLLOUTS = 8

Score = Callable[[RolloutGroup], Sequence[Tensor]]
"""The policy's log-probabilities of a group's tokens: one tensor per rollout."""


def can_compare(sampling: SamplingConfig) -> bool:
    """Whether log-probabilities per token can be compared: not with top-k, min-p or a repetition penalty."""
    return not (sampling.top_k or sampling.min_p or sampling.repetition_penalty != 1)


def sampler_difference(score: Score, groups: Sequence[RolloutGroup], sampling: SamplingConfig) -> float | None:
    """Mean absolute difference of log-probabilities, in nats, on the group with the longest sequence.

    Args:
        score: Runs the policy, with the temperature of `sampling`.
        groups: Groups just sampled from the policy's current weights.
        sampling: Their sampling options.

    Returns:
        The difference, or None if no rollout has tokens with log-probabilities.
    """
    candidates = []
    for group in groups:
        scored = [r for r in group.rollouts if r.num_sampled_tokens and r.logprobs is not None]
        longest = sorted(scored, key=lambda rollout: len(rollout.token_ids), reverse=True)[:_ROLLOUTS]
        if longest:
            rows = [replace(rollout, episode=None) for rollout in longest]  # compared one by one, in this order
            candidates.append(RolloutGroup(group.prompt_ids, rows, media=group.media))
    if not candidates:
        return None
    chosen = max(candidates, key=lambda group: len(group.prompt_ids) + len(group.rollouts[0].token_ids))
    return mean_difference(score(chosen), chosen, sampling)


def mean_difference(expected: Sequence[Tensor], group: RolloutGroup, sampling: SamplingConfig) -> float:
    """Mean absolute difference over the sampled tokens of a group, allowing for top-p.

    Args:
        expected: The policy's log-probabilities, one tensor per rollout.
        group: Group with the sampler's log-probabilities.
        sampling: Its `top_p` raises the probabilities of kept tokens, by a factor of at most 1 / top_p.
    """
    rollouts = group.rollouts
    sampled = torch.cat([torch.tensor(r.loss_mask or [1] * len(r.token_ids)) for r in rollouts]).bool()
    ours = torch.cat([logprobs.cpu().double() for logprobs in expected])[sampled]
    theirs = torch.cat([torch.tensor(r.logprobs, dtype=torch.float64) for r in rollouts])[sampled]
    explained = -math.log(sampling.top_p) if sampling.temperature else 0.0
    return compare(theirs - (theirs - ours).clamp(0, explained), ours).mean
