"""Models that read images and videos: their backbone, their positions, their processor.

Legend: B rollouts, T packed tokens, L longest sequence, S prompts as they stand in a batch: those of a packed row, or
that of each of the B padded rows.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from pl_grouprl.attention import find_backbone
from pl_grouprl.packing import ScoringBatch
from pl_grouprl.packing.media import is_per_token

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PLACEHOLDERS = ("image_token_id", "video_token_id", "audio_token_id")


class PromptPositions(NamedTuple):
    """Rotary positions of prompts with images and videos.

    Attributes:
        position_ids: For each token its place in time, height and width, shape [3, S, prompt tokens], int64.
        next_position_S: The position, in all three, of the first token behind each prompt, int64.
    """

    position_ids: Tensor
    next_position_S: Tensor


def placeholder_ids(model: PreTrainedModel) -> dict[str, int]:
    """Tokens in whose places the model puts images and videos, by their names in its config; empty for text models."""
    config = getattr(find_backbone(model), "config", None)
    ids = {name: getattr(config, name, None) for name in _PLACEHOLDERS}
    return {name: token for name, token in ids.items() if isinstance(token, int)}


def language_model_class(config: Any) -> str:
    """Name of transformers' auto class for a model that continues text, and images and videos if it reads them.

    Args:
        config: A transformers config.
    """
    from transformers.models.auto import modeling_auto as auto

    with_media = auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.keys() - auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys()
    return "AutoModelForImageTextToText" if config.model_type in with_media else "AutoModelForCausalLM"


def load_processor(source: Any) -> Any:
    """Load the processor that turns images, videos and text into a model's inputs.

    Args:
        source: Path or hub name of a Hugging Face model, a source of a policy that names one (`PretrainedPolicy`), or
            one with a method `load_processor` of its own.

    Raises:
        ValueError: If the source names no model, or its model has no processor of images.
    """
    if callable(load := getattr(source, "load_processor", None)):
        return load()
    path = source if isinstance(source, str) else getattr(source, "path", None)
    if path is None:
        raise ValueError(f"{source!r} does not say where a processor is from; pass processor=... to PromptDataModule.")
    from transformers import AutoProcessor

    options = {name: getattr(source, name) for name in ("revision", "trust_remote_code") if hasattr(source, name)}
    try:
        processor = AutoProcessor.from_pretrained(str(Path(path).expanduser()) if path[:1] == "~" else path, **options)
    except (ImportError, OSError, ValueError) as error:
        raise ValueError(
            f"the processor of {path!r} cannot be loaded: {error} (Processors with videos need torchvision.)"
        ) from error
    if not hasattr(processor, "image_processor"):
        raise ValueError(f"{path!r} has no processor of images ({type(processor).__name__}); choose a model with one.")
    return processor


def reads_media(source: Any) -> bool:
    """Whether the policy of a source reads images or videos, as far as its processor or its config tells.

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
    except (OSError, ValueError):  # the policy itself says what is wrong with its path
        return False
    return any(isinstance(getattr(config, name, None), int) for name in _PLACEHOLDERS)


def check_media(model: PreTrainedModel, batch: ScoringBatch) -> None:
    """Refuse a batch whose images and videos the model cannot place.

    Raises:
        ValueError: If the model takes no such argument, or a rollout holds the token in whose place it puts an image.
    """
    backbone = find_backbone(model)
    unknown = sorted(batch.media.keys() - inspect.signature(backbone.forward).parameters.keys())
    if unknown:
        raise ValueError(
            f"the prompts have media {unknown}, which {type(backbone).__name__} does not take; use the processor that "
            "belongs to the model, or a model that reads images and videos."
        )
    for name, token in placeholder_ids(model).items():
        places = (batch.targets_N == token).nonzero().flatten().tolist()
        if places and batch.media:
            rollout = int(batch.rollout_index_N[places[0]])
            raise ValueError(
                f"rollout {rollout} of the batch (counted from 0, through the groups in order) holds token {token}, "
                f"the model's {name}, for which there is no image or video; forbid the sampler to draw it."
            )


