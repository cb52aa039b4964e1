"""A first look at a model by running it: a few tokens through the shared and the repeated path, forward only.

What a decoder does beside attention cannot be read off its config: layers may mix tokens in ways that nobody thought
of. A forest of a few tokens costs two short calls and shows it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pl_grouprl.attention.support import find_decoder, positions_are_relative, refusal
from pl_grouprl.packing import SharedPrefixLayout, repeat_rows

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ALLOWED = {torch.bfloat16: 5e-2, torch.float16: 2e-2}
"""Mean difference of hidden states over their mean size that rounding explains; of wider types `_ALLOWED_WIDE`."""

_ALLOWED_WIDE = 1e-4

_FORESTS = {
    None: SharedPrefixLayout([5, 3, 2, 4, 1, 3, 4], [None, 0, 1, 1, 0, None, 5]),
    1: SharedPrefixLayout([5, 3, 4, 1, 3, 4], [None, 0, 0, 0, None, 4]),
}
"""By the deepest forest that a backend runs."""


def check_structure(model: PreTrainedModel, max_depth: int | None) -> bool | None:
    """Compare both paths on a few tokens. A model whose weights are not whole here (sharded, on meta) is not looked at.

    Args:
        model: In a `shared_prefix` context that lets ordinary calls through.
        max_depth: Deepest forest that the context's backend runs.

    Returns:
        Whether the model gives the same at positions moved by a constant; None if it was not looked at.

    Raises:
        UnsupportedModelError: If the results differ, or the shared path refuses.
    """
    decoder = find_decoder(model)
    if not _is_whole(decoder):
        return None
    layout = _FORESTS[max_depth]
    vocabulary = int(decoder.get_input_embeddings().weight.shape[0])  # type: ignore[index, arg-type]
    tokens = torch.arange(layout.num_tokens, device=decoder.device)[None] % vocabulary
    with _plainly(decoder):
        try:
            shared = _run(decoder, {"input_ids": tokens, "prefix_layout": layout})[0]
            rows = _run(decoder, repeat_rows(layout, tokens))
            relative = _sees_distances_only(decoder, tokens)
        except Exception as error:
            reason = str(error)
            if "sharing=" not in reason:  # not an error of ours
                reason = (
                    "its layers cannot run a packed row: they compute with the attention mask themselves, or fail "
                    f"otherwise ({type(error).__name__}: {error})"
                )
            raise refusal(model, _without_remedy(reason)) from error
    difference, size = 0.0, 0.0
    for row, leaf in enumerate(layout.leaves):
        path = layout.path(leaf).to(tokens.device)
        expected = rows[row, : len(path)].float()
        difference += (shared[path].float() - expected).abs().sum().item()
        size += expected.abs().sum().item()
    if not difference <= _ALLOWED.get(shared.dtype, _ALLOWED_WIDE) * size:  # a NaN is refused too
        raise refusal(
            model,
            f"its hidden states of a few tokens differ between a shared and a repeated prefix by "
            f"{difference / max(size, 1e-30):.1e} of their size, so it mixes tokens in a way that is not known here.",
        )
    return relative


def _sees_distances_only(decoder: PreTrainedModel, tokens: Tensor) -> bool:
    """Whether a row gives the same, up to the rounding of angles, at positions moved far away."""
    if not positions_are_relative(decoder):
        return False
    longest = getattr(decoder.config, "max_position_embeddings", None) or 0
    positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
    moved = positions + max(min(longest - tokens.shape[1], 4096), 64)
    here, there = (_run(decoder, {"input_ids": tokens, "position_ids": p}).float() for p in (positions, moved))
    allowed = max(_ALLOWED.get(decoder.dtype, 0.0), 1e-3)
    return bool((here - there).abs().sum() <= allowed * here.abs().sum())


def _without_remedy(reason: str) -> str:
    """The reason alone: `refusal` says what to do."""
    return re.split(r"; (?:train|Train) this|\. Train this|; the result would be", reason)[0].rstrip(".") + "."


def _run(decoder: nn.Module, inputs: dict[str, Any]) -> Tensor:
    return decoder(**inputs, use_cache=False, return_dict=True).last_hidden_state


def _is_whole(decoder: nn.Module) -> bool:
    """Whether every parameter is an ordinary tensor with its data: not on meta, sharded or quantized."""
    if any("FullyShardedDataParallel" in type(module).__name__ for module in decoder.modules()):
        return False
    return all(type(p) is nn.Parameter and not p.is_meta and p.numel() for p in decoder.parameters())


@contextmanager
def _plainly(decoder: PreTrainedModel) -> Iterator[None]:
    """Evaluation mode, no gradient, no compilation, no autocast (its rounding would be taken for a difference)."""
    training = [module for module in decoder.modules() if module.training]
    frequencies = [
        (module, dict(module.__dict__), dict(module._buffers))
        for module in decoder.modules()
        if hasattr(module, "rope_type")
    ]
    decoder.eval()
    try:
        with (
            torch.inference_mode(False),
            torch.no_grad(),
            torch.autocast(decoder.device.type, enabled=False),
            torch.compiler.set_stance("force_eager"),
        ):
            yield
    finally:
        for module, attributes, buffers in frequencies:  # dynamic ones are those of the longest call so far
            module.__dict__.update(attributes)
            module._buffers.update(buffers)
        for module in training:
            module.training = True
