"""Servers with vLLM behind them: what they sample, what weights do to it, and what they refuse."""

import asyncio
import json
import threading
import time
import urllib.error
import urllib.request
from itertools import chain

import pytest
import torch
from helpers.serving import Server
from helpers.tiny_models import tiny_model
from helpers.tiny_tokenizers import letters_tokenizer

from pl_grouprl.distributed.checksum import WeightsMismatchError
from pl_grouprl.distributed.weight_stream import checkpoint_weights
from pl_grouprl.rollout import HFRolloutEngine, VLLMServerRolloutEngine
from pl_grouprl.rollout.engine import SamplerLostError
from pl_grouprl.rollout.vllm.scheduler import _Dispatcher
from pl_grouprl.types import SamplingConfig

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm

TOKEN = "a-token-of-the-tests"
PROMPTS = [[1, 2, 3, 4, 5], [9], [20, 11, 7] * 9, [3, 3], [5, 4, 3, 2], [1, 2, 3, 4, 5]]
GREEDY = SamplingConfig(max_new_tokens=16, temperature=0.0)
LONG = SamplingConfig(max_new_tokens=400, temperature=1.0)


def make_policy(family="qwen3", tied=False, seed=0):
    # Heads of a size that vLLM has kernels for on CPUs.
    return tiny_model(family, seed=seed, head_dim=32, hidden_size=64, num_attention_heads=2, tie_word_embeddings=tied)


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
        assert one.weight_versions == [engine.version] * len(one.token_ids)


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """Two of an untied model, one of a tied one, with a tokenizer; all start at once."""
    folder = tmp_path_factory.mktemp("servers")
    for tied in (False, True):
        make_policy("llama" if tied else "qwen3", tied).save_pretrained(folder / f"tied-{tied}")
    letters_tokenizer().save_pretrained(folder / "tied-True")
    started = [
        Server(folder / f"tied-{tied}", folder / f"{place}.log", "--load-format", form, token=TOKEN).start()
        for place, (tied, form) in enumerate([(False, "dummy"), (False, "auto"), (True, "dummy")])
    ]
    try:
        yield [server.wait() for server in started]
    finally:
        for server in started:
            server.stop()
    assert TOKEN not in "".join(server.log.read_text() for server in started)


def make_engine(policy, *servers, version=None, **options):
    engine = VLLMServerRolloutEngine([server.url for server in servers], token=TOKEN, timeout=200, **options)
    engine.bind(policy)
    engine._bucket_bytes = 20_000  # several buckets
    if version is not None:
        engine.update_weights(weights(policy), version=version)
    return engine


@pytest.mark.parametrize("tied", [False, True])
def test_it_samples_from_the_latest_weights(servers, tied):
    policy = make_policy("llama" if tied else "qwen3", tied, seed=3)
    engine = make_engine(policy, servers[2 if tied else 0])
    outputs = []
    for version in (1, 2, 5):
        engine.update_weights(weights(policy), version=version)
        assert_samples_like(policy, engine)
        outputs.append(ids(engine.generate(PROMPTS, GREEDY, num_generations=1, seed=0)))
        disturb(policy, seed=version)
    assert outputs[0] != outputs[1] != outputs[2]
    (folder,) = engine._fleet._folders
    assert list(folder.iterdir()) == []


