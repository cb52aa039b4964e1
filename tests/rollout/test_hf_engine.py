import itertools
import math
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pl_grouprl.rollout import HFRolloutEngine, RolloutEngine
from pl_grouprl.types import SamplingConfig

PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8], [9, 10], [11, 12, 13, 14, 15, 16, 17, 18, 19], [3], [20, 1, 5, 9, 2, 2, 7, 8]]
FAMILIES = ["llama", "qwen3", "qwen2_window", "qwen3_moe", "gpt2"]


def ids(groups):
    return [[rollout.token_ids for rollout in group] for group in groups]


def assert_same(left, right, atol=1e-5):
    assert ids(left) == ids(right)
    for a, b in zip(itertools.chain(*left), itertools.chain(*right), strict=True):
        torch.testing.assert_close(torch.tensor(a.logprobs), torch.tensor(b.logprobs), atol=atol, rtol=0)
        assert a.finish_reason == b.finish_reason


@torch.no_grad()
def reference_logprobs(model, prompt, rollout, sampling):
    """A fresh forward over prompt and completion, then transformers' own processors."""
    from transformers.generation import logits_process as lp

    inputs = torch.tensor([prompt + rollout.token_ids])
    scores = model(inputs).logits[0, len(prompt) - 1 : -1].float()
    processors = [
        (sampling.temperature not in (0.0, 1.0), lambda: lp.TemperatureLogitsWarper(sampling.temperature)),
        (sampling.top_k > 0, lambda: lp.TopKLogitsWarper(sampling.top_k)),
        (sampling.top_p < 1, lambda: lp.TopPLogitsWarper(sampling.top_p)),
        (sampling.min_p > 0, lambda: lp.MinPLogitsWarper(sampling.min_p)),
    ]
    for wanted, make in processors:
        if wanted:
            scores = make()(None, scores)
    return scores.log_softmax(dim=-1).gather(-1, torch.tensor(rollout.token_ids)[:, None])[:, 0]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_generate(make_model, family):
    model = make_model(family)
    model.generation_config.eos_token_id = [3, 7]
    groups = HFRolloutEngine(model).generate(
        PROMPTS, SamplingConfig(max_new_tokens=24, temperature=0.0), num_generations=2, seed=0
    )
    for prompt, group in zip(PROMPTS, groups, strict=True):
        inputs = torch.tensor([prompt])
        expected = model.generate(
            inputs, attention_mask=torch.ones_like(inputs), do_sample=False, max_new_tokens=24, pad_token_id=0
        )
        assert [rollout.token_ids for rollout in group] == 2 * [expected[0, len(prompt) :].tolist()]


def test_long_completions_outgrow_the_first_buffer(make_model):
    model = make_model("llama")
    (group,) = HFRolloutEngine(model).generate(
        [[1, 2]], SamplingConfig(max_new_tokens=200, temperature=0.0), num_generations=1, seed=0
    )
    expected = model.generate(
        torch.tensor([[1, 2]]), attention_mask=torch.ones(1, 2), do_sample=False, max_new_tokens=200, pad_token_id=0
    )
    assert group[0].token_ids == expected[0, 2:].tolist()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.7}, {"temperature": 1.3, "top_k": 12, "top_p": 0.9, "min_p": 0.02}]
)
def test_logprobs_equal_a_fresh_forward(make_model, family, options):
    model = make_model(family)
    sampling = SamplingConfig(max_new_tokens=20, stop_token_ids=(4, 9), **options)
    groups = HFRolloutEngine(model).generate(PROMPTS, sampling, num_generations=4, seed=5)
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for rollout in group:
            expected = reference_logprobs(model, prompt, rollout, sampling)
            torch.testing.assert_close(torch.tensor(rollout.logprobs), expected, atol=1e-4, rtol=0)


def test_cutting_into_batches_changes_nothing(qwen3):
    sampling = SamplingConfig(max_new_tokens=16, stop_token_ids=(4, 9))
    whole = HFRolloutEngine(qwen3).generate(PROMPTS, sampling, num_generations=4, seed=1)
    lengths = {len(rollout.token_ids) for group in whole for rollout in group}
    assert len(lengths) > 3  # some leave early
    for max_sequences, max_prefill_tokens in [(1, 8192), (3, 1), (4, 20), (7, 9), (100, 1)]:
        engine = HFRolloutEngine(qwen3, max_sequences=max_sequences, max_prefill_tokens=max_prefill_tokens)
        assert_same(whole, engine.generate(PROMPTS, sampling, num_generations=4, seed=1))


