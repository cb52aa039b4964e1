import gc
import itertools

import pytest
import torch
from helpers.sampling_oracle import assert_sampled, tiny_decoder
from helpers.static_steps import Watch, dense_runs
from torch.utils._pytree import tree_leaves

from pl_grouprl.attention.masks import MaskRule
from pl_grouprl.rollout import HFRolloutEngine
from pl_grouprl.rollout.engine import StopStrings
from pl_grouprl.rollout.hf import attention, decode, engine
from pl_grouprl.rollout.hf.attention import Columns, PromptLayer, Runs, StaticLayer, attend_runs, sharing_prompts
from pl_grouprl.rollout.hf.copied_batch import CopiedBatch
from pl_grouprl.rollout.hf.decode import DecodeRow
from pl_grouprl.rollout.hf.kept import EncodedPrompt
from pl_grouprl.rollout.hf.prefill import Prefix
from pl_grouprl.rollout.hf.static_batch import StaticBatch, shares_prompts
from pl_grouprl.types import SamplingConfig

CPU = torch.device("cpu")


def random(*shape, generator):
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("per_row", [1, 3])
@pytest.mark.parametrize(
    ("rows", "starts", "used", "columns"),
    [
        ([2, 0, 3, 1], [0, 4, 9, 10], [4, 5, 1, 7], None),  # packed prompts, one without rows
        ([1, 1, 1], [0, 10, 20], [6, 6, 6], 10),  # buffers read alike
        ([1, 1, 1], [2, 13, 20], [8, 3, 1], 10),  # of any length
        ([1, 1], [3, 12], [5, 5], 10),  # the same number, in other columns
    ],
)
def test_runs_attend_to_their_keys(rows, starts, used, columns, per_row):
    generator = torch.Generator().manual_seed(0)
    total = (columns or 0) * len(rows) or starts[-1] + used[-1]
    cu_k, used_k = (torch.tensor(values, dtype=torch.int32) for values in ([*starts, total], used))
    runs = Runs(rows, cu_k, used_k, max(used), columns)
    query, keys, values = (random(n, 2, 8, generator=generator) for n in (sum(rows) * per_row, total, total))
    expected = [
        dense(query[number], keys[start : start + count], values[start : start + count])
        for run, (start, count) in enumerate(zip(starts, used, strict=True))
        for number in range(sum(rows[:run]) * per_row, sum(rows[: run + 1]) * per_row)
    ]
    for found in (attend_runs(query, keys, values, runs, 0.3), dense_runs(query, keys, values, runs, 0.3)):
        torch.testing.assert_close(found[0], torch.stack([out for out, _ in expected]))
        torch.testing.assert_close(found[1], torch.stack([lse for _, lse in expected], dim=1))


def dense(query_KD, keys_SKD, values_SKD, sinks_K=None):
    scores = torch.einsum("kd,skd->ks", query_KD, keys_SKD) * 0.3
    if sinks_K is not None:
        scores = torch.cat([scores, sinks_K[:, None]], dim=-1)
    weights = scores.softmax(dim=-1)[:, : len(keys_SKD)]
    return torch.einsum("ks,skd->kd", weights, values_SKD), scores.logsumexp(dim=-1)


def encoded(lengths, generator, rule=None):
    """Prompts of these lengths, encoded together, in one layer of 2 key heads of size 8."""
    layer = PromptLayer() if rule is None else attention.PromptWindow(rule.window or rule.chunk, rule.chunk is not None)
    layer.update(*(random(len(lengths), 2, max(lengths), 8, generator=generator) for _ in range(2)))
    layer.readers.append(True)
    logits = torch.zeros(len(lengths), 5, dtype=torch.float64)
    return Prefix(attention.Cache(layers=[layer]), logits, lengths, lengths, [EncodedPrompt(n) for n in lengths])


