"""Servers with vLLM behind them: what they sample, what weights do to it, and what they refuse."""

import http.client
import json
import re
import threading
import time
from dataclasses import asdict
from itertools import chain

import pytest
import torch
from helpers.serving import Server
from helpers.tiny_models import tiny_model
from safetensors.torch import load, save

from pl_grouprl.rollout import HFRolloutEngine
from pl_grouprl.rollout.server import VLLMServerRolloutEngine
from pl_grouprl.sync.sampler import SamplerLostError, WeightsMismatchError
from pl_grouprl.types import SamplingConfig

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm

TOKEN = "a-token-of-the-tests"
PROMPTS = [[1, 2, 3, 4, 5], [9], [20, 11, 7] * 9, [3, 3], [5, 4, 3, 2], [1, 2, 3, 4, 5]]
GREEDY = SamplingConfig(max_new_tokens=16, temperature=0.0)


def make_policy(tied, seed=0):
    # Heads of a size that vLLM has kernels for on CPUs.
    return tiny_model("qwen3", seed=seed, head_dim=32, num_attention_heads=2, tie_word_embeddings=tied)


def disturb(policy, seed):
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))


def weights(policy):
    return ((name, parameter.detach()) for name, parameter in policy.named_parameters())


def ids(groups):
    return [[rollout.token_ids for rollout in group] for group in groups]


def assert_samples_like(policy, engine, prompts=PROMPTS):
    found = engine.generate(prompts, GREEDY, num_generations=2, seed=0)
    expected = HFRolloutEngine(policy).generate(prompts, GREEDY, num_generations=2, seed=0)
    assert ids(found) == ids(expected)
    for one, other in zip(chain(*found), chain(*expected), strict=True):
        torch.testing.assert_close(torch.tensor(one.logprobs), torch.tensor(other.logprobs), atol=1e-4, rtol=0)
        assert one.finish_reason == other.finish_reason


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """Two of an untied model, one of a tied one; all start at once."""
    folder = tmp_path_factory.mktemp("servers")
    for tied in (False, True):
        make_policy(tied).save_pretrained(folder / f"tied-{tied}")
    started = [
        Server(folder / f"tied-{tied}", folder / f"{place}.log", "--load-format", form, token=TOKEN).start()
        for place, (tied, form) in enumerate([(False, "dummy"), (False, "auto"), (True, "dummy")])
    ]
    try:
        yield [server.wait() for server in started]
    finally:
        codes = [server.stop() for server in started]
    assert codes == [0, 0, 0]
    assert TOKEN not in "".join(server.log.read_text() for server in started)


def make_engine(policy, *servers, **options):
    engine = VLLMServerRolloutEngine([server.url for server in servers], token=TOKEN, timeout=60, **options)
    engine.bind(policy)
    engine._bucket_bytes = 20_000  # several buckets
    return engine


@pytest.mark.parametrize("tied", [False, True])
def test_it_samples_from_the_latest_weights(servers, tied):
    policy = make_policy(tied, seed=3)
    engine = make_engine(policy, servers[2 if tied else 0])
    outputs = []
    for version in (1, 2, 5):
        engine.update_weights(weights(policy), version=version)
        assert_samples_like(policy, engine)
        outputs.append(ids(engine.generate(PROMPTS, GREEDY, num_generations=1, seed=0)))
        disturb(policy, seed=version)
    assert outputs[0] != outputs[1] != outputs[2]


def test_two_servers_sample_what_one_does(servers):
    policy = make_policy(False)
    one, two = make_engine(policy, servers[0]), make_engine(policy, *servers[:2], max_concurrent_requests=2)
    sampling = SamplingConfig(max_new_tokens=12, temperature=0.9, top_k=20, stop_token_ids=(4,))
    found = []
    for version, engine in enumerate((one, two, one)):
        engine.update_weights(weights(policy), version=version + 1)
        found.append(engine.generate(PROMPTS, sampling, num_generations=4, seed=7))
    assert ids(found[0]) == ids(found[1]) == ids(found[2])
    assert len({tuple(tokens) for tokens in chain(*ids(found[0]))}) > 20  # equal prompts have other seeds
    assert ids(found[0]) != ids(one.generate(PROMPTS, sampling, num_generations=4, seed=8))
    per_prompt = [
        one.generate([prompt], sampling, num_generations=4, seed=7, prompt_indices=[place])[0]
        for place, prompt in enumerate(PROMPTS)
    ]
    assert ids(per_prompt) == ids(found[0])