def test_other_prompts_and_rollouts_change_nothing(qwen3):
    sampling = SamplingConfig(max_new_tokens=16, stop_token_ids=(4,))
    engine = HFRolloutEngine(qwen3)
    whole = engine.generate(PROMPTS, sampling, num_generations=4, seed=1)
    fewer = engine.generate(PROMPTS[:2], sampling, num_generations=3, seed=1)
    assert_same([group[:3] for group in whole[:2]], fewer)


def test_seed_decides(qwen3):
    sampling, engine = SamplingConfig(max_new_tokens=12), HFRolloutEngine(qwen3)
    first = engine.generate(PROMPTS, sampling, num_generations=3, seed=1)
    again = engine.generate(PROMPTS, sampling, num_generations=3, seed=1)
    other = engine.generate(PROMPTS, sampling, num_generations=3, seed=2)
    assert first == again  # to the bit
    everything = [tuple(tokens) for group in ids(first) + ids(other) for tokens in group]
    assert len(set(everything)) == len(everything)


def test_global_random_state_is_left_alone(qwen3):
    torch.manual_seed(0), np.random.seed(0), random.seed(0)
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    one = HFRolloutEngine(qwen3).generate(PROMPTS, SamplingConfig(max_new_tokens=4), num_generations=2, seed=3)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1] == before[1]).all()
    assert random.getstate() == before[2]
    torch.manual_seed(99)
    assert one == HFRolloutEngine(qwen3).generate(PROMPTS, SamplingConfig(max_new_tokens=4), num_generations=2, seed=3)


def test_first_tokens_follow_the_model(qwen3):
    count = 4000
    sampling = SamplingConfig(max_new_tokens=1, temperature=2.0, top_k=6)
    (group,) = HFRolloutEngine(qwen3).generate([[5, 6]], sampling, num_generations=count, seed=8)
    with torch.no_grad():
        logits = qwen3(torch.tensor([[5, 6]])).logits[0, -1] / 2.0
    kept = logits.topk(6)
    expected = count * kept.values.softmax(dim=-1)
    seen = torch.bincount(torch.tensor([rollout.token_ids[0] for rollout in group]), minlength=len(logits))
    assert seen[kept.indices].sum() == count
    assert ((seen[kept.indices] - expected) ** 2 / expected).sum() < 20.5  # 0.999 quantile, 5 degrees of freedom


def test_prompts_are_encoded_once_and_sequences_leave(make_model):
    model = make_model("qwen3")
    engine = HFRolloutEngine(model, max_sequences=5)
    engine.generate(
        [[1]], SamplingConfig(max_new_tokens=1), num_generations=1, seed=0
    )  # has its first look at the model
    shapes, head = [], []
    model.model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    model.lm_head.register_forward_pre_hook(lambda module, args: head.append(args[0].shape[1]))
    prompts = [PROMPTS[0], PROMPTS[4], PROMPTS[0]]  # same length; one of them twice
    groups = engine.generate(
        prompts, SamplingConfig(max_new_tokens=30, stop_token_ids=(2, 3, 4)), num_generations=4, seed=0
    )
    assert shapes.count((2, 8)) == 1
    decoding = [shape for shape in shapes if shape != (2, 8)]
    assert {columns for _, columns in decoding} == {1}
    # a sequence is run once for every token but its last
    assert sum(rows for rows, _ in decoding) == sum(len(r.token_ids) - 1 for group in groups for r in group)
    assert set(head) == {1}
    assert len({tuple(tokens) for tokens in ids(groups)[0] + ids(groups)[2]}) == 8