@pytest.mark.parametrize("rule", [None, MaskRule(window=4), MaskRule(chunk=4)], ids=str)
@pytest.mark.parametrize("with_sinks", [False, True])
def test_a_layer_attends_to_prompt_and_own_tokens(rule, with_sinks):
    generator = torch.Generator().manual_seed(0)
    first, second = encoded([3, 5], generator, rule), encoded([7], generator, rule)
    places = [(first, 0), (second, 0), (first, 1), (first, 0), (second, 0)]
    rows = [DecodeRow(*place, (0, number), 9) for number, place in enumerate(places)]
    batch = StaticBatch(rows, SamplingConfig(), end_ids=[1], stop=StopStrings(None, ()), seed=0)
    assert batch.numbers == [0, 3, 1, 4, 2]
    (layer,) = batch.cache.layers
    whole = []
    for number in batch.numbers:
        prefix, place = places[number]
        (held,) = prefix.cache.layers
        count = min(prefix.lengths[place], held.keys.shape[2])
        whole.append([states[place, :, -count:].transpose(0, 1) for states in (held.keys, held.values)])
    lengths = [rows[number].length for number in batch.numbers]
    sinks = random(4, generator=generator) if with_sinks else None
    numbers = batch.numbers
    for leaving in ([], [1, 3], [], [0], [1]):  # the first prompt keeps a row; later the second is gone
        if leaving:
            batch._remove([row in leaving for row in range(len(whole))])
            left = [number for row, number in enumerate(numbers) if row not in leaving]
            assert sorted(left) == sorted(batch.numbers)
            order = [numbers.index(number) for number in batch.numbers]
            whole, lengths = [whole[row] for row in order], [lengths[row] for row in order]
        numbers = batch.numbers
        for columns in batch._columns.values():
            columns.count_step()
            columns.point(batch.length_B)
        query, *new = (random(len(whole), heads, 1, 8, generator=generator) for heads in (4, 2, 2))
        layer.update(*new)
        for row, own in enumerate(whole):
            for states, more in enumerate(new):
                own[states] = torch.cat([own[states], more[row].transpose(0, 1)])
            lengths[row] += 1
        expected = []
        for row, (keys, values) in enumerate(whole):
            seen = lengths[row]
            if rule is not None:
                seen = min(seen, rule.window) if rule.window else (lengths[row] - 1) % rule.chunk + 1
            heads = [
                dense(head, keys[-seen:], values[-seen:], None if sinks is None else sinks.view(2, 2)[:, number])[0]
                for number, head in enumerate(query[row, :, 0].view(2, 2, 8).unbind(1))
            ]
            expected.append(torch.stack(heads, dim=1).flatten(0, 1))
        torch.testing.assert_close(layer.attend(query, 0.3, sinks)[:, 0], torch.stack(expected))
        batch.length_B += 1
    assert len(whole) == 1


def test_keys_that_are_read_otherwise_are_an_error():
    prefix = encoded([3], torch.Generator().manual_seed(0))
    rows = [DecodeRow(prefix, 0, (0, number), 9) for number in range(2)]
    batch = StaticBatch(rows, SamplingConfig(), end_ids=[], stop=StopStrings(None, ()), seed=0)
    new = torch.zeros(2, 2, 1, 8, dtype=torch.float64)
    batch.cache.layers[0].update(new, new)
    with pytest.raises(RuntimeError, match="differently from when it encoded the prompts"):
        batch.cache.layers[0].update(new, new)


def test_prompts_are_shared_where_that_saves_copies():
    prefix = encoded([100, 60], torch.Generator().manual_seed(0))

    def shares(places):
        return shares_prompts([DecodeRow(prefix, place, (0, 0), 1) for place in places])

    assert not shares([0, 0, 0, 1])  # 200 tokens for two prompts
    assert shares([0, 0, 0, 0, 0, 1, 1, 1])  # 520
    assert not shares([0, 1])
    prefix.cache.layers[0].readers.append(False)
    assert not shares([0] * 9)


SHARED = {
    **dict.fromkeys(["gpt2", "opt", "gemma3_text", "gpt_oss", "lfm2", "mistral", "llama4_text"], True),
    **dict.fromkeys(["qwen3_5_text", "qwen3_next", "stablelm"], True),  # transformers' flag does not say so
    "gemma2": False,  # its scores are capped
    "deepseek_v3": False,  # its values have a head size of their own
    "falcon_h1": False,  # both kinds of state in one layer
}
"""Which families share prompts."""


EAGER = ("gpt_oss", "gemma2", "mistral", "lfm2")  # the first two run eager attention only


