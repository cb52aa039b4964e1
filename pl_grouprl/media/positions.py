"""Rotary positions of prompts with images and videos, and of the rollouts that continue them.

Legend: B rollouts, T packed tokens, L padded length, S prompts of a batch: those of a packed row, or one for each of
the B padded rows.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from pl_grouprl.attention import find_backbone
from pl_grouprl.packing import ScoringBatch, SharedPrefixLayout
from pl_grouprl.packing.repeat import repeat_values
from pl_grouprl.types import is_per_token

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class PromptPositions(NamedTuple):
    """Rotary positions of prompts with images and videos.

    Attributes:
        position_ids: Time, height and width position of each token, shape [3, S, prompt tokens], int64.
        next_position_S: The position, on all three axes, of the first token after each prompt, int64.
    """

    position_ids: Tensor
    next_position_S: Tensor


def media_position_ids(model: PreTrainedModel, batch: ScoringBatch) -> Tensor | None:
    """Compute positions of a batch for models whose rotary positions depend on images and videos (Qwen-VL).

    A prompt's positions come from the model's `get_rope_index`; a rollout's continue from there, equally in time,
    height and width, as in one forward pass over both. Does not run the vision tower.

    Returns:
        Positions of the packed row, shape [3, 1, T], or of the padded rows, [3, B, L], 0 at padding; None if the batch
        has no images or videos, or the model uses text positions.
    """
    backbone = find_backbone(model)
    if not hasattr(backbone, "get_rope_index") or not any(name.endswith("grid_thw") for name in batch.media):
        return None
    input_ids = batch.model_inputs["input_ids"]
    roots = [segment for segment in batch.layout.segments if segment.parent is None]
    if batch.sharing == "shared":
        spans = [(0, segment.start, segment.length) for segment in roots]
        places = list(range(len(roots)))
    else:
        parents = [segment.parent for segment in batch.layout.segments if segment.parent is not None]
        spans = [(row, 0, batch.layout.segments[parent].length) for row, parent in enumerate(parents)]
        places = [parents.index(place) for place, segment in enumerate(batch.layout.segments) if segment.parent is None]

    def prompts(values: Tensor) -> Tensor:
        return pad_sequence([values[row, start : start + length] for row, start, length in spans], batch_first=True)

    # On the CPU, because it loops over images and reads numbers from tensors.
    media = {name: value.cpu() for name, value in batch.media.items() if not name.startswith("pixel_values")}
    media = {name: prompts(value) if is_per_token(name) else value for name, value in media.items()}
    tokens = input_ids.cpu()
    positions = prompt_positions(backbone, prompts(tokens), prompts(torch.ones_like(tokens)), media)
    packed_T3 = _continued(batch.layout, positions, places).T
    rows = packed_T3[None] if batch.sharing == "shared" else repeat_values(batch.layout, packed_T3)
    return rows.permute(2, 0, 1).to(input_ids.device)


def prompt_positions(
    backbone: Any, input_ids_SL: Tensor, attention_mask_SL: Tensor, media: dict[str, Tensor]
) -> PromptPositions:
    """Compute the positions of prompts, one per row, with the model's `get_rope_index`.

    Args:
        backbone: A model with transformers' `get_rope_index`; see `find_backbone`.
        input_ids_SL: The prompts, padded on either side.
        attention_mask_SL: 1 at the tokens of each row's prompt.
        media: Images and videos of all rows, concatenated; per-token entries have the shape of `input_ids_SL`.
    """
    accepted = inspect.signature(backbone.get_rope_index).parameters
    known = {name: value for name, value in media.items() if name in accepted}
    position_ids, deltas_S1 = backbone.get_rope_index(input_ids_SL, attention_mask=attention_mask_SL, **known)
    # After text, continue from the last token, even if a long video has larger positions; after an image, from the
    # largest position.
    places = torch.arange(input_ids_SL.shape[1]).expand_as(input_ids_SL)
    last_S = (places * attention_mask_SL.cpu()).argmax(dim=1)
    rows_S = torch.arange(len(last_S))
    after_last_S = position_ids[:, rows_S, last_S].amax(dim=0) + 1
    types_SL = media.get("mm_token_type_ids", torch.zeros_like(input_ids_SL))
    ends_in_text_S = types_SL[rows_S, last_S] == 0
    largest_S = attention_mask_SL.sum(dim=1) + deltas_S1.flatten()
    return PromptPositions(position_ids, torch.where(ends_in_text_S, after_last_S, largest_S))


def _continued(layout: SharedPrefixLayout, positions: PromptPositions, places: Sequence[int]) -> Tensor:
    """Continue the positions of the layout's prompts, found at `places`, in their rollouts, shape [3, T]."""
    prompts = iter(places)
    runs: list[Tensor] = []
    following: list[Tensor] = []  # per segment, the position after its last token
    for segment in layout.segments:
        if segment.parent is None:
            prompt = next(prompts)
            runs.append(positions.position_ids[:, prompt, : segment.length])
            following.append(positions.next_position_S[prompt])
            continue
        start = following[segment.parent]
        runs.append((start + torch.arange(segment.length)).expand(3, -1))
        following.append(start + segment.length)
    return torch.cat(runs, dim=1)
