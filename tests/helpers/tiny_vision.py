"""Random vision-language models of two layers with processors of their families' real classes, built offline."""

from __future__ import annotations

import re
from typing import Any

import torch

from pl_grouprl.types import Rollout, RolloutGroup

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "gemma3")

_QWEN_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_GEMMA_TOKENS = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
_LETTERS = [*"abcdefghijklmnopqrstuvwxyz0123456789 .?:<>\n"]

_QWEN_TEMPLATE = (
    "{% for m in messages %}{{ m.role + ':' }}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for c in m.content %}{% if c.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif c.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>{% else %}{{ c.text }}{% endif %}"
    "{% endfor %}{% endif %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
_GEMMA_TEMPLATE = _QWEN_TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", "<start_of_image>")

TOOL_TEMPLATE = _QWEN_TEMPLATE.replace(
    "{{ '\n' }}{% endfor %}{% if add",
    "{% for call in m.tool_calls or [] %}<chance>{{ call.function.name }} {{ call.function.arguments.values() | list }}"
    "{% endfor %}<end>{{ '\n' }}{% endfor %}{% if add",
)
"""Qwen's, with calls, which `helpers.chance_episodes` parses; images of tools like those of prompts."""

_TEXT = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 512, "initializer_range": 0.2},
    **{"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1, "attention_dropout": 0.0},
}
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}


def tiny_tokenizer(family: str) -> Any:
    """One token per character, and the family's tokens for images."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = list(_GEMMA_TOKENS.values()) if family == "gemma3" else list(_QWEN_TOKENS)
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<end>", "<unk>", *_LETTERS, *special])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    named = {"extra_special_tokens": _GEMMA_TOKENS} if family == "gemma3" else {"extra_special_tokens": special}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<end>", unk_token="<unk>", **named
    )


def tiny_processor(family: str) -> Any:
    """The family's processor: patches of 4 pixels merged two by two (Qwen), images of 16 pixels in 4 tokens (Gemma)."""
    import transformers

    tokenizer = tiny_tokenizer(family)
    if family == "gemma3":
        tokenizer.chat_template = _GEMMA_TEMPLATE
        images: Any = transformers.Gemma3ImageProcessorPil(size={"height": 16, "width": 16})
        return transformers.Gemma3Processor(images, tokenizer, chat_template=_GEMMA_TEMPLATE, image_seq_length=4)
    tokenizer.chat_template = _QWEN_TEMPLATE
    images = transformers.Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, temporal_patch_size=2, size={"shortest_edge": 64, "longest_edge": 1024}
    )
    kind: Any = {"qwen2_5_vl": transformers.Qwen2_5_VLProcessor, "qwen3_vl": transformers.Qwen3VLProcessor}[family]
    # Its constructor insists on a video processor, which needs torchvision; images do without.
    parts = {"get_attributes": classmethod(lambda cls: ["image_processor", "tokenizer"])}
    return type(kind.__name__, (kind,), parts)(images, tokenizer, chat_template=_QWEN_TEMPLATE)


def tiny_vision_model(family: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, **text: Any) -> Any:
    """A model with a vision tower in eval mode; `text` goes to the config of its language model."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    vocabulary = tiny_tokenizer(family).get_vocab()
    options = {**_TEXT, "vocab_size": len(vocabulary), **_FAMILY_TEXT[family], **text}
    config = AutoConfig.for_model(
        family, text_config=options, vision_config=_VISION[family], initializer_range=0.2, tie_word_embeddings=False,
        **_token_ids(family, vocabulary),
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config, dtype=dtype).eval()
        if family == "gemma3":  # transformers starts it at zero, which would hide the images
            torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight, std=0.2)
    return model


_FAMILY_TEXT: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {"rope_parameters": _MROPE},
    "qwen3_vl": {"rope_parameters": {**_MROPE, "mrope_interleaved": True}},
    "gemma3": {
        **{"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 16}
    },
}
_VISION: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {
        **{"depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32},
        **{"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 16},
        **{"fullatt_block_indexes": [1], "tokens_per_second": 2},
    },
    "qwen3_vl": {
        **{"depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32},
        **{"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 64},
        **{"deepstack_visual_indexes": [0]},
    },
    "gemma3": {
        **{"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2},
        **{"image_size": 16, "patch_size": 4, "vision_use_head": False},
    },
}


def _token_ids(family: str, ids: dict[str, int]) -> dict[str, int]:
    if family == "gemma3":
        return {
            "image_token_index": ids["<image_soft_token>"],
            "boi_token_index": ids["<start_of_image>"],
            "eoi_token_index": ids["<end_of_image>"],
            "mm_tokens_per_image": 4,
        }
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    return dict(zip(names, (ids[token] for token in _QWEN_TOKENS), strict=True))


def tiny_image(seed: int, width: int = 16, height: int = 16) -> Any:
    """An image of random pixels."""
    import numpy as np
    from PIL import Image

    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def vision_group(processor: Any, text: str, images: list[Any], rollouts: list[int], seed: int = 0) -> RolloutGroup:
    """A prompt of text and images, with rollouts of random letters.

    Args:
        processor: See `tiny_processor`.
        text: Comes behind the images.
        images: May be empty.
        rollouts: Length of each rollout.
        seed: Of the letters.
    """
    content = [*({"type": "image"} for _ in images), {"type": "text", "text": text}]
    rendered = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    encoded = dict(processor(text=[rendered], images=images or None, return_tensors="pt"))
    tokens = encoded.pop("input_ids")[0].tolist()
    encoded.pop("attention_mask")
    media = {name: v[0] if name.endswith("token_type_ids") else v for name, v in encoded.items()} if images else {}
    generator = torch.Generator().manual_seed(seed)
    sampled = [torch.randint(3, 3 + len(_LETTERS), (count,), generator=generator).tolist() for count in rollouts]
    return RolloutGroup(tokens, [Rollout(own) for own in sampled], media=media)


def saw_image(processor: Any, image: Any, before: int, after: int, seed: int = 0) -> Rollout:
    """A rollout of random letters, then an image that it reads (`loss_mask` 0), then letters."""
    (place,) = re.findall(r"'image' %}(.*?){%", processor.chat_template)
    encoded = dict(processor(text=[f"see{place}."], images=[image], return_tensors="pt"))
    read = encoded.pop("input_ids")[0].tolist()
    encoded.pop("attention_mask")
    generator = torch.Generator().manual_seed(seed)
    letters = torch.randint(3, 3 + len(_LETTERS), (before + after,), generator=generator).tolist()
    padded = {
        name: torch.nn.functional.pad(value[0], (before, after)) if name.endswith("token_type_ids") else value
        for name, value in encoded.items()
    }
    mask = [1] * before + [0] * len(read) + [1] * after
    return Rollout([*letters[:before], *read, *letters[before:]], loss_mask=mask, media=padded)


def prompts_and_media(family: str) -> tuple[list[list[int]], list[Any]]:
    """One image, the same tokens with another image, text, two images of two sizes, the first again, short text."""
    processor = tiny_processor(family)
    pair = [tiny_image(2, width=16, height=24), tiny_image(3)]
    asked = [("cat?", [tiny_image(0)]), ("cat?", [tiny_image(1)]), ("a long line of text", []), ("two", pair)]
    asked += [("cat?", [tiny_image(0)]), ("no", [])]
    groups = [vision_group(processor, text, images, []) for text, images in asked]
    return [group.prompt_ids for group in groups], [group.media for group in groups]
