"""A decoder call on the peers of a sequence group: pads and splits the row, then gathers the output.

The peers of a group run the same packed row together, each running the decoder on its own tokens (`call.RowShards`).
All get the hidden states of the whole row, so each computes the row's whole loss and **weights it by 1 / s**. Summed
over ranks, gradients then equal those of one process: in the decoder, each peer contributes those of its tokens; after
the decoder, each contributes 1 / s of the total.

Legend: T packed tokens that run, t = ceil(T / s) tokens of a peer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from pl_grouprl.attention.call import LayoutCall, RowShards, check_heads
from pl_grouprl.attention.function import scales_by_row
from pl_grouprl.attention.stateful import stateful_mixers
from pl_grouprl.attention.support import find_decoder, has_dynamic_rope
from pl_grouprl.packing import SharedPrefixLayout
from pl_grouprl.utilities.distributed import num_ranks

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from transformers import PreTrainedModel

_SPLIT_ARGUMENTS = ("input_ids", "position_ids")
"""Arguments with an entry per token along the last dimension, which are split over the peers."""

_PER_TOKEN = {"last_hidden_state": 1, "hidden_states": 1, "router_logits": 0}
"""Per-token outputs of a decoder, and their token dimension."""


def sequence_mesh(sequence_parallel_size: int, device_type: str) -> DeviceMesh:
    """Arrange all ranks as (data, sequence): s consecutive ranks run one row. Collective.

    Independent of the strategy: parameters stay replicated or sharded over all ranks.

    Args:
        sequence_parallel_size: s, the number of peers that run one row.
        device_type: `cuda` or `cpu`.

    Returns:
        The mesh; `mesh.get_group("sequence")` is this rank's sequence group.

    Raises:
        ValueError: If s does not divide the number of ranks.
    """
    check_sequence_parallel_size(sequence_parallel_size, num_ranks())
    shape = (num_ranks() // sequence_parallel_size, sequence_parallel_size)
    return init_device_mesh(device_type, shape, mesh_dim_names=("data", "sequence"))


def check_sequence_parallel_size(sequence_parallel_size: int, num_ranks: int) -> None:
    """Check that a size divides the ranks.

    Raises:
        ValueError: If it does not.
    """
    if sequence_parallel_size < 1 or num_ranks % sequence_parallel_size:
        raise ValueError(
            f"sequence_parallel_size={sequence_parallel_size} does not divide the {num_ranks} ranks of this run."
        )


def check_sequence_parallel(model: PreTrainedModel, sequence_parallel_size: int) -> None:
    """Check that a model's tokens can be split over ranks; called at setup, and again in each call.

    Raises:
        NotImplementedError: If its layers are stateful, compiled, or depend on the row in a way that cannot be split.
        ValueError: If s does not divide the query heads.
    """
    if sequence_parallel_size == 1:
        return
    decoder = find_decoder(model)
    reason = None
    stateful = sorted({type(mixer).__name__ for mixer in stateful_mixers(decoder)})
    if stateful:
        reason = f"the state of its layers {', '.join(stateful)} runs from token to token, over all ranks"
    elif any(scales_by_row(module) for module in decoder.modules()):
        reason = "it scales queries by their index in the row, which differs in a rank's part of it"
    elif has_dynamic_rope(decoder):
        reason = "its rotary frequencies depend on the largest position, which differs between the parts of a row"
    elif any(getattr(module, "_compiled_call_impl", None) is not None for module in decoder.modules()):
        reason = "its layers are compiled, where tokens cannot be exchanged (kernels='compile')"
    if reason is not None:
        raise NotImplementedError(
            f"sequence_parallel_size={sequence_parallel_size} for {type(decoder).__name__}: {reason}."
        )
    num_heads = getattr(decoder.config, "num_attention_heads", None)
    if isinstance(num_heads, int):
        check_heads(num_heads, sequence_parallel_size)


def shard_call(model: PreTrainedModel, kwargs: dict[str, Any], group: ProcessGroup) -> dict[str, Any]:
    """Turn the arguments of a decoder call on a packed row into those for this peer's tokens.

    Args:
        model: The model to call.
        kwargs: Arguments for the whole row: `input_ids` [1, T], `position_ids` [1, T] or [kinds, 1, T], and a
            `LayoutCall` as `prefix_layout`.
        group: The sequence group. Each peer makes this call, with the same row.

    Raises:
        NotImplementedError: If the model or the arguments (images, embeddings) cannot be split.
        ValueError: If s does not divide the query heads.
        RuntimeError: If the peers have different rows.
    """
    check_sequence_parallel(model, group.size())
    call: LayoutCall = kwargs["prefix_layout"]
    allowed = (*_SPLIT_ARGUMENTS, "attention_mask")
    refused = sorted(name for name, value in kwargs.items() if isinstance(value, Tensor) and name not in allowed)
    if refused:
        raise NotImplementedError(f"sequence_parallel_size with {', '.join(refused)}: only rows of text can be split.")
    layout = call.layout
    shards = RowShards(group, layout.num_queries)
    # Compare checksums of layout and tokens, since different rows would silently give wrong gradients.
    input_ids = kwargs["input_ids"]
    forest = tuple((s.length, -1 if s.parent is None else s.parent) for s in layout.segments)
    factors = torch.arange(1, input_ids.numel() + 1, device=input_ids.device)
    tokens = (input_ids.flatten() * factors).sum()
    checksums = torch.stack([torch.full_like(tokens, hash(forest)), tokens])
    found = [torch.empty_like(checksums) for _ in range(shards.num_peers)]
    dist.all_gather(found, checksums, group=shards.group)
    if any(not torch.equal(other, checksums) for other in found):
        raise RuntimeError(f"the {shards.num_peers} ranks of a sequence group were given different rows.")
    split = {
        name: nn.functional.pad(kwargs[name], (0, shards.num_padding))[..., shards.own_tokens]
        for name in _SPLIT_ARGUMENTS
        if kwargs.get(name) is not None
    }
    split["attention_mask"] = torch.ones_like(split["input_ids"], dtype=torch.long)

    def with_padding() -> SharedPrefixLayout:
        """The layout with a padding segment at its end, which no token attends to."""
        lengths = [segment.length for segment in layout.segments]
        parents = [segment.parent for segment in layout.segments]
        parent = 0 if layout.num_prefilled else None  # prefilled tokens are the root of all other segments
        padded, above = [*lengths, shards.num_padding], [*parents, parent]
        return SharedPrefixLayout(padded, above, num_prefilled=layout.num_prefilled)

    extended = layout.memo(("padding", shards.num_padding), with_padding) if shards.num_padding else layout
    return {**split, "prefix_layout": replace(call, layout=extended, shards=shards)}


def gather_output(output: Any, shards: RowShards) -> Any:
    """Gather the decoder's output for all peers' tokens.

    Raises:
        NotImplementedError: If the output has other fields.
    """
    for name, value in list(output.items()):
        if name not in _PER_TOKEN:
            raise NotImplementedError(f"sequence_parallel_size: {name} of a split row cannot be gathered; omit it.")
        dim = _PER_TOKEN[name]
        is_tensor = isinstance(value, Tensor)
        output[name] = shards.gather(value, dim) if is_tensor else tuple(shards.gather(one, dim) for one in value)
    return output
