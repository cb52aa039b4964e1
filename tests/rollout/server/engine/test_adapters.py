"""Adapters that the engine sends to fake servers without their base."""

import logging

import pytest
import torch
from helpers.server_engines import PROMPTS, after, make_engine, sample, tokens
from helpers.tiny_models import tiny_model

from pl_grouprl.distributed.checksum import WeightsMismatchError
from pl_grouprl.distributed.weight_stream import base_weights, checkpoint_weights
from pl_grouprl.models import LoRAAdapter
from pl_grouprl.rollout import VLLMServerRolloutEngine
from pl_grouprl.rollout.engine import SamplerLostError
from pl_grouprl.rollout.vllm import fleet as fleet_module

pytest.importorskip("peft")
from helpers.adapted import adapter_bytes, renew, sync, weights_of


@pytest.fixture
def adapted():
    model = LoRAAdapter(r=4, alpha=8).add_to(tiny_model("llama", tie_word_embeddings=False))
    renew(model, 0)
    return model


def separate(model, *servers, **options):
    """An engine whose servers have the base and an adapter."""
    engine = make_engine(model, *servers, **options)
    assert engine.adapter == "separate"
    sync(engine, model, base=True)
    return engine


def test_only_the_adapter_is_sent(adapted, servers, monkeypatch):
    monkeypatch.setattr(fleet_module, "_PIECE_BYTES", 1000)  # several messages
    first, second = servers(max_lora_rank=8), servers(max_lora_rank=16)
    engine = separate(adapted, first, second)
    assert first.weights.keys() == dict(base_weights(adapted, adapted.named_parameters())).keys()
    for version in (2, 3):
        renew(adapted, version)
        first.calls.clear()
        assert sync(engine, adapted)["bytes"] == adapter_bytes(adapted)
        pieces = first.calls.count("receive_adapter")
        assert pieces > 2
        assert first.calls == [
            *("describe", "sleep", "update_weight_version", "begin_update"),
            *("receive_adapter" for _ in range(pieces)),
            *("v1_unload_lora_adapter", "v1_load_lora_adapter", "reset_prefix_cache", "weight_checksums"),
            *("adapter_checksums", "update_weight_version", "resume"),
        ]
        for server in (first, second):
            ((name, (config, weights)),) = server.adapters.items()
            assert (name, config["r"], config["lora_alpha"]) == (f"policy-{version}", 4, 8)
            expected = dict(weights_of(adapted).weights)
            assert weights.keys() == expected.keys()
            assert all(torch.equal(weights[key], expected[key]) for key in expected)
        sample(engine)
        asked = [body.pop("model") for body in first.asked + second.asked]
        assert asked == [f"policy-{version}"] * len(PROMPTS)
        first.asked, second.asked = [], []


def test_names_that_an_earlier_run_has_left(adapted, servers):
    server = servers(max_lora_rank=8)
    for _ in range(2):
        engine = separate(adapted, server)
        sync(engine, adapted)
        assert list(server.adapters) == ["policy-2"]
        assert len(sample(engine)) == len(PROMPTS)


def test_an_adapter_that_is_gone_is_an_error(adapted, servers):
    server = servers(max_lora_rank=8)
    engine = separate(adapted, server)
    server.adapters = {"policy-0": server.adapters["policy-1"]}
    with pytest.raises(WeightsMismatchError, match="has weights of version 1, but no adapter 'policy-1'"):
        sample(engine)


def test_weights_that_differ_end_the_run(adapted, servers):
    server = servers(max_lora_rank=8)
    engine = separate(adapted, server)
    name = next(name for name, _ in weights_of(adapted).weights if "layers.1.mlp.up_proj.lora_A" in name)
    server.spoil = lambda weights: weights[name].view(torch.int32)[0, 0].bitwise_xor_(1)
    with pytest.raises(WeightsMismatchError, match=rf"{server.url}: .*1 differ: \S*layers.1.mlp.up_proj.lora_A"):
        sync(engine, adapted)
    assert server.label.endswith(":lost")
    server.spoil = lambda weights: None
    sync(engine, adapted)
    with torch.no_grad():
        server.weights["model.norm.weight"][0] += 1  # the base has to stay
    with pytest.raises(WeightsMismatchError, match=r"1 differ: model\.norm\.weight"):
        sync(engine, adapted)


def test_a_restarted_server_needs_the_base_again(adapted, servers):
    server = servers(max_lora_rank=8)
    engine = separate(adapted, server)
    server.restart()
    with pytest.raises(SamplerLostError, match="restarted"):
        sample(engine)
    with pytest.raises(SamplerLostError, match="base"):
        sync(engine, adapted)
    sync(engine, adapted, base=True)
    assert len(sample(engine)) == len(PROMPTS)


@pytest.mark.parametrize("stopped", [None, "abort", "length"])
def test_sequences_start_again_with_a_new_adapter(adapted, servers, stopped):
    """Those that vLLM aborts, that it finishes with the old adapter under the new label, and that ask too late."""
    server = servers(max_lora_rank=8)
    engine = separate(adapted, server)

    def update():
        sync(engine, adapted)
        logprobs, spans = (
            {"content": [{"token_id": 5, "logprob": -1.0}]},
            [{"version": server.label, "start": 0, "end": 1}],
        )
        choice = {"token_ids": [5], "logprobs": logprobs, "finish_reason": stopped, "weight_versions": spans}
        return stopped and {"choices": [choice]}

    server.before = after(server, 3, update)
    groups = sample(engine)
    assert {version for (rollout,) in groups for version in rollout.weight_versions} == {1, 2}
    assert tokens(groups) == tokens(sample(engine))
    assert server.asked[-1]["model"] == "policy-2"


@pytest.mark.parametrize(
    ("options", "info", "reason"),
    [
        ({"use_dora": True}, {"max_lora_rank": 8}, "use_dora=True, which vLLM's LoRA does not have"),
        ({}, {}, "max_lora_rank None, not 8"),
        ({"r": 16}, {"max_lora_rank": 8}, "max_lora_rank 8, not 16"),
        ({}, {"max_lora_rank": 8, "device": "cuda"}, "dtype 'float32'"),
    ],
)
def test_what_servers_cannot_apply_is_merged(servers, options, info, reason, caplog):
    model = LoRAAdapter(**{"r": 4, **options}).add_to(tiny_model("llama", tie_word_embeddings=False))
    server = servers(**info)
    with caplog.at_level(logging.INFO):
        engine = make_engine(model, server)
    assert engine.adapter == "merged"
    assert reason in caplog.text
    assert "merged into its base" in caplog.text
    assert "pass adapter" not in caplog.text
    engine.update_weights(checkpoint_weights(model, model.named_parameters()), version=1)
    assert server.adapters == {}
    sample(engine)
    assert "model" not in server.asked[0]
    engine = make_engine(model, server, adapter="separate")
    with pytest.raises(ValueError, match=f"{reason}.*; pass adapter='merged'"):
        sync(engine, model, base=True)


def test_a_policy_without_adapter_asks_no_server():
    engine = VLLMServerRolloutEngine()
    engine.bind(tiny_model("llama"))
    assert engine.adapter == "merged"
