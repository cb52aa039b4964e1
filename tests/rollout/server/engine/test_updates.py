"""Weights that the engine sends to fake servers: updates, in flight and broken off."""

import threading
import time
from pathlib import Path

import pytest
import torch
from helpers.fake_sampler import FakeSampler
from helpers.scripts import run_script
from helpers.server_engines import after, at, make_engine, sample, started, tokens, weights

from pl_grouprl.distributed.checksum import WeightsMismatchError
from pl_grouprl.rollout.engine import SamplerLostError
from pl_grouprl.rollout.vllm import fleet as fleet_module
from pl_grouprl.rollout.vllm import servers as engine_module


def state(server):
    """What a server's label says of its weights: a version, `updating` or `lost`."""
    return server.label.partition(":")[2]


def test_all_servers_get_all_weights(policy, servers):
    first, second = servers(), servers()
    engine = make_engine(policy, first, second)
    metrics = engine.update_weights(weights(policy), version=3)
    assert engine.version == 3
    assert metrics["bytes"] == sum(parameter.nbytes for parameter in policy.parameters())
    for server in (first, second):
        assert (state(server), server.paused) == ("3", None)
        assert server.weights.keys() == dict(policy.named_parameters()).keys()
        for name, parameter in policy.named_parameters():
            assert torch.equal(server.weights[name], parameter)


def test_weights_have_the_dtype_of_the_servers(policy, servers):
    server = servers(dtype="bfloat16")
    started(policy, server)
    assert {value.dtype for value in server.weights.values()} == {torch.bfloat16}
    started(policy, server, version=2, dtype="bfloat16")


def test_a_weight_may_change_once_the_next_is_asked_for(policy, servers):
    server = servers()
    reused = torch.empty(4)
    stream = ((f"w{index}", reused.fill_(index)) for index in range(5))
    make_engine(policy, server).update_weights(stream, version=1)
    assert {name: value.tolist() for name, value in server.weights.items()} == {f"w{i}": 4 * [i] for i in range(5)}


def test_an_update_step_by_step(policy, servers, tmp_path):
    """Nothing is sampled while weights are incomplete, and nothing that old weights computed is left."""
    server = servers(folder=str(tmp_path))
    engine, labels = make_engine(policy, server), []
    server.before = at("/update_weights", lambda: labels.append(state(server)))
    engine.update_weights(weights(policy), version=3)
    assert len(labels) > 1
    assert set(labels) == {"updating"}
    assert server.calls == [
        *("describe", "sleep", "update_weight_version", "begin_update", "start_weight_update"),
        *("update_weights" for _ in labels),
        *("finish_weight_update", "refresh_stale_weights", "reset_prefix_cache", "weight_checksums"),
        *("update_weight_version", "resume"),
    ]
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_another_machine_is_refused(policy, servers, tmp_path):
    server = servers(folder=str(tmp_path / "on another machine"))
    with pytest.raises(ValueError, match="--weights-folder"):
        started(policy, server)
    assert server.calls == ["describe"]


def test_no_bucket_is_on_its_way_when_weights_are_lost(policy, servers, monkeypatch):
    slow, fast = servers(), servers()
    engine = make_engine(policy, slow, fast)
    begun, labels = [], []

    def load(info):
        begun.append(info)
        time.sleep(0.1)
        labels.append(state(slow))
        return FakeSampler.load(slow, info)

    def breaks_off():
        yield from weights(policy)
        raise OSError("no more weights")

    monkeypatch.setattr(slow, "load", load)
    with pytest.raises(OSError, match="no more weights"):
        engine.update_weights(breaks_off(), version=1)
    assert labels == ["updating"] * len(begun)
    assert state(slow) == state(fast) == "lost"
    assert slow.paused == fast.paused == "abort"


