"""Images and videos of prompts: which prompts are the same, and what the model is given beside the tokens.

Shapes: S tokens of one prompt.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pl_grouprl.attention import find_backbone
from pl_grouprl.models.media import PromptPositions, prompt_positions
from pl_grouprl.packing.media import is_per_token
from pl_grouprl.types import Media


def media_key(media: Media) -> bytes:
    """Stand for the content of a prompt's media: equal for equal tensors under equal names; empty for text."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(media.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update(tensor.detach().cpu().flatten().view(torch.uint8).numpy().tobytes())
    return digest.digest() if media else b""


def check_media(model: Any, prompts: Sequence[Sequence[int]], media: Sequence[Media]) -> None:
    """Refuse media that the model cannot be given.

    Raises:
        ValueError: If there is not one entry per prompt, a value is no tensor or has not one number per token where it
            should, or the model names no such argument.
    """
    if len(media) != len(prompts):
        raise ValueError(
            f"media has {len(media)} entries for {len(prompts)} prompts; pass one for each, {{}} for text."
        )
    if not any(media):
        return
    backbone = find_backbone(model)
    taken = inspect.signature(backbone.forward).parameters
    for index, (prompt, own) in enumerate(zip(prompts, media, strict=True)):
        for name, value in own.items():
            where = f"media[{index}][{name!r}]"
            if name not in taken:
                raise ValueError(
                    f"{where} is given, but {type(backbone).__name__} takes no {name}; use the processor that belongs "
                    "to the model, or a model that reads images and videos."
                )
            if not isinstance(value, Tensor):
                raise ValueError(f"{where} is of type {type(value).__name__}; pass a tensor.")
            if is_per_token(name) and value.shape != (len(prompt),):
                raise ValueError(
                    f"{where} has shape {list(value.shape)} for a prompt of {len(prompt)} tokens; pass one entry per "
                    "token."
                )


def media_inputs(model: Any, prompt: Sequence[int], media: Media) -> tuple[dict[str, Tensor], PromptPositions | None]:
    """What the model is given with one prompt that has media.

    Args:
        model: A transformers model with a vision tower.
        prompt: The tokens.
        media: Its images and videos.

    Returns:
        Keyword arguments on the model's device, and on the CPU the positions of the prompt where the model has them in
        time, height and width, shape [3, 1, S]; None where it counts tokens like any other.
    """
    rows = {name: value[None] if is_per_token(name) else value for name, value in media.items()}
    backbone, positions = find_backbone(model), None
    if hasattr(backbone, "get_rope_index") and any(name.endswith("grid_thw") for name in media):
        input_ids = torch.tensor([list(prompt)])
        positions = prompt_positions(backbone, input_ids, torch.ones_like(input_ids), rows)
    device = next(model.parameters()).device
    return {name: value.to(device) for name, value in rows.items()}, positions
