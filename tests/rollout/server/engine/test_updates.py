"""Weights that the engine sends to fake servers: updates, in flight and broken off."""

import threading
import time
from pathlib import Path

import pytest
import torch
from helpers.fake_sampler import FakeSampler
from helpers.scripts import run_script
from helpers.server_engines import PROMPTS, SAMPLING, make_engine, tokens, weights

from pl_grouprl.distributed.checksum import WeightsMismatchError
from pl_grouprl.rollout.engine import SamplerLostError
from pl_grouprl.rollout.vllm import fleet as fleet_module
from pl_grouprl.rollout.vllm import servers as engine_module


def test_all_servers_get_all_weights(policy, servers):
    first, second = servers(), servers()
    engine = make_engine(policy, first, second)
    metrics = engine.update_weights(weights(policy), version=3)
    assert engine.version == 3
    assert metrics["bytes"] == sum(parameter.nbytes for parameter in policy.parameters())
    for server in (first, second):
        assert server.label == engine._labels.of(3)
        assert server.paused is None
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


def test_an_update_step_by_step(policy, servers, tmp_path):
    """Nothing is sampled while weights are incomplete, and nothing that old weights computed is left."""
    server = servers(folder=str(tmp_path))
    engine = make_engine(policy, server)
    labels = []
    server.before = lambda path: labels.append(server.label) if path == "/update_weights" else None
    engine.update_weights(weights(policy), version=3)
    sent = len(labels)
    assert sent > 1
    assert set(labels) == {engine._labels.updating}
    assert server.calls == [
        *("describe", "sleep", "update_weight_version", "begin_update", "start_weight_update"),
        *("update_weights" for _ in range(sent)),
        *("finish_weight_update", "refresh_stale_weights", "reset_prefix_cache", "weight_checksums"),
        *("update_weight_version", "resume"),
    ]
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_another_machine_is_refused(policy, servers, tmp_path):
    server = servers(folder=str(tmp_path / "on another machine"))
    with pytest.raises(ValueError, match="start it with --weights-folder"):
        make_engine(policy, server).update_weights(weights(policy), version=1)
    assert server.calls == ["describe"]


def test_no_bucket_is_on_its_way_when_weights_are_lost(policy, servers, monkeypatch):
    slow, fast = servers(), servers()
    engine = make_engine(policy, slow, fast)
    begun, labels = [], []

    def load(info):
        begun.append(info)
        time.sleep(0.1)
        labels.append(slow.label)
        return FakeSampler.load(slow, info)

    def breaks_off():
        yield from weights(policy)
        raise OSError("no more weights")

    monkeypatch.setattr(slow, "load", load)
    with pytest.raises(OSError, match="no more weights"):
        engine.update_weights(breaks_off(), version=1)
    assert labels == [engine._labels.updating] * len(begun)
    assert slow.label == fast.label == engine._labels.lost


def test_other_ranks_sample_but_send_no_weights(policy, servers, monkeypatch):
    server = servers()
    first = make_engine(policy, server)
    first.update_weights(weights(policy), version=4)
    shared = [first._labels.run, first.max_model_len]
    monkeypatch.setattr(engine_module, "own_rank", lambda: 1)
    monkeypatch.setattr(engine_module, "gather_plain", lambda own, device: [shared, own])
    other = make_engine(policy, server)
    before, stream = list(server.calls), weights(policy)
    assert other.update_weights(stream, version=4)["bytes"] == 0
    assert list(stream) == []  # all ranks gather it
    assert other.max_model_len == 512
    assert len(other.generate(PROMPTS, SAMPLING, num_generations=1, seed=0)) == 7
    assert server.calls == before
    other.update_weights(weights(policy), version=5)  # which rank 0 has not sent
    with pytest.raises(WeightsMismatchError, match=r"has weights '\w+:4', not '\w+:5'. They are older"):
        other.generate(PROMPTS, SAMPLING, num_generations=1, seed=0)


@pytest.mark.parametrize("fail", [False, True])
def test_update_weights_returns_on_all_ranks_at_once(servers, fail):
    """Else a rank could sample from old weights while rank 0 still sends."""
    script = Path(__file__).with_name("update_ranks.py")
    told = run_script(script, servers().url, *(["fail"] if fail else []), ranks=2)
    assert told.stdout.count("lost") == (2 if fail else 0)
    assert told.stdout.count("ended 512") == 2


def test_a_restarted_server_gets_the_weights_again(policy, servers):
    server = servers()
    engine = make_engine(policy, server)
    engine.update_weights(weights(policy), version=1)
    server.close()
    again = servers(port=server.port, instance="second")
    with pytest.raises(SamplerLostError, match="It was restarted, or has lost an update"):
        engine.generate(PROMPTS, SAMPLING, num_generations=1, seed=0)
    engine.update_weights(weights(policy), version=2)
    assert len(engine.generate(PROMPTS, SAMPLING, num_generations=1, seed=0)) == 7
    assert len(again.asked) == 7


@pytest.mark.parametrize("place", ["/update_weights", "/finish_weight_update"])
def test_a_server_that_restarts_in_an_update_is_lost(policy, servers, place):
    server, other = servers(), servers()
    engine = make_engine(policy, other, server)

    def restart(path):
        if path == place:
            server.restart()
            server.before = lambda path: None

    server.before = restart
    with pytest.raises(SamplerLostError):
        engine.update_weights(weights(policy), version=1)
    assert engine.version is None
    assert other.label == engine._labels.lost
    assert other.paused  # nothing is sampled from incomplete weights
    engine.update_weights(weights(policy), version=2)
    assert server.label == other.label == engine._labels.of(2)
    assert not other.paused


