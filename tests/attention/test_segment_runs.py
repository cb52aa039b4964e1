"""Batches of segments: worked out by hand for small forests, invariants for random ones."""

from __future__ import annotations

import pytest
import torch
from helpers.forests import random_forest

from pl_grouprl.attention.stateful import Batch, RunPlan, plan_runs
from pl_grouprl.packing import SharedPrefixLayout

CPU = torch.device("cpu")


def plan(lengths: list[int], parents: list[int | None], *, pad_roots: bool = True) -> RunPlan:
    return plan_runs(SharedPrefixLayout(lengths, parents), pad_roots=pad_roots, device=CPU)


def rows(batch: Batch) -> list[list[int]]:
    """The packed token at each place of a batch; -1 for padding."""
    slots = torch.full((batch.size[0] * batch.size[1],), -1).index_copy(0, batch.slots, batch.tokens)
    return slots.reshape(batch.size).tolist()


def test_a_group_is_its_prompt_and_its_rollouts_padded_on_the_right() -> None:
    prompt, rollouts = plan([2, 3, 4, 3], [None, 0, 0, 0]).batches
    assert rows(prompt) == [[0, 1]]
    assert prompt.starts is None
    assert rows(rollouts) == [[5, 6, 7, 8], [2, 3, 4, -1], [9, 10, 11, -1]]
    assert rollouts.starts is not None
    assert rollouts.starts.tolist() == [0, 0, 0]


def test_prompts_are_padded_on_the_left_where_that_is_exact() -> None:
    lengths, parents = [4, 2, 3, 2], [None, 0, None, 2]
    prompts, _ = plan(lengths, parents).batches
    assert rows(prompts) == [[0, 1, 2, 3], [-1, 6, 7, 8]]
    first, second, _ = plan(lengths, parents, pad_roots=False).batches
    assert (rows(first), rows(second)) == ([[0, 1, 2, 3]], [[6, 7, 8]])


def test_a_single_inner_token_is_recomputed_before_its_children() -> None:
    built = plan([2, 1, 2, 3], [None, 0, 1, 1])
    root, longest, alone = built.batches
    assert rows(root) == [[0, 1]]
    assert rows(longest) == [[2, 5, 6, 7], [2, 3, 4, -1]]
    assert rows(alone) == [[2, -1]]
    every = torch.cat([batch.tokens for batch in built.batches])
    assert built.outputs.tolist() == [0, 1, 9, 7, 8, 3, 4, 5]
    assert every[built.outputs].tolist() == list(range(8))


def test_an_empty_segment_passes_on_its_parents_state() -> None:
    root, leaves = plan([3, 0, 2, 0], [None, 0, 1, 0]).batches
    assert rows(root) == [[0, 1, 2]]
    assert rows(leaves) == [[3, 4]]
    assert leaves.starts is not None
    assert leaves.starts.tolist() == [0]


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
@pytest.mark.parametrize("pad_roots", [False, True])
def test_invariants_of_every_plan(depth: int, pad_roots: bool) -> None:
    for seed in range(10):
        lengths, parents = random_forest(seed, depth, roots=4)
        built = plan(lengths, parents, pad_roots=pad_roots)
        tokens = torch.cat([batch.tokens for batch in built.batches])
        assert tokens[built.outputs].tolist() == list(range(sum(lengths)))
        states = 0
        for batch in built.batches:
            filled = len(batch.tokens) / (batch.size[0] * batch.size[1])
            assert filled >= (0.75 if batch.size[1] > 2 else 0.5)
            if batch.starts is not None:
                assert batch.size[1] > 1  # single tokens on a state would be decoded
                assert int(batch.starts.max()) < states  # parents come first
            if batch.keeps_state and (batch.starts is not None or not pad_roots):
                assert filled == 1
            states += batch.size[0] * batch.keeps_state