def test_a_single_bit_on_one_side_is_caught(servers, monkeypatch):
    policy = make_policy(False)
    engine = make_engine(policy, *servers[:2])
    client = engine._clients[1]
    send = client.send_bucket

    def flip(update, index, bucket):
        tensors = load(bucket)
        if "model.layers.1.mlp.up_proj.weight" in tensors:
            tensors["model.layers.1.mlp.up_proj.weight"].view(torch.int32)[5, 6] ^= 1
        send(update, index, save(tensors))

    monkeypatch.setattr(client, "send_bucket", flip)
    with pytest.raises(WeightsMismatchError, match=r"1 differ: model\.layers\.1\.mlp\.gate_up_proj\.weight differs"):
        engine.update_weights(weights(policy), version=1)
    monkeypatch.undo()
    engine.update_weights(weights(policy), version=2)
    assert_samples_like(policy, engine)


def test_a_weight_that_was_left_out_is_caught(servers):
    policy = make_policy(False)
    engine = make_engine(policy, servers[0])
    some = [(name, weight) for name, weight in weights(policy) if "layers.1.mlp.down_proj" not in name]
    with pytest.raises((WeightsMismatchError, RuntimeError), match=r"layers\.1\.mlp\.down_proj"):
        engine.update_weights(some, version=1)
    engine.update_weights(weights(policy), version=2)
    assert_samples_like(policy, engine)


def test_a_weight_that_the_model_does_not_have_is_refused(servers):
    policy = make_policy(False)
    engine = make_engine(policy, servers[0])
    with pytest.raises((WeightsMismatchError, RuntimeError), match="nowhere"):
        engine.update_weights([*weights(policy), ("model.nowhere.weight", torch.ones(3))], version=1)
    engine.update_weights(weights(policy), version=2)
    assert_samples_like(policy, engine)


def test_an_update_begun_over_an_unfinished_one_starts_cleanly(servers):
    policy = make_policy(False)
    engine = make_engine(policy, servers[0])
    engine.update_weights(weights(policy), version=1)
    client = engine._clients[0]
    stale = client.begin_weights()  # a trainer that dies here
    client.send_bucket(stale, 0, save({"lm_head.weight": torch.zeros(61, 32)}))
    disturb(policy, seed=1)
    engine.update_weights(weights(policy), version=2)
    assert_samples_like(policy, engine)
    status, answer = ask(servers[0], "POST", f"/weights/bucket?update={stale}&index=1", save({"a": torch.ones(1)}))
    assert (status, answer["updating"], answer["version"]) == (409, False, 2)
    client.abort_weights(stale)  # which is not the present one
    assert_samples_like(policy, engine)


def test_a_bucket_that_comes_twice_counts_once(servers):
    policy = make_policy(False)
    engine = make_engine(policy, servers[0])
    client = engine._clients[0]
    send = client.send_bucket
    client.send_bucket = lambda *bucket: (send(*bucket), send(*bucket))
    engine.update_weights(weights(policy), version=1)
    assert_samples_like(policy, engine)
    assert client.end_weights(engine._updates[0], 1, ["model.norm.weight"])  # an end that comes twice, too
    update = client.begin_weights()
    status, answer = ask(servers[0], "POST", f"/weights/bucket?update={update}&index=1", save({"a": torch.ones(1)}))
    assert (status, answer["error"]) == (422, "index is 1, but bucket 0 comes next.")


def test_rollouts_end_where_an_update_begins(servers):
    policy = make_policy(False)
    engine, other = make_engine(policy, servers[0]), make_engine(policy, servers[0])
    engine.update_weights(weights(policy), version=1)
    begin = other._clients[0].begin_weights

    timer = threading.Timer(0.3, begin)
    timer.start()
    long = SamplingConfig(max_new_tokens=400, temperature=0.0)
    with pytest.raises(WeightsMismatchError, match="Does another trainer use this server"):
        engine.generate(PROMPTS, long, num_generations=8, seed=0)
    timer.join()
    with pytest.raises(RuntimeError, match="no weights"):
        engine.generate(PROMPTS, GREEDY, num_generations=1, seed=0)


def test_weights_that_were_dropped_are_lost(servers):
    policy = make_policy(False)
    engine = make_engine(policy, servers[0])
    engine.update_weights(weights(policy), version=1)
    engine._clients[0].abort_weights(engine._updates[0])
    with pytest.raises(SamplerLostError):
        engine.generate(PROMPTS, GREEDY, num_generations=1, seed=0)


