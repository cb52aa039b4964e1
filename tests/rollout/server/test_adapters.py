"""Servers with vLLM behind them that are sent an adapter alone."""

import pytest
import torch
from helpers.adapted import POLICIES, adapted, adapter_bytes, assert_like_merged, renew, sync
from helpers.engines import new_policy
from helpers.serving import Server

from pl_grouprl.distributed.checksum import WeightsMismatchError
from pl_grouprl.distributed.weight_stream import checkpoint_weights
from pl_grouprl.rollout import VLLMServerRolloutEngine
from pl_grouprl.rollout.vllm.adapter import adapter_tensors
from pl_grouprl.rollout.vllm.client import RefusedError
from pl_grouprl.types import SamplingConfig

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm

LORA = ("--enable-lora", "--max-lora-rank", "8")


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """One per policy; all start at once. The last takes no adapters."""
    folder, started = tmp_path_factory.mktemp("servers"), {}
    for name, options in (("qwen3", LORA), ("llama tied", LORA), ("merged", ())):
        family, overrides = POLICIES.get(name, POLICIES["qwen3"])
        new_policy(family, **overrides)[0].save_pretrained(folder / name)
        started[name] = Server(folder / name, folder / f"{name}.log", "--load-format", "dummy", *options).start()
    try:
        yield {name: server.wait() for name, server in started.items()}
    finally:
        for server in started.values():
            server.stop()


def make_engine(model, server, **options):
    engine = VLLMServerRolloutEngine(server.url, timeout=200, **options)
    engine.bind(model)
    return engine


@pytest.mark.parametrize("policy", ["qwen3", "llama tied"])
def test_each_of_twenty_syncs_is_sampled_from(servers, policy):
    model = adapted(policy)
    engine = make_engine(model, servers[policy])
    assert engine.adapter == "separate"
    everything = sum(weight.nbytes for weight in model.parameters())
    before = None
    for version in range(1, 21):
        renew(model, version, scale=0.1)
        sent = sync(engine, model, base=version == 1)["bytes"]
        assert sent == (everything if version == 1 else adapter_bytes(model))
        found = assert_like_merged(engine, model)
        assert before is None or not any(map(torch.equal, found, before))
        before = found
        assert engine.served_model == f"policy-{version}"
        if version > 1:
            body = {"token_ids": [1], "sampling_params": {"max_tokens": 1}, "model": f"policy-{version - 1}"}
            with pytest.raises(RefusedError, match=rf"404: The model `policy-{version - 1}` does not exist"):
                engine._servers[0].post("/inference/v1/generate", body)
    with torch.no_grad():  # another base can follow
        for name, parameter in model.named_parameters():
            if "lora_" not in name and parameter.ndim > 1:
                parameter.copy_(parameter.flip(0))
    sync(engine, model, base=True)
    assert_like_merged(engine, model)


def test_another_run_and_merged_weights_may_follow(servers):
    """With the same versions, of which the server has had others."""
    model = adapted(target_modules=["v_proj", "down_proj"])
    for _ in range(2):
        engine = make_engine(model, servers["qwen3"])
        for seed in (1, 2):
            renew(model, seed)
            sync(engine, model, base=seed == 1)
            assert_like_merged(engine, model)
    merged = make_engine(model, servers["qwen3"], adapter="merged")
    merged.update_weights(checkpoint_weights(model, model.named_parameters()), version=1)
    assert_like_merged(merged, model)
    with pytest.raises(WeightsMismatchError, match="another trainer"):
        engine.generate([[1]], SamplingConfig(max_new_tokens=1), num_generations=1, seed=0)


def test_an_adapter_that_the_server_has_lost(servers):
    model = adapted()
    engine = make_engine(model, servers["qwen3"])
    sync(engine, model, base=True)
    engine._servers[0]._act("/v1/unload_lora_adapter", {"lora_name": "policy-1"})
    with pytest.raises(WeightsMismatchError, match="of version 1, but no adapter 'policy-1'"):
        assert_like_merged(engine, model)


def test_adapters_that_arrive_otherwise_are_detected(servers, monkeypatch):
    model = adapted()
    engine = make_engine(model, servers["qwen3"])
    sync(engine, model, base=True)

    def other(adapter, dtype, checksums):
        weights = adapter_tensors(adapter, dtype, checksums)
        (name,) = (name for name in weights if "layers.1.mlp.down_proj.lora_A" in name)
        weights[name].view(torch.int32)[-1, -1] ^= 1
        return weights

    with monkeypatch.context() as patch:
        patch.setattr("pl_grouprl.rollout.vllm.fleet.adapter_tensors", other)
        with pytest.raises(WeightsMismatchError, match=r"1 differ: \S*layers.1.mlp.down_proj.lora_A"):
            sync(engine, model)
    assert engine.version is None
    sync(engine, model)  # the base is still there
    assert_like_merged(engine, model)


def test_what_servers_cannot_apply_is_merged(servers):
    for model, server in (
        (adapted(), servers["merged"]),
        (adapted(use_dora=True), servers["qwen3"]),
        (adapted(r=16), servers["qwen3"]),
    ):
        engine = make_engine(model, server)
        assert engine.adapter == "merged"
        engine.update_weights(checkpoint_weights(model, model.named_parameters()), version=1)
        assert_like_merged(engine, model)
    engine = make_engine(adapted(), servers["merged"], adapter="separate")
    with pytest.raises(ValueError, match="--enable-lora --max-lora-rank 8"):
        sync(engine, engine.model, base=True)