def test_end_tokens_and_length(make_model, letters):
    model = make_model("qwen3")
    model.generation_config.eos_token_id = 3
    engine = HFRolloutEngine(model, letters(eos_token_id=5))
    sampling = SamplingConfig(max_new_tokens=6, stop_token_ids=(9,), temperature=2.0)
    groups = engine.generate(PROMPTS, sampling, num_generations=20, seed=0)
    rollouts = list(itertools.chain(*groups))
    ends = {3, 5, 9}
    for rollout in rollouts:
        assert not ends & set(rollout.token_ids[:-1])
        stopped = rollout.token_ids[-1] in ends
        assert rollout.finish_reason == ("stop" if stopped else "length")
        assert stopped or len(rollout.token_ids) == 6
        assert rollout.text == "".join(chr(ord("a") + token) for token in rollout.token_ids if token != 5)
    assert any(len(r.token_ids) == 6 and r.finish_reason == "stop" for r in rollouts)
    assert {r.token_ids[-1] for r in rollouts if r.finish_reason == "stop"} == ends
    assert {len(r.token_ids) for r in rollouts} == {1, 2, 3, 4, 5, 6}


def test_stop_strings(qwen3, letters):
    free = SamplingConfig(max_new_tokens=20, temperature=2.0)
    stop = SamplingConfig(max_new_tokens=20, temperature=2.0, stop=("ab", "q", "cd"))
    engine = HFRolloutEngine(qwen3, letters())
    unstopped = engine.generate(PROMPTS, free, num_generations=20, seed=4)
    stopped = engine.generate(PROMPTS, stop, num_generations=20, seed=4)
    by_string = set()
    for long, short in zip(itertools.chain(*unstopped), itertools.chain(*stopped), strict=True):
        ends = {long.text.find(string) + len(string): string for string in stop.stop if string in long.text}
        expected = long.text[: min(ends)] if ends else long.text
        assert short.text == expected
        assert short.token_ids == long.token_ids[: len(expected)]
        assert short.finish_reason == ("stop" if ends else "length")
        by_string.add(ends[min(ends)] if ends else None)
    assert by_string == {"ab", "q", "cd", None}


def test_without_tokenizer_there_is_no_text(qwen3):
    ((rollout,),) = HFRolloutEngine(qwen3).generate([[1]], SamplingConfig(max_new_tokens=2), num_generations=1, seed=0)
    assert rollout.text is None
    assert rollout.reward is None
    assert rollout.loss_mask is None
    assert all(type(token) is int for token in rollout.token_ids)
    assert all(type(value) is float for value in rollout.logprobs)


def test_no_prompts_give_no_groups(qwen3):
    assert HFRolloutEngine(qwen3).generate([], SamplingConfig(), num_generations=3, seed=0) == []


def test_modes_are_restored_also_after_an_error(make_model):
    model = make_model("qwen3", attention_dropout=0.5)
    model.train()
    model.model.layers[0].eval()
    before = [module.training for module in model.modules()]
    sampling = SamplingConfig(max_new_tokens=4)
    first = HFRolloutEngine(model).generate([[1, 2]], sampling, num_generations=2, seed=0)
    assert [module.training for module in model.modules()] == before
    hook = model.lm_head.register_forward_hook(fail_on_purpose)
    with pytest.raises(RuntimeError, match="on purpose"):
        HFRolloutEngine(model).generate([[1, 2]], sampling, num_generations=2, seed=0)
    assert [module.training for module in model.modules()] == before
    hook.remove()
    model.eval()
    assert first == HFRolloutEngine(model).generate([[1, 2]], sampling, num_generations=2, seed=0)  # no dropout


def fail_on_purpose(*args):
    raise RuntimeError("on purpose")


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_shared_prefix_context_changes_nothing(make_model, family):
    from pl_grouprl.attention import shared_prefix

    model = make_model(family)
    engine, sampling = HFRolloutEngine(model), SamplingConfig(max_new_tokens=12, stop_token_ids=(4,))
    outside = engine.generate(PROMPTS, sampling, num_generations=4, seed=1)
    with shared_prefix(model):
        inside = engine.generate(PROMPTS, sampling, num_generations=4, seed=1)
    assert_same(outside, inside)


