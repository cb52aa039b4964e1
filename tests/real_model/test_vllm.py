"""vLLM's CPU build: the policy's tokens and log-probabilities, before and after an update, and an exported folder."""

import copy
import json
import logging
import os
import subprocess
import sys
from contextlib import ExitStack

import pytest
import torch
from helpers.adapted import renew
from helpers.adapted import sync as send_adapter
from helpers.engines import new_engine, sync
from helpers.rollouts import greedily, reference_logprobs
from helpers.serving import Server
from helpers.smollm2 import QUESTIONS, messages, prompt_ids

from pl_grouprl.distributed.weight_stream import checkpoint_weights
from pl_grouprl.models import LoRAAdapter
from pl_grouprl.rollout import VLLMServerRolloutEngine
from pl_grouprl.types import SamplingConfig

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm")

COUNT = 12
SERVE = """
import json, sys
from vllm import LLM, SamplingParams

folder, conversations, count = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
llm = LLM(folder, dtype="float32", enforce_eager=True, max_model_len=512, max_num_seqs=8)
outputs = llm.chat(conversations, SamplingParams(temperature=0.0, max_tokens=count), use_tqdm=False)
print("RESULT", json.dumps([[output.prompt_token_ids, list(output.outputs[0].token_ids)] for output in outputs]))
"""


@pytest.fixture(autouse=True)
def _httpx_logs_as_before():
    """vLLM's engine lowers what its HTTP client logs."""
    logger = logging.getLogger("httpx2")
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.fixture(scope="module")
def prompts(tokenizer):
    return [prompt_ids(tokenizer, question) for question in QUESTIONS]


def test_rollouts_and_weight_sync(model, tokenizer, prompts):
    policy = copy.deepcopy(model)
    engine = new_engine("vllm", max_model_len=512)
    try:
        engine.bind(policy, tokenizer)
        first = compare(engine, policy, prompts)
        train(policy, prompts)
        second = compare(engine, policy, prompts)
    finally:
        engine.close()
    assert first != second


def compare(engine, policy, prompts):
    """Sync the weights, and compare greedy tokens and log-probabilities of samples; returns the samples."""
    sync(engine, policy)
    greedy = engine.generate(prompts, SamplingConfig(max_new_tokens=COUNT, temperature=0.0), num_generations=1, seed=0)
    assert [group[0].token_ids for group in greedy] == [greedily(policy, prompt, COUNT) for prompt in prompts]
    sampling = SamplingConfig(max_new_tokens=COUNT)
    groups = engine.generate(prompts, sampling, num_generations=4, seed=1)
    largest = 0.0
    for prompt, group in zip(prompts, groups, strict=True):
        for rollout in group:
            expected = reference_logprobs(policy, prompt, rollout, sampling)
            largest = max(largest, (torch.tensor(rollout.logprobs) - expected).abs().max().item())
            assert rollout.finish_reason in ("stop", "length")
    print(f"\nlog-probabilities of vLLM and of the policy differ by {largest:.1e} nats at most")
    assert largest < 1e-3
    return [rollout.token_ids for group in groups for rollout in group]


@pytest.mark.parametrize("place", ["process", "server"])
def test_an_adapter_alone(model, tokenizer, converted, prompts, place, tmp_path):
    """How much less is sent, and that it is sampled from."""
    policy = LoRAAdapter(r=16, alpha=32).add_to(copy.deepcopy(model)).eval()
    sampling = SamplingConfig(max_new_tokens=COUNT)
    options = ["--load-format", "dummy", "--max-model-len", "512", "--enable-lora", "--max-lora-rank", "16"]
    with ExitStack() as opened:
        if place == "server":
            server = Server(converted, tmp_path / "log", *options).start()
            opened.callback(server.stop)
            engine = VLLMServerRolloutEngine(server.wait().url)
        else:
            engine = new_engine("vllm", max_model_len=512)
        opened.callback(engine.close)
        engine.bind(policy, tokenizer)
        assert engine.adapter == "separate"
        for seed in range(3):
            renew(policy, seed, scale=0.02)
            figures = send_adapter(engine, policy, base=seed == 0)
            print(f"\n{figures['bytes']:,.0f} bytes in {figures['seconds']:.2f} s")
            groups = engine.generate(prompts, sampling, num_generations=1, seed=1)
            for prompt, (rollout,) in zip(prompts, groups, strict=True):
                expected = reference_logprobs(policy, prompt, rollout, sampling)
                torch.testing.assert_close(torch.tensor(rollout.logprobs), expected, atol=1e-3, rtol=0)
        assert figures["bytes"] == 4 * 4_884_480
        if place == "server":
            merged = VLLMServerRolloutEngine(engine.urls, adapter="merged")
        else:
            engine.close()
            merged = new_engine("vllm", max_model_len=512, adapter="merged")
        opened.callback(merged.close)
        merged.bind(policy, tokenizer)
        for version in (1, 2):  # the first starts vLLM
            weights = checkpoint_weights(policy, policy.named_parameters())
            figures = merged.update_weights(weights, version=version)
        print(f"\nmerged: {figures['bytes']:,.0f} bytes in {figures['seconds']:.2f} s")
        assert figures["bytes"] == 4 * 134_515_008


def train(policy, prompts):
    """A gradient step large enough that other tokens follow."""
    tokens = torch.tensor([prompts[0]])
    policy(tokens, labels=tokens).loss.backward()
    torch.optim.SGD(policy.parameters(), lr=0.1).step()
    policy.zero_grad()


def test_an_exported_folder_is_served(model, converted, prompts):
    """By vLLM alone, in a process without this package."""
    conversations = json.dumps([messages(question) for question in QUESTIONS])
    environment = {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-c", SERVE, str(converted), conversations, str(COUNT)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    lines = [line.removeprefix("RESULT ") for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert len(lines) == 1, done.stderr[-3000:]
    served = json.loads(lines[0])
    assert [prompt for prompt, _ in served] == prompts
    assert [tokens for _, tokens in served] == [greedily(model, prompt, COUNT) for prompt in prompts]
