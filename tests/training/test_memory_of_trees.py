"""Memory of a split tree: that of its longest path and one slice, however many leaves it has."""

import torch
from helpers.peak_memory import Peak
from helpers.tiny_models import tiny_model

from pl_grouprl.attention import shared_prefix
from pl_grouprl.models.score import PrefixPass, score
from pl_grouprl.training.buffer import RolloutBuffer
from pl_grouprl.training.micro_batches import MicroBatchSchedule, RowOptions
from pl_grouprl.types import Rollout, RolloutGroup

SEGMENT = 48


def random_tokens(count):
    return torch.randint(1, 60, (count,), generator=torch.Generator().manual_seed(count)).tolist()


def tree(depth):
    """A prompt, and below it a binary tree of segments, which begin with different tokens."""
    paths = [[60, *random_tokens(SEGMENT - 1)]]
    for _ in range(depth - 1):
        paths = [[*path, first, *random_tokens(SEGMENT - 1)] for path in paths for first in (1, 2)]
    return RolloutGroup(random_tokens(SEGMENT), [Rollout(path) for path in paths])


def line(depth, segment=SEGMENT):
    """A prompt and one rollout, as long as a path of that tree."""
    return RolloutGroup(random_tokens(segment), [Rollout(random_tokens(depth * segment))])


def comb(depth, segment):
    """A prompt and a rollout, which others leave at the end of each segment."""
    spine = random_tokens(depth * segment)
    ends = [Rollout([*spine[: level * segment], 60, *random_tokens(segment - 1)]) for level in range(1, depth)]
    return RolloutGroup(random_tokens(segment), [*ends, Rollout(spine)])


def peak(model, group, budget):
    options = RowOptions("shared", budget, torch.device("cpu"))
    model.zero_grad()
    with shared_prefix(model), Peak() as found:
        for batch in MicroBatchSchedule(RolloutBuffer([group]), [0], options):
            loss = batch.loss(model.parameters()) if isinstance(batch, PrefixPass) else None
            (score(model, batch.scoring).logprobs_N.sum() if loss is None else loss).backward()
            del batch, loss
    return found.peak


def model_of():
    sizes = {"hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 8, "num_key_value_heads": 2}
    return tiny_model("llama", num_hidden_layers=4, **sizes).train()


def test_a_split_tree_takes_the_memory_of_one_path_and_a_level():
    model = model_of()
    path = {depth: peak(model, line(depth), None) for depth in (4, 5)}
    split, whole = (peak(model, tree(5), budget) for budget in (SEGMENT, None))
    assert split < 1.1 * (path[5] + path[5] - path[4])
    assert split < whole / 2.5


def test_a_deep_tree_takes_no_more_for_each_level():
    """Of a path of 40 branches, nothing is kept for each pair of them."""
    model, segment = model_of(), 16
    path = {depth: peak(model, line(depth, segment), None) for depth in (39, 40)}
    assert peak(model, comb(40, segment), segment) < 1.1 * (path[40] + path[40] - path[39])