def test_other_ranks_sample_but_send_no_weights(policy, servers, monkeypatch):
    server = servers()
    first = started(policy, server, version=4)
    shared = [server.label.partition(":")[0], first.max_model_len]
    monkeypatch.setattr(engine_module, "own_rank", lambda: 1)
    monkeypatch.setattr(engine_module, "gather_plain", lambda own, device: [shared, own])
    other = make_engine(policy, server)
    before, stream = list(server.calls), weights(policy)
    assert other.update_weights(stream, version=4)["bytes"] == 0
    assert list(stream) == []  # all ranks gather it
    assert other.max_model_len == 512
    assert len(sample(other)) == 7
    assert server.calls == before
    other.update_weights(weights(policy), version=5)  # which rank 0 has not sent
    with pytest.raises(WeightsMismatchError, match="They are older"):
        sample(other)


@pytest.mark.parametrize("fail", [False, True])
def test_update_weights_returns_on_all_ranks_at_once(servers, fail):
    """Else a rank could sample from old weights while rank 0 still sends."""
    script = Path(__file__).with_name("update_ranks.py")
    told = run_script(script, servers().url, *(["fail"] if fail else []), ranks=2)
    assert told.stdout.count("lost") == (2 if fail else 0)
    assert told.stdout.count("ended 512") == 2


def test_a_restarted_server_gets_the_weights_again(policy, servers):
    server = servers()
    engine = started(policy, server)
    server.close()
    again = servers(port=server.port, instance="second")
    with pytest.raises(SamplerLostError, match="restarted"):
        sample(engine)
    engine.update_weights(weights(policy), version=2)
    assert len(sample(engine)) == len(again.asked) == 7


@pytest.mark.parametrize("place", ["/update_weights", "/finish_weight_update"])
@pytest.mark.parametrize("breaks", [False, True], ids=["restarts", "breaks off"])
def test_a_server_that_is_lost_in_an_update(policy, servers, place, breaks):
    server, other = servers(), servers()
    engine = make_engine(policy, other, server)

    def lose():
        server.before = lambda path: None
        if breaks:
            raise ConnectionAbortedError
        server.restart()

    server.before = at(place, lose)
    with pytest.raises(SamplerLostError):
        engine.update_weights(weights(policy), version=1)
    assert engine.version is None
    assert state(other) == "lost"
    assert other.paused  # nothing is sampled from incomplete weights
    engine.update_weights(weights(policy), version=2)
    assert state(server) == state(other) == "2"
    assert not other.paused


@pytest.mark.parametrize("place", ["/update_weights", "/finish_weight_update", "/reset_prefix_cache"])
def test_another_trainer_in_an_update_is_noticed(policy, servers, place):
    server = servers()
    engine, other = make_engine(policy, server), make_engine(policy, server)

    def intrude():
        server.before = lambda path: None
        other._ready({})._begin("keep", other._servers[0])

    server.before = at(place, intrude)
    with pytest.raises(WeightsMismatchError, match="another trainer"):
        engine.update_weights(weights(policy), version=2)
    assert state(server) == "updating"  # which is left alone


def test_weights_that_differ_end_the_run(policy, servers):
    first, second = servers(), servers()
    engine = make_engine(policy, first, second)

    def flip(loaded):
        loaded["model.norm.weight"].view(torch.int32)[3] ^= 1

    second.spoil = flip
    with pytest.raises(WeightsMismatchError, match=rf"{second.url}: .*1 differ: model\.norm\.weight"):
        engine.update_weights(weights(policy), version=1)
    assert engine.version is None
    assert state(first) == state(second) == "lost"
    assert first.paused
    assert second.paused
    with pytest.raises(SamplerLostError, match="failed"):
        sample(engine)


def in_flight(servers, policy, during, **options):
    """Rollouts during which `during(engine, server)` is called, at the fourth of seven sequences."""
    server = servers()
    engine = started(policy, server, **options)

    server.before = after(server, 3, lambda: during(engine, server))
    return engine, sample(engine)


