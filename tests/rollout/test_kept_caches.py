import copy
import gc
import threading
from contextlib import suppress

import pytest
import torch
from helpers.continued import counted_tokens, play
from helpers.rollouts import PROMPTS, assert_same
from helpers.sampling_oracle import FAMILIES, tiny_decoder
from transformers.cache_utils import DynamicLayer

from pl_grouprl.rollout import HFRolloutEngine
from pl_grouprl.rollout.hf import engine as hf_engine
from pl_grouprl.rollout.hf.kept import EncodedPrompt, KeptCaches, KeptSequence
from pl_grouprl.rollout.hf.prefill import MAX_REPEATED, plan_continuing
from pl_grouprl.types import Prompt, SamplingConfig
from pl_grouprl.utilities.internals import cache_argument

LONG = [1 + place % 23 for place in range(100)]
SAMPLING = {
    "ends": {"stop_token_ids": (4, 9)},
    "greedy": {"temperature": 0.0, "stop_token_ids": (4, 9)},
    "strings": {"stop": ("e", "bc"), "temperature": 1.3, "top_p": 0.9},
}


def check(engine, prompts, sampling, *, atol=1e-5, **options):
    """Compare episodes whose caches are kept with those that are encoded from the start; returns the rollouts."""
    apart, expected = play(engine, prompts, sampling, keep=False, **options)
    kept, turns = play(engine, prompts, sampling, keep=True, **options)
    assert apart == kept
    for left, right in zip(expected, turns, strict=True):
        assert_same(left, right, atol)
    return [rollout for turn in turns for group in turn for rollout in group]


@pytest.mark.parametrize(("family", "max_sequences"), [("qwen3", None), ("gpt2", 4), ("qwen2_window", 4)])
def test_continuing_equals_encoding_from_the_start(make_model, family, max_sequences):
    engine = HFRolloutEngine(make_model(family), max_sequences=max_sequences)
    sampling = SamplingConfig(max_new_tokens=6, stop_token_ids=(4, 9))
    rollouts = check(engine, PROMPTS, sampling, new_tokens=lambda numbers: numbers.choice([1, 2, 3, 30]))
    assert {rollout.finish_reason for rollout in rollouts} == {"stop", "length"}


@pytest.mark.parametrize("kind", SAMPLING)
def test_every_way_to_sample(qwen3, letters, kind):
    engine = HFRolloutEngine(qwen3, letters())
    rollouts = check(engine, [*PROMPTS, LONG], SamplingConfig(max_new_tokens=6, **SAMPLING[kind]))
    assert {rollout.finish_reason for rollout in rollouts} == {"stop", "length"}


def test_results_of_very_different_lengths(make_model):
    engine = HFRolloutEngine(make_model("qwen2_window", max_position_embeddings=1024), max_prefill_tokens=500)
    sampling = SamplingConfig(max_new_tokens=4)
    lengths = [1, 2, 5, 90, 100, 200]
    check(engine, [LONG, [3], LONG[:40]], sampling, new_tokens=lambda numbers: numbers.choice(lengths))


@pytest.mark.parametrize(("family", "max_sequences"), [("llama", None), ("gpt2", 5), ("qwen2_window", 5)])
def test_continuing_shared_prompts(make_model, monkeypatch, family, max_sequences):
    shared, shares_prompts = [], hf_engine.shares_prompts
    monkeypatch.setattr(hf_engine, "shares_prompts", lambda *args: shared.append(shares_prompts(*args)) or shared[-1])
    model = make_model(family, **{"n_positions" if family == "gpt2" else "max_position_embeddings": 1024})
    sampling = SamplingConfig(max_new_tokens=6, stop_token_ids=(4, 9))
    options = {"num_generations": 6, "turns": 3, "new_tokens": lambda numbers: numbers.choice([1, 2, 20])}
    check(HFRolloutEngine(model, max_sequences=max_sequences), [4 * LONG, 3 * LONG], sampling, **options)
    assert shared[-1]
    assert sum(shared) > len(shared) / 2


