"""Variants of vLLM's multimodal models for preprocessed images, and such images as its items; imported with vLLM."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import torch
from transformers import BatchFeature
from vllm.inputs.engine import MultiModalInput, mm_input
from vllm.model_executor.models import ModelRegistry
from vllm.model_executor.models.utils import WeightsMapper
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems, PlaceholderRange
from vllm.multimodal.processing import BaseDummyInputsBuilder, BaseMultiModalProcessor, BaseProcessingInfo

from pl_grouprl.types import Media

_LARGEST_IMAGE = 16384
"""Tokens of the largest image from Qwen's processors by default."""

_SIGLIP_NAMES = re.compile(r"^(model\.)?vision_tower\.(?=embeddings\.|encoder\.|post_layernorm\.)")
_SIGLIP = WeightsMapper(orig_to_new_regex={_SIGLIP_NAMES: "vision_tower.vision_model."})
"""Maps transformers 5's names of a vision tower's weights."""


def register(architecture: str, *, images: bool) -> str:
    """Register one of vLLM's models under a new name, without its family's processor.

    Args:
        architecture: Name of the model's class.
        images: Whether it gets images.

    Returns:
        The new name.

    Raises:
        ImportError: If vLLM cannot import the model.
    """
    name = f"Preprocessed{architecture}"
    if name in ModelRegistry.models:
        return name
    kind = ModelRegistry.models[architecture].load_model_cls()
    variant: Any = type(name, (kind,), {"hf_to_vllm_mapper": _SIGLIP | kind.hf_to_vllm_mapper})
    info = _ImageInfo if images else _TextInfo
    ModelRegistry.register_model(
        name, MULTIMODAL_REGISTRY.register_processor(_NoProcessor, info=info, dummy_inputs=_NoDummies)(variant)
    )
    return name


def image_items(media: Media) -> MultiModalKwargsItems:
    """Split a processor's output for a prompt's images into one item per image.

    Args:
        media: `pixel_values`, the patches of all images, concatenated, and `image_grid_thw`, shape [images, 3].

    Raises:
        ValueError: If the patches do not match the grids, or an image has several frames.
    """
    patches, grids_I3 = media["pixel_values"], media["image_grid_thw"]
    sizes_I = grids_I3.prod(-1)
    if int(sizes_I.sum()) != len(patches) or (grids_I3[:, 0] != 1).any():
        raise ValueError(
            f"media['image_grid_thw'] is {grids_I3.tolist()} for {len(patches)} patches in media['pixel_values']; pass "
            "one row [1, height, width] for each image, whose products add up to the patches."
        )
    fields = {
        "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", sizes_I),
        "image_grid_thw": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
    }
    return MultiModalKwargsItems.from_hf_inputs(BatchFeature({name: media[name] for name in fields}), fields)


class _TextInfo(BaseProcessingInfo):
    """A model that gets only text."""

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {}


class _ImageInfo(BaseProcessingInfo):
    """Maximum size of images."""

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {"image": None}

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> Mapping[str, int]:
        return {"image": math.prod(self.largest_image())}

    def largest_image(self) -> tuple[int, int]:
        """Height and width in tokens."""
        longest = self.ctx.model_config.max_model_len
        limit: Any = self.ctx.get_mm_config().limit_per_prompt.get("image")
        if limit is not None and limit.width and limit.height:
            vision = self.get_hf_config().vision_config
            pixels = vision.patch_size * vision.spatial_merge_size
            height, width = -(-limit.height // pixels), -(-limit.width // pixels)
            if height * width <= longest:
                return height, width
        tokens = min(longest, _LARGEST_IMAGE)
        height = math.isqrt(tokens)
        return height, tokens // height


class _NoDummies(BaseDummyInputsBuilder[BaseProcessingInfo]):
    """No unprocessed images."""

    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        return ""

    def get_dummy_mm_data(self, *args: Any, **kwargs: Any) -> Any:
        return {}


class _NoProcessor(BaseMultiModalProcessor[Any]):
    """Creates the image with which vLLM profiles its memory; prompts never get here."""

    requires_tokenizer = False

    def get_dummy_mm_inputs(self, mm_counts: Mapping[str, int], **kwargs: Any) -> MultiModalInput:
        """The largest image."""
        vision, (height, width) = self.info.get_hf_config().vision_config, self.info.largest_image()
        grid = torch.tensor([[1, height * vision.spatial_merge_size, width * vision.spatial_merge_size]])
        size = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        items = image_items({"pixel_values": torch.zeros(int(grid.prod()), size), "image_grid_thw": grid})
        length = height * width
        return mm_input([0] * length, items, {"image": [""]}, {"image": [PlaceholderRange(0, length)]})

    def _get_mm_fields_config(self, *args: Any) -> Any:
        raise NotImplementedError("images are processed in the trainer")

    def _get_prompt_updates(self, *args: Any) -> Any:
        raise NotImplementedError("images are processed in the trainer")
