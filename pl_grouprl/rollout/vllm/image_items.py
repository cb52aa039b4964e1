"""A prompt's preprocessed images as vLLM's items."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pl_grouprl.types import Media

if TYPE_CHECKING:
    from vllm.multimodal.inputs import MultiModalKwargsItems

IMAGES = ("pixel_values", "image_grid_thw")
"""What a processor returns for images, by name."""


def image_items(media: Media) -> MultiModalKwargsItems:
    """Split a processor's output for a prompt's images into one item per image.

    Args:
        media: `pixel_values`, the patches of all images, concatenated, and `image_grid_thw`, shape [images, 3].

    Raises:
        ValueError: If the patches do not match the grids, or an image has several frames.
    """
    from transformers import BatchFeature
    from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems

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
    return MultiModalKwargsItems.from_hf_inputs(BatchFeature({name: media[name] for name in IMAGES}), fields)