@pytest.mark.slow
@pytest.mark.parametrize("max_sequences", [None, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_families(family, max_sequences):
    engine = HFRolloutEngine(tiny_decoder(family, max_position_embeddings=512), max_sequences=max_sequences)
    sampling = SamplingConfig(max_new_tokens=6, stop_token_ids=(0, 6, 10))
    prompts = [LONG[:11], LONG[20:23], LONG[3:11], [7]]
    for lengths in ([3], [1, 2, 20]):
        check(engine, prompts, sampling, new_tokens=lambda numbers: numbers.choice(lengths), atol=1e-4)  # noqa: B023
    check(engine, [LONG[:60], LONG[2:60]], sampling, num_generations=8, atol=1e-4)


@pytest.mark.parametrize("prompts", [[LONG[:30], LONG[1:20]], [4 * LONG, 3 * LONG]], ids=["copied", "shared"])
@pytest.mark.parametrize("family", ["llama", "qwen2_window"])
def test_every_token_of_an_episode_runs_once(make_model, family, prompts):
    model = make_model(family, max_position_embeddings=1024)
    engine = HFRolloutEngine(model)
    sampling = SamplingConfig(max_new_tokens=5)
    play(engine, prompts, sampling, turns=2, keep=True)  # checks the model
    for turns in (2, 6):
        with counted_tokens(model) as counts:
            episodes, groups = play_simply(engine, prompts, sampling, turns)
        own = sum(len(episode) for episode in episodes) - 4 * sum(map(len, prompts))
        assert sum(counts) == sum(map(len, prompts)) + own - len(episodes)  # the last sampled token does not run
        assert len(groups) == turns


def play_simply(engine, prompts, sampling, turns):
    """Four episodes of each prompt, all of which go on."""
    with engine.keep_caches():
        groups = engine.generate(prompts, sampling, num_generations=4, seed=1)
        played = [groups]
        episodes = [[*prompt, *own.token_ids] for prompt, group in zip(prompts, groups, strict=True) for own in group]
        for turn in range(1, turns):
            episodes = [[*own, turn, 2, 3] for own in episodes]
            groups = engine.generate(episodes, sampling, num_generations=1, seed=1 + turn)
            played.append(groups)
            episodes = [[*own, *group[0].token_ids] for own, group in zip(episodes, groups, strict=True)]
    return episodes, played


@pytest.mark.parametrize("max_sequences", [None, 6])
def test_a_shared_prompt_is_stored_once(make_model, max_sequences):
    engine = HFRolloutEngine(make_model("gpt2", n_positions=512), max_sequences=max_sequences)
    sampling, prompts = SamplingConfig(max_new_tokens=5), [4 * LONG, 3 * LONG]
    play(engine, prompts, sampling, turns=2, keep=True)  # checks the model
    with engine.keep_caches():
        groups = engine.generate(prompts, sampling, num_generations=9, seed=1)
        for turn in range(3):
            kept = [one for one in gc.get_objects() if isinstance(one, KeptSequence)]
            assert [layer.keys.shape[2] for one in kept for layer in one.layers] == [4 + 8 * turn] * 18 * 2
            shared = {one.prompt for one in kept}
            assert len(shared) == 2
            addresses = {keys.untyped_storage().data_ptr() for one in shared for keys, _ in one.states}
            assert len(addresses) <= 2 * (1 if max_sequences is None else 2)  # packed in each layer
            assert len([one for one in gc.get_objects() if isinstance(one, EncodedPrompt)]) == 2
            sampled = [(own, one) for own, group in zip(prompts, groups, strict=True) for one in group]
            prompts = [[*own, *one.token_ids, 1, 2, 3] for own, one in sampled]
            del kept, shared
            groups = engine.generate(prompts, sampling, num_generations=1, seed=1)


def test_few_tokens_run_twice_where_results_differ_in_length(make_model):
    model = make_model("qwen3", max_position_embeddings=1024)
    engine, sampling = HFRolloutEngine(model), SamplingConfig(max_new_tokens=4)
    options = {"new_tokens": lambda numbers: numbers.randrange(1, 60), "turns": 5}
    play(engine, [LONG, LONG[:50]], sampling, keep=True, **options)
    with counted_tokens(model) as counts:
        _, turns = play(engine, [LONG, LONG[:50]], sampling, keep=True, **options)
    with counted_tokens(model) as from_start:
        play(engine, [LONG, LONG[:50]], sampling, keep=False, **options)
    sequences = sum(len(turn) for turn in turns[1:])
    sampled = sum(len(rollout.token_ids) for turn in turns for group in turn for rollout in group)
    assert sum(counts) <= 150 + 3 + sampled + (60 + MAX_REPEATED) * sequences
    assert sum(counts) < sum(from_start) / 2


def layer(tokens):
    own = DynamicLayer()
    own.update(torch.zeros(1, 1, tokens, 2), torch.zeros(1, 1, tokens, 2))
    return own


def sequence(tokens):
    return KeptSequence(tokens, [layer(tokens)])


def test_the_longest_prefix_is_found():
    kept = KeptCaches()
    for tokens in ([1], [1, 2], [1, 2, 3, 4], [1, 2, 300], [7, 8], [1, 2, 3, 4]):
        kept.add(tokens, sequence(len(tokens)))
    prompts = [[1, 2, 3, 5], [1, 2, 3, 4, 5], [1, 2, 3, 4], [1], [1, 2, 300, 4, 4], [7, 9], [1, 2, 3, 5], [258, 3]]
    found = kept.claim([Prompt(prompt) for prompt in prompts])
    assert [own and own.num_tokens for own in found] == [2, 4, 3, None, 3, None, 2, None]
    assert kept.claim([Prompt([1, 2, 3])]) == [None]  # all were handed out or forgotten


def test_plan_groups_about_as_many_new_tokens():
    def plan(pairs, budget=1000, **options):
        lengths = [cached + new for cached, new in pairs]
        kept = [sequence(cached) for cached, _ in pairs]
        return [list(batch) for batch in plan_continuing(lengths, kept, budget, **options)]

    pairs = [(9, 1), (60, 1 + MAX_REPEATED), (60, 2 + MAX_REPEATED), (60, 200), (80, 220), (60, 230)]
    assert plan([]) == []
    assert plan(pairs) == [[0], [1, 2], [3, 4], [5]]  # the first has only 10 tokens
    assert plan([(1 + MAX_REPEATED, 1), *pairs[1:2]]) == [[0, 1]]
    assert plan([(MAX_REPEATED, 1), *pairs[1:2]]) == [[0], [1]]  # one token has to stay
    assert plan([(20, 1), *pairs[2:3]]) == [[0], [1]]
    assert plan(pairs[3:5], budget=439) == [[0], [1]]
    assert plan([(5, 3), (5, 3), (6, 3)], padding=False) == [[0, 1], [2]]


def held():
    return [one for one in gc.get_objects() if isinstance(one, KeptSequence | DynamicLayer)]


def test_caches_are_freed(make_model):
    model, sampling = make_model("qwen3", max_position_embeddings=512), SamplingConfig(max_new_tokens=12)
    engine = HFRolloutEngine(model)
    play(engine, PROMPTS, sampling, keep=True)
    gc.collect()
    gc.disable()
    try:
        before = len(held())
        with engine.keep_caches():
            groups = engine.generate(PROMPTS, sampling, num_generations=4, seed=1)
            assert len(held()) == before + 3 * 20  # a sequence and its two layers
            continued = [[*PROMPTS[0], *own.token_ids, 1] for own in groups[0]]
            engine.generate(continued[:2], sampling, num_generations=1, seed=1)
            assert len(held()) == before + 3 * 2
        assert len(held()) == before
        play(engine, [2 * LONG], sampling, num_generations=9, turns=3, keep=True)
        assert len(held()) == before
        fail_inside(engine)
        play(engine, PROMPTS, sampling, keep=False)
        assert len(held()) == before
    finally:
        gc.enable()


def fail_inside(engine):
    with suppress(ValueError), engine.keep_caches():
        engine.generate(PROMPTS, SamplingConfig(max_new_tokens=3), num_generations=1, seed=1)
        engine.generate([[]], SamplingConfig(), num_generations=1, seed=1)


def test_copies_of_the_engine_keep_their_own(make_model):
    model = make_model("qwen3")
    engine, sampling = HFRolloutEngine(model), SamplingConfig(max_new_tokens=5)
    (ours, _), (theirs, _) = (play(engine, prompts, sampling, keep=False) for prompts in (PROMPTS, [LONG]))
    with engine.keep_caches():
        twin = copy.copy(engine)
        twin.bind(copy.deepcopy(model))
        groups = engine.generate(PROMPTS, sampling, num_generations=1, seed=0)
        found = []
        thread = threading.Thread(target=lambda: found.append(play(twin, [LONG], sampling, keep=True)))
        thread.start()
        thread.join()
        assert [episodes for episodes, _ in found] == [theirs]
        with counted_tokens(model) as counts:  # the copy has not taken this one's
            continued = [[*PROMPTS[0], *groups[0][0].token_ids, 1, 2]]
            engine.generate(continued, sampling, num_generations=1, seed=0)
        assert counts[0] == 3
    assert play(engine, PROMPTS, sampling, keep=True)[0] == ours


def test_a_model_that_continues_caches_inexactly_is_encoded_from_the_start(make_model, caplog):
    model = make_model("llama")
    attention = model.model.layers[0].self_attn
    forward = attention.forward

    def forget(hidden_states, **kwargs):
        cache = kwargs.get(cache_argument(type(attention).forward))
        if hidden_states.shape[1] > 1 and cache is not None and cache.get_seq_length(1):
            hidden_states = 1.05 * hidden_states + 0.05
        return forward(hidden_states, **kwargs)

    attention.forward = forget
    engine, sampling = HFRolloutEngine(model), SamplingConfig(max_new_tokens=4)
    with caplog.at_level("INFO"):
        check(engine, PROMPTS, sampling)
        check(engine, PROMPTS, sampling)
    assert caplog.text.count("every turn of an episode from the start: log-probabilities of LlamaForCausalLM") == 1
    with counted_tokens(model) as counts, engine.keep_caches():
        engine.generate([LONG], SamplingConfig(max_new_tokens=1), num_generations=1, seed=0)
        engine.generate([[*LONG, *LONG[:5]]], SamplingConfig(max_new_tokens=1), num_generations=1, seed=0)
    assert counts == [100, 105]


def test_another_model_does_not_continue_the_caches_of_the_last(make_model):
    first, second = make_model("qwen3"), make_model("llama")
    engine, sampling = HFRolloutEngine(first), SamplingConfig(max_new_tokens=1)
    with engine.keep_caches():
        engine.bind(second)
        ((rollout,),) = engine.generate([LONG], sampling, num_generations=1, seed=0)  # checks the model
        engine.bind(second)
        prompt = [*LONG, *rollout.token_ids, 1, 2]
        for model, run in [(second, 3), (first, 103)]:
            engine.bind(model)
            with counted_tokens(model) as counts:
                engine.generate([prompt], sampling, num_generations=1, seed=0)
            assert counts[-1] == run
            prompt = LONG + prompt[-3:]
