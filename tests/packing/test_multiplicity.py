import pytest
import torch
from helpers.forests import random_forest

from pl_grouprl.packing import SharedPrefixLayout


def test_by_hand():
    # A prompt of 2 with rollouts of 1, 0 and 2 tokens, and a root of 1 alone.
    layout = SharedPrefixLayout([2, 1, 0, 2, 1], [None, 0, 0, 0, None])
    assert layout.multiplicity.tolist() == [3, 3, 1, 1, 1, 1]


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", range(5))
def test_counts_the_sequences_that_contain_a_token(seed, depth):
    layout = SharedPrefixLayout(*random_forest(seed, depth))
    counts = torch.zeros(layout.num_tokens, dtype=torch.long)
    for leaf in layout.leaves:
        counts[layout.path(leaf)] += 1
    assert torch.equal(layout.multiplicity, counts)
    assert int(layout.multiplicity.sum()) == sum(layout.repeated_lengths)
