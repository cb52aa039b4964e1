import gc
from types import SimpleNamespace

import pytest
import torch
from helpers.sampling_oracle import assert_sampled, tiny_decoder
from transformers.cache_utils import Cache

from pl_grouprl.rollout import HFRolloutEngine
from pl_grouprl.rollout.hf import decode
from pl_grouprl.rollout.hf.cache import drop_rows, gather_cache, needs_padding_mask
from pl_grouprl.rollout.hf.prompt_attention import _masked_softmax, attend, attending_to_shared_prompts
from pl_grouprl.rollout.hf.shared_prompt import (
    ContinuedPromptsLayer,
    EncodedPrompt,
    PromptLayer,
    PromptRows,
    find_shared_prompts,
)
from pl_grouprl.types import SamplingConfig

CPU = torch.device("cpu")


def encoded(lengths, generator):
    """Prompts of these lengths in one batch, right-aligned: one layer with 2 key/value heads of 8."""
    layer = PromptLayer()
    shape = (len(lengths), 2, max(lengths), 8)
    layer.update(*(torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2)))
    layer.was_read(True)
    return SimpleNamespace(cache=Cache(layers=[layer]), lengths=lengths, shared=prompts_of(lengths))


def prompts_of(lengths):
    return [EncodedPrompt(length) for length in lengths]


def dense(query, keys, values, scale, sinks):
    """Softmax attention of one row: query [H, D], keys and values [K, S, D], sinks [H] or None."""
    repeats = len(query) // len(keys)
    scores = torch.einsum("hd,hsd->hs", query, keys.repeat_interleave(repeats, dim=0)) * scale
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None]], dim=-1)
    weights = scores.softmax(dim=-1)[:, : keys.shape[1]]
    return torch.einsum("hs,hsd->hd", weights, values.repeat_interleave(repeats, dim=0))


@pytest.mark.parametrize("with_sinks", [False, True])
def test_attention_equals_a_softmax_over_prompt_and_suffix(with_sinks):
    generator = torch.Generator().manual_seed(0)
    parts = [(encoded([3, 5], generator), [0, 0, 1]), (encoded([7], generator), [0, 0])]
    prompts = find_shared_prompts([(prefix.shared, prefix.lengths, rows) for prefix, rows in parts], CPU, 0)
    indexed = [(prefix.cache, torch.tensor(rows)) for prefix, rows in parts]
    cache = gather_cache(indexed, width=7, limit=20, prompts=prompts)
    (layer,) = cache.layers
    assert isinstance(layer, ContinuedPromptsLayer)
    assert not needs_padding_mask(cache)
    whole = [
        [states[row, :, states.shape[2] - prefix.lengths[row] :] for states in (held.keys, held.values)]
        for prefix, rows in parts
        for held in prefix.cache.layers
        for row in rows
    ]
    sinks = torch.randn(4, generator=generator, dtype=torch.float64) if with_sinks else None
    leaving = [[], [0, 3], [], [0], [1]]  # the third prompt is in front of the first, later the second is gone
    for step, finished in enumerate(leaving):
        if finished:
            mask = torch.zeros(len(whole), dtype=torch.bool)
            mask[finished] = True
            whole = [whole[row] for row in drop_rows(cache, mask).tolist()]
        query = torch.randn(len(whole), 4, 1, 8, generator=generator, dtype=torch.float64)
        new = [torch.randn(len(whole), 2, 1, 8, generator=generator, dtype=torch.float64) for _ in range(2)]
        layer.update(*new)
        assert layer.get_seq_length() == 7 + step + 1
        whole = [
            [torch.cat([states, own[row]], dim=1) for states, own in zip(held, new, strict=True)]
            for row, held in enumerate(whole)
        ]
        expected = torch.stack([dense(query[row, :, 0], *held, 0.3, sinks) for row, held in enumerate(whole)])
        torch.testing.assert_close(attend(query, layer, 0.3, sinks)[:, :, 0], expected)
    assert len(whole) == 1


@pytest.mark.parametrize("with_sinks", [False, True])
def test_attention_of_several_tokens_after_rows_of_different_lengths(with_sinks):
    generator = torch.Generator().manual_seed(0)
    first, second = (encoded([length], generator) for length in (5, 3))
    prompts = find_shared_prompts([(first.shared, [5], [0, 0]), (second.shared, [3], [0])], CPU, 0)
    parts = [(first.cache, torch.tensor([0, 0])), (second.cache, torch.tensor([0]))]
    cache = gather_cache(parts, width=5, limit=20, prompts=prompts)
    whole = [[held.keys[0], held.values[0]] for part, rows in parts for held in part.layers for _ in rows]
    sinks = torch.randn(4, generator=generator, dtype=torch.float64) if with_sinks else None
    for new, remaining in [(4, [2, 4, 1]), (3, [4, 6, 3]), (1, [1, 2, 3]), (1, None)]:
        query = torch.randn(3, 4, new, 8, generator=generator, dtype=torch.float64)
        own = [torch.randn(3, 2, new, 8, generator=generator, dtype=torch.float64) for _ in range(2)]
        (layer,) = cache.layers
        layer.update(*own)
        whole = [
            [torch.cat([states, more[row]], dim=1) for states, more in zip(held, own, strict=True)]
            for row, held in enumerate(whole)
        ]
        expected = [
            dense(query[row, :, token], *before(held, new - 1 - token), 0.3, sinks)
            for row, held in enumerate(whole)
            for token in range(new)
        ]
        attended = attend(query, layer, 0.3, sinks)
        torch.testing.assert_close(attended.transpose(1, 2).flatten(0, 1), torch.stack(expected))
        if remaining is not None:  # rows leave, some of their tokens are forgotten, and they are gathered again
            lengths = [own + count for own, count in zip((5, 5, 3), remaining, strict=True)]
            rows = [layer.row(row).clone().first(count) for row, count in enumerate(remaining)]
            whole = [[states[:, :length] for states in held] for held, length in zip(whole, lengths, strict=True)]
            names = [first.shared[0], first.shared[0], second.shared[0]]
            sequences = [([name], [length], [0]) for name, length in zip(names, lengths, strict=True)]
            parts = [(Cache(layers=[row]), torch.tensor([0])) for row in rows]
            cache = gather_cache(parts, max(lengths), 40, find_shared_prompts(sequences, CPU, 0))
            for row, own_layer in enumerate(gather_cache(parts, max(lengths), 40).layers[0].keys):  # copied
                torch.testing.assert_close(own_layer[:, -lengths[row] :], whole[row][0])


