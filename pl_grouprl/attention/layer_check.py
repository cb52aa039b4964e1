"""Checks, before a model shares prefixes, that shared and repeated prefixes give the same hidden states.

Configs do not say how layers mix tokens outside attention; two forward calls on a few tokens show it. `shared_prefix`
runs this check before the first shared call; the other self-checks are in `pl_grouprl.checks`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from pl_grouprl.attention.masks import is_marker
from pl_grouprl.attention.support import (
    LayersFailedError,
    SmallSelections,
    find_decoder,
    positions_are_relative,
    refusal,
)
from pl_grouprl.packing import SharedPrefixLayout, repeat_rows
from pl_grouprl.utilities.modes import examining
from pl_grouprl.utilities.tolerances import compare, computing_dtype, tolerance_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Padding = Literal["padding", "padding on the left"]
"""Rows with this padding are not shared, because a trial on a few tokens gave different results."""

_FORESTS = {
    None: SharedPrefixLayout([5, 3, 2, 4, 1, 3, 4], [None, 0, 1, 1, 0, None, 5]),
    1: SharedPrefixLayout([5, 3, 4, 1, 3, 4], [None, 0, 0, 0, None, 4]),
}
"""The forests to try, by a backend's maximum depth."""

_STRIDE = 7919
"""Between the tokens of the check, around the vocabulary: a prime, so that none repeats in a small one."""

_NUM_REPEATED = 5
"""Number of different tokens in the check of a model whose layers select tokens."""


def check_layers(model: PreTrainedModel, max_depth: int | None, *, selects: bool = False) -> bool:
    """Compare shared and repeated prefixes on a few tokens.

    Args:
        model: A model in a `shared_prefix` context that lets ordinary calls through.
        max_depth: Maximum depth of a forest that the context's backend can run.
        selects: Whether its layers may select tokens by the attention mask. The check then limits selections to a few
            tokens, and repeats tokens, so that a model that gives equal tokens equal scores fails: it breaks ties by
            the place in the row, which differs.

    Returns:
        Whether shifting all positions by a constant leaves the results unchanged.

    Raises:
        UnsupportedModelError: If the results differ, or the model cannot run a packed row; a `LayersFailedError` if it
            raised an error.
    """
    decoder = find_decoder(model)
    layout = _FORESTS[1 if max_depth == 1 else None]
    numbers = torch.arange(layout.num_tokens, device=decoder.device)[None]
    tokens = _ordinary_tokens(numbers % _NUM_REPEATED if selects else numbers, decoder)
    paths = [layout.path(leaf).to(tokens.device) for leaf in layout.leaves]
    longest = max(paths, key=len)
    selections = SmallSelections()
    with examining(decoder), selections if selects else nullcontext():
        try:
            shared = _run(decoder, {"input_ids": tokens, "prefix_layout": layout})[0]
            rows = _run(decoder, repeat_rows(layout, tokens))
            alone = _run(decoder, {"input_ids": tokens[:, longest]})[0]  # without padding, so often without a mask
            relative = _is_shift_invariant(decoder, tokens)
        except Exception as error:
            if "sharing=" in str(error):  # an error of ours
                raise refusal(model, _without_remedy(str(error))) from error
            reason = (
                "its layers cannot run a packed row: they compute with the attention mask themselves, or fail "
                f"otherwise ({type(error).__name__}: {error})"
            )
            raise refusal(model, _without_remedy(reason), kind=LayersFailedError) from error
    found = torch.cat([shared[path] for path in [*paths, longest]])
    expected = torch.cat([*(rows[row, : len(path)] for row, path in enumerate(paths)), alone])
    difference = compare(found, expected).relative_mean
    if not difference <= tolerance_of(computing_dtype(decoder)).hidden:  # also refuses NaN
        if not bool(expected.isfinite().all()):
            raise refusal(
                model,
                f"the model itself gives NaN or infinity for a few tokens in a batch padded on the right, in "
                f"{found.dtype}.",
                "Check its weights, or load it in another dtype (float32) or with another attn_implementation.",
            )
        raise refusal(
            model,
            "its hidden states of a few tokens differ between a shared and a repeated prefix by a relative "
            f"{difference:.1e}, so it mixes tokens{', or selects them,' if selects else ''} in an unknown way.",
        )
    untried = selections.untried(decoder) if selects else ()
    if untried:
        raise refusal(model, f"its {', '.join(untried)} selects tokens in long rows only, which the check cannot try.")
    return relative


