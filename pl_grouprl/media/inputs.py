"""Image and video arguments of models, and rotary positions of prompts that have them.

Legend: B rollouts, T packed tokens, L padded length, S prompts of a batch: those of a packed row, or one for each of
the B padded rows.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from pl_grouprl.attention import find_backbone
from pl_grouprl.packing import ScoringBatch
from pl_grouprl.packing.layout import repeat_values
from pl_grouprl.types import Media, is_per_token

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PLACEHOLDERS = ("image_token_id", "video_token_id", "audio_token_id")
"""Names in a model's config of the placeholder tokens for images, videos and sound."""


def placeholder_ids(model: PreTrainedModel) -> dict[str, int]:
    """Ids of the placeholder tokens, by their names in the model's config; empty for text models."""
    config = getattr(find_backbone(model), "config", None)
    ids = {name: getattr(config, name, None) for name in PLACEHOLDERS}
    return {name: token for name, token in ids.items() if isinstance(token, int)}


def media_key(media: Media) -> bytes:
    """Hash a prompt's media: equal for equal tensors under equal names; empty for text."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(media.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update(tensor.detach().cpu().flatten().view(torch.uint8).numpy().tobytes())
    return digest.digest() if media else b""


def _unknown_arguments(model: Any, names: Collection[str]) -> list[str]:
    """The names that are not arguments of the model."""
    return sorted(names - inspect.signature(find_backbone(model).forward).parameters.keys())


def check_prompt_media(model: Any, prompts: Sequence[Sequence[int]], media: Sequence[Media]) -> None:
    """Check that a model takes the media of a request.

    Raises:
        ValueError: If the model has no such argument, or a per-token value has the wrong length.
    """
    unknown = _unknown_arguments(model, {name for own in media for name in own}) if any(media) else []
    for index, (prompt, own) in enumerate(zip(prompts, media, strict=True)):
        for name, value in own.items():
            if name in unknown:
                kind = type(find_backbone(model)).__name__
                raise ValueError(f"media[{index}][{name!r}] is given, but {kind} takes no {name}; use its processor.")
            if is_per_token(name) and value.shape != (len(prompt),):
                shape = list(value.shape)
                raise ValueError(f"media[{index}][{name!r}] has shape {shape} for a prompt of {len(prompt)} tokens.")


def check_batch_media(model: PreTrainedModel, batch: ScoringBatch) -> None:
    """Check that a model can place a batch's images and videos.

    Raises:
        ValueError: If the model has no such argument, or a rollout contains a placeholder token.
    """
    unknown = _unknown_arguments(model, batch.media.keys())
    if unknown:
        kind = type(find_backbone(model)).__name__
        raise ValueError(f"the prompts have media {unknown}, which {kind} does not take; use its processor.")
    for name, token in placeholder_ids(model).items():
        places = (batch.targets_N == token).nonzero().flatten().tolist()
        if places and batch.media:
            rollout = int(batch.rollout_index_N[places[0]])
            raise ValueError(
                f"rollout {rollout} of the batch (counted from 0, over all groups in order) has token {token}, "
                f"the model's {name}, for which there is no image or video; exclude it from sampling."
            )


def media_inputs(model: Any, prompt: Sequence[int], media: Media) -> tuple[dict[str, Tensor], PromptPositions | None]:
    """Create the arguments of a model for one prompt with media.

    Args:
        model: A transformers model with a vision tower.
        prompt: The tokens.
        media: Its images and videos.

    Returns:
        Keyword arguments, on the model's device; and positions of the prompt, shape [3, 1, tokens], on the CPU, if the
        model has positions in time, height and width, otherwise None.
    """
    rows = {name: value[None] if is_per_token(name) else value for name, value in media.items()}
    backbone, positions = find_backbone(model), None
    if hasattr(backbone, "get_rope_index") and any(name.endswith("grid_thw") for name in media):
        input_ids = torch.tensor([list(prompt)])
        positions = prompt_positions(backbone, input_ids, torch.ones_like(input_ids), rows)
    device = next(model.parameters()).device
    return {name: value.to(device) for name, value in rows.items()}, positions


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
    in_order = iter(places)
    runs: list[Tensor] = []
    following: list[Tensor] = []  # per segment, the position after its last token
    for segment in batch.layout.segments:
        if segment.parent is None:
            prompt = next(in_order)
            runs.append(positions.position_ids[:, prompt, : segment.length])
            following.append(positions.next_position_S[prompt])
        else:
            start = following[segment.parent]
            runs.append((start + torch.arange(segment.length)).expand(3, -1))
            following.append(start + segment.length)
    packed_T3 = torch.cat(runs, dim=1).T
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
