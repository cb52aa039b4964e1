"""What later calls read of earlier ones: values, gradients, and a graph that is no larger after a long path."""

import pytest
import torch
from torch import nn

from pl_grouprl.attention.call import Leaf, Prefilled

LAYER = nn.Identity()


def prefilled_of(*recorded):
    return Prefilled([{LAYER: {("key",): Leaf(tensor)}} for tensor in recorded], LAYER, ("key",))


def test_gradients_go_to_the_leaves_and_to_what_runs():
    first, second = torch.tensor([1.0, 2.0], requires_grad=True), torch.tensor([3.0])
    own = torch.tensor([4.0, 5.0], requires_grad=True)
    prefilled = prefilled_of(first, second)
    for _ in range(2):
        joined = prefilled.join(own)
        assert joined.tolist() == [1, 2, 3, 4, 5]
        (joined * torch.tensor([1.0, 10, 100, 1000, 10_000])).sum().backward()
    assert prefilled.leaves()[0].gradient.tolist() == [2, 20]
    assert prefilled.leaves()[1].gradient is None  # nothing trained led to it
    assert first.grad is None
    assert own.grad.tolist() == [2000, 20_000]


def test_the_prefilled_tensors_may_be_all_that_is_trained():
    prefilled = prefilled_of(torch.ones(2, requires_grad=True))
    prefilled.join(torch.ones(1)).sum().backward()
    assert prefilled.leaves()[0].gradient.tolist() == [1, 1]
    assert not prefilled_of(torch.ones(2)).join(torch.ones(1)).requires_grad


@pytest.mark.parametrize("calls", [1, 500])
def test_the_graph_is_as_small_after_a_long_path(calls):
    prefilled = prefilled_of(*[torch.ones(1, requires_grad=True)] * calls)
    joined = prefilled.join(torch.ones(1, requires_grad=True))
    edges = [edge for edge, _ in joined.grad_fn.next_functions if edge is not None]
    assert len(edges) == 2  # what runs, and the anchor
    joined.sum().backward()
    assert all(leaf.gradient.item() == 1 for leaf in prefilled.leaves())