def test_an_adapter_is_merged(servers):
    peft = pytest.importorskip("peft")
    policy = peft.get_peft_model(make_policy(seed=5), peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    disturb(policy, seed=5)
    engine = make_engine(policy, servers[0])
    engine.update_weights(checkpoint_weights(policy, policy.named_parameters()), version=1)
    assert_samples_like(policy.merge_and_unload(), engine)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_families(family, tied, tmp_path):
    policy = make_policy(family, tied)
    policy.save_pretrained(tmp_path / "model")
    server = Server(tmp_path / "model", tmp_path / "log", "--load-format", "dummy", token=TOKEN).start()
    try:
        engine = make_engine(policy, server.wait())
        for version in (1, 2):
            disturb(policy, seed=version)
            engine.update_weights(weights(policy), version=version)
            assert_samples_like(policy, engine)
    finally:
        server.stop()


def test_two_servers_sample_what_one_does(servers):
    policy = make_policy()
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


def update_during(engine, policy, version, **options):
    """Rollouts with an update in the middle."""
    found = []
    thread = threading.Thread(target=lambda: found.extend(engine.generate(PROMPTS, LONG, **options)))
    thread.start()
    time.sleep(0.5)
    engine.update_weights(weights(policy), version=version)
    thread.join()
    return list(chain(*found))


def test_an_update_in_flight(servers):
    """With the same weights, it changes no token, whether sequences go on or start again."""
    policy = make_policy()
    engine = make_engine(policy, servers[0], version=1)
    expected = list(chain(*engine.generate(PROMPTS, LONG, num_generations=2, seed=3)))
    kept = update_during(engine, policy, 2, num_generations=2, seed=3)
    assert {version for rollout in kept for version in rollout.weight_versions} == {1, 2}
    assert all(rollout.weight_versions == sorted(rollout.weight_versions) for rollout in kept)
    engine.in_flight = "restart"
    again = update_during(engine, policy, 3, num_generations=2, seed=3)
    assert 3 in {version for rollout in again for version in rollout.weight_versions}
    assert all(len(set(rollout.weight_versions)) == 1 for rollout in again)
    for found in (kept, again):
        assert [rollout.token_ids for rollout in found] == [rollout.token_ids for rollout in expected]


def test_sequences_go_on_with_new_weights_and_nothing_of_the_old(servers):
    """Neither keys and values of the running sequences nor those in the prefix cache are from old weights."""
    policy = make_policy()
    engine = make_engine(policy, servers[0], version=1)
    disturb(policy, seed=9)
    rollouts = update_during(engine, policy, 2, num_generations=1, seed=3)
    for prompt, rollout in zip(PROMPTS, rollouts, strict=True):
        tokens = torch.tensor([prompt + rollout.token_ids])
        with torch.no_grad():
            logprobs = policy(tokens).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        expected = logprobs.gather(-1, tokens[0, len(prompt) :, None])[:, 0]
        new = torch.tensor(rollout.weight_versions) == 2
        assert new.any()
        torch.testing.assert_close(torch.tensor(rollout.logprobs)[new], expected[new], atol=1e-4, rtol=0)
    assert_samples_like(policy, engine)


def flip(monkeypatch, name):
    """Flip a bit of a weight on the way to one server."""
    from pl_grouprl.rollout.vllm import fleet

    def save(tensors, path):
        if name in tensors and not flipped:
            flipped.append(name)
            tensors = {**tensors, name: tensors[name].clone()}
            tensors[name].view(torch.int32)[5, 6] ^= 1
        save_file(tensors, path)

    flipped, save_file = [], fleet.save_file
    monkeypatch.setattr(fleet, "save_file", save)


def test_a_single_bit_on_one_side_is_caught(servers, monkeypatch):
    policy = make_policy()
    engine = make_engine(policy, *servers[:2])
    flip(monkeypatch, "model.layers.1.mlp.up_proj.weight")
    with pytest.raises(WeightsMismatchError, match=r"1 differ: model\.layers\.1\.mlp\.gate_up_proj"):
        engine.update_weights(weights(policy), version=1)
    with pytest.raises(SamplerLostError, match="failed"):
        engine.generate(PROMPTS, GREEDY, num_generations=1, seed=0)
    engine.update_weights(weights(policy), version=2)
    assert_samples_like(policy, engine)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda own: [item for item in own if "layers.1.mlp.down_proj" not in item[0]], r"layers\.1\.mlp\.down_proj"),
        (lambda own: [*own, ("model.nowhere.weight", torch.ones(3))], "nowhere"),
    ],
    ids=["left out", "unknown"],
)
def test_weights_that_are_not_the_model_s_are_caught(servers, change, named):
    policy = make_policy()
    engine = make_engine(policy, servers[0])
    with pytest.raises((WeightsMismatchError, RuntimeError), match=named):
        engine.update_weights(change(weights(policy)), version=1)
    engine.update_weights(weights(policy), version=2)
    assert_samples_like(policy, engine)


