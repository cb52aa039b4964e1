"""A first look at a model by running it: a few tokens through the shared and the repeated path, forward only.

What a decoder does beside attention cannot be read off its config: layers may mix tokens in ways that nobody thought
of. A forest of a few tokens costs two short calls and shows it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from pl_grouprl.attention.support import refusal
from pl_grouprl.packing import SharedPrefixLayout, repeat_rows

if TYPE_CHECKING:
    from pl_grouprl.attention.patch import SharedPrefix

_ALLOWED = {torch.bfloat16: 5e-2, torch.float16: 2e-2}
"""Mean difference of hidden states over their mean size that rounding explains; of wider types `_ALLOWED_WIDE`."""

_ALLOWED_WIDE = 1e-4

_FORESTS = {
    None: SharedPrefixLayout([5, 3, 2, 4, 1, 3, 4], [None, 0, 1, 1, 0, None, 5]),
    1: SharedPrefixLayout([5, 3, 4, 1, 3, 4], [None, 0, 0, 0, None, 4]),
}
"""By the deepest forest that a backend runs."""

_CHECKED: WeakKeyDictionary[nn.Module, dict[str, dict[str, tuple[str, int]]]] = WeakKeyDictionary()
"""The backends that each decoder has passed with, and the kinds of layers that were found."""


def check_structure(patch: SharedPrefix, max_depth: int | None) -> None:
    """Compare both paths once per decoder and backend. Weights that are not whole here (sharded, on meta) are skipped.

    Raises:
        UnsupportedModelError: If the results differ, or the shared path refuses.
    """
    passed = _CHECKED.setdefault(patch.decoder, {})
    if patch.backend in passed:
        patch.layers = passed[patch.backend]
    if patch.backend in passed or not _is_whole(patch.decoder):
        return
    layout = _FORESTS[max_depth]
    vocabulary = int(patch.decoder.get_input_embeddings().weight.shape[0])  # type: ignore[index, arg-type]
    tokens = torch.arange(1, layout.num_tokens + 1, device=patch.decoder.device)[None] * 7 % vocabulary
    with _quiet(patch):
        try:
            shared = _run(patch, {"input_ids": tokens, "prefix_layout": layout})[0]
            rows = _run(patch, repeat_rows(layout, tokens))
        except Exception as error:
            known = isinstance(error, (NotImplementedError, ValueError, RuntimeError)) and "sharing=" in str(error)
            reason = str(error) if known else f"its layers fail on a packed row ({type(error).__name__}: {error})"
            raise refusal(patch.model, _without_remedy(reason)) from error
    difference, size = 0.0, 0.0
    for row, leaf in enumerate(layout.leaves):
        path = layout.path(leaf).to(tokens.device)
        expected = rows[row, : len(path)].float()
        difference += (shared[path].float() - expected).abs().sum().item()
        size += expected.abs().sum().item()
    if not difference <= _ALLOWED.get(shared.dtype, _ALLOWED_WIDE) * size:  # a NaN is refused too
        raise refusal(
            patch.model,
            f"its hidden states of a few tokens differ between a shared and a repeated prefix by "
            f"{difference / max(size, 1e-30):.1e} of their size, so it mixes tokens in a way that is not known here.",
        )
    passed[patch.backend] = patch.layers


def _without_remedy(reason: str) -> str:
    """The reason alone: `refusal` says what to do."""
    return re.split(r"; (?:train|Train) this|\. Train this|; the result would be", reason)[0].rstrip(".") + "."


def _run(patch: SharedPrefix, inputs: dict[str, Any]) -> Tensor:
    return patch.decoder(**inputs, use_cache=False, return_dict=True).last_hidden_state


def _is_whole(decoder: nn.Module) -> bool:
    """Whether every parameter is an ordinary tensor with its data: not on meta, sharded or quantized."""
    if any("FullyShardedDataParallel" in type(module).__name__ for module in decoder.modules()):
        return False
    return all(type(p) is nn.Parameter and not p.is_meta and p.numel() for p in decoder.parameters())


@contextmanager
def _quiet(patch: SharedPrefix) -> Iterator[None]:
    """Evaluation mode, no gradient, no compilation, and nobody hears of these calls."""
    training = [module for module in patch.decoder.modules() if module.training]
    listeners, patch.listeners = patch.listeners, []
    last_call, paused, patch.paused = patch.last_call, patch.paused, True
    patch.decoder.eval()
    try:
        with (
            torch.inference_mode(False),
            torch.no_grad(),
            torch.autocast(patch.decoder.device.type, enabled=False),  # its rounding would be taken for a difference
            torch.compiler.set_stance("force_eager"),
        ):
            yield
    finally:
        for module in training:
            module.training = True
        patch.listeners, patch.last_call, patch.paused = listeners, last_call, paused
