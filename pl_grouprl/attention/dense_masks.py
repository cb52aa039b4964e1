"""Packed rows for layers that compute with the attention mask themselves, such as those that select tokens by score.

Such a layer gets the forest as a dense mask [1, 1, T, T], so it scores and selects only tokens of the query's own
sequence. The wrapped attention implementation then runs the layer, as it runs an ordinary row.

Legend: B rows, T tokens (of the packed row, if there is one), S query tokens, H query heads, K key/value heads, D head
size, N selected tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pl_grouprl.attention.backends.rule import AttentionRule, visibility_function
from pl_grouprl.attention.layer_options import OWN_MASK, read_layer_options
from pl_grouprl.attention.layout_call import LayoutCall

DENSE = "dense mask"
"""Reported as the kind of such layers."""


def forest_mask(
    rule: AttentionRule, call: LayoutCall, make_mask: Callable[..., Any] | None, kwargs: dict[str, Any]
) -> Any:
    """Make the dense mask of a forest in the form of the wrapped implementation: bool, or added to the scores.

    Args:
        rule: Windows, chunks and blocks of the mask; its other options have no effect.
        call: The call on the packed row.
        make_mask: The wrapped implementation's mask function.
        kwargs: Arguments with which the model calls it.

    Raises:
        NotImplementedError: If the implementation makes no masks, or the row is split over ranks or calls.
    """
    if make_mask is None or call.shards is not None or call.states is not None:
        raise NotImplementedError(
            "layers that compute with the attention mask themselves need a dense mask of the whole row; use "
            "attn_implementation='sdpa' or 'eager', sequence_parallel_size=1 and a larger token budget."
        )
    visible = visibility_function(call.layout, rule, torch.device(kwargs["device"]))

    def mask_function(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return visible(query, key)

    ours = {"mask_function": mask_function, "attention_mask": None, "allow_is_causal_skip": False, "use_vmap": False}
    return make_mask(**kwargs | ours)


def check_dense(
    module: nn.Module, query: Tensor, key: Tensor, mask: Any, call: LayoutCall, kwargs: dict[str, Any]
) -> None:
    """Refuse a layer whose keys or mask are not those of the row, or that passes unknown keywords.

    Args:
        module: The attention layer.
        query: Shape [1, H, T, D].
        key: Shape [1, K, T, D].
        mask: The layer's mask, shape [1, 1 or H, T, T].
        call: The call on the packed row.
        kwargs: Further keywords of the layer.

    Raises:
        NotImplementedError: If the mask has another shape, or a keyword is unknown.
    """
    read_layer_options(module, query, {name: value for name, value in kwargs.items() if name != "indices"})
    tokens = call.layout.num_tokens
    if not isinstance(mask, Tensor) or mask.shape[-2:] != (tokens, tokens) or key.shape[2] != tokens:
        raise NotImplementedError(f"{type(module).__name__} {OWN_MASK}")


def only_selected(indices: Tensor, mask: Tensor) -> Tensor:
    """Hide from each query the tokens that it did not select.

    Args:
        indices: Tokens that each query selected, shape [B, S, N].
        mask: Shape [B, 1 or H, S, T], bool, or added to the scores.
    """
    selected = torch.zeros(*indices.shape[:2], mask.shape[-1], dtype=torch.bool, device=mask.device)
    selected = selected.scatter(-1, indices.long(), True)[:, None]
    return mask & selected if mask.dtype == torch.bool else mask.masked_fill(~selected, torch.finfo(mask.dtype).min)