def test_a_server_that_breaks_off_an_update_gets_it_again(policy, servers):
    server = servers()
    engine = make_engine(policy, server)

    def cut(path):
        if path == "/update_weights":
            server.before = lambda path: None
            raise ConnectionAbortedError

    server.before = cut
    with pytest.raises(SamplerLostError, match="broke off an update"):
        engine.update_weights(weights(policy), version=1)
    engine.update_weights(weights(policy), version=2)


@pytest.mark.parametrize("place", ["/update_weights", "/finish_weight_update", "/reset_prefix_cache"])
def test_another_trainer_in_an_update_is_noticed(policy, servers, place):
    server = servers()
    engine, other = make_engine(policy, server), make_engine(policy, server)

    def intrude(path):
        if path == place:
            server.before = lambda path: None
            other._ready()._begin("keep", other._servers[0])

    server.before = intrude
    with pytest.raises(WeightsMismatchError, match="Does another trainer use this server"):
        engine.update_weights(weights(policy), version=2)
    assert server.label == other._labels.updating  # which is left alone


def test_weights_that_differ_end_the_run(policy, servers):
    first, second = servers(), servers()
    engine = make_engine(policy, first, second)

    def flip(loaded):
        loaded["model.norm.weight"].view(torch.int32)[3] ^= 1

    second.spoil = flip
    with pytest.raises(WeightsMismatchError, match=rf"At {second.url}: .*1 differ: model\.norm\.weight differs"):
        engine.update_weights(weights(policy), version=1)
    assert engine.version is None
    assert first.label == second.label == engine._labels.lost
    assert first.paused
    assert second.paused


def in_flight(servers, policy, during, **options):
    """Rollouts during which `during(engine, server)` is called, at the fourth of seven sequences."""
    server = servers()
    engine = make_engine(policy, server, **options)
    engine.update_weights(weights(policy), version=1)

    def update(path):
        if path == "/inference/v1/generate" and len(server.asked) == 3:
            server.before = lambda path: None
            return during(engine, server)
        return None

    server.before = update
    return engine, engine.generate(PROMPTS, SAMPLING, num_generations=1, seed=0)


def test_sequences_go_on_with_new_weights(policy, servers):
    def during(engine, server):
        engine.update_weights(weights(policy), version=2)
        spans = [(engine._labels.of(1), 0, 1), (engine._labels.of(2), 1, 3)]
        return {
            "choices": [
                {
                    **{"token_ids": [1, 2, 3], "finish_reason": "length"},
                    "logprobs": {"content": [{"token_id": token, "logprob": -1.0} for token in (1, 2, 3)]},
                    "weight_versions": [{"version": v, "start": start, "end": end} for v, start, end in spans],
                }
            ]
        }

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
    assert tokens(groups) == tokens(engine.generate(PROMPTS, SAMPLING, num_generations=1, seed=0))


def test_rollouts_during_an_update_that_fails_are_lost(policy, servers):
    def during(engine, server):
        with pytest.raises(ZeroDivisionError):
            engine.update_weights((("w", torch.zeros(1 // 0)) for _ in range(1)), version=2)

    with pytest.raises(SamplerLostError, match="It was restarted, or has lost an update"):
        in_flight(servers, policy, during)


def test_after_a_failed_update_the_weights_are_lost(policy, servers):
    server = servers()
    engine = make_engine(policy, server)
    engine.update_weights(weights(policy), version=1)
    server.close()
    engine._servers[0].timeout = 0.2
    with pytest.raises(RuntimeError, match="did not come back"):
        engine.update_weights(weights(policy), version=2)
    with pytest.raises(SamplerLostError, match="the last update of the sampling servers has failed"):
        engine.generate(PROMPTS, SAMPLING, num_generations=1, seed=0)


def test_what_the_stream_raises_ends_the_update(policy, servers):
    server = servers()

    def stream():
        yield from list(weights(policy))[:6]
        raise KeyError("the shard of another rank")

    with pytest.raises(KeyError, match="the shard of another rank"):
        make_engine(policy, server).update_weights(stream(), version=1)
    assert (server.paused, server.label.partition(":")[2]) == ("abort", "lost")


def test_the_next_bucket_is_gathered_while_one_is_sent(policy, servers):
    server = servers()
    began, gathered = threading.Event(), threading.Event()

    def slow(path):
        if path == "/update_weights":
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


def test_servers_must_take_weights_in_the_same_way(policy, servers):
    with pytest.raises(ValueError, match="has backend 'nccl', not 'pl_grouprl'; start all servers with the same"):
        make_engine(policy, servers(), servers(backend="nccl")).update_weights(weights(policy), version=1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_nccl_needs_a_gpu(policy, servers):
    with pytest.raises(ValueError, match="--transfer is 'nccl', but this machine has no CUDA device"):
        make_engine(policy, servers(backend="nccl")).update_weights(weights(policy), version=1)


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

    def go(path):
        if path == place:
            server.before = lambda path: None
            raise ConnectionAbortedError

    def hang(path):
        if path == place:
            server.before = lambda path: None
            time.sleep(2)

    engine = make_engine(policy, server)
    server.before = go
    before = Broadcaster.made
    with pytest.raises(SamplerLostError, match="broke off an update"):
        engine.update_weights(weights(policy), version=1)
    assert engine._fleet is None  # nothing is broadcast in a group that was left
    assert server.paused
    engine._servers[0].timeout = 0.5
    engine._servers[0].__dict__.pop("_http")
    server.before = hang
    with pytest.raises(RuntimeError, match=r"have waited 0.5 seconds for NCCL, .* Stop the server and start it again"):
        engine.update_weights(weights(policy), version=2)
    assert Broadcaster.made == before + 2
