"""An engine of fake servers: its options, and servers that it refuses."""

import pytest
import torch
from helpers.server_engines import PROMPTS, SAMPLING, make_engine, weights

from pl_grouprl.distributed.checksum import WeightsMismatchError
from pl_grouprl.rollout import VLLMServerRolloutEngine
from pl_grouprl.rollout.engine import AdapterWeights, SyncedRolloutEngine
from pl_grouprl.types import SamplingConfig


def test_it_is_a_synced_engine(policy, servers):
    assert isinstance(make_engine(policy, servers()), SyncedRolloutEngine)


def test_a_server_that_stays_away_ends_the_run(policy, servers):
    server = servers()
    engine = make_engine(policy, server)
    engine.update_weights(weights(policy), version=1)
    server.close()
    engine._servers[0].timeout = 0.5
    told = rf"at {server.url} did not come back within 0.5 seconds .*--host 127\.0\.0\.1 --port {server.port}"
    with pytest.raises(RuntimeError, match=told):
        engine.generate(PROMPTS, SAMPLING, num_generations=1, seed=0)
    with pytest.raises(RuntimeError, match="did not come back"):
        engine.update_weights(weights(policy), version=2)


def test_another_trainer_is_noticed(policy, servers):
    server = servers()
    engine, other = make_engine(policy, server), make_engine(policy, server)
    engine.update_weights(weights(policy), version=1)
    other.update_weights(weights(policy), version=1)  # the same number
    with pytest.raises(WeightsMismatchError, match="Does another trainer use this server"):
        engine.generate(PROMPTS, SAMPLING, num_generations=1, seed=0)


def test_what_vllm_refuses(policy, servers):
    server = servers()
    engine = make_engine(policy, server)
    engine.update_weights(weights(policy), version=1)
    server.before = lambda path: (400, {"error": {"message": "no"}}) if path == "/inference/v1/generate" else None
    with pytest.raises(ValueError, match="answers 400: no"):
        engine.generate([[1]], SAMPLING, num_generations=1, seed=0)
    for answer in ((200, b"hello"), (404, b"")):
        server.before = lambda path, answer=answer: answer
        with pytest.raises(RuntimeError, match="this is not a sampling server; start one with python -m"):
            engine.update_weights(weights(policy), version=2)
    server.before = lambda path: (401, {"error": "the token is missing or wrong"})
    with pytest.raises(RuntimeError, match="answers 401: the token is missing or wrong"):
        engine.update_weights(weights(policy), version=2)


def test_requests_that_cannot_be_served(policy, servers):
    engine = make_engine(policy, servers())
    with pytest.raises(RuntimeError, match="has no weights; call update_weights before generate"):
        engine.generate(PROMPTS, SAMPLING, num_generations=1, seed=0)
    engine.update_weights(weights(policy), version=1)
    with pytest.raises(ValueError, match=r"prompts\[0\] has 511 tokens"):
        engine.generate([[1] * 511], SAMPLING, num_generations=1, seed=0)
    with pytest.raises(ValueError, match="has images or videos"):
        engine.generate([[1]], SAMPLING, num_generations=1, seed=0, media=[{"pixel_values": torch.zeros(1)}])
    with pytest.raises(ValueError, match="the engine has no tokenizer"):
        engine.generate([[1]], SamplingConfig(stop=("a",)), num_generations=1, seed=0)
    with pytest.raises(ValueError, match="only takes merged weights"):
        engine.update_weights(iter(()), version=2, adapter=AdapterWeights({}, ()))
    with pytest.raises(ValueError, match=r"has no model; call bind\(model, tokenizer\)"):
        VLLMServerRolloutEngine().generate([[1]], SAMPLING, num_generations=1, seed=0)


@pytest.mark.parametrize(
    ("info", "message"),
    [
        ({"model_type": "qwen3"}, "has model_type 'qwen3', not 'llama'; start it with --model of the policy"),
        (
            {"logprobs_mode": "raw_logprobs"},
            "has logprobs_mode 'raw_logprobs', not 'processed_logprobs'; start it with",
        ),
        ({"vocab_size": 62}, "has vocab_size 62, not 61; start it with --model of the policy"),
    ],
)
def test_a_server_of_another_model_is_refused(policy, servers, info, message):
    with pytest.raises(ValueError, match=message):
        make_engine(policy, servers(**info)).update_weights(weights(policy), version=1)


def test_a_server_under_two_names_is_refused(policy, servers):
    url = servers().url
    engine = VLLMServerRolloutEngine([url, f"{url}/"], timeout=3)
    engine.bind(policy)
    with pytest.raises(ValueError, match="of which two are the same server"):
        engine.update_weights(weights(policy), version=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"urls": []}, "urls is .*; it must be at least one url, each once"),
        ({"urls": 2 * ["http://127.0.0.1:1"]}, "urls is .*; it must be at least one url, each once"),
        ({"timeout": 0}, "timeout is 0; it must be larger than 0"),
        ({"bucket_mib": 0}, "bucket_mib is 0; it must be at least 1"),
        ({"adapter": "separate"}, "adapter is 'separate'; it must be 'merged'"),
        ({"in_flight": "drop"}, "in_flight is 'drop'; it must be 'keep' or 'restart'"),
        ({"max_concurrent_requests": 0}, "max_concurrent_requests is 0; it must be at least 1"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        VLLMServerRolloutEngine(**options)


def test_the_token_is_sent(policy, servers, monkeypatch):
    server = servers()
    monkeypatch.setenv("PL_GROUPRL_TOKEN", "secret")
    for options, expected in (({}, "Bearer secret"), ({"token": "mine"}, "Bearer mine")):
        engine = make_engine(policy, server, **options)
        engine.update_weights(weights(policy), version=1)
        assert server.headers["Authorization"] == expected
        engine.generate([[1]], SAMPLING, num_generations=1, seed=0)
        assert server.headers["Authorization"] == expected
    monkeypatch.delenv("PL_GROUPRL_TOKEN")
    make_engine(policy, server).update_weights(weights(policy), version=1)
    assert "Authorization" not in server.headers


@pytest.mark.parametrize(
    "url",
    [
        *("127.0.0.1:8000", "ftp://host", "http://", "http://user:word@host:1", "http://:word@h:1", "http://h?a=b"),
        *("http://h#a", "http://h:0", "http://h:99999", "http://h:abc"),
    ],
)
def test_malformed_urls_are_refused(url):
    with pytest.raises(ValueError, match=r"it must be like http://127\.0\.0\.1:8000") as error:
        VLLMServerRolloutEngine(url)
    assert "word" not in str(error.value)


def test_a_token_must_fit_into_a_header():
    with pytest.raises(ValueError, match="characters not allowed in headers") as error:
        VLLMServerRolloutEngine(token="sec\nret")
    assert "ret" not in str(error.value).replace("carry", "")
