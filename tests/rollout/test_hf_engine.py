from types import SimpleNamespace

import pytest
import torch
from helpers.rollouts import PROMPTS, assert_same, ids, reference_logprobs, shortened

from pl_grouprl.rollout import HFRolloutEngine
from pl_grouprl.rollout.hf import decode
from pl_grouprl.types import SamplingConfig


def test_splitting_into_batches_changes_nothing(qwen3):
    sampling = SamplingConfig(max_new_tokens=16, stop_token_ids=(4, 9))
    whole = HFRolloutEngine(qwen3).generate(PROMPTS, sampling, num_generations=4, seed=1)
    lengths = {len(rollout.token_ids) for group in whole for rollout in group}
    assert len(lengths) > 3  # some leave early
    for max_sequences, max_prefill_tokens in [(1, 8192), (3, 1), (7, 9)]:
        engine = HFRolloutEngine(qwen3, max_sequences=max_sequences, max_prefill_tokens=max_prefill_tokens)
        assert_same(whole, engine.generate(PROMPTS, sampling, num_generations=4, seed=1))


@pytest.mark.parametrize("stop_token_ids", [(4, 9), (), tuple(range(24))])
def test_checking_for_ends_every_few_steps_changes_nothing(qwen3, monkeypatch, stop_token_ids):
    sampling = SamplingConfig(max_new_tokens=16, stop_token_ids=stop_token_ids)
    often = HFRolloutEngine(qwen3).generate(PROMPTS, sampling, num_generations=4, seed=1)
    for steps in (3, 16, 50):
        monkeypatch.setitem(decode.STEPS_PER_CHECK, "cpu", steps)
        assert_same(often, HFRolloutEngine(qwen3).generate(PROMPTS, sampling, num_generations=4, seed=1))


@pytest.mark.parametrize(("family", "steps_per_check"), [("qwen3", 1), ("gpt2", 8), ("qwen2_window", 8)])
def test_a_limit_per_prompt_truncates_its_rollouts(make_model, monkeypatch, family, steps_per_check):
    monkeypatch.setitem(decode.STEPS_PER_CHECK, "cpu", steps_per_check)
    model, limits = make_model(family), [3, 16, 1, 10, 10]
    sampling = SamplingConfig(max_new_tokens=16, stop_token_ids=(4, 9))
    for max_sequences in (None, 3):
        engine = HFRolloutEngine(model, max_sequences=max_sequences)
        whole = engine.generate(PROMPTS, sampling, num_generations=4, seed=1)
        cut = engine.generate(PROMPTS, sampling, num_generations=4, seed=1, max_new_tokens=limits)
        assert_same(shortened(whole, limits), cut)
        assert {rollout.finish_reason for group in cut for rollout in group} == {"stop", "length"}


def test_an_end_token_at_the_limit_is_a_stop(qwen3):
    sampling, engine = SamplingConfig(max_new_tokens=50, stop_token_ids=(4, 9)), HFRolloutEngine(qwen3)
    ended = engine.generate(PROMPTS, sampling, num_generations=1, seed=1)
    limits = [len(rollout.token_ids) for (rollout,) in ended]
    assert {rollout.finish_reason for (rollout,) in ended} == {"stop"}
    assert len(set(limits)) > 1
    assert_same(ended, engine.generate(PROMPTS, sampling, num_generations=1, seed=1, max_new_tokens=limits))


