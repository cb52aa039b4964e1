"""An engine of fake servers: its options, and servers that it refuses."""

import pytest
import torch
from helpers.server_engines import GENERATE, PROMPTS, at, make_engine, sample, started, weights

from pl_grouprl.distributed.checksum import WeightsMismatchError
from pl_grouprl.rollout import VLLMServerRolloutEngine
from pl_grouprl.rollout.engine import SyncedRolloutEngine
from pl_grouprl.types import SamplingConfig


def test_a_server_that_stays_away_ends_the_run(policy, servers):
    server = servers()
    engine = started(policy, server, timeout=0.5)
    assert isinstance(engine, SyncedRolloutEngine)
    server.close()
    for use in (lambda: sample(engine), lambda: engine.update_weights(weights(policy), version=2)):
        with pytest.raises(RuntimeError, match=rf"{server.url} did not come back .*--port {server.port}"):
            use()


def test_another_trainer_is_noticed(policy, servers):
    server = servers()
    engine = started(policy, server)
    started(policy, server)  # the same number
    with pytest.raises(WeightsMismatchError, match="another trainer"):
        sample(engine)


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        ((200, b"hello"), RuntimeError, "not a sampling server"),
        ((404, b""), RuntimeError, "not a sampling server"),
        ((401, {"error": "the token is wrong"}), RuntimeError, "401: the token is wrong"),
    ],
)
def test_answers_that_are_no_sampling_server_s(policy, servers, answer, error, message):
    server = servers()
    server.before = lambda path: answer
    with pytest.raises(error, match=message):
        started(policy, server)


def test_requests_that_cannot_be_served(policy, servers):
    server = servers()
    engine = make_engine(policy, server)
    with pytest.raises(RuntimeError, match="has no weights"):
        sample(engine)
    engine.update_weights(weights(policy), version=1)
    for options, message in (
        ({"prompts": [[1] * 511]}, r"prompts\[0\]"),
        ({"prompts": [[1]], "media": [{"pixel_values": torch.zeros(1)}]}, "images or videos"),
        ({"prompts": [[1]], "sampling": SamplingConfig(stop=("a",))}, "no tokenizer"),
    ):
        with pytest.raises(ValueError, match=message):
            sample(engine, **options)
    server.before = at(GENERATE, lambda: (400, {"error": {"message": "no"}}))
    with pytest.raises(ValueError, match="400: no"):
        sample(engine)
    with pytest.raises(ValueError, match="bind"):
        sample(VLLMServerRolloutEngine())


@pytest.mark.parametrize(
    ("info", "options"),
    [
        ({"model_type": "qwen3"}, {}),
        ({"logprobs_mode": "raw_logprobs"}, {}),
        ({"vocab_size": 62}, {}),
        ({"dtype": "bfloat16"}, {"dtype": "float32"}),
    ],
)
def test_a_server_of_another_model_is_refused(policy, servers, info, options):
    with pytest.raises(ValueError, match=next(iter(info))):
        started(policy, servers(**info), **options)


def test_a_server_under_two_names_is_refused(policy, servers):
    url = servers().url
    engine = VLLMServerRolloutEngine([url, f"{url}/"], timeout=3)
    engine.bind(policy)
    with pytest.raises(ValueError, match="same server"):
        engine.update_weights(weights(policy), version=1)


@pytest.mark.parametrize(
    "options",
    [
        *({"urls": []}, {"urls": 2 * ["http://127.0.0.1:1"]}, {"timeout": 0}, {"bucket_mib": 0}),
        *({"adapter": "both"}, {"in_flight": "drop"}, {"max_concurrent_requests": 0}),
    ],
)
def test_options_are_checked(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        VLLMServerRolloutEngine(**options)


def test_the_token_is_sent(policy, servers, monkeypatch):
    server = servers()
    monkeypatch.setenv("PL_GROUPRL_TOKEN", "secret")
    for options, expected in (({}, "Bearer secret"), ({"token": "mine"}, "Bearer mine")):
        engine = started(policy, server, **options)
        assert server.headers["Authorization"] == expected
        sample(engine, PROMPTS[:1])
        assert server.headers["Authorization"] == expected
    monkeypatch.delenv("PL_GROUPRL_TOKEN")
    started(policy, server)
    assert "Authorization" not in server.headers


@pytest.mark.parametrize(
    "url",
    [
        *("127.0.0.1:8000", "ftp://host", "http://", "http://user:word@host:1", "http://:word@h:1", "http://h?a=b"),
        *("http://h#a", "http://h:0", "http://h:99999", "http://h:abc"),
    ],
)
def test_malformed_urls_are_refused(url):
    with pytest.raises(ValueError, match=r"http://127\.0\.0\.1:8000") as error:
        VLLMServerRolloutEngine(url)
    assert "word" not in str(error.value)


def test_a_token_must_fit_into_a_header():
    with pytest.raises(ValueError, match="headers") as error:
        VLLMServerRolloutEngine(token="sec\nret")
    assert "ret" not in str(error.value).replace("carry", "")