def test_rollouts_of_a_disconnected_client_are_stopped(servers):
    policy = make_policy(False)
    engine = make_engine(policy, servers[0])
    engine.update_weights(weights(policy), version=1)
    request = rollout_request(engine, seeds=list(range(640)), max_new_tokens=400)  # minutes of work
    connection = connect(servers[0])
    connection.request("POST", "/generate", json.dumps(request), headers())
    assert connection.getresponse().readline()
    connection.sock.close()
    connection.close()
    started = time.monotonic()
    engine.generate([[1, 2]], SamplingConfig(max_new_tokens=1, temperature=0), num_generations=1, seed=0)
    assert time.monotonic() - started < 20


def test_tokens_that_are_never_sampled(servers):
    policy = make_policy(False)
    engine = make_engine(policy, servers[0])
    engine.update_weights(weights(policy), version=1)
    ((free, *_),) = engine.generate([[9]], GREEDY, num_generations=1, seed=0)
    engine.policy.never = sorted({*free.token_ids, 100})  # one that the model does not have
    ((bound, *_),) = engine.generate([[9]], GREEDY, num_generations=1, seed=0)
    assert set(free.token_ids).isdisjoint(bound.token_ids)


def test_stop_strings_need_a_tokenizer_at_the_server(servers):
    policy = make_policy(False)
    engine = make_engine(policy, servers[0])
    engine.bind(policy, type("Letters", (), {"eos_token_id": None, "decode": lambda *a, **k: ""})())
    engine.update_weights(weights(policy), version=1)
    with pytest.raises(ValueError, match=r"answers 422: .*tokenizer"):
        engine.generate(PROMPTS, SamplingConfig(stop=("a",)), num_generations=1, seed=0)


# What is not served


def connect(server):
    return http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)


def headers(path="/generate"):
    kind = "octet-stream" if path.startswith("/weights/bucket") else "json"
    return {"Content-Type": f"application/{kind}", "Authorization": f"Bearer {TOKEN}"}


def ask(server, method, path, body=None, **options):
    connection = connect(server)
    try:
        connection.request(method, path, body, options.get("headers", headers(path)))
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def rollout_request(engine, seeds=(1,), **sampling):
    return {
        "version": engine.version,
        "update": engine._updates[0],
        "sampling": {**asdict(SamplingConfig(max_new_tokens=2)), **sampling},
        "requests": [{"prompt": [1, 2], "seeds": list(seeds)}],
    }


ROUTES = [
    "/info",
    "/generate",
    "/weights/begin",
    "/weights/bucket",
    "/weights/end",
    "/weights/abort",
    "/nowhere",
    "/docs",
]


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("given", [None, "Bearer", "Bearer wrong", TOKEN, f"Basic {TOKEN}", f"Bearer {TOKEN}x"])
def test_every_route_needs_the_token(servers, path, given):
    sent = {} if given is None else {"Authorization": given}
    status, answer = ask(servers[0], "GET" if path == "/info" else "POST", path, None, headers=sent)
    assert status == 401
    assert answer == {"error": "the token is missing or wrong; pass token=, or set PL_GROUPRL_TOKEN."}


def test_liveness_needs_no_token(servers):
    assert ask(servers[0], "GET", "/health", headers={}) == (200, {"status": "ok"})


def test_the_engine_says_that_the_token_is_wrong(servers, monkeypatch):
    monkeypatch.delenv("PL_GROUPRL_TOKEN", raising=False)
    for token in (None, "wrong"):
        engine = VLLMServerRolloutEngine(servers[0].url, token=token)
        engine.bind(make_policy(False))
        with pytest.raises(RuntimeError, match="answers 401: the token is missing or wrong; pass token="):
            engine.update_weights(iter(()), version=1)