@pytest.mark.parametrize("inference_mode", [False, True])
def test_training_goes_on_afterwards(make_model, inference_mode):
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}  # renews its buffer in the forward pass
    model = make_model("llama", max_position_embeddings=16, rope_parameters=rope)
    model(torch.zeros(1, 20, dtype=torch.long))  # too long to sample; what follows goes back to shorter ones
    model.lm_head.register_forward_hook(lambda *args: inference.append(torch.is_inference_mode_enabled()))
    inference = []
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.config.use_cache = False
    with torch.inference_mode(inference_mode):
        groups = HFRolloutEngine(model).generate(
            [list(range(8))], SamplingConfig(max_new_tokens=8), num_generations=2, seed=0
        )
    assert len(inference) >= 8
    assert not any(inference)
    assert model.config.use_cache is False
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())
    assert torch.is_grad_enabled()
    assert not any(buffer.is_inference() for buffer in model.buffers())
    inputs = torch.tensor([groups[0][0].token_ids])
    model(inputs, labels=inputs).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_bfloat16_model_reports_float32_logprobs(make_model):
    model = make_model("qwen3").to(torch.bfloat16)
    sampling = SamplingConfig(max_new_tokens=8)
    groups = HFRolloutEngine(model).generate(PROMPTS, sampling, num_generations=2, seed=0)
    values = [value for group in groups for rollout in group for value in rollout.logprobs]
    assert any(torch.tensor(value) != torch.tensor(value).bfloat16() for value in values)
    assert all(value <= 0 for value in values)


def test_changed_weights_are_seen(make_model):
    model = make_model("gpt2")
    engine, sampling = HFRolloutEngine(model), SamplingConfig(max_new_tokens=6)
    before = engine.generate([[1, 2]], sampling, num_generations=1, seed=0)
    with torch.no_grad():
        model.transformer.h[0].mlp.c_fc.weight.mul_(-2)
    after = engine.generate([[1, 2]], sampling, num_generations=1, seed=0)
    assert before[0][0].logprobs != after[0][0].logprobs


def test_engine_is_bound_later_and_again(qwen3, make_model):
    engine = HFRolloutEngine(max_sequences=2)
    assert isinstance(engine, RolloutEngine)
    sampling = SamplingConfig(max_new_tokens=3)
    with pytest.raises(ValueError, match="has no model; pass one to the constructor or call bind"):
        engine.generate([[1]], sampling, num_generations=1, seed=0)
    engine.bind(qwen3, None)
    first = engine.generate([[1]], sampling, num_generations=1, seed=0)
    engine.bind(qwen3, None)
    assert engine.generate([[1]], sampling, num_generations=1, seed=0) == first


@pytest.mark.parametrize(
    ("prompts", "num_generations", "options", "message"),
    [
        ([[1], []], 1, {"max_new_tokens": 4}, r"prompts\[1\] is empty"),
        ([[1]], 0, {}, "num_generations is 0; it must be at least 1"),
        (
            [[1], [1] * 250],
            1,
            {"max_new_tokens": 7},
            r"prompts\[1\] has 250 tokens, which with max_new_tokens=7 exceeds the model's "
            r"max_position_embeddings=256; shorten the prompt",
        ),
        ([[1, 24]], 1, {"max_new_tokens": 4}, "token ids from 1 to 24, but the model has vocab_size=24"),
        ([[1, -1]], 1, {"max_new_tokens": 4}, "token ids from -1 to 1"),
        ([[1]], 1, {"max_new_tokens": 4, "stop": ("x",)}, "has no tokenizer"),
    ],
)
def test_requests_that_cannot_be_served(qwen3, prompts, num_generations, options, message):
    with pytest.raises(ValueError, match=message):
        HFRolloutEngine(qwen3).generate(prompts, SamplingConfig(**options), num_generations=num_generations, seed=0)


@pytest.mark.parametrize(
    ("kind", "limit"),
    [("dynamic", "max_position_embeddings"), ("longrope", r"original_max_position_embeddings \(its longrope .*\)")],
)
def test_moving_frequencies_end_where_they_begin_to_move(make_model, kind, limit):
    factors = {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4, "original_max_position_embeddings": 16}
    options = {"factor": 2.0} if kind == "dynamic" else factors
    model = make_model(
        "llama",
        max_position_embeddings=16 if kind == "dynamic" else 64,
        rope_parameters={"rope_type": kind, "rope_theta": 10000.0, **options},
    )
    engine, prompts, sampling = HFRolloutEngine(model), [list(range(12)), [1, 2, 3]], SamplingConfig(max_new_tokens=4)
    groups = engine.generate(prompts, sampling, num_generations=2, seed=0)
    model(torch.zeros(1, 40, dtype=torch.long))  # leaves other frequencies behind
    assert_same(groups, engine.generate(prompts, sampling, num_generations=2, seed=0))
    for prompt, group in zip(prompts, groups, strict=True):
        for rollout in group:
            expected = reference_logprobs(model, prompt, rollout, sampling)
            torch.testing.assert_close(torch.tensor(rollout.logprobs), expected, atol=1e-4, rtol=0)
    with pytest.raises(ValueError, match=f"exceeds the model's {limit}=16; shorten"):
        engine.generate([*prompts, list(range(13))], sampling, num_generations=2, seed=0)


