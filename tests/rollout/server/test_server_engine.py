"""The engine against servers that have no model."""

import threading
import time

import pytest
import torch
from helpers.fake_sampler import FakeSampler
from helpers.tiny_models import tiny_model

from pl_grouprl.rollout.engine import SyncedRolloutEngine
from pl_grouprl.rollout.server import VLLMServerRolloutEngine
from pl_grouprl.rollout.server import client as client_module
from pl_grouprl.rollout.server import engine as engine_module
from pl_grouprl.sync.sampler import AdapterWeights, SamplerLostError, WeightsMismatchError
from pl_grouprl.types import SamplingConfig
from pl_grouprl.utilities.distributed import derive_seed

SAMPLING = SamplingConfig(max_new_tokens=3, stop_token_ids=(4,))
PROMPTS = [[1, 2, 3], [4], [5, 6], [7, 8, 9, 10], [11], [12, 13], [14]]


@pytest.fixture(autouse=True)
def _no_long_pauses(monkeypatch):
    monkeypatch.setattr(client_module, "_FIRST_WAIT", 0.01)
    monkeypatch.setattr(client_module, "_LONGEST_WAIT", 0.1)
    monkeypatch.delenv("PL_GROUPRL_TOKEN", raising=False)


@pytest.fixture(scope="module")
def policy():
    return tiny_model("llama", tie_word_embeddings=False)


@pytest.fixture
def servers():
    made = []

    def make(**options):
        made.append(FakeSampler(**options))
        return made[-1]

    yield make
    for server in made:
        server.close()


def weights(policy):
    return ((name, parameter.detach()) for name, parameter in policy.named_parameters())


def make_engine(policy, *servers, **options):
    engine = VLLMServerRolloutEngine([server.url for server in servers], timeout=3, **options)
    engine.bind(policy)
    engine._bucket_bytes = 8192  # several buckets
    return engine


def tokens(groups):
    return [[rollout.token_ids for rollout in group] for group in groups]


def test_it_is_a_synced_engine(policy, servers):
    assert isinstance(make_engine(policy, servers()), SyncedRolloutEngine)


def test_all_servers_get_all_weights(policy, servers):
    first, second = servers(), servers()
    engine = make_engine(policy, first, second)
    metrics = engine.update_weights(weights(policy), version=3)
    assert engine.version == 3
    assert metrics["bytes"] == sum(parameter.nbytes for parameter in policy.parameters())
    for server in (first, second):
        assert server.state["version"] == 3
        assert server.weights.keys() == dict(policy.named_parameters()).keys()
        for name, parameter in policy.named_parameters():
            assert torch.equal(server.weights[name], parameter)


def test_weights_have_the_dtype_of_the_servers(policy, servers):
    server = servers(dtype="bfloat16")
    make_engine(policy, server).update_weights(weights(policy), version=1)
    assert {value.dtype for value in server.weights.values()} == {torch.bfloat16}
    make_engine(policy, server, dtype="bfloat16").update_weights(weights(policy), version=2)
    with pytest.raises(ValueError, match="has dtype 'bfloat16', not 'float32'; start it with --dtype float32"):
        make_engine(policy, server, dtype="float32").update_weights(weights(policy), version=3)


def test_a_weight_may_change_once_the_next_is_asked_for(policy, servers):
    server = servers()
    reused = torch.empty(4)

    def stream():
        for index in range(5):
            yield f"w{index}", reused.fill_(index)

    make_engine(policy, server).update_weights(stream(), version=1)
    assert {name: value.tolist() for name, value in server.weights.items()} == {f"w{i}": 4 * [i] for i in range(5)}


def test_the_request_that_is_sent(policy, servers):
    server = servers()
    engine = make_engine(policy, server)
    engine.update_weights(weights(policy), version=3)
    engine.generate(PROMPTS[:1], SAMPLING, num_generations=2, seed=9)
    (asked,) = server.asked
    assert asked.pop("update") == server.state["update"]
    assert asked == {
        "version": 3,
        "tokenizer": None,  # no stop strings
        "requests": [{"prompt": [1, 2, 3], "seeds": [derive_seed(9, 0, 0), derive_seed(9, 0, 1)]}],
        "sampling": {
            **{"max_new_tokens": 3, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0},
            **{"stop": [], "stop_token_ids": [4]},
        },
        "end_ids": [4],
        "never": [],
    }