def test_the_token_is_not_in_the_process_list(servers):
    import psutil

    process = psutil.Process(servers[0].process.pid)
    for own in [process, *process.children(recursive=True)]:
        assert TOKEN not in " ".join(own.cmdline())
        if own is not process:
            assert "PL_GROUPRL_TOKEN" not in own.environ()


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/generate", b"", 422, "the body is invalid"),
        ("/generate", b"\x80\x04\x95pickle", 422, "the body is invalid"),
        ("/generate", b"[" * 100_000, 422, "the body is invalid"),
        ("/generate", b"{}", 422, "version: Field required"),
        ("/generate", {"requests": "all"}, 422, "requests: Input should be a valid"),
        ("/generate", {"requests": [{"prompt": [1, "2"], "seeds": [1]}]}, 422, r"requests\.0\.prompt\.1"),
        ("/generate", {"requests": [{"prompt": [-1], "seeds": [1]}]}, 422, r"requests\.0\.prompt\.0"),
        ("/generate", {"requests": [{"prompt": [1], "seeds": [2**63]}]}, 422, r"requests\.0\.seeds\.0"),
        ("/generate", {"requests": [{"prompt": [], "seeds": [1]}]}, 422, r"prompts\[0\] is empty"),
        ("/generate", {"requests": [{"prompt": [61], "seeds": [1]}]}, 422, "vocab_size=61"),
        ("/generate", {"requests": [{"prompt": [1] * 511, "seeds": [1]}]}, 422, "max_model_len=512"),
        ("/generate", {"sampling": {"temperature": -1}}, 422, "temperature is -1.0; it must be 0"),
        (
            "/generate",
            {"sampling": {"temperature": "hot"}},
            422,
            r"sampling\.temperature: Input should be a valid number",
        ),
        ("/generate", {"sampling": {"n": 3}}, 422, r"sampling\.n: Extra inputs"),
        (
            "/generate",
            {"sampling": {"stop_token_ids": 3}},
            422,
            r"sampling\.stop_token_ids: Input should be a valid array",
        ),
        ("/generate", {"sampling": {"stop": ["a"]}}, 422, "tokenizer"),
        ("/generate", {"never": ["x"]}, 422, r"never\.0"),
        ("/generate", {"version": 99}, 409, "version 99 of update"),
        ("/generate", {"update": "x"}, 409, "of update x"),
        ("/weights/begin", b"[]", 422, "the body is invalid"),
        ("/weights/bucket", b"x", 422, "needs .update=ID&index=NUMBER"),
        ("/weights/bucket?update=x&index=-1", b"x", 422, "needs .update=ID&index=NUMBER"),
        ("/weights/bucket?update=x&index=0", b"x", 422, "the body is not in safetensors format"),
        ("/weights/bucket?update=x&index=0", b"\x80\x04\x95" * 100, 422, "the body is not in safetensors format"),
        ("/weights/bucket?update=x&index=0", save({}), 422, "the body has no weights"),
        ("/weights/bucket?update=x&index=0", save({"a": torch.ones(1)}), 409, "update x is not in progress"),
        ("/weights/end", b'{"update": "x", "version": 1}', 422, "names: Field required"),
        ("/weights/end", b'{"update": "x", "version": 7, "names": []}', 409, "update x is not in progress"),
        ("/weights/connect", b"{}", 404, "there is no POST /weights/connect"),
        ("/nowhere", b"{}", 404, "there is no POST /nowhere"),
        ("/info", b"{}", 405, "there is no POST /info"),
    ],
)
def test_malformed_requests_are_refused(serving, path, body, status, message):
    server, engine = serving
    if isinstance(body, dict):
        request = rollout_request(engine)
        sampling = {**request["sampling"], **body.get("sampling", {})}
        body = json.dumps({**request, **body, "sampling": sampling}).encode()
    found, answer = ask(server, "POST", path, body)
    assert found == status, answer
    assert re.search(message, answer["error"]), answer
    assert len(answer["error"]) < 1500
    engine.generate([[1]], GREEDY, num_generations=1, seed=0)  # it lives, and has its weights


@pytest.fixture(scope="module")
def serving(servers):
    engine = make_engine(make_policy(False), servers[1])
    engine.update_weights(weights(make_policy(False)), version=1)
    return servers[1], engine


def test_bodies_have_a_size_limit(serving):
    server, _ = serving
    for path, length in [("/generate", (256 << 20) + 1), ("/weights/bucket?update=x&index=0", (8192 << 20) + 1)]:
        connection = connect(server)
        connection.putrequest("POST", path)
        for name, value in {**headers(path), "Content-Length": str(length)}.items():
            connection.putheader(name, value)
        connection.endheaders()
        response = connection.getresponse()
        assert response.status == 413
        assert f"the body has {length} bytes; at most {length - 1} are read" in json.loads(response.read())["error"]
        connection.close()
    status, answer = ask(server, "POST", "/generate", iter([b"{}"]))  # in chunks, of any length
    expected = "the request has a Transfer-Encoding, which announces no length; send a Content-Length."
    assert (status, answer["error"]) == (411, expected)


def test_web_pages_are_refused(serving):
    for path in ("/weights/begin", "/weights/bucket?update=x&index=0"):
        status, answer = ask(serving[0], "POST", path, b"{}", headers={**headers(), "Content-Type": "text/plain"})
        assert (status, "Content-Type is not application/" in answer["error"]) == (415, True)


def test_no_bucket_is_left(servers):
    import tempfile
    from pathlib import Path

    for folder in (Path("/dev/shm"), Path(tempfile.gettempdir())):
        if folder.is_dir():
            assert not list(folder.glob("pl-grouprl-*"))
