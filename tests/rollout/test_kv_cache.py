import pytest
import torch

from pl_grouprl.rollout.hf.cache import GrowingLayer, drop_rows, gather_cache


def numbered(rows, length, base):
    """States [rows, 2, length, 3] whose entries name row and position."""
    states = base + 100.0 * torch.arange(rows)[:, None] + torch.arange(length)[None, :]
    return states[:, None, :, None].expand(rows, 2, length, 3).clone()


def cache_of(layer_class, *states, **kwargs):
    from transformers.cache_utils import Cache

    layers = []
    for keys in states:
        layer = layer_class(**kwargs)
        layer.update(keys, -keys)
        layers.append(layer)
    return Cache(layers=layers)


def test_layer_grows_like_transformers_dynamic_layer():
    from transformers.cache_utils import DynamicLayer

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
    from transformers.cache_utils import DynamicLayer

    short, long = cache_of(DynamicLayer, numbered(2, 3, 1)), cache_of(DynamicLayer, numbered(2, 5, 5000))
    parts = [(short, torch.tensor([0, 0, 1])), (long, torch.tensor([1]))]
    layer = gather_cache(parts, width=5, limit=7).layers[0]
    zero = [0.0, 0.0]
    assert layer.keys[:, 0, :, 0].tolist() == [
        [*zero, 1, 2, 3],
        [*zero, 1, 2, 3],
        [*zero, 101, 102, 103],
        [5100, 5101, 5102, 5103, 5104],
    ]
    assert torch.equal(layer.values, -layer.keys)


def test_gathering_sliding_layers_keeps_the_window():
    from transformers.cache_utils import DynamicSlidingWindowLayer

    short = cache_of(DynamicSlidingWindowLayer, numbered(1, 3, 1), sliding_window=5)
    long = cache_of(DynamicSlidingWindowLayer, numbered(1, 9, 5000), sliding_window=5)
    cache = gather_cache([(short, torch.tensor([0])), (long, torch.tensor([0]))], width=9, limit=12)
    layer = cache.layers[0]
    assert layer.keys[:, 0, :, 0].tolist() == [[0, 1, 2, 3], [5005, 5006, 5007, 5008]]
    assert layer.get_seq_length() == 9
    assert short.layers[0].get_seq_length() == 3


@pytest.mark.parametrize("finished", [[0], [3], [0, 1, 2], [1, 3], [0, 2, 4], [4]])
def test_dropping_rows(finished):
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    states = numbered(5, 4, 1)
    cache = cache_of(DynamicLayer, states)
    cache.layers += cache_of(DynamicSlidingWindowLayer, states, sliding_window=8).layers
    cache = gather_cache([(cache, torch.arange(5))], width=4, limit=9)
    mask = torch.zeros(5, dtype=torch.bool)
    mask[finished] = True
    order = drop_rows(cache, mask)
    assert sorted(order.tolist()) == [row for row in range(5) if row not in finished]
    new = numbered(len(order), 1, 7)
    for layer in cache.layers:
        keys, values = layer.update(new, -new)
        assert torch.equal(keys[:, :, :4], states[order])
        assert torch.equal(keys[:, :, 4:], new)
        assert torch.equal(values, -keys)


def test_public_row_operations():
    states = numbered(3, 4, 1)
    layer = GrowingLayer(states.clone(), -states, length=4, limit=8)
    layer.batch_repeat_interleave(2)
    assert torch.equal(layer.keys, states[[0, 0, 1, 1, 2, 2]])
    layer.batch_select_indices(torch.tensor([5, 0]))
    layer.update(states[:2, :, :1], states[:2, :, :1])
    assert torch.equal(layer.keys[:, :, :4], states[[2, 0]])


@pytest.mark.parametrize("finished", [[0], [2], [0, 1]])
def test_states_are_copied_and_rows_leave(finished):
    from transformers.cache_utils import Cache, LinearAttentionAndFullAttentionLayer, LinearAttentionLayer

    keys, recurrent = numbered(2, 4, 1), torch.arange(2.0)[:, None, None].expand(2, 3, 5)
    layers = [LinearAttentionLayer(), LinearAttentionAndFullAttentionLayer(number_of_states=2)]
    for layer in layers:
        for state in range(layer.number_of_states):
            layer.update_conv_state(keys[:, 0, :, :].mT + 10 * state, state)
        layer.update_recurrent_state(recurrent)
    layers[1].update(keys, -keys)
    cache = gather_cache([(Cache(layers=layers), torch.tensor([1, 0, 1]))], width=4, limit=8)
    before = [layer.conv_states[0].clone() for layer in layers]
    mask = torch.zeros(3, dtype=torch.bool)
    mask[finished] = True
    rows = torch.tensor([1, 0, 1])[drop_rows(cache, mask)]
    for layer, source, states in zip(cache.layers, layers, before, strict=True):
        for state in range(source.number_of_states):
            assert torch.equal(layer.conv_states[state], source.conv_states[state][rows])
        assert torch.equal(layer.recurrent_states[0], recurrent[rows])
        layer.conv_states[0].zero_()  # decoding writes into its own
        assert torch.equal(source.conv_states[0], states)
    assert torch.equal(cache.layers[1].keys, keys[rows])


def test_layers_with_another_state_are_refused():
    from transformers.cache_utils import Cache, DynamicIndexedLayer, LinearAttentionLayer

    class Compressing(DynamicIndexedLayer):
        def crop(self, tokens_to_remove):
            raise NotImplementedError

    compressing = cache_of(Compressing, numbered(1, 4, 1)).layers[0]
    for layer, reason in (
        (compressing, "layer 0 of the model caches its state as Compressing"),
        (LinearAttentionLayer(), "layer 0 of the model leaves its LinearAttentionLayer empty"),
    ):
        with pytest.raises(ValueError, match=reason):
            gather_cache([(Cache(layers=[layer]), torch.tensor([0]))], width=4, limit=8)
