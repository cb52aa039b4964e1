"""Weights that come into a running vLLM: what it samples afterwards, and what it is caught at."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from helpers.engines import new_engine, new_policy, sync
from helpers.rollouts import PROMPTS, ids, reference_logprobs
from helpers.vllm_engines import LONG, assert_greedy, nudged, sample, started

from pl_grouprl.distributed.checksum import WeightsMismatchError
from pl_grouprl.distributed.weight_stream import checkpoint_weights
from pl_grouprl.types import SamplingConfig

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm")


POLICIES = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "qwen2": ("qwen2_tied", {"tie_word_embeddings": False}),
    "qwen2 tied": ("qwen2_tied", {}),
    "qwen3": ("qwen3", {}),
    "qwen3 tied": ("qwen3_tied", {}),
}


@pytest.fixture
def start():
    with started(sync) as start:
        yield start


@torch.no_grad()
def renew(model, seed):
    """Give a policy other weights, all of them."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
        else:
            parameter.copy_(parameter.std() * torch.randn(parameter.shape, generator=generator))


@pytest.mark.parametrize("name", POLICIES)
def test_new_weights_are_sampled_from(start, name):
    policy, options = POLICIES[name]
    model, _ = new_policy(policy, **options)
    engine = start(model)
    prompts = [*PROMPTS, *LONG]
    seen = [assert_greedy(engine, model, prompts, 12)]
    for seed in (1, 2):
        renew(model, seed)
        assert ids(sample(engine, prompts, max_new_tokens=12, temperature=0.0)) == seen[-1]  # until it is given them
        sync(engine, model)
        seen.append(assert_greedy(engine, model, prompts, 12))
        assert all(new != before for new, before in zip(seen[-1], seen[-2], strict=True))
    assert engine.version == 3


def test_updates_empty_the_prefix_cache(start, monkeypatch):
    """Were it kept, its old keys and values would be sampled from: so the test above has teeth."""
    model, _ = new_policy("qwen3")
    engine = start(model)
    assert_greedy(engine, model, LONG)
    vllm = engine._vllm._engine
    renew(model, 1)
    with monkeypatch.context() as patch:
        patch.setattr(vllm, "reset_prefix_cache", lambda *args, **kwargs: True)
        sync(engine, model)
    ((kept,), _) = sample(engine, LONG, max_new_tokens=12)
    expected = reference_logprobs(model, LONG[0], kept, SamplingConfig())
    assert (torch.tensor(kept.logprobs) - expected).abs().max() > 0.01
    sync(engine, model)
    assert_greedy(engine, model, LONG)


def test_turns_read_their_history_from_the_prefix_cache(start, monkeypatch):
    """In whole blocks of 128 tokens, those of results and sampled ones too; after new weights nothing of it."""
    model, _ = new_policy("qwen3", max_position_embeddings=512)
    engine = start(model)
    vllm, cached = engine._vllm._engine, []
    step = vllm.step

    def watched_step():
        outputs = step()
        cached.extend(output.num_cached_tokens for output in outputs)
        return outputs

    monkeypatch.setattr(vllm, "step", watched_step)
    history = LONG[0]
    with engine.keep_caches():
        for number in range(3):
            ((rollout,),) = sample(engine, [history], max_new_tokens=50)
            expected = reference_logprobs(model, history, rollout, SamplingConfig())
            torch.testing.assert_close(torch.tensor(rollout.logprobs), expected, atol=1e-4, rtol=0)
            history = [*history, *rollout.token_ids, *LONG[1][: 7 + number]]
    assert cached == [0, 128, 256]  # of 200, 257 and 315 tokens
    renew(model, 1)
    sync(engine, model)
    sample(engine, [history])
    assert cached[-1] == 0


def test_one_adapter_after_the_other(start):
    peft = pytest.importorskip("peft")
    base, _ = new_policy("qwen3_tied")
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"])
    model = peft.get_peft_model(base, config).eval()
    engine = start(model)
    seen = [assert_greedy(engine, model)]
    for seed in (1, 2):
        generator = torch.Generator().manual_seed(seed)
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.data.copy_(0.3 * torch.randn(weight.shape, generator=generator))
        sync(engine, model)
        seen.append(assert_greedy(engine, model))
        assert seen[-1] != seen[-2]


@pytest.mark.parametrize(("policy_dtype", "options"), [("bfloat16", {}), ("float32", {"dtype": "bfloat16"})])
def test_bfloat16(start, policy_dtype, options):
    """vLLM has the policy's weights rounded, to the bit; what it makes of them differs by its own rounding."""
    model, _ = new_policy("qwen3_tied", initializer_range=0.1)
    model.to(getattr(torch, policy_dtype))
    engine = start(model, **options)
    for seed in (1, 2):
        renew(model, seed)
        sync(engine, model)
        rounded, _ = new_policy("qwen3_tied", initializer_range=0.1)
        rounded.load_state_dict({name: value.bfloat16().float() for name, value in model.state_dict().items()})
        for prompt, (rollout,) in zip(PROMPTS, sample(engine, PROMPTS, max_new_tokens=16), strict=True):
            expected = reference_logprobs(rounded, prompt, rollout, SamplingConfig())
            torch.testing.assert_close(torch.tensor(rollout.logprobs), expected, atol=0.05, rtol=0)