def test_sequences_leave_at_their_limit(make_model):
    model, engine = make_model("qwen3"), HFRolloutEngine()
    engine.bind(model)
    sampling = SamplingConfig(max_new_tokens=30)
    engine.generate([[1]], sampling, num_generations=1, seed=0)  # checks the model
    rows = []
    model.model.register_forward_pre_hook(
        lambda module, args, kwargs: rows.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    engine.generate([[1, 2], [3, 4]], sampling, num_generations=3, seed=0, max_new_tokens=[2, 5])
    assert rows == [2, 6, 3, 3, 3]


def test_the_same_call_gives_the_same_bits(qwen3):
    engine, options = HFRolloutEngine(qwen3), {"num_generations": 3, "seed": 1}
    first, again = (engine.generate(PROMPTS, SamplingConfig(max_new_tokens=7), **options) for _ in range(2))
    ignored = SamplingConfig(max_new_tokens=100)
    assert first == again == engine.generate(PROMPTS, ignored, max_new_tokens=[7] * len(PROMPTS), **options)


def test_prompts_are_encoded_once_and_sequences_leave(make_model):
    model = make_model("qwen3")
    engine = HFRolloutEngine(model, max_sequences=5)
    engine.generate([[1]], SamplingConfig(max_new_tokens=1), num_generations=1, seed=0)  # checks the model
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


def test_modes_are_restored_also_after_an_error(make_model):
    model = make_model("qwen3", attention_dropout=0.5)
    model.train()
    model.model.layers[0].eval()
    before = [module.training for module in model.modules()]
    sampling = SamplingConfig(max_new_tokens=4)
    first = HFRolloutEngine(model).generate([[1, 2]], sampling, num_generations=2, seed=0)
    assert [module.training for module in model.modules()] == before
    hook = model.lm_head.register_forward_hook(lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        HFRolloutEngine(model).generate([[1, 2]], sampling, num_generations=2, seed=0)
    assert [module.training for module in model.modules()] == before
    hook.remove()
    model.eval()
    assert first == HFRolloutEngine(model).generate([[1, 2]], sampling, num_generations=2, seed=0)  # no dropout


def test_shared_prefix_context_changes_nothing(make_model):
    from pl_grouprl.attention import shared_prefix

    model = make_model("gpt2")
    engine, sampling = HFRolloutEngine(model), SamplingConfig(max_new_tokens=12, stop_token_ids=(4,))
    outside = engine.generate(PROMPTS, sampling, num_generations=4, seed=1)
    with shared_prefix(model):
        inside = engine.generate(PROMPTS, sampling, num_generations=4, seed=1)
    assert_same(outside, inside)


@pytest.mark.parametrize("inference_mode", [False, True])
def test_training_continues_afterwards(make_model, inference_mode):
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


@pytest.mark.parametrize(
    ("kind", "limit"),
    [("dynamic", "max_position_embeddings"), ("longrope", r"original_max_position_embeddings \(its longrope .*\)")],
)
def test_dynamic_rotary_frequencies_limit_the_length(make_model, kind, limit):
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


def test_constructor_refuses():
    import transformers as tf

    for options in ({"max_sequences": 0}, {"max_prefill_tokens": -1}):
        with pytest.raises(ValueError, match=next(iter(options))):
            HFRolloutEngine(**options)
    small = {"vocab_size": 24, "hidden_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "intermediate_size": 16, "is_decoder": True}
    roberta = tf.RobertaForCausalLM(tf.RobertaConfig(**small, **heads))  # cannot be padded
    rwkv = tf.RwkvForCausalLM(tf.RwkvConfig(**small))
    encoder_decoder = SimpleNamespace(config=SimpleNamespace(is_encoder_decoder=True))
    for model, message in ((encoder_decoder, "encoder-decoder"), (roberta, "positions"), (rwkv, "takes none")):
        with pytest.raises(ValueError, match=message):
            HFRolloutEngine(model)


def test_models_with_a_state_outside_of_the_cache_are_refused():
    import transformers as tf

    config = tf.RecurrentGemmaConfig(
        vocab_size=24, hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2, head_dim=8,
        num_key_value_heads=1, lru_width=16, attention_window_size=8,
    )  # fmt: skip
    model = tf.AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match="layer 0 of the model"):
        HFRolloutEngine(model).generate([[1, 2]], SamplingConfig(max_new_tokens=2), num_generations=1, seed=0)


def test_a_model_whose_decoding_differs_from_its_scoring_is_refused(make_model):
    model = make_model("llama")
    attention = model.model.layers[0].self_attn
    forward = attention.forward
    attention.forward = lambda hidden_states, **kwargs: forward(
        hidden_states if hidden_states.shape[1] > 1 else 1.05 * hidden_states + 0.05, **kwargs
    )
    engine, sampling = HFRolloutEngine(model), SamplingConfig(max_new_tokens=4)
    with pytest.raises(ValueError, match="cannot sample from LlamaForCausalLM"):
        engine.generate([[1, 2]], sampling, num_generations=1, seed=0)
    attention.forward = forward
    assert engine.generate([[1, 2]], sampling, num_generations=1, seed=0)
    model.lm_head.register_forward_pre_hook(lambda *args: calls.append(args))
    calls = []
    engine.generate([[1, 2]], sampling, num_generations=1, seed=0)
    assert len(calls) == 4  # what has passed is not looked at again
