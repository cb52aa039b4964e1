"""A first look at a model by running it: a few tokens as rollouts sample them, and as they are scored.

Whether decoding goes on exactly behind a padded, copied cache cannot be read off a config: models keep states of their
own, read masks in their own way, or compute a single token by other arithmetic. A handful of tokens shows it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from pl_grouprl.media.inputs import placeholder_ids
from pl_grouprl.rollout.packed_linear import own_weights
from pl_grouprl.types import Prompt, Rollout, SamplingConfig

LENGTHS = (3, 8, 9)
"""Of the prompts: the last two are padded to one batch where the model allows it, and all three are decoded in one."""

SAMPLING = SamplingConfig(max_new_tokens=4)
LONGEST = max(LENGTHS) + SAMPLING.max_new_tokens

_ALLOWED = {torch.bfloat16: 0.5, torch.float16: 0.1, "tensor cores": 0.1}
"""Largest difference of a log-probability that rounding explains, in nats; of wider types `_ALLOWED_WIDE`."""

_ALLOWED_WIDE = 1e-3

_PASSED: WeakSet[nn.Module] = WeakSet()

Sample = Callable[[list[Prompt], SamplingConfig], list[list[Rollout]]]


def uncompiled() -> AbstractContextManager[Any]:
    """Run compiled layers as they are written.

    That holds for the whole process. A thread that samples beside training changes nothing: it samples from a copy of
    the policy, and a deep copy is not compiled.
    """
    if threading.current_thread() is not threading.main_thread():
        return nullcontext()
    return torch.compiler.set_stance("force_eager")


def check_decoding(model: Any, sample: Sample) -> None:
    """Compare log-probabilities of a few sampled tokens with those of forwards without a cache, once per model.

    Models whose weights are not whole here (sharded, on meta, quantized) are skipped.

    Args:
        model: A transformers decoder, in evaluation mode, without gradients, that can serve `LONGEST` tokens.
        sample: Samples one rollout per prompt or more, without end tokens.

    Raises:
        ValueError: If they differ by more than rounding.
    """
    whole = all(type(p) is nn.Parameter and not p.is_meta and p.numel() for p in model.parameters())
    if model in _PASSED or not whole:
        return
    tokens = _ordinary_tokens(model)
    prompts = [Prompt(tokens[start : start + length]) for start, length in enumerate(LENGTHS)]
    with uncompiled():
        groups = sample(prompts, SAMPLING)
        worst = max(
            _difference(model, prompt.token_ids, rollout)
            for prompt, group in zip(prompts, groups, strict=True)
            for rollout in group
        )
    if worst > _allowed(model):
        raise ValueError(
            f"HFRolloutEngine cannot sample from {type(model).__name__}: behind its cache a log-probability differs by "
            f"{worst:.1e} from that of a forward over the whole sequence, so rollouts would not be what is scored. "
            "Choose another rollout engine for this model."
        )
    _PASSED.add(model)


def _ordinary_tokens(model: Any) -> list[int]:
    size = int(model.get_input_embeddings().weight.shape[0])
    ordinary = sorted(set(range(1, min(size, 500))) - set(placeholder_ids(model).values())) or [0]
    return [ordinary[7 * place % len(ordinary)] for place in range(LONGEST)]


def _difference(model: Any, prompt: list[int], rollout: Rollout) -> float:
    tokens = torch.tensor(rollout.token_ids, device=next(model.parameters()).device)
    row = torch.cat([tokens.new_tensor(prompt), tokens])[None]
    with own_weights(model):
        logits_TV = model(input_ids=row, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    never = [token for token in placeholder_ids(model).values() if token < logits_TV.shape[-1]]
    logits_TV[:, never] = -torch.inf
    expected = logits_TV.log_softmax(dim=-1).gather(-1, tokens[:, None])[:, 0].cpu()
    return float((expected - torch.tensor(rollout.logprobs)).abs().max())


def _allowed(model: Any) -> float:
    weight = next(model.parameters())
    if torch.is_autocast_enabled(weight.device.type):
        return _ALLOWED.get(torch.get_autocast_dtype(weight.device.type), _ALLOWED_WIDE)
    if weight.dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        return _ALLOWED["tensor cores"]
    return _ALLOWED.get(weight.dtype, _ALLOWED_WIDE)