def media_position_ids(model: PreTrainedModel, batch: ScoringBatch) -> Tensor | None:
    """Positions of a batch for models whose rotary positions depend on images and videos (Qwen-VL).

    Those of a prompt come from the model's own `get_rope_index`; the tokens of a rollout go on, in time, height and
    width alike, behind the prompt's last token, as in one forward of both. The vision tower is not run.

    Returns:
        Positions of the packed row, shape [3, 1, T], or of the padded rows, [3, B, L]; None where the batch has no
        images or videos, or the model's positions are those of text.
    """
    backbone = find_backbone(model)
    if not hasattr(backbone, "get_rope_index") or not any(name.endswith("grid_thw") for name in batch.media):
        return None
    input_ids = batch.model_inputs["input_ids"]
    roots = [segment for segment in batch.layout.segments if segment.parent is None]
    if batch.sharing == "shared":
        spans = [(0, segment.start, segment.length) for segment in roots]
    else:
        parents = [segment.parent for segment in batch.layout.segments if segment.parent is not None]
        spans = [(row, 0, batch.layout.segments[parent].length) for row, parent in enumerate(parents)]

    def prompts(values: Tensor) -> Tensor:
        return pad_sequence([values[row, start : start + length] for row, start, length in spans], batch_first=True)

    # On the CPU: it is a loop over images that reads numbers from tensors.
    media = {name: value.cpu() for name, value in batch.media.items() if not name.startswith("pixel_values")}
    media = {name: prompts(value) if is_per_token(name) else value for name, value in media.items()}
    tokens = input_ids.cpu()
    positions = prompt_positions(backbone, prompts(tokens), prompts(torch.ones_like(tokens)), media)
    lay_out = _packed_row if batch.sharing == "shared" else _padded_rows
    return lay_out(batch, positions).to(input_ids.device)


def prompt_positions(
    backbone: Any, input_ids_SL: Tensor, attention_mask_SL: Tensor, media: dict[str, Tensor]
) -> PromptPositions:
    """Ask a model for the positions of prompts, one per row.

    Args:
        backbone: A model with transformers' `get_rope_index`; see `find_backbone`.
        input_ids_SL: The prompts, padded on either side.
        attention_mask_SL: 1 where a row holds its prompt.
        media: Images and videos of all rows one after another; per-token entries of the shape of `input_ids_SL`.
    """
    accepted = inspect.signature(backbone.get_rope_index).parameters
    known = {name: value for name, value in media.items() if name in accepted}
    position_ids, deltas_S1 = backbone.get_rope_index(input_ids_SL, attention_mask=attention_mask_SL, **known)
    # Text goes on behind the last token, beyond which a long video may reach; behind an image, behind the largest.
    places = torch.arange(input_ids_SL.shape[1]).expand_as(input_ids_SL)
    last_S = (places * attention_mask_SL.cpu()).argmax(dim=1)
    rows_S = torch.arange(len(last_S))
    behind_last_S = position_ids[:, rows_S, last_S].amax(dim=0) + 1
    types_SL = media.get("mm_token_type_ids", torch.zeros_like(input_ids_SL))
    ends_in_text_S = types_SL[rows_S, last_S] == 0
    largest_S = attention_mask_SL.sum(dim=1) + deltas_S1.flatten()
    return PromptPositions(position_ids, torch.where(ends_in_text_S, behind_last_S, largest_S))


def _packed_row(batch: ScoringBatch, positions: PromptPositions) -> Tensor:
    runs: list[Tensor] = []
    following: list[Tensor] = []  # for each segment the position behind its last token
    prompt = 0
    for segment in batch.layout.segments:
        if segment.parent is None:
            runs.append(positions.position_ids[:, prompt, : segment.length])
            following.append(positions.next_position_S[prompt])
            prompt += 1
            continue
        start = following[segment.parent]
        runs.append((start + torch.arange(segment.length)).expand(3, -1))
        following.append(start + segment.length)
    return torch.cat(runs, dim=1)[:, None]


def _padded_rows(batch: ScoringBatch, positions: PromptPositions) -> Tensor:
    segments = batch.layout.segments
    prompt_lengths = [segments[s.parent].length for s in segments if s.parent is not None]
    width = batch.model_inputs["input_ids"].shape[1]
    rows = []
    for row, length in enumerate(prompt_lengths):
        start = positions.next_position_S[row]
        behind = (start + torch.arange(width - length)).expand(3, -1)
        rows.append(torch.cat([positions.position_ids[:, row, :length], behind], dim=1))
    return torch.stack(rows, dim=1)
