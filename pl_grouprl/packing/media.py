"""Joins images and videos of several prompts into the keyword arguments of one model call.

Legend: B rollouts, T packed tokens, L longest sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pl_grouprl.packing.layout import SharedPrefixLayout
from pl_grouprl.packing.repeat import repeat_values
from pl_grouprl.types import RolloutGroup, is_per_token


def join_media(groups: Sequence[RolloutGroup], layout: SharedPrefixLayout, sharing: str) -> dict[str, Tensor]:
    """Join the media of all groups, in the order of their prompts in the batch.

    Args:
        groups: Prompts with at least one rollout each, with or without media.
        layout: Layout of these groups.
        sharing: `shared` takes each group's media once, `repeated` once per rollout.

    Returns:
        A tensor per name: images, videos or patches, concatenated; or, for per-token tensors, the packed row [1, T] or
        padded rows [B, L] with zeros for text, rollouts and padding. Empty without any media.

    Raises:
        ValueError: If a per-token tensor has the wrong length, or images of different shapes cannot be joined.
    """
    names = list(dict.fromkeys(name for group in groups for name in group.media))
    for number, group in enumerate(groups):
        _check(group, number if group.group_id is None else group.group_id)
    return {
        name: _per_token(name, groups, layout, sharing) if is_per_token(name) else _joined(name, groups, sharing)
        for name in names
    }


def _check(group: RolloutGroup, name_of_group: object) -> None:
    for name, value in group.media.items():
        if not isinstance(value, Tensor):
            raise ValueError(
                f"group {name_of_group!r}: media[{name!r}] is of type {type(value).__name__}; pass a tensor (call the "
                "processor with return_tensors='pt')."
            )
        if is_per_token(name) and value.shape != (len(group.prompt_ids),):
            raise ValueError(
                f"group {name_of_group!r}: media[{name!r}] has shape {list(value.shape)} for a prompt of "
                f"{len(group.prompt_ids)} tokens; pass one entry per token of the prompt."
            )


def _joined(name: str, groups: Sequence[RolloutGroup], sharing: str) -> Tensor:
    parts: list[Tensor] = []
    for group in groups:
        if name in group.media:
            parts += [group.media[name]] * (1 if sharing == "shared" else len(group.rollouts))
    shapes = {tuple(part.shape[1:]) for part in parts}
    if len(shapes) > 1:
        raise ValueError(
            f"media[{name!r}] of different groups have items of shapes {sorted(shapes)}, which cannot be concatenated; "
            "let the processor resize images to one size, or put these prompts into batches of one group."
        )
    return torch.cat(parts)


def _per_token(name: str, groups: Sequence[RolloutGroup], layout: SharedPrefixLayout, sharing: str) -> Tensor:
    """Entries of the prompts' tokens, shape [1, T] or [B, L]; zeros for text, rollouts and padding."""
    packed_T = torch.zeros(layout.num_tokens, dtype=torch.long)
    prompts = (segment for segment in layout.segments if segment.parent is None)
    for segment, group in zip(prompts, groups, strict=True):
        packed_T[segment.start : segment.stop] = group.media.get(name, 0)
    return packed_T[None] if sharing == "shared" else repeat_values(layout, packed_T)
