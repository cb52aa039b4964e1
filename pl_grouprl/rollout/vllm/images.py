"""Prompts with preprocessed images for vLLM, bypassing vLLM's processors.

vLLM calls such a prompt an engine input. Only `LLMEngine.add_request` takes it: `LLM.generate` reads its tokens and
silently drops its images.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from pl_grouprl.media.inputs import media_key, placeholder_ids
from pl_grouprl.models.adapters import base_of
from pl_grouprl.types import Media, is_per_token

if TYPE_CHECKING:
    from vllm.inputs.engine import MultiModalInput, TokensInput

_IMAGES = ("pixel_values", "image_grid_thw")
"""What a processor returns for images, by name."""

_WITH_IMAGES = {"qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration", "qwen3_vl": "Qwen3VLForConditionalGeneration"}
_TEXT_ALONE = {"gemma3": "Gemma3ForConditionalGeneration"}
_ARCHITECTURES = {**_WITH_IMAGES, **_TEXT_ALONE}
"""Families that vLLM can start with, and the names of our variants of vLLM's models."""

_ELSEWHERE = "sample with HFRolloutEngine"


def media_engine_args(model: Any) -> dict[str, Any]:
    """Additional arguments of vLLM's `EngineArgs` for a policy that reads images.

    vLLM normally asks the model's image processor for the maximum size of images. The architecture named here is vLLM's
    model with a fixed answer: an image has at most as many tokens as a prompt, and at most 16384, or as many as fit the
    width and height in `limit_mm_per_prompt={"image": {"count": 1, "width": ..., "height": ...}}`. vLLM reserves the
    memory for that at the start.

    Args:
        model: A transformers model, with or without an adapter.

    Returns:
        Arguments; none for text models.

    Raises:
        ValueError: If vLLM cannot run such a model without its processor.
        ImportError: If vLLM cannot import the model.
    """
    model = base_of(model)
    family = model.config.model_type
    if not placeholder_ids(model):
        return {}
    if family not in _ARCHITECTURES:
        raise ValueError(
            f"vLLM cannot start with a model of the family {family}: it needs the model's processor, which stays "
            f"in the trainer, except for {', '.join(_ARCHITECTURES)}; {_ELSEWHERE}."
        )
    from pl_grouprl.rollout.vllm.image_models import register

    architecture = register(_ARCHITECTURES[family], images=family in _WITH_IMAGES)
    tied = {"tie_word_embeddings": bool(model.config.tie_word_embeddings)}  # vLLM only reads the text config's
    return {"hf_overrides": {"architectures": [architecture], "text_config": tied}, "mm_processor_cache_gb": 0}


def engine_prompt(model: Any, prompt: Sequence[int], media: Media) -> MultiModalInput | TokensInput:
    """Convert a prompt for `LLMEngine.add_request`.

    Equal images are encoded once, and equal prompts with equal images share blocks in the prefix cache, because vLLM
    identifies an image by a hash of its pixels and shape.

    Args:
        model: The policy.
        prompt: The tokens, with one placeholder per image token.
        media: Its images; see `Media`.

    Raises:
        ValueError: If the media are not only images, the family is not supported, or placeholders and images do not
            match.
    """
    from vllm.inputs.engine import mm_input, tokens_input

    tokens = list(prompt)
    if not media:
        return tokens_input(tokens)
    from vllm.multimodal.inputs import PlaceholderRange

    from pl_grouprl.rollout.vllm.image_models import image_items

    config = base_of(model).config
    if config.model_type not in _WITH_IMAGES:
        raise ValueError(
            f"images for vLLM are not supported with models of the family {config.model_type}, only with "
            f"{', '.join(_WITH_IMAGES)}; {_ELSEWHERE}."
        )
    others = sorted(name for name in media if name not in _IMAGES and not is_per_token(name))
    if others:
        raise ValueError(
            f"media has {others}, which are not supported: after a video vLLM counts positions differently from "
            f"transformers; omit videos, or {_ELSEWHERE}."
        )
    items = image_items(media)
    lengths = [int(grid.prod()) // config.vision_config.spatial_merge_size**2 for grid in media["image_grid_thw"]]
    starts = _image_starts(tokens, lengths, config.image_token_id)
    # The trainer finds images by their types, vLLM by their placeholders.
    types = (torch.tensor(tokens) == config.image_token_id).long()
    for name, value in media.items():
        if is_per_token(name) and (value.shape != types.shape or (value.cpu() != types).any()):
            raise ValueError(
                f"media[{name!r}] is not 1 at the placeholders of images and 0 elsewhere; pass what the model's "
                "processor returns."
            )
    hashes = [media_key({name: item[name].data for name in _IMAGES}).hex() for item in items["image"]]
    ranges = [PlaceholderRange(start, length) for start, length in zip(starts, lengths, strict=True)]
    return mm_input(tokens, items, {"image": hashes}, {"image": ranges})


def _image_starts(tokens: list[int], lengths: list[int], placeholder: int) -> list[int]:
    """Index of each image's first placeholder."""
    places = [place for place, token in enumerate(tokens) if token == placeholder]
    starts, used = [], 0
    for length in lengths:
        run = places[used : used + length]
        if len(run) < length or run[-1] - run[0] >= length:
            break
        starts.append(run[0])
        used += length
    if len(starts) < len(lengths) or used < len(places):
        raise ValueError(
            f"the prompt has {len(places)} placeholders {placeholder}, but its images have {lengths} tokens, each "
            "in a run; pass the prompt and the media from the same call of the processor."
        )
    return starts