def test_a_stale_head_is_detected(start, monkeypatch):
    """vLLM packs the weights of a head on CPUs; an update of tied embeddings does not reach that copy by itself."""
    from pl_grouprl.rollout.vllm.worker import WeightReceiver

    model, _ = new_policy("qwen2_tied")
    engine = start(model)
    renew(model, 1)
    monkeypatch.setattr(WeightReceiver, "refresh_stale_weights", lambda self: None)
    with pytest.raises(WeightsMismatchError, match=r"lm_head\.weight"):
        sync(engine, model)


def test_a_policy_that_vllm_builds_differently_is_refused(start):
    """vLLM's Qwen2 does not read `head_dim`, and its loaders cut weights to what it has room for."""
    model, _ = new_policy("qwen2_tied", head_dim=64)
    with pytest.raises(WeightsMismatchError, match=r"qkv_proj.weight"):
        start(model)


def test_experts_on_cpus_are_refused():
    """They are packed once; a reload leaves the packed ones, which no checksum of the stored ones would show."""
    from helpers.tiny_models import tiny_model

    model = tiny_model("qwen3_moe", hidden_size=64, head_dim=32)
    engine = new_engine("vllm")
    engine.bind(model)
    try:
        with pytest.raises(ValueError, match="mixture of experts"):
            engine.update_weights(checkpoint_weights(model, model.named_parameters()), version=1)
    finally:
        engine.close()


def test_there_is_one_vllm_in_a_process(start):
    start(new_policy("qwen3")[0])
    with pytest.raises(RuntimeError, match="another vLLM"):
        start(new_policy("qwen3_tied")[0])


def test_another_policy_starts_another_vllm(start):
    first, _ = new_policy("qwen3")
    second, _ = new_policy("llama", num_hidden_layers=1)
    engine = start(first)
    engine.bind(second)
    with pytest.raises(RuntimeError, match="has no weights"):
        sample(engine, [[1]])
    sync(engine, second)
    assert_greedy(engine, second, PROMPTS)


def test_buckets_may_split_layers(start, monkeypatch):
    """One weight to a bucket: layers that are made of several wait for the last."""
    model, _ = new_policy("qwen2_tied")
    engine = start(model)
    monkeypatch.setattr(engine, "_bucket_bytes", 1)
    renew(model, 1)
    sync(engine, model)
    assert_greedy(engine, model, PROMPTS)


_ALL = (
    *("embed_tokens.weight", "q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight", "gate_proj.weight"),
    *("up_proj.weight", "down_proj.weight", "input_layernorm.weight", "post_attention_layernorm.weight"),
    "model.norm.weight",
)
KINDS = {
    "qwen2": (*_ALL, "q_proj.bias", "k_proj.bias", "v_proj.bias", "lm_head.weight"),
    "qwen3 tied": (*_ALL, "q_norm.weight", "k_norm.weight"),
}
"""Every kind of weight in two policies."""


@pytest.fixture(scope="module", params=list(KINDS))
def running(request):
    """An engine, its policy and the kinds of its weights; what starts another vLLM comes before the tests with it."""
    policy, options = POLICIES[request.param]
    model, _ = new_policy(policy, **options)
    engine = new_engine("vllm")
    engine.bind(model)
    sync(engine, model)
    yield engine, model, KINDS[request.param]
    engine.close()


def last_name(model, kind):
    """Of the weights of that kind."""
    return [name for name, _ in checkpoint_weights(model, model.named_parameters()) if name.endswith(kind)][-1]


def test_a_flipped_bit_is_detected(running, monkeypatch):
    """The last entry of one weight arrives as the number next to it."""
    engine, model, kinds = running
    load = engine._vllm.load

    def load_otherwise(changed, bucket):
        load([(own, nudged(weight) if own == changed else weight) for own, weight in bucket])

    for changed in (last_name(model, kind) for kind in kinds):
        with monkeypatch.context() as patch:
            patch.setattr(engine._vllm, "load", partial(load_otherwise, changed))
            with pytest.raises(WeightsMismatchError, match=rf"sent as [^;]*{changed}"):
                sync(engine, model)
        assert engine.version is None
        with pytest.raises(RuntimeError, match="has no weights"):
            sample(engine, [[1]])
        sync(engine, model)
    assert_greedy(engine, model, PROMPTS[:1], 4)


def test_a_missing_weight_is_detected(running, monkeypatch):
    """What vLLM computes with then is the old weight, or none."""
    engine, model, kinds = running
    load = engine._vllm.load
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    try:
        for seed, kind in enumerate(kinds):
            renew(model, seed)
            changed = last_name(model, kind)
            without = partial(lambda changed, bucket: load([item for item in bucket if item[0] != changed]), changed)
            with monkeypatch.context() as patch:
                patch.setattr(engine._vllm, "load", without)
                with pytest.raises(WeightsMismatchError):
                    sync(engine, model)
    finally:
        model.load_state_dict(kept)
        sync(engine, model)
    assert_greedy(engine, model, PROMPTS[:1], 4)


def test_a_stream_that_breaks_off_can_be_followed_by_another(running):
    engine, model, _ = running

    def broken():
        for place, item in enumerate(checkpoint_weights(model, model.named_parameters())):
            if place == 5:
                raise OSError("the other rank is gone")
            yield item

    with pytest.raises(OSError, match="the other rank is gone"):
        engine.update_weights(broken(), version=100)
    assert engine.version is None
    sync(engine, model)
    assert_greedy(engine, model, PROMPTS)