def differing_padding(context: Any) -> Padding | None:
    """Run a small padded batch with and without sharing; return the padding for which the results differ, if any.

    First pads prompts on the left and completions on the right. If the results differ, tries padding on the right only.

    Args:
        context: An active `SharedPrefix`, whose decoder `check_layers` accepted. Its `paused` changes.
    """
    decoder = context.decoder
    kinds: tuple[tuple[Padding, int], ...] = (("padding on the left", 6), ("padding", 0))
    differing: Padding | None = None
    columns = torch.arange(18, device=decoder.device)
    with examining(decoder):
        for kind, left in kinds:
            # Two groups of two rows, shape [4, 18]; the first group's prompt begins after `left` columns of padding.
            spans = [(left, 12, 18), (left, 12, 15), (0, 13, 18), (0, 13, 17)]  # start, start of the completion, end
            rows = [
                columns + 20 * (number // 2) + 7 * number * (columns >= start)
                for number, (_, start, _) in enumerate(spans)
            ]
            kept = torch.stack([(columns >= first) & (columns < stop) for first, _, stop in spans])
            inputs = {"input_ids": _ordinary_tokens(torch.stack(rows), decoder), "attention_mask": kept.long()}
            try:
                context.paused = True
                expected = _run(decoder, inputs)[kept]
                context.paused = False
                found = _run(decoder, inputs)[kept]
            except Exception:  # if it is the model's own error, an unshared call raises it again
                differing = kind
                continue
            if compare(found, expected).relative_mean <= tolerance_of(computing_dtype(decoder)).hidden:
                break
            differing = kind
    return differing


def _is_shift_invariant(decoder: PreTrainedModel, tokens: Tensor) -> bool:
    """Whether a row gives the same result, up to rounding of angles, at far larger positions."""
    if not positions_are_relative(decoder):
        return False
    longest = getattr(decoder.config, "max_position_embeddings", None) or 0
    positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
    moved = positions + max(min(longest - tokens.shape[1], 4096), 64)
    here, there = (_run(decoder, {"input_ids": tokens, "position_ids": p}) for p in (positions, moved))
    return compare(there, here).relative_mean <= tolerance_of(computing_dtype(decoder)).moved


def _ordinary_tokens(numbers: Tensor, decoder: PreTrainedModel) -> Tensor:
    """Different tokens for different numbers, from all over the vocabulary.

    Its beginning often has special tokens, on which trained models may amplify the rounding of bfloat16 by far more.
    """
    vocabulary_size = int(decoder.get_input_embeddings().weight.shape[0])  # type: ignore[index, arg-type]
    return (numbers * _STRIDE + vocabulary_size // 3) % vocabulary_size


def _without_remedy(reason: str) -> str:
    """Strip the remedy; `refusal` adds one."""
    return re.split(r"; (?:train|Train) this|\. Train this|; the result would be", reason)[0].rstrip(".") + "."


def _run(decoder: nn.Module, inputs: dict[str, Any]) -> Tensor:
    return decoder(**inputs, use_cache=False, return_dict=True).last_hidden_state


def layers_of(decoder: nn.Module) -> list[nn.Module]:
    """The decoder's layers: its longest list of modules."""
    lists = [module for module in decoder.modules() if isinstance(module, nn.ModuleList)]
    return list(max(lists, key=len, default=[]))


@contextmanager
def tracking_idle_layers(decoder: nn.Module) -> Iterator[list[nn.Module]]:
    """Yields the decoder's layers; a layer leaves the list when it runs."""
    idle = layers_of(decoder)

    def note(layer: nn.Module, args: Any) -> None:
        if any(layer is one for one in idle):
            idle.remove(layer)

    handles = [layer.register_forward_pre_hook(note) for layer in idle]
    try:
        yield idle
    finally:
        for handle in handles:
            handle.remove()


def refuse_packed_row(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A hook of layers that do not run in the check, such as cross-attention to images, about which it says nothing."""
    if kwargs.get("prefix_layout") is not None or any(map(is_marker, (*args, *kwargs.values()))):
        raise NotImplementedError(
            f"{type(layer).__name__} did not run on text alone, so it was not compared between a shared and a repeated "
            "prefix; train this model with sharing='repeated'."
        )