def test_the_longest_request_is_served(qwen3):
    sampling = SamplingConfig(max_new_tokens=6)
    ((rollout,),) = HFRolloutEngine(qwen3).generate([[1] * 250], sampling, num_generations=1, seed=0)
    assert len(rollout.token_ids) == 6


def test_constructor_refuses():
    with pytest.raises(ValueError, match="max_sequences is 0; it must be at least 1"):
        HFRolloutEngine(max_sequences=0)
    with pytest.raises(ValueError, match="max_prefill_tokens is -1"):
        HFRolloutEngine(max_prefill_tokens=-1)
    with pytest.raises(ValueError, match="model is an encoder-decoder"):
        HFRolloutEngine(SimpleNamespace(config=SimpleNamespace(is_encoder_decoder=True)))


def test_models_with_a_state_outside_of_the_cache_are_refused():
    import transformers as tf

    config = tf.RecurrentGemmaConfig(
        vocab_size=24, hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2, head_dim=8,
        num_key_value_heads=1, lru_width=16, attention_window_size=8,
    )  # fmt: skip
    model = tf.AutoModelForCausalLM.from_config(config)
    with pytest.raises(
        ValueError, match="layer 0 of the model leaves its LinearAttentionLayer empty, so that it keeps"
    ):
        HFRolloutEngine(model).generate([[1, 2]], SamplingConfig(max_new_tokens=2), num_generations=1, seed=0)


def test_a_model_that_decodes_other_than_it_is_scored_is_refused(make_model):
    model = make_model("llama")
    attention = model.model.layers[0].self_attn
    forward = attention.forward
    attention.forward = lambda hidden_states, **kwargs: forward(
        hidden_states if hidden_states.shape[1] > 1 else 1.05 * hidden_states + 0.05, **kwargs
    )
    engine, sampling = HFRolloutEngine(model), SamplingConfig(max_new_tokens=4)
    with pytest.raises(
        ValueError, match=r"cannot sample from LlamaForCausalLM: behind its cache a log-probability diff"
    ):
        engine.generate([[1, 2]], sampling, num_generations=1, seed=0)
    attention.forward = forward
    assert engine.generate([[1, 2]], sampling, num_generations=1, seed=0)
    model.lm_head.register_forward_pre_hook(lambda *args: calls.append(args))
    calls = []
    engine.generate([[1, 2]], sampling, num_generations=1, seed=0)
    assert len(calls) == 4  # what has passed is not looked at again


def test_models_that_count_positions_themselves_are_refused():
    import transformers as tf

    small = {"vocab_size": 24, "hidden_size": 16, "num_hidden_layers": 1}
    mamba = tf.MambaForCausalLM(tf.MambaConfig(**small, state_size=4))
    heads = {"num_attention_heads": 2, "intermediate_size": 16, "is_decoder": True}
    roberta = tf.RobertaForCausalLM(tf.RobertaConfig(**small, **heads))
    for model, reason in ((mamba, "MambaModel takes no position_ids"), (roberta, "RobertaModel counts positions")):
        with pytest.raises(ValueError, match=f"needs to say where they begin, but {reason}"):
            HFRolloutEngine(model)


def test_logits_that_are_not_finite_are_reported(make_model):
    model = make_model("gpt2")
    with torch.no_grad():
        model.transformer.ln_f.weight.fill_(math.nan)
    with pytest.raises(FloatingPointError, match="logits are not finite"):
        HFRolloutEngine(model).generate([[1, 2]], SamplingConfig(max_new_tokens=2), num_generations=1, seed=0)
