import pytest
import torch
from transformers.cache_utils import (
    Cache,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

from pl_grouprl.rollout.engine import StopStrings
from pl_grouprl.rollout.hf.copied_batch import CopiedBatch, GrowingLayer
from pl_grouprl.rollout.hf.decode import DecodeRow
from pl_grouprl.rollout.hf.prefill import Prefix
from pl_grouprl.types import SamplingConfig


def numbered(rows, length, base):
    """States [rows, 2, length, 3] whose entries name row and position."""
    states = base + 100.0 * torch.arange(rows)[:, None] + torch.arange(length)[None, :]
    return states[:, None, :, None].expand(rows, 2, length, 3).clone()


def cache_of(layer_class, *states, **kwargs):
    layers = []
    for keys in states:
        layer = layer_class(**kwargs)
        layer.update(keys, -keys)
        layers.append(layer)
    return Cache(layers=layers)


def batch_of(parts, steps):
    """A batch of the rows of caches whose prompts have these lengths."""
    rows = []
    for cache, length, places in parts:
        count = max(places) + 1
        prefix = Prefix(cache, torch.zeros(count, 5), [length] * count, [length] * count, [])
        rows += [DecodeRow(prefix, place, (0, place), steps) for place in places]
    return CopiedBatch(rows, SamplingConfig(), end_ids=[1], stop=StopStrings(None, ()), seed=0)


def drop(batch, finished):
    """Remove rows; returns the old index of each that remains."""
    batch._remove([row in finished for row in range(len(batch.numbers))])
    return torch.tensor(batch.numbers)


def test_layer_grows_like_transformers_dynamic_layer():
    reference, start = DynamicLayer(), numbered(3, 5, 1)
    reference.update(start, -start)
    layer = GrowingLayer(start.clone(), -start, length=5, limit=400)
    for step in range(200):
        new = numbered(3, 1 + step % 2, 1000.0 * step)
        expected, result = reference.update(new, -new), layer.update(new, -new)
        assert torch.equal(result[0], expected[0])
        assert torch.equal(result[1], expected[1])
        assert layer.get_seq_length() == reference.get_seq_length()
        assert layer.get_mask_sizes(1) == reference.get_mask_sizes(1)


def test_capacity_is_bounded_by_the_limit():
    assert GrowingLayer.capacity(10, 1000) == 138
    assert GrowingLayer.capacity(1000, 10_000) == 1500
    assert GrowingLayer.capacity(10, 20) == 20


def test_gathering_right_aligns_and_repeats():
    short, long = cache_of(DynamicLayer, numbered(2, 3, 1)), cache_of(DynamicLayer, numbered(2, 5, 5000))
    batch = batch_of([(short, 3, [0, 0, 1]), (long, 5, [1])], steps=2)
    layer = batch.cache.layers[0]
    zero = [0.0, 0.0]
    assert layer.keys[:, 0, :, 0].tolist() == [
        [*zero, 1, 2, 3],
        [*zero, 1, 2, 3],
        [*zero, 101, 102, 103],
        [5100, 5101, 5102, 5103, 5104],
    ]
    assert torch.equal(layer.values, -layer.keys)


def test_gathering_sliding_layers_keeps_the_window():
    short = cache_of(DynamicSlidingWindowLayer, numbered(1, 3, 1), sliding_window=5)
    long = cache_of(DynamicSlidingWindowLayer, numbered(1, 9, 5000), sliding_window=5)
    layer = batch_of([(short, 3, [0]), (long, 9, [0])], steps=3).cache.layers[0]
    assert layer.keys[:, 0, :, 0].tolist() == [[0, 1, 2, 3], [5005, 5006, 5007, 5008]]
    assert layer.get_seq_length() == 9
    assert short.layers[0].get_seq_length() == 3


@pytest.mark.parametrize("finished", [[0], [3], [0, 1, 2], [1, 3], [0, 2, 4], [4]])
def test_dropping_rows(finished):
    states = numbered(5, 4, 1)
    cache = cache_of(DynamicLayer, states)
    cache.layers += cache_of(DynamicSlidingWindowLayer, states, sliding_window=8).layers
    batch = batch_of([(cache, 4, range(5))], steps=5)
    order = drop(batch, finished)
    assert sorted(order.tolist()) == [row for row in range(5) if row not in finished]
    new = numbered(len(order), 1, 7)
    for layer in batch.cache.layers:
        keys, values = layer.update(new, -new)
        assert torch.equal(keys[:, :, :4], states[order])
        assert torch.equal(keys[:, :, 4:], new)
        assert torch.equal(values, -keys)


@pytest.mark.parametrize("finished", [[0], [2], [0, 1]])
def test_states_are_copied_and_rows_leave(finished):
    keys, recurrent = numbered(2, 4, 1), torch.arange(2.0)[:, None, None].expand(2, 3, 5)
    layers = [LinearAttentionLayer(), LinearAttentionAndFullAttentionLayer(number_of_states=2)]
    for layer in layers:
        for state in range(layer.number_of_states):
            layer.update_conv_state(keys[:, 0, :, :].mT + 10 * state, state)
        layer.update_recurrent_state(recurrent)
    layers[1].update(keys, -keys)
    batch = batch_of([(Cache(layers=layers), 4, [1, 0, 1])], steps=4)
    before = [layer.conv_states[0].clone() for layer in layers]
    rows = torch.tensor([1, 0, 1])[drop(batch, finished)]
    for layer, source, states in zip(batch.cache.layers, layers, before, strict=True):
        for state in range(source.number_of_states):
            assert torch.equal(layer.conv_states[state], source.conv_states[state][rows])
        assert torch.equal(layer.recurrent_states[0], recurrent[rows])
        layer.conv_states[0].zero_()  # decoding writes into its own
        assert torch.equal(source.conv_states[0], states)
    assert torch.equal(batch.cache.layers[1].keys, keys[rows])


def test_layers_with_another_state_are_refused():
    class Compressing(DynamicIndexedLayer):
        def crop(self, tokens_to_remove):
            raise NotImplementedError

    compressing = cache_of(Compressing, numbered(1, 4, 1)).layers[0]
    for layer, reason in (
        (compressing, "layer 0 of the model caches its state as Compressing"),
        (LinearAttentionLayer(), "layer 0 of the model leaves its LinearAttentionLayer empty"),
    ):
        with pytest.raises(ValueError, match=reason):
            batch_of([(Cache(layers=[layer]), 4, [0])], steps=4)