def test_each_prompt_has_its_limit(policy, servers):
    """It is that of its request: servers that know one limit per request serve it too."""
    first, second = servers(), servers()
    engine = make_engine(policy, first, second)
    engine.update_weights(weights(policy), version=1)
    limits = [3, 1, 2, 2, 1, 3, 2]
    groups = engine.generate(PROMPTS, SAMPLING, num_generations=2, seed=9, max_new_tokens=limits)
    assert [[len(found) for found in group] for group in tokens(groups)] == [[limit, limit] for limit in limits]
    asked = {tuple(told["requests"][0]["prompt"]): told["sampling"] for told in first.asked + second.asked}
    for prompt, limit in zip(PROMPTS, limits, strict=True):
        assert asked[tuple(prompt)] == {**asked[tuple(PROMPTS[0])], "max_new_tokens": limit}
    whole = engine.generate(PROMPTS, SAMPLING, num_generations=2, seed=9)
    cut = [[found[:limit] for found in group] for group, limit in zip(tokens(whole), limits, strict=True)]
    assert tokens(groups) == cut


def test_any_episodes_in_any_order_sample_the_same(policy, servers):
    """A later turn: a seed depends on the seed of the call and the index of the episode."""
    engines = [make_engine(policy, *(servers() for _ in range(count)), max_concurrent_requests=1) for count in (1, 3)]
    for engine in engines:
        engine.update_weights(weights(policy), version=1)
    seeds = [derive_seed(6, 20 + place, 0) for place in range(7)]
    for engine in engines:
        for chosen in (range(7), [6, 2, 4], [3], [5, 6, 0, 1]):
            prompts, indices = [PROMPTS[place] for place in chosen], [20 + place for place in chosen]
            groups = engine.generate(prompts, SAMPLING, num_generations=1, seed=6, prompt_indices=indices)
            for place, (found,) in zip(chosen, tokens(groups), strict=True):
                assert found == [sum(PROMPTS[place]) % 61, seeds[place] % 61, seeds[place] // 61 % 61]


def test_no_prompts_ask_no_server(policy, servers):
    """Ranks without an open episode go through a turn with the others."""
    server = servers()
    engine = make_engine(policy, server)
    engine.update_weights(weights(policy), version=1)
    server.close()
    for options in ({}, {"prompt_indices": []}, {"prompt_indices": [], "max_new_tokens": []}):
        assert engine.generate([], SAMPLING, num_generations=1, seed=0, **options) == []


def test_the_longest_sequence_is_that_of_all_servers(policy, servers):
    engine = make_engine(policy, servers(), servers(max_model_len=20), servers(max_model_len=30))
    assert engine.max_model_len is None
    engine.update_weights(weights(policy), version=1)
    assert engine.max_model_len == 20
    assert len(engine.generate([[1] * 17], SAMPLING, num_generations=1, seed=0)) == 1
    refused = r"prompts\[1\] has 18 tokens, which with max_new_tokens=3 exceeds the model's max_model_len=20"
    with pytest.raises(ValueError, match=refused):
        engine.generate([[1], [1] * 18], SAMPLING, num_generations=1, seed=0, max_new_tokens=[4, 3])


def test_results_do_not_depend_on_servers_or_ranks(policy, servers):
    one = make_engine(policy, servers())
    three = make_engine(policy, *(servers() for _ in range(3)), max_concurrent_requests=1)
    for engine in (one, three):
        engine.update_weights(weights(policy), version=1)
    whole = one.generate(PROMPTS, SAMPLING, num_generations=3, seed=5)
    assert len({tuple(found) for group in tokens(whole) for found in group}) == 21
    assert three.generate(PROMPTS, SAMPLING, num_generations=3, seed=5) == whole
    ranks = [
        one.generate(PROMPTS[rank::2], SAMPLING, num_generations=3, seed=5, prompt_indices=range(rank, 7, 2))
        for rank in range(2)
    ]
    assert [ranks[place % 2][place // 2] for place in range(7)] == whole
    assert one.generate([], SAMPLING, num_generations=3, seed=5) == []


def test_servers_share_the_prompts(policy, servers):
    first, second = servers(), servers()
    first.before = lambda path: time.sleep(0.2) if path == "/generate" else None  # the other has time for more
    engine = make_engine(policy, first, second, max_concurrent_requests=1)
    engine.update_weights(weights(policy), version=1)
    engine.generate(PROMPTS, SAMPLING, num_generations=1, seed=5)
    assert 1 <= len(first.asked) < len(second.asked)
    assert len(first.asked) + len(second.asked) == 7


def test_text_is_decoded_by_the_tokenizer(policy, servers):
    class Tokenizer:
        eos_token_id = 2

        def decode(self, token_ids, skip_special_tokens):
            assert skip_special_tokens
            return "-".join(map(str, token_ids))

    engine = make_engine(policy, servers())
    engine.bind(policy, Tokenizer())
    engine.update_weights(weights(policy), version=1)
    ((rollout,),) = engine.generate([[1, 2]], SAMPLING, num_generations=1, seed=0)
    assert rollout.text == "-".join(map(str, rollout.token_ids))


def test_other_ranks_sample_but_send_no_weights(policy, servers, monkeypatch):
    server = servers()
    make_engine(policy, server).update_weights(weights(policy), version=4)
    monkeypatch.setattr(engine_module, "own_rank", lambda: 1)
    other = make_engine(policy, server)
    before = dict(server.state)
    assert other.update_weights(weights(policy), version=4)["bytes"] == 0
    assert len(other.generate(PROMPTS, SAMPLING, num_generations=1, seed=0)) == 7
    assert server.state == before
    other.update_weights(weights(policy), version=5)  # which rank 0 has not sent
    with pytest.raises(WeightsMismatchError, match="Does another trainer use this server"):
        other.generate(PROMPTS, SAMPLING, num_generations=1, seed=0)


def test_a_restarted_server_gets_the_weights_again(policy, servers):
    server = servers()
    engine = make_engine(policy, server)
    engine.update_weights(weights(policy), version=1)
    server.close()
    again = servers(port=server.port, instance="second")
    with pytest.raises(SamplerLostError, match="It was restarted, or has lost an update"):
        engine.generate(PROMPTS, SAMPLING, num_generations=1, seed=0)
    assert engine.version is None
    engine.update_weights(weights(policy), version=2)
    assert len(engine.generate(PROMPTS, SAMPLING, num_generations=1, seed=0)) == 7
    assert len(again.asked) == 7


@pytest.mark.parametrize("place", ["/weights/bucket", "/weights/end"])
def test_a_server_that_restarts_in_an_update_is_lost(policy, servers, place):
    server, other = servers(), servers()
    engine = make_engine(policy, other, server)

    def restart(path):
        if path.startswith(place):
            server.state.update(instance="second", version=None, update=None, updating=False)
            server.before = lambda path: None

    server.before = restart
    with pytest.raises(SamplerLostError):
        engine.update_weights(weights(policy), version=1)
    assert engine.version is None
    assert other.state == {**other.state, "version": None, "update": None, "updating": False}  # aborted
    engine.update_weights(weights(policy), version=2)
    assert server.state["version"] == other.state["version"] == 2


def test_a_server_that_stays_away_ends_the_run(policy, servers):
    server = servers()
    engine = make_engine(policy, server)
    engine.update_weights(weights(policy), version=1)
    server.close()
    engine._clients[0].timeout = 0.5
    with pytest.raises(RuntimeError, match=f"at {server.url} did not come back within 0.5 seconds"):
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

    def intrude(path):
        if path.startswith("/weights/bucket"):
            server.before = lambda path: None
            server.state.update(update="another's")

    server.before = intrude
    with pytest.raises(WeightsMismatchError, match="Does another trainer use this server"):
        engine.update_weights(weights(policy), version=2)
    assert server.state["update"] == "another's"  # which is left alone


def test_weights_that_differ_end_the_run(policy, servers):
    first, second = servers(), servers()
    engine = make_engine(policy, first, second)

    def flip(loaded):
        loaded["model.norm.weight"].view(torch.int32)[3] ^= 1

    second.spoil = flip
    with pytest.raises(WeightsMismatchError, match=rf"At {second.url}: .*1 differ: model\.norm\.weight differs"):
        engine.update_weights(weights(policy), version=1)
    assert engine.version is None
    assert first.state["version"] is second.state["version"] is None


def test_what_the_stream_raises_ends_the_update(policy, servers):
    server = servers()

    def stream():
        yield from list(weights(policy))[:6]
        raise KeyError("the shard of another rank")

    with pytest.raises(KeyError, match="the shard of another rank"):
        make_engine(policy, server).update_weights(stream(), version=1)
    assert server.state["updating"] is False


def test_the_next_bucket_is_gathered_while_one_is_sent(policy, servers):
    server = servers()
    began, gathered = threading.Event(), threading.Event()

    def slow(path):
        if path.startswith("/weights/bucket"):
            began.set()
            assert gathered.wait(10)

    def stream():
        for index in range(4):
            if index == 3:  # the first two make a bucket
                assert began.wait(10)
                gathered.set()
            yield f"w{index}", torch.zeros(1000)

    server.before = slow
    make_engine(policy, server).update_weights(stream(), version=1)


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
        ({"vocab_size": 62}, "has vocab_size 62, not 61; start it with --model of the policy"),
    ],
)
def test_a_server_of_another_model_is_refused(policy, servers, info, message):
    with pytest.raises(ValueError, match=message):
        make_engine(policy, servers(**info)).update_weights(weights(policy), version=1)


def test_transfer_must_be_that_of_the_server(policy, servers):
    with pytest.raises(ValueError, match="has transfer 'http', not 'nccl'; start it with --transfer nccl"):
        make_engine(policy, servers(), transfer="nccl").update_weights(weights(policy), version=1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_nccl_needs_a_gpu(policy, servers):
    server = servers()
    server.info["transfer"] = "nccl"
    with pytest.raises(ValueError, match="transfer is 'nccl', but this machine has no CUDA device; choose 'http'"):
        make_engine(policy, server, transfer="nccl").update_weights(weights(policy), version=1)


class Broadcaster:
    """Tells the servers of each bucket, and sends none of it."""

    made = 0

    def __init__(self, workers, join, pool):
        type(self).made += 1
        for rank, one in enumerate(join):
            one(unique_id="id", rank_offset=1 + rank, world_size=1 + sum(workers))

    def send(self, bucket, announce, pool):
        self.last = [name for name, _ in bucket]
        for one in announce:
            one({"names": self.last, "dtypes": [], "shapes": []})

    def close(self):
        pass


@pytest.mark.parametrize("place", ["/weights/broadcast", "/weights/connect"])
def test_nccl_with_a_server_that_dies_or_hangs(policy, servers, monkeypatch, place):
    from pl_grouprl.rollout.server import fleet as fleet_module
    from pl_grouprl.rollout.server import nccl

    monkeypatch.setattr(nccl, "check_device", lambda: None)
    monkeypatch.setattr(nccl, "Broadcaster", Broadcaster)
    monkeypatch.setattr(fleet_module, "_on_gpu", lambda stream: stream)
    server = servers()
    server.info["transfer"] = "nccl"
    server._weights_connect = server._weights_broadcast = lambda handler, body: (200, {})

    def go(path):
        if path.startswith(place):
            server.before = lambda path: None
            raise ConnectionAbortedError  # the connection ends without an answer

    def hang(path):
        if path.startswith(place):
            server.before = lambda path: None
            time.sleep(2)

    engine = make_engine(policy, server, transfer="nccl")
    server.before = go
    before = Broadcaster.made
    with pytest.raises(SamplerLostError, match="it has gone"):
        engine.update_weights(weights(policy), version=1)
    assert engine._fleet is None  # nothing is broadcast in a group that was left
    engine._clients[0].timeout = 0.5
    server.before = hang
    with pytest.raises(RuntimeError, match=r"have waited 0.5 seconds for NCCL, .* Stop the server and start it again"):
        engine.update_weights(weights(policy), version=2)
    assert Broadcaster.made == before + 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"urls": []}, "urls is .*; it must be at least one url, each once"),
        ({"urls": 2 * ["http://127.0.0.1:1"]}, "urls is .*; it must be at least one url, each once"),
        ({"timeout": 0}, "timeout is 0; it must be larger than 0"),
        ({"transfer": "ipc"}, "transfer is 'ipc'; it must be 'http' or 'nccl'"),
        ({"bucket_mib": 0}, "bucket_mib is 0; it must be at least 1"),
        ({"adapter": "separate"}, "adapter is 'separate'; it must be 'merged'"),
        ({"max_concurrent_requests": 0}, "max_concurrent_requests is 0; it must be at least 1"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        VLLMServerRolloutEngine(**options)


def test_the_token_is_read_from_the_environment(monkeypatch):
    monkeypatch.setenv("PL_GROUPRL_TOKEN", "secret")
    assert VLLMServerRolloutEngine()._clients[0]._headers == {"Authorization": "Bearer secret"}
    assert VLLMServerRolloutEngine(token="mine")._clients[0]._headers == {"Authorization": "Bearer mine"}
    monkeypatch.delenv("PL_GROUPRL_TOKEN")
    assert VLLMServerRolloutEngine()._clients[0]._headers == {}