@pytest.mark.parametrize(
    ("family", "implementation"),
    [*((family, "sdpa") for family in SHARED if family not in EAGER[:2]), *((family, "eager") for family in EAGER)],
)
def test_sampling_after_shared_prompts_equals_a_full_forward(family, implementation, monkeypatch):
    model = tiny_decoder(family, attn_implementation=implementation)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(1, 24, (length,), generator=generator).tolist() for length in (41, 44, 41)]
    sampling = SamplingConfig(max_new_tokens=9, temperature=2.0, repetition_penalty=1.3, stop_token_ids=(0, 6, 10, 14))
    sampler = HFRolloutEngine(model)
    sampler.generate([[1]], SamplingConfig(max_new_tokens=1), num_generations=1, seed=0)  # has its first look
    kinds = []
    for kind in (StaticBatch, CopiedBatch):
        monkeypatch.setattr(
            engine, kind.__name__, lambda *args, kind=kind, **kwargs: kinds.append(kind) or kind(*args, **kwargs)
        )
    groups = sampler.generate(prompts, sampling, num_generations=8, seed=3)
    assert set(kinds) == {StaticBatch if SHARED[family] else CopiedBatch}
    assert len({len(rollout.token_ids) for group in groups for rollout in group}) > 1
    for index, (prompt, group) in enumerate(zip(prompts, groups, strict=True)):
        for generation, rollout in enumerate(group):
            assert_sampled(model, prompt, rollout, sampling, name=(index, generation), seed=3)


def addresses(batch, model):
    """Where all tensors are that steps share."""
    held = {f"batch.{name}": value for name, value in vars(batch).items()}
    for number, columns in enumerate(batch._columns.values()):
        held |= {f"columns.{number}.{name}": value for name, value in vars(columns).items()}
        held |= {f"runs.{number}.{name}": value for name, value in vars(columns.runs).items()}
    for number, layer in enumerate(batch.cache.layers):
        held |= {f"layer.{number}.{name}": value for name, value in vars(layer).items()}
    held |= dict(itertools.chain(model.named_parameters(), model.named_buffers()))
    return {
        name: [one.data_ptr() for one in tree_leaves(value) if isinstance(one, torch.Tensor)]
        for name, value in held.items()
    }


@pytest.mark.parametrize(
    ("family", "temperature"),
    [("llama", 0.0), ("qwen3", 1.0), ("gpt2", 0.0), ("gemma3_text", 1.0), ("lfm2", 0.0), ("mistral", 1.0)],
)
def test_a_step_asks_nothing_and_moves_nothing(family, temperature, monkeypatch):
    monkeypatch.setitem(decode.STEPS_PER_CHECK, "cpu", 8)
    model = tiny_decoder(family)
    prompts = [[1 + place % 20 for place in range(length)] for length in (60, 50)]
    filters = {"top_k": 9, "top_p": 0.9, "repetition_penalty": 1.2}
    sampling = SamplingConfig(max_new_tokens=24, temperature=temperature, stop_token_ids=(3, 4), **filters)
    sampler = HFRolloutEngine(model)
    expected = sampler.generate(prompts, sampling, num_generations=6, seed=0)
    monkeypatch.setattr(attention, "attend_runs", dense_runs)
    step, seen = StaticBatch._step, {}

    def watched(batch, logits):
        with Watch() as watch:
            step(batch, logits)
        seen.setdefault(len(batch.numbers), []).append((watch.trace, addresses(batch, model)))

    monkeypatch.setattr(StaticBatch, "_step", watched)
    found = sampler.generate(prompts, sampling, num_generations=6, seed=0)
    assert [[one.token_ids for one in group] for group in found] == [
        [one.token_ids for one in group] for group in expected
    ]
    assert sum(map(len, seen.values())) > 6
    for _, *later in seen.values():  # the first step after rows left prepares the next ones
        assert all(one == later[0] for one in later)


@pytest.mark.parametrize(
    "plant",
    [
        lambda x: x.sum().item(),
        lambda x: torch.isin(x, x),
        lambda x: x[x > 0],
        torch.nonzero,
        lambda x: bool(x.sum() > 0),
    ],
)
def test_the_watch_finds_operators_that_ask(plant):
    with pytest.raises(AssertionError), Watch():
        plant(torch.ones(3))


def test_attention_implementation_is_restored(make_model):
    for model in (make_model("qwen3"), make_model("qwen3", attn_implementation="eager")):
        before = model.config._attn_implementation
        with sharing_prompts(model):
            assert model.config._attn_implementation == f"rollouts_over_{before}"
        assert model.config._attn_implementation == before


def test_caches_are_freed_without_garbage_collection():
    model = tiny_decoder("qwen3")
    sampler = HFRolloutEngine(model, max_sequences=4)

    def sample():
        prompts = [[1 + (place + first) % 20 for place in range(100)] for first in (0, 1)]  # long enough to be shared
        return sampler.generate(prompts, SamplingConfig(max_new_tokens=4), num_generations=4, seed=0)

    kinds = PromptLayer, StaticLayer, StaticBatch, Columns
    sample()  # the first look at the model
    gc.collect()
    gc.disable()
    try:
        sample()
        assert not [held for held in gc.get_objects() if isinstance(held, kinds)]
    finally:
        gc.enable()
