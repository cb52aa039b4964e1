"""Image and video arguments of models, and rotary positions of prompts and rollouts that have them.

Legend: B rollouts, T packed tokens, L padded length, S runs of tokens (prompts, and rollouts with images), P prompts.
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
from pl_grouprl.packing.batch import concat_media
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
        ValueError: If the model has no such argument, or the model wrote a placeholder token.
    """
    unknown = _unknown_arguments(model, batch.media.keys())
    if unknown:
        kind = type(find_backbone(model)).__name__
        raise ValueError(f"the groups have media {unknown}, which {kind} does not take; use its processor.")
    for name, token in placeholder_ids(model).items():
        places = ((batch.targets_N == token) & batch.loss_mask_N).nonzero().flatten().tolist()
        if places and batch.media:
            rollout = int(batch.rollout_index_N[places[0]])
            raise ValueError(
                f"rollout {rollout} of the batch (counted from 0, over all groups in order) has token {token}, "
                f"the model's {name}, for which there is no image or video; exclude it from sampling."
            )


def media_inputs(model: Any, prompt: Sequence[int], media: Media) -> tuple[dict[str, Tensor], RunPositions | None]:
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
        positions = run_positions(backbone, input_ids, torch.ones_like(input_ids), rows)
    device = next(model.parameters()).device
    return {name: value.to(device) for name, value in rows.items()}, positions


class RunPositions(NamedTuple):
    """Rotary positions of runs of tokens with images and videos, each as if it came first.

    Attributes:
        position_ids: Time, height and width position of each token, shape [3, S, tokens], int64.
        next_position_S: The position, on all three axes, of the first token after each run, int64.
    """

    position_ids: Tensor
    next_position_S: Tensor


def media_position_ids(model: PreTrainedModel, batch: ScoringBatch) -> Tensor | None:
    """Compute positions of a batch for models whose rotary positions depend on images and videos (Qwen-VL).

    The positions of prompts, and of rollouts with images, come from the model's `get_rope_index`; a rollout's continue
    from its prompt's, as in one forward pass over both. Does not run the vision tower.

    Returns:
        Positions of the packed row, shape [3, 1, T], or of the padded rows, [3, B, L], 0 at padding; None if the batch
        has no images or videos, or the model uses text positions.
    """
    backbone = find_backbone(model)
    parts = [batch] if batch.prefix is None else [batch.prefix.batch, batch]  # a slice continues its prompt
    ids = [part.model_inputs["input_ids"].cpu() for part in parts]
    # On the CPU, because it loops over images and reads numbers from tensors.
    given = [{n: value.cpu() for n, value in part.media.items() if not n.startswith("pixel_values")} for part in parts]
    media = concat_media([(own, part.shape[1]) for own, part in zip(given, ids, strict=True)])
    if not hasattr(backbone, "get_rope_index") or not any(name.endswith("grid_thw") for name in media):
        return None
    input_ids, segments = torch.cat(ids, dim=1), batch.layout.segments
    if batch.sharing == "shared":
        spans = [(index, 0, segment.start) for index, segment in enumerate(segments)]
    else:
        pairs = [
            (row, index)
            for row, leaf in enumerate(batch.layout.leaves)
            for index in (segments[leaf].parent, leaf)
            if index is not None
        ]
        spans = [(index, row, segments[index].position) for row, index in pairs]
    types = [value for name, value in media.items() if is_per_token(name)]
    spans = [
        (index, row, start)
        for index, row, start in spans
        if segments[index].parent is None
        or any(value[row, start : start + segments[index].length].any() for value in types)
    ]

    def cut(values: Tensor) -> Tensor:
        cuts = [values[row, start : start + segments[index].length] for index, row, start in spans]
        return pad_sequence(cuts, batch_first=True)

    media = {name: cut(value) if is_per_token(name) else value for name, value in media.items()}
    positions = run_positions(backbone, cut(input_ids), cut(torch.ones_like(input_ids)), media)
    places = {index: place for place, (index, _, _) in enumerate(spans)}  # of a repeated prompt, any
    runs: list[Tensor] = []
    following: list[Any] = []  # per segment, the position after its last token
    for index, segment in enumerate(segments):
        start = 0 if segment.parent is None else following[segment.parent]
        if index in places:
            runs.append(start + positions.position_ids[:, places[index], : segment.length])
            following.append(start + positions.next_position_S[places[index]])
        else:
            runs.append((start + torch.arange(segment.length)).expand(3, -1))
            following.append(start + segment.length)
    packed_T3 = torch.cat(runs, dim=1).T[batch.layout.num_prefilled :]
    laid_out = packed_T3[None] if batch.sharing == "shared" else repeat_values(batch.layout, packed_T3)
    return laid_out.permute(2, 0, 1).to(batch.model_inputs["input_ids"].device)


def run_positions(
    backbone: Any, input_ids_SL: Tensor, attention_mask_SL: Tensor, media: dict[str, Tensor]
) -> RunPositions:
    """Compute the positions of prompts or rollouts, one per row, with the model's `get_rope_index`.

    Args:
        backbone: A model with transformers' `get_rope_index`; see `find_backbone`.
        input_ids_SL: The tokens, padded on either side.
        attention_mask_SL: 1 at the tokens of each row.
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
    return RunPositions(position_ids, torch.where(ends_in_text_S, after_last_S, largest_S))
