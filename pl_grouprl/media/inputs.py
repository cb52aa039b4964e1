"""Checks the image and video arguments of models, and creates them for one prompt.

Legend: S tokens of one prompt.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pl_grouprl.attention import find_backbone
from pl_grouprl.media.positions import PromptPositions, prompt_positions
from pl_grouprl.packing import ScoringBatch
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
    """Refuse a request with media that the model does not take.

    Raises:
        ValueError: If there is not one entry per prompt, a value is not a tensor or has the wrong shape, or the model
            has no such argument.
    """
    if len(media) != len(prompts):
        raise ValueError(
            f"media has {len(media)} entries for {len(prompts)} prompts; pass one for each, {{}} for text."
        )
    if not any(media):
        return
    unknown = _unknown_arguments(model, {name for prompt_media in media for name in prompt_media})
    for index, (prompt, prompt_media) in enumerate(zip(prompts, media, strict=True)):
        for name, value in prompt_media.items():
            where = f"media[{index}][{name!r}]"
            if name in unknown:
                raise ValueError(
                    f"{where} is given, but {type(find_backbone(model)).__name__} takes no {name}; use the processor "
                    "that belongs to the model, or a model that reads images and videos."
                )
            if not isinstance(value, Tensor):
                raise ValueError(f"{where} is of type {type(value).__name__}; pass a tensor.")
            if is_per_token(name) and value.shape != (len(prompt),):
                raise ValueError(
                    f"{where} has shape {list(value.shape)} for a prompt of {len(prompt)} tokens; pass one entry per "
                    "token."
                )


def check_batch_media(model: PreTrainedModel, batch: ScoringBatch) -> None:
    """Refuse a batch whose images and videos the model cannot place.

    Raises:
        ValueError: If the model has no such argument, or a rollout contains a placeholder token.
    """
    unknown = _unknown_arguments(model, batch.media.keys())
    if unknown:
        raise ValueError(
            f"the prompts have media {unknown}, which {type(find_backbone(model)).__name__} does not take; use the "
            "processor that belongs to the model, or a model that reads images and videos."
        )
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
        Keyword arguments, on the model's device; and positions of the prompt, shape [3, 1, S], on the CPU, if the model
        has positions in time, height and width, otherwise None.
    """
    rows = {name: value[None] if is_per_token(name) else value for name, value in media.items()}
    backbone, positions = find_backbone(model), None
    if hasattr(backbone, "get_rope_index") and any(name.endswith("grid_thw") for name in media):
        input_ids = torch.tensor([list(prompt)])
        positions = prompt_positions(backbone, input_ids, torch.ones_like(input_ids), rows)
    device = next(model.parameters()).device
    return {name: value.to(device) for name, value in rows.items()}, positions
