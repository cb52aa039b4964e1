"""The experts in answers of vLLM's server, read from a stand-in of its route."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest
import torch
from helpers.fake_vllm import FakeVLLM
from helpers.tiny_models import tiny_model

from pl_grouprl.rollout import VLLMServerRolloutEngine
from pl_grouprl.rollout.engine import StopStrings
from pl_grouprl.rollout.vllm.requests import Completion
from pl_grouprl.types import RolloutGroup, SamplingConfig

PROMPT = [3, 4, 5]


@pytest.fixture
def served():
    """An engine, its server, and what the server adds to an answer; the model's first layer has no experts."""
    server = FakeVLLM()
    model = tiny_model("qwen3_moe", num_hidden_layers=3, mlp_only_layers=[0])
    engine = VLLMServerRolloutEngine(server.url, router_replay=True)
    engine.bind(model)
    server.model, engine.version = model, 0
    server.version = engine.weight_version
    yield engine, server
    engine.close()
    server.close()


def test_experts_are_those_of_the_layers_that_have_any(served):
    engine, server = served
    record = np.arange(5 * 3 * 2, dtype=np.uint8).reshape(5, 3, 2)  # of all tokens but the last, as vLLM sends them

    def spoil(answer):
        if "choices" in answer:
            file = io.BytesIO()
            np.save(file, record)
            answer["choices"][0]["routed_experts"] = base64.b64encode(file.getvalue()).decode()

    server.spoil = spoil
    ((rollout,),) = engine.generate([PROMPT], SamplingConfig(max_new_tokens=3), num_generations=1, seed=0)
    group = RolloutGroup(PROMPT, [rollout])
    expected = torch.from_numpy(record[:, 1:].astype(np.int16))
    assert torch.equal(group.routed_experts, expected[:3])
    assert torch.equal(rollout.routed_experts, torch.cat([expected[3:], torch.full((1, 2, 2), -1)]))


def test_a_server_that_returns_none_is_refused(served):
    engine, _ = served
    with pytest.raises(ValueError, match="--enable-return-routed-experts"):
        engine.generate([PROMPT], SamplingConfig(max_new_tokens=3), num_generations=1, seed=0)


def test_a_sequence_that_a_stop_string_cut_has_no_more_experts_than_tokens():
    completion = Completion(StopStrings(None, ()))
    completion.add([1, 2], [0.0, 0.0], "stop")
    completion.routed_experts = np.ones((9, 1, 2), dtype=np.uint16)
    record = completion.rollout(3, [0]).routed_experts
    assert record.shape == (5, 1, 2)
    assert record[:, 0, 0].tolist() == [1, 1, 1, 1, -1]
