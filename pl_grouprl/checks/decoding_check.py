"""Samples a few tokens as in rollouts, and compares their log-probabilities with those of forwards without a cache.

Configs do not say whether decoding from a padded, copied cache is exact: models may keep extra states, interpret masks
differently, or compute single tokens differently. Layers that select tokens by score select few of them in the check,
as its rows are short; not in half precision, where rounding alone changes which ones.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn

from pl_grouprl.attention.selections import SmallSelections
from pl_grouprl.attention.support import find_decoder
from pl_grouprl.checks.probes import token_logprobs
from pl_grouprl.types import Prompt, Rollout, SamplingConfig
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
        limit: Most tokens that the model can serve; None if unlimited.
        placeholders: Tokens that `sample` never draws (image placeholders).
        scoring: Context of the forwards without a cache.

    Raises:
        ValueError: If they differ by more than rounding, the model fails, or a layer selects tokens in long rows only.
    """
    passed = _PASSED.setdefault(model, set())
    if not is_whole(model) or _precision(model) in passed:
        return
    decoder = find_decoder(model)
    with _selecting_few(model) as selections:
        for factor in (1, *LONGER):
            if limit is None or max(LENGTHS) * factor + SAMPLING.max_new_tokens <= limit:
                _check_prompts(model, sample, _prompts(model, placeholders, factor), placeholders, scoring)
            if not (untried := selections.untried(decoder)):
                break
    if untried:
        raise _refusal(model, f"its {', '.join(untried)} selects tokens in long rows only, which cannot be tried.")
    passed.add(_precision(model))


def _check_prompts(
    model: Any,
    sample: Sample,
    prompts: list[Prompt],
    placeholders: Collection[int],
    scoring: Callable[[], AbstractContextManager[Any]],
) -> None:
    try:
        groups = sample(prompts, SAMPLING)
    except (AttributeError, KeyError, IndexError, TypeError, NotImplementedError) as error:
        raise _refusal(model, f"with transformers' cache it fails ({type(error).__name__}: {error}).") from error
    with scoring():
        worst = max(
            _difference(model, prompt.token_ids, rollout, placeholders)
            for prompt, group in zip(prompts, groups, strict=True)
            for rollout in group
        )
    if not worst <= _allowed(model):
        raise _refusal(
            model,
            f"with its cache a log-probability differs by {worst:.1e} from that of a forward over the whole sequence, "
            "so rollouts would not match their scores.",
        )


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
