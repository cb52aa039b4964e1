"""The passes of a group that is larger than a micro-batch, filled up with dummies to a shape that all ranks share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from torch import Tensor

from pl_grouprl.packing import Branch, SplitGroup
from pl_grouprl.training.distribution import from_state, to_state
from pl_grouprl.training.micro_batch_plan import Shape
from pl_grouprl.types import RolloutGroup

Selection = tuple[list[RolloutGroup], dict[str, Tensor], tuple[int, ...]]
"""What `RolloutBuffer.select` returns."""


class Passes(NamedTuple):
    """What runs of a prompt, or of a branch.

    Attributes:
        prompt: A group with the prompt, without rollouts; None for a branch.
        token_ids: The branch; empty for a prompt.
        slices: What continues it.
        branches: What continues it and does not fit into a slice.
    """

    prompt: RolloutGroup | None
    token_ids: list[int]
    slices: list[Selection]
    branches: list[Passes]


def passes_of(
    group: RolloutGroup,
    split: SplitGroup | Branch | None,
    shape: Shape,
    select: Callable[[Sequence[int]], Selection],
    dummy: Selection,
) -> Passes:
    """The passes of a group, or of one of its branches.

    Args:
        group: The group.
        split: How it is split; None for dummies alone.
        shape: How many passes there must be. Dummies come before slices and after branches.
        select: Returns some of the group's rollouts.
        dummy: A rollout of one token.
    """
    slices, branches = ((), ()) if split is None else (split.slices, split.branches)
    tokens: list[int] = group.prompt_ids[-1:]
    if isinstance(split, Branch):
        tokens = group.rollouts[split.rollout].token_ids[split.start : split.stop]
    return Passes(
        None,
        tokens,
        [dummy] * (shape.count - len(slices)) + [select(own) for own in slices],
        [passes_of(group, *below, select, dummy) for below in zip_longest(branches, shape.splits)],
    )


def passes_to_state(passes: Passes) -> dict[str, Any]:
    """Plain containers and tensors, to be sent to another rank."""
    return {
        "prompt": None if passes.prompt is None else to_state(passes.prompt),
        "token_ids": passes.token_ids,
        "slices": [selection_to_state(selection) for selection in passes.slices],
        "branches": [passes_to_state(below) for below in passes.branches],
    }


def passes_from_state(state: dict[str, Any]) -> Passes:
    """The passes that `passes_to_state` was given."""
    return Passes(
        None if state["prompt"] is None else from_state(state["prompt"]),
        state["token_ids"],
        [selection_from_state(selection) for selection in state["slices"]],
        [passes_from_state(below) for below in state["branches"]],
    )


def selection_to_state(selection: Selection) -> Any:
    """The same of some rollouts."""
    groups, tokens, numbers = selection
    return [to_state(group) for group in groups], tokens, numbers


def selection_from_state(state: Any) -> Selection:
    """The rollouts that `selection_to_state` was given."""
    groups, tokens, numbers = state
    return [from_state(group) for group in groups], tokens, numbers
