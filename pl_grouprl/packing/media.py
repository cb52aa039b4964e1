"""Images and videos of several prompts as the keyword arguments of one model call.

Legend: B rollouts, T packed tokens, L longest sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pl_grouprl.types import RolloutGroup, is_per_token


def join_media(groups: Sequence[RolloutGroup], sharing: str) -> dict[str, Tensor]:
    """Join the media of all groups in the order in which their prompts stand in the batch.

    Args:
        groups: Prompts with at least one rollout each; those without media take part as text.
        sharing: `shared` takes the media of each group once, `repeated` once for each of its rollouts.

    Returns:
        For each name a tensor: images, videos or patches one after another, or, where there is an entry per token, the
        packed row [1, T] or padded rows [B, L] with zeros for text, rollouts and padding. Empty without any media.

    Raises:
        ValueError: If a tensor has not one entry per token, or images of different shapes are to be joined.
    """
    names = list(dict.fromkeys(name for group in groups for name in group.media))
    for number, group in enumerate(groups):
        _check(group, number if group.group_id is None else group.group_id)
    lay_out = _packed_row if sharing == "shared" else _padded_rows
    return {name: lay_out(name, groups) if is_per_token(name) else _joined(name, groups, sharing) for name in names}


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
            f"media[{name!r}] of different groups have items of the shapes {sorted(shapes)}, which cannot be joined; "
            "let the processor resize images to one size, or put these prompts into batches of one group."
        )
    return torch.cat(parts)


def _types(name: str, group: RolloutGroup) -> Tensor:
    own = group.media.get(name)
    return torch.zeros(len(group.prompt_ids), dtype=torch.long) if own is None else own.long()


def _packed_row(name: str, groups: Sequence[RolloutGroup]) -> Tensor:
    runs: list[Tensor] = []
    for group in groups:
        runs += [_types(name, group), torch.zeros(sum(len(r.token_ids) for r in group.rollouts), dtype=torch.long)]
    return torch.cat(runs)[None]


def _padded_rows(name: str, groups: Sequence[RolloutGroup]) -> Tensor:
    width = max(len(group.prompt_ids) + len(rollout.token_ids) for group in groups for rollout in group.rollouts)
    rows_BL = torch.zeros(sum(len(group.rollouts) for group in groups), width, dtype=torch.long)
    row = 0
    for group in groups:
        rows_BL[row : row + len(group.rollouts), : len(group.prompt_ids)] = _types(name, group)
        row += len(group.rollouts)
    return rows_BL