def test_sequences_go_on_with_new_weights(policy, servers):
    def during(engine, server):
        engine.update_weights(weights(policy), version=2)
        run = server.label.partition(":")[0]
        spans = [(f"{run}:1", 0, 1), (f"{run}:2", 1, 3)]
        choice = {
            **{"token_ids": [1, 2, 3], "finish_reason": "length"},
            "logprobs": {"content": [{"token_id": token, "logprob": -1.0} for token in (1, 2, 3)]},
            "weight_versions": [{"version": v, "start": start, "end": end} for v, start, end in spans],
        }
        return {"choices": [choice]}

    engine, groups = in_flight(servers, policy, during)
    versions = [rollout.weight_versions for (rollout,) in groups]
    assert versions.count([1, 2, 2]) == 1
    assert {version for own in versions for version in own} == {1, 2}
    assert engine.version == 2


def test_sequences_start_again_with_new_weights(policy, servers):
    def during(engine, server):
        engine.update_weights(weights(policy), version=2)
        assert server.calls.count("sleep") == 2
        return {"choices": [{"token_ids": [5], "logprobs": None, "finish_reason": "abort", "weight_versions": None}]}

    engine, groups = in_flight(servers, policy, during, in_flight="restart")
    assert [2, 2, 2] in [rollout.weight_versions for (rollout,) in groups]
    assert tokens(groups) == tokens(sample(engine))


def test_rollouts_during_an_update_that_fails_are_lost(policy, servers):
    def during(engine, server):
        with pytest.raises(ZeroDivisionError):
            engine.update_weights((("w", torch.zeros(1 // 0)) for _ in range(1)), version=2)

    with pytest.raises(SamplerLostError, match="has lost an update"):
        in_flight(servers, policy, during)


def test_the_next_bucket_is_gathered_while_one_is_sent(policy, servers):
    server = servers()
    began, gathered = threading.Event(), threading.Event()

    def slow():
        began.set()
        assert gathered.wait(10)

    def stream():
        for index in range(4):
            if index == 3:  # the first two make a bucket
                assert began.wait(10)
                gathered.set()
            yield f"w{index}", torch.zeros(1000)

    server.before = at("/update_weights", slow)
    make_engine(policy, server).update_weights(stream(), version=1)


def test_servers_must_take_weights_in_the_same_way(policy, servers):
    with pytest.raises(ValueError, match="backend 'nccl'"):
        started(policy, servers(), servers(backend="nccl"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_nccl_needs_a_gpu(policy, servers):
    with pytest.raises(ValueError, match="--transfer is 'nccl'"):
        started(policy, servers(backend="nccl"))


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
            one({"update_info": {"names": self.last, "dtype_names": [], "shapes": []}})

    def close(self):
        pass


@pytest.mark.parametrize("place", ["/update_weights", "/init_weight_transfer_engine"])
def test_nccl_with_a_server_that_dies_or_hangs(policy, servers, monkeypatch, place):
    monkeypatch.setattr(fleet_module, "check_device", lambda: None)
    monkeypatch.setattr(fleet_module, "Broadcaster", Broadcaster)
    monkeypatch.setattr(fleet_module, "_on_gpu", lambda stream: stream)
    server = servers(backend="nccl")
    monkeypatch.setattr(server, "load", lambda info: {})

    def go():
        server.before = lambda path: None
        raise ConnectionAbortedError

    def hang():
        server.before = lambda path: None
        time.sleep(1.2)

    engine, before = make_engine(policy, server, timeout=0.5), Broadcaster.made
    server.before = at(place, go)
    with pytest.raises(SamplerLostError, match="broke off an update"):
        engine.update_weights(weights(policy), version=1)
    assert engine._fleet is None  # nothing is broadcast in a group that was left
    assert server.paused
    server.before = at(place, hang)
    with pytest.raises(RuntimeError, match="NCCL"):
        engine.update_weights(weights(policy), version=2)
    assert Broadcaster.made == before + 2