@pytest.mark.parametrize("new", [1, 3])
def test_masked_softmax_equals_the_kernel(new):
    generator = torch.Generator().manual_seed(0)
    query, keys, values = (torch.randn(3, 2, count, 8, generator=generator) for count in (4 * new, 9, 9))
    mask = PromptRows([0, 0, 1], CPU, [3, 5, 1]).mask(new, 9, torch.float32).repeat(1, 1, 4, 1)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    expected = kernel(query, keys, values, attn_mask=mask, scale=0.3)
    torch.testing.assert_close(_masked_softmax(query, keys, values, mask, 0.3), tuple(expected))


def before(held, count):
    """Keys and values without the last `count`."""
    return [states[:, : states.shape[1] - count] for states in held]


def test_keys_that_are_read_without_the_prompt_are_an_error():
    parts = [(encoded([3], torch.Generator().manual_seed(0)), [0, 0])]
    prompts = find_shared_prompts([(prefix.shared, prefix.lengths, rows) for prefix, rows in parts], CPU, 0)
    (layer,) = gather_cache([(parts[0][0].cache, torch.tensor([0, 0]))], 3, 9, prompts).layers
    new = torch.zeros(2, 2, 1, 8, dtype=torch.float64)
    layer.update(new, new)
    with pytest.raises(RuntimeError, match="differently from when it encoded the prompts"):
        layer.update(new, new)


def test_prompts_are_shared_where_that_saves_copies():
    def find(rows):
        return find_shared_prompts([(prompts, [100, 60], rows)], CPU)

    prompts = prompts_of([100, 60])
    assert find([0, 0, 0, 1]) is None  # 200 tokens for two prompts
    shared = find([0, 0, 0, 0, 0, 1, 1, 1])  # 520
    assert shared.lengths == [100, 60]
    assert shared.rows.counts == [5, 3]
    assert find([0, 1]) is None


FAMILIES = {
    "gpt2": {"ContinuedPromptsLayer"},
    "opt": {"ContinuedPromptsLayer"},
    "gemma3_text": {"ContinuedPromptsLayer", "DynamicSlidingWindowLayer"},
    "gpt_oss": {"ContinuedPromptsLayer", "DynamicSlidingWindowLayer"},
    "lfm2": {"ContinuedPromptsLayer", "LinearAttentionLayer"},
    "gemma2": {"GrowingLayer", "DynamicSlidingWindowLayer"},  # its scores are capped
    "deepseek_v3": {"GrowingLayer"},  # its values have a head size of their own
}
"""Which layers of a decode batch share prompts."""


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_sampling_after_shared_prompts_equals_a_full_forward(family, attention, monkeypatch):
    if family in ("gpt_oss", "gemma2") and attention == "sdpa":
        pytest.skip("runs eager attention only")
    kinds = set()

    def recorded(*args):
        cache = gather_cache(*args)
        kinds.update(type(layer).__name__ for layer in cache.layers)
        return cache

    model = tiny_decoder(family, attn_implementation=attention)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(1, 24, (length,), generator=generator).tolist() for length in (41, 44, 41)]
    sampling = SamplingConfig(max_new_tokens=9, temperature=2.0, stop_token_ids=(0, 6, 10, 14))
    engine = HFRolloutEngine(model)
    engine.generate([[1]], SamplingConfig(max_new_tokens=1), num_generations=1, seed=0)  # has its first look
    monkeypatch.setattr(decode, "gather_cache", recorded)
    groups = engine.generate(prompts, sampling, num_generations=8, seed=3)
    assert kinds == FAMILIES[family]
    assert len({len(rollout.token_ids) for group in groups for rollout in group}) > 1
    for index, (prompt, group) in enumerate(zip(prompts, groups, strict=True)):
        for generation, rollout in enumerate(group):
            assert_sampled(model, prompt, rollout, sampling, name=(index, generation), seed=3)


def test_attention_implementation_is_restored(make_model):
    for model in (make_model("qwen3"), make_model("qwen3", attn_implementation="eager")):
        before = model.config._attn_implementation
        with attending_to_shared_prompts(model):
            assert model.config._attn_implementation == f"rollouts_over_{before}"
        assert model.config._attn_implementation == before


def test_caches_are_freed_without_garbage_collection():
    model = tiny_decoder("qwen3")
    engine = HFRolloutEngine(model, max_sequences=4)

    def sample():
        prompts = [[1 + (place + first) % 20 for place in range(100)] for first in (0, 1)]  # long enough to be shared
        return engine.generate(prompts, SamplingConfig(max_new_tokens=4), num_generations=4, seed=0)

    kinds = PromptLayer, ContinuedPromptsLayer
    sample()  # the first look at the model
    gc.collect()
    gc.disable()
    try:
        sample()
        assert not [held for held in gc.get_objects() if isinstance(held, kinds)]
    finally:
        gc.enable()
