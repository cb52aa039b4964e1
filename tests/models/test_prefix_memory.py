"""Memory of a step on a group in slices: that of the prompt and one slice, however many rollouts the group has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.peak_memory import Peak
from helpers.tiny_models import random_groups, tiny_model

from pl_grouprl.attention import shared_prefix
from pl_grouprl.models import score
from pl_grouprl.models.score import PrefixPass
from pl_grouprl.packing import pack
from pl_grouprl.packing.batch import pack_slice

PROMPT, RESPONSE, SLICE = 96, 128, 4


def model_of(checkpointing: bool) -> Any:
    model = tiny_model("llama").train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def peak_in_slices(model: Any, num_rollouts: int) -> int:
    (group,) = random_groups(0, [(PROMPT, [RESPONSE] * num_rollouts)])
    model.zero_grad()
    with shared_prefix(model), Peak() as peak:
        prefix = PrefixPass(group, "cpu")
        for start in range(0, num_rollouts, SLICE):
            score(model, pack_slice(group, range(start, start + SLICE), prefix)).logprobs_N.sum().backward()
        prefix.loss(model.parameters()).backward()
    return peak.peak


def peak_in_one_call(model: Any, num_rollouts: int) -> int:
    (group,) = random_groups(0, [(PROMPT, [RESPONSE] * num_rollouts)])
    model.zero_grad()
    with shared_prefix(model), Peak() as peak:
        score(model, pack([group])).logprobs_N.sum().backward()
    return peak.peak


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_larger_group_takes_no_more_memory(checkpointing):
    model = model_of(checkpointing)
    small, large = peak_in_slices(model, 4), peak_in_slices(model, 32)
    assert large < 1.3 * small
    assert peak_in_one_call(model, 32) > 2 * large


def test_slices_take_little_more_memory_than_one_call():
    """Of four rollouts: a prompt's tensors are there twice at most, with their gradients."""
    model = model_of(False)
    assert peak_in_slices(model, 4) < 1.3 * peak_in_one_call(model, 4)


def test_retained_memory_is_counted():
    with Peak() as peak:
        kept = [torch.zeros(1000) + 1 for _ in range(3)]
        assert peak.live == 12_000
        del kept
        assert peak.live == 0
    assert 12_000 <= peak.peak <= 16_000