def test_an_update_begun_over_an_unfinished_one_starts_cleanly(servers):
    policy = make_policy()
    engine, other = make_engine(policy, servers[0]), make_engine(policy, servers[0])
    fleet = other._ready({})
    fleet._begin("keep", other._servers[0])
    other._servers[0].post("/start_weight_update")
    bucket = [("lm_head.weight", torch.zeros(61, 64))]
    fleet._deliver(other._servers[0], fleet._folders[0], bucket)  # a trainer that dies here
    engine.version = 1
    with pytest.raises(WeightsMismatchError, match="another trainer"):
        engine.generate(PROMPTS, GREEDY, num_generations=1, seed=0)
    engine.update_weights(weights(policy), version=2)
    assert_samples_like(policy, engine)


def test_rollouts_of_a_client_that_fails_are_stopped(servers, monkeypatch):
    policy = make_policy()
    engine = make_engine(policy, servers[0], version=1)

    async def fail(*args):
        await asyncio.sleep(1)
        raise KeyError("the watch")

    with monkeypatch.context() as patch:
        patch.setattr(_Dispatcher, "_ask", fail)
        with pytest.raises(KeyError, match="the watch"):
            engine.generate([[1, 2]], LONG, num_generations=640, seed=0)  # minutes of work
    started = time.monotonic()
    engine.generate([[1, 2]], SamplingConfig(max_new_tokens=1, temperature=0), num_generations=1, seed=0)
    assert time.monotonic() - started < 60


def test_tokens_that_are_never_sampled(servers, monkeypatch):
    policy = make_policy()
    engine = make_engine(policy, servers[0], version=1)
    ((free, *_),) = engine.generate([[9]], GREEDY, num_generations=1, seed=0)
    never = {str(token): token for token in (*free.token_ids, 100)}  # one that the model does not have
    monkeypatch.setattr("pl_grouprl.rollout.vllm.servers.placeholder_ids", lambda model: never)
    ((bound, *_),) = engine.generate([[9]], GREEDY, num_generations=1, seed=0)
    assert set(free.token_ids).isdisjoint(bound.token_ids)


# What is not served


def ask(server, path, body=None, token=TOKEN, **headers):
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    content = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(server.url + path, content, {"Content-Type": "application/json", **headers})
    try:
        with urllib.request.urlopen(request, timeout=200) as response:
            return response.status, json.loads(response.read() or b"null")
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


@pytest.mark.parametrize(
    "path",
    [
        *("/inference/v1/generate", "/v1/chat/completions", "/sleep", "/resume", "/collective_rpc", "/update_weights"),
        *("/start_weight_update", "/update_weight_version", "/weight_info", "/pause", "/metrics", "/nowhere"),
    ],
)
@pytest.mark.parametrize("token", [None, "wrong", f"{TOKEN}x"])
def test_every_route_needs_the_token(servers, path, token):
    assert ask(servers[0], "/health", token=None) == (200, None)
    assert ask(servers[0], path, {}, token=token)[0] == 401


def test_the_token_is_not_in_the_process_list(servers):
    import psutil

    process = psutil.Process(servers[0].process.pid)
    for own in [process, *process.children(recursive=True)]:
        assert TOKEN not in " ".join(own.cmdline())


def test_other_clients_chat_with_the_policy(servers):
    """vLLM's own routes serve the trainer's weights."""
    policy = make_policy("llama", tied=True)
    engine = make_engine(policy, servers[2], version=1)
    message = {"role": "user", "content": "abc"}
    body = {"messages": [message], "max_tokens": 4, "temperature": 0, "logprobs": True, "return_token_ids": True}
    status, answer = ask(servers[2], "/v1/chat/completions", {**body, "model": str(servers[2].model)})
    assert status == 200
    ((expected,),) = engine.generate([answer["prompt_token_ids"]], GREEDY, num_generations=1, seed=0)
    assert answer["choices"][0]["token_ids"] == expected.token_ids[: len(answer["choices"][0]["token_ids"])]
