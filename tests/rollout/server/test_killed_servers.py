"""Servers that are killed, and started again or not, with vLLM behind them."""

import threading
import time

import pytest
import torch
from helpers.serving import Server
from helpers.tiny_models import tiny_model

from pl_grouprl.rollout import HFRolloutEngine, VLLMServerRolloutEngine
from pl_grouprl.rollout.engine import SamplerLostError
from pl_grouprl.types import SamplingConfig

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm

PROMPTS = [[1, 2, 3, 4, 5], [9], [20, 11, 7] * 9]
GREEDY = SamplingConfig(max_new_tokens=12, temperature=0.0)
LONG = SamplingConfig(max_new_tokens=450, temperature=0.0)


@pytest.fixture(scope="module")
def policy():
    return tiny_model("qwen3", head_dim=32, num_attention_heads=2, tie_word_embeddings=False)


@pytest.fixture(scope="module")
def server(policy, tmp_path_factory):
    folder = tmp_path_factory.mktemp("killed")
    policy.save_pretrained(folder / "model")
    started = Server(folder / "model", folder / "log", "--load-format", "dummy").start()
    try:
        yield started.wait()
    finally:
        started.stop()


def make_engine(policy, server, timeout=400):
    engine = VLLMServerRolloutEngine(server.url, timeout=timeout)
    engine.bind(policy)
    engine._bucket_bytes = 20_000
    return engine


def weights(policy):
    return ((name, parameter.detach()) for name, parameter in policy.named_parameters())


def assert_samples_like(policy, engine):
    found = engine.generate(PROMPTS, GREEDY, num_generations=1, seed=0)
    expected = HFRolloutEngine(policy).generate(PROMPTS, GREEDY, num_generations=1, seed=0)
    assert [[r.token_ids for r in group] for group in found] == [[r.token_ids for r in group] for group in expected]


def restart_soon(server):
    """Kill the server while what follows is at work, and start it again."""

    def restart():
        time.sleep(0.7)
        server.kill()
        server.start()

    thread = threading.Thread(target=restart)
    thread.start()
    return thread


def test_killed_in_the_middle_of_a_rollout(policy, server):
    import psutil

    engine = make_engine(policy, server)
    engine.update_weights(weights(policy), version=1)
    left = psutil.Process(server.process.pid).children(recursive=True)
    thread = restart_soon(server)
    with pytest.raises(SamplerLostError, match=f"{server.url} .* It was restarted"):
        engine.generate(PROMPTS, LONG, num_generations=8, seed=0)
    thread.join()
    assert not [process for process in left if process.is_running() and process.status() != "zombie"]
    with torch.no_grad():
        policy.lm_head.weight.mul_(-1)
    engine.update_weights(weights(policy), version=2)
    assert_samples_like(policy, engine)


def test_killed_in_the_middle_of_an_update(policy, server):
    engine = make_engine(policy, server)

    def stream():
        for place, weight in enumerate(weights(policy)):
            if place == 12:
                server.kill()
                server.start()
            yield weight

    with pytest.raises(SamplerLostError, match="broke off an update"):
        engine.update_weights(stream(), version=1)
    assert engine.version is None
    engine.update_weights(weights(policy), version=2)
    assert_samples_like(policy, engine)


def test_shapes_that_do_not_fit_are_refused(policy, server):
    engine = make_engine(policy, server)
    wrong = [(n, w[:, :3] if n == "lm_head.weight" else w) for n, w in weights(policy)]
    with pytest.raises(RuntimeError, match="answers 500: "):
        engine.update_weights(wrong, version=1)
    with pytest.raises(RuntimeError, match="failed"):
        engine.generate(PROMPTS, GREEDY, num_generations=1, seed=0)
    server.kill()  # vLLM keeps the weights that do not fit
    server.start().wait()


def test_a_dead_engine_ends_its_server(policy, server):
    import psutil

    make_engine(policy, server).update_weights(weights(policy), version=1)
    for child in psutil.Process(server.process.pid).children(recursive=True):
        if "EngineCore" in " ".join(child.cmdline()):
            child.kill()
    assert server.process.wait(120) is not None
    with pytest.raises(RuntimeError, match="did not come back"):
        make_engine(policy, server, timeout=1).update_weights(weights(policy), version=2)
    server.start().wait()
