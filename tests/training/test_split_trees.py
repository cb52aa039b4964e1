"""Trees larger than the token budget: whichever way they are cut, losses and gradients are those of repeated rows."""

import sys

import pytest
import torch
from helpers.branched import branched_groups
from helpers.tiny_models import gradients, tiny_model, worst_gradient_error

from pl_grouprl.attention import shared_prefix
from pl_grouprl.models.score import PrefixPass, score
from pl_grouprl.packing import build_trie, pack
from pl_grouprl.packing.plan import split_group
from pl_grouprl.training.buffer import RolloutBuffer
from pl_grouprl.training.micro_batches import (
    MicroBatchSchedule,
    RowOptions,
    Shape,
    largest,
    passes_of,
    plan_micro_batches,
)
from pl_grouprl.types import Rollout, RolloutGroup

pytestmark = pytest.mark.usefixtures("layers_checked_once")

CPU = torch.device("cpu")
QWEN3_NEXT = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 4},
    **{"layer_types": ["linear_attention", "full_attention"], "num_experts": 2, "num_experts_per_tok": 1},
    **{"moe_intermediate_size": 8, "shared_expert_intermediate_size": 8},
}


def buffer_of(groups):
    buffer = RolloutBuffer(groups)
    lengths = [len(rollout.token_ids) for group in groups for rollout in group.rollouts]
    weights = torch.randn(sum(lengths), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    buffer.put("weights", weights)
    return buffer


def loss_of(model, scoring, weights_N):
    """Weighs each token of each rollout on its own; half of it couples the tokens of a rollout, as GSPO does."""
    logprobs_N = score(model, scoring).logprobs_N.double()
    sums_B = torch.zeros(scoring.num_rollouts, dtype=torch.float64).index_add(
        0, scoring.rollout_index_N, logprobs_N * weights_N
    )
    return sums_B.sum() + sums_B.square().sum(), logprobs_N.detach()


def in_passes(model, buffer, options):
    """The log-probabilities of all tokens in the buffer's order, and the gradients."""
    model.zero_grad()
    schedule = MicroBatchSchedule(buffer, range(len(buffer.groups)), options)
    found, numbers, passes = [], [], 0
    with shared_prefix(model):
        for micro_batch in schedule:
            passes += 1
            if isinstance(micro_batch, PrefixPass):
                micro_batch.loss(model.parameters()).backward()
                continue
            loss, logprobs_N = loss_of(model, micro_batch.scoring, micro_batch.tokens["weights"])
            loss.backward()
            if micro_batch.rollout_numbers:
                found.append(logprobs_N)
                numbers += micro_batch.rollout_numbers
    assert passes == schedule.number
    return buffer.in_order(found, numbers, per_token=True), gradients(model)


def repeated(model, buffer):
    model.zero_grad()
    batch = pack(buffer.groups, "repeated")
    loss, logprobs_N = loss_of(model, batch, torch.cat(buffer.tokens["weights"]))
    loss.backward()
    return logprobs_N, gradients(model)


def assert_same(model, groups, budget, tolerance):
    buffer = buffer_of(groups)
    expected, others = repeated(model, buffer)
    actual, found = in_passes(model, buffer, RowOptions("shared", budget, CPU, min_saved_tokens=1))
    torch.testing.assert_close(actual.double(), expected.double(), atol=tolerance, rtol=tolerance)
    assert worst_gradient_error(found, others) < tolerance


@pytest.mark.parametrize("budget", [8, 13, 30])
@pytest.mark.parametrize("seed", range(12))
def test_losses_and_gradients(seed, budget):
    assert_same(tiny_model("gpt2", dtype=torch.float64), branched_groups(seed, 3, most=14), budget, 1e-9)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_next", "gemma3_text"])
def test_other_layers(family):
    model = tiny_model(family, dtype=torch.float64, **(QWEN3_NEXT if family == "qwen3_next" else {}))
    model.set_experts_implementation("eager")
    for seed in range(4):
        assert_same(model, branched_groups(seed, 2, most=14), 8, 1e-5)


def test_the_trees_are_deep_enough_to_tell():
    depths = [depth_of(plan(seed)) for seed in range(12)]
    assert max(depths) >= 3
    assert depths.count(1) < 6


def plan(seed):
    groups = branched_groups(seed, 3, most=14)
    return plan_micro_batches(groups, range(len(groups)), RowOptions("shared", 8, CPU, min_saved_tokens=1))


def depth_of(plan):
    return max((1 + depth for split in plan.splits for depth, _ in split.shape), default=0)


def comb(depth):
    """A prompt and rollouts that leave the longest of them one after another, every two tokens."""
    spine = torch.randint(1, 40, (2 * depth,), generator=torch.Generator().manual_seed(0)).tolist()
    ends = [Rollout([*spine[: 2 * level], 50]) for level in range(1, depth)]
    return RolloutGroup([3, 4], [*ends, Rollout(spine)])


def test_more_branches_on_a_path_than_frames_on_the_stack():
    model, group = tiny_model("gpt2", dtype=torch.float64), comb(30)
    assert depth_of(plan_micro_batches([group], [0], RowOptions("shared", 4, CPU, min_saved_tokens=1))) > 25
    before = sys.getrecursionlimit()
    frame, frames = sys._getframe(), 0
    while frame is not None:
        frame, frames = frame.f_back, frames + 1
    sys.setrecursionlimit(frames + 80)  # the model takes fewer than 60
    try:
        assert_same(model, [group], 4, 1e-9)
    finally:
        sys.setrecursionlimit(before)


def test_thousands_of_branches_are_planned_and_merged():
    depth, group = 1100, comb(1100)
    split = split_group(0, 2, build_trie([rollout.token_ids for rollout in group.rollouts], 1), 4)
    found = [rollout for part in (split, *split.branches) for indices in part.slices for rollout in indices]
    assert sorted(found) == list(range(depth))
    assert [branch.depth for branch in split.branches] == list(range(1, depth))
    shape = Shape(0, (split.shape,))
    assert largest([shape, Shape(2, (((0, 4), (1, 1)),))]).number == shape.number + 6
    passes = passes_of(group, split, shape.splits[0], lambda chosen: ([group], {}, tuple(chosen)), ([group], {}, ()))
    assert [token for one in passes for token in one.token_ids if one.depth] == group.rollouts[-1].token_ids[:-2]


def test_ranks_agree_on_the_largest_shape():
    one = Shape(2, (((0, 3),), ((0, 1), (1, 2), (1, 1))))
    other = Shape(0, (((0, 1), (1, 4)),))
    both = largest([one, other])
    assert both == Shape(2, (((0, 3), (1, 4)), ((0, 1), (1, 2), (1, 1))))
    # Rows and slices: 2 + (3 + 4) + (1 + 2 + 1), and each prompt and branch by itself: 2 + 1 + 2.
    assert both.number == 2 + 7 + 4 + 5


@pytest.mark.parametrize("seed", range(3))
def test_a_rank_fills_up_with_dummies_that_change_nothing(seed, monkeypatch):
    model, groups = tiny_model("gpt2", dtype=torch.float64), branched_groups(seed, 3, most=14)
    trees = ((0, 5), (1, 2), (2, 3), (1, 2)), ((0, 2),), ((0, 3),), ((0, 1), (1, 1))
    others = Shape(3, trees)
    monkeypatch.setattr("pl_grouprl.training.micro_batches.gather_plain", lambda own, *_: [own, tuple(others)])
    buffer = buffer_of(groups)
    expected, gradients_ = repeated(model, buffer)
    # A dummy has one token of weight 0.
    actual, found = in_passes(model, buffer, RowOptions("shared", 8, CPU, min_saved_tokens=1))
    torch.testing.assert_close(actual, expected, atol=1e-9, rtol=1e-9)
    assert worst_gradient_error(found, gradients_) < 1e-9
