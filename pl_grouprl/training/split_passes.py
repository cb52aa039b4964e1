"""The passes of a group larger than a micro-batch, padded with dummies so that every rank runs the same kinds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from pl_grouprl.packing import Branch, SplitGroup, SplitShape
from pl_grouprl.training.distribution import from_state, to_state
from pl_grouprl.types import RolloutGroup

Selection = tuple[list[RolloutGroup], dict[str, Tensor], tuple[int, ...]]
"""What `RolloutBuffer.select` returns."""


class Pass(NamedTuple):
    """A prompt or branch to run, with the slices that continue it.

    Attributes:
        depth: 0 for a prompt, otherwise as in `packing.Branch`.
        prompt: A group with the prompt, without rollouts; None for a branch.
        token_ids: Tokens of the branch; one token for a dummy. Not used for a prompt.
        slices: Rollouts that continue it, slice by slice.
    """

    depth: int
    prompt: RolloutGroup | None
    token_ids: list[int]
    slices: list[Selection]


def passes_of(
    group: RolloutGroup,
    split: SplitGroup | None,
    shape: SplitShape,
    select: Callable[[Sequence[int]], Selection],
    dummy: Selection,
) -> list[Pass]:
    """The passes of a group: its prompt, then its branches, depth-first.

    Args:
        group: The group.
        split: How it is split; None returns only dummies.
        shape: Which passes to return. Dummies fill up: before the slices, and after the branches.
        select: Selects rollouts of the group by their indices.
        dummy: A selection of one rollout of one token.
    """
    prompt = replace(group if split else dummy[0][0], rollouts=[])
    own: list[tuple[int, SplitGroup | Branch]] = []
    if split is not None:
        own = [*((branch.depth, branch) for branch in reversed(split.branches)), (0, split)]
    passes = []
    for depth, count in shape:
        # The shape has room for the whole tree, so its passes are those that are as deep as the next of the tree.
        part = own.pop()[1] if own and own[-1][0] == depth else None
        slices = () if part is None else part.slices
        tokens: list[int] = group.prompt_ids[-1:]
        if isinstance(part, Branch):
            tokens = group.rollouts[part.rollout].token_ids[part.start : part.stop]
        selected = [dummy] * (count - len(slices)) + [select(indices) for indices in slices]
        passes.append(Pass(depth, None if depth else prompt, tokens, selected))
    return passes


def passes_to_state(passes: Sequence[Pass]) -> list[dict[str, Any]]:
    """Plain containers and tensors, to be sent to another rank."""
    return [
        {
            "depth": one.depth,
            "prompt": None if one.prompt is None else to_state(one.prompt),
            "token_ids": one.token_ids,
            "slices": [selection_to_state(selection) for selection in one.slices],
        }
        for one in passes
    ]


def passes_from_state(state: Sequence[dict[str, Any]]) -> list[Pass]:
    """The passes that `passes_to_state` was given."""
    return [
        Pass(
            one["depth"],
            None if one["prompt"] is None else from_state(one["prompt"]),
            one["token_ids"],
            [selection_from_state(selection) for selection in one["slices"]],
        )
        for one in state
    ]


def selection_to_state(selection: Selection) -> Any:
    """Plain containers and tensors, to be sent to another rank."""
    groups, tokens, numbers = selection
    return [to_state(group) for group in groups], tokens, numbers


def selection_from_state(state: Any) -> Selection:
    """The selection that `selection_to_state` was given."""
    groups, tokens, numbers = state
    return [from_state(group) for group in groups], tokens, numbers
