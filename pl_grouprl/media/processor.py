"""Loads the processor of a multimodal model, and checks its options."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pl_grouprl.media.inputs import PLACEHOLDERS

_GIVEN = ("text", "images", "videos", "return_tensors")
"""Arguments passed to the processor for each prompt."""


def language_model_class(config: Any) -> str:
    """Name of transformers' auto class for a language model, text-only or multimodal.

    Args:
        config: A transformers config.
    """
    from transformers.models.auto import modeling_auto as auto

    with_media = auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.keys() - auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys()
    return "AutoModelForImageTextToText" if config.model_type in with_media else "AutoModelForCausalLM"


def reads_media(source: Any) -> bool:
    """Whether a source's policy reads images or videos, by its processor or its config.

    Args:
        source: A source of a policy, or None.
    """
    if callable(getattr(source, "load_processor", None)):
        return True
    load_config = getattr(source, "load_config", None)
    if not callable(load_config):
        return False
    try:
        config = load_config()
    except (OSError, ValueError):  # loading the policy will report the bad path
        return False
    return any(isinstance(getattr(config, name, None), int) for name in PLACEHOLDERS)


def load_processor(source: Any) -> Any:
    """Load the processor that converts images, videos and text to a model's inputs.

    Args:
        source: Path or hub name of a Hugging Face model, a policy source that names one (`PretrainedPolicy`), or one
            with a method `load_processor`.

    Raises:
        ValueError: If the source names no model, or its model has no image processor.
    """
    if callable(load := getattr(source, "load_processor", None)):
        return load()
    path = source if isinstance(source, str) else getattr(source, "path", None)
    if path is None:
        raise ValueError(f"{source!r} does not name a processor; pass processor=... to PromptDataModule.")
    from transformers import AutoProcessor

    options = {name: getattr(source, name) for name in ("revision", "trust_remote_code") if hasattr(source, name)}
    try:
        processor = AutoProcessor.from_pretrained(str(Path(path).expanduser()) if path[:1] == "~" else path, **options)
    except (ImportError, OSError, ValueError) as error:
        raise ValueError(
            f"the processor of {path!r} cannot be loaded: {error} (Many need torchvision: "
            "`pip install 'pl-grouprl[vlm]'`.)"
        ) from error
    if not hasattr(processor, "image_processor"):
        raise ValueError(f"{path!r} has no image processor ({type(processor).__name__}); choose a model with one.")
    return processor


def check_processor_options(processor: Any, options: Mapping[str, Any]) -> None:
    """Refuse options that a processor would ignore, or refuse only later.

    Args:
        processor: A transformers processor; if it does not declare its arguments, it must check them itself.
        options: Keyword arguments for it.

    Raises:
        ValueError: If it does not take an argument.
    """
    groups = getattr(getattr(processor, "valid_processor_kwargs", None), "__annotations__", None)
    if groups is None:
        return
    known = {name: _names_in(processor, name, group) for name, group in groups.items()}
    anywhere = {*known, *(name for names in known.values() for name in names), "common_kwargs"} - {*_GIVEN}
    for name, value in options.items():
        if name not in anywhere:
            raise _unknown(name, processor, sorted(name for name, names in known.items() if names))
        if known.get(name) and not isinstance(value, Mapping):
            raise ValueError(f"processor_kwargs[{name!r}] is {value!r}; it must be a mapping.")
        for inner in value if known.get(name) else ():
            if inner not in known[name]:
                raise _unknown(f"{name}.{inner}", processor, sorted(known[name]))


def _names_in(processor: Any, group: str, declared: Any) -> set[str]:
    """Options of a group such as `images_kwargs`, as declared by the processor's class and its parts."""
    part = {"images_kwargs": "image_processor", "videos_kwargs": "video_processor"}.get(group, "")
    both = (declared, getattr(getattr(processor, part, None), "valid_kwargs", None))
    return {name for source in both for name in getattr(source, "__annotations__", ())}


def _unknown(name: str, processor: Any, known: list[str]) -> ValueError:
    return ValueError(
        f"processor_kwargs: {type(processor).__name__} takes no {name!r}, or it is already set; choose among "
        f"{', '.join(known)}."
    )
