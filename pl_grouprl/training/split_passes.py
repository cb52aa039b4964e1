"""The passes of a group larger than a micro-batch, padded with dummies so that every rank runs the same kinds."""

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
    """A prompt or branch to run, with the slices and branches that continue it.

    Attributes:
        prompt: A group with the prompt, without rollouts; None for a branch.
        token_ids: Tokens of the branch; one token for a dummy. Not used for a prompt.
        slices: Rollouts that continue it, slice by slice.
        branches: Branches that continue it.
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
    """The passes of a group, or of one of its branches. The caller sets `prompt` for a group.

    Args:
        group: The group.
        split: How the group or branch is split; None returns only dummies.
        shape: Number of passes to return. Dummies fill up: before the slices, and after the branches.
        select: Selects rollouts of the group by their indices.
        dummy: A selection of one rollout of one token.
    """
    slices, branches = ((), ()) if split is None else (split.slices, split.branches)
    tokens: list[int] = group.prompt_ids[-1:]
    if isinstance(split, Branch):
        tokens = group.rollouts[split.rollout].token_ids[split.start : split.stop]
    return Passes(
        None,
        tokens,
        [dummy] * (shape.count - len(slices)) + [select(indices) for indices in slices],
        [passes_of(group, branch, part, select, dummy) for branch, part in zip_longest(branches, shape.splits)],
    )


def passes_to_state(passes: Passes) -> dict[str, Any]:
    """Plain containers and tensors, to be sent to another rank."""
    return {
        "prompt": None if passes.prompt is None else to_state(passes.prompt),
        "token_ids": passes.token_ids,
        "slices": [selection_to_state(selection) for selection in passes.slices],
        "branches": [passes_to_state(branch) for branch in passes.branches],
    }


def passes_from_state(state: dict[str, Any]) -> Passes:
    """The passes that `passes_to_state` was given."""
    return Passes(
        None if state["prompt"] is None else from_state(state["prompt"]),
        state["token_ids"],
        [selection_from_state(selection) for selection in state["slices"]],
        [passes_from_state(branch) for branch in state["branches"]],
    )


def selection_to_state(selection: Selection) -> Any:
    """Plain containers and tensors, to be sent to another rank."""
    groups, tokens, numbers = selection
    return [to_state(group) for group in groups], tokens, numbers


def selection_from_state(state: Any) -> Selection:
    """The selection that `selection_to_state` was given."""
    groups, tokens, numbers = state
    return [from_state(group) for group in groups], tokens, numbers
