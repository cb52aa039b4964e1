"""The engine against servers that have no model."""

import asyncio
import json
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from helpers.fake_sampler import FakeSampler
from helpers.scripts import run_script
from helpers.tiny_models import tiny_model

from pl_grouprl.rollout.engine import SyncedRolloutEngine
from pl_grouprl.rollout.server import VLLMServerRolloutEngine
from pl_grouprl.rollout.server import distribution as distribution_module
from pl_grouprl.rollout.server import engine as engine_module
from pl_grouprl.rollout.server import fleet as fleet_module
from pl_grouprl.rollout.server import server as server_module
from pl_grouprl.sync.sampler import AdapterWeights, SamplerLostError, WeightsMismatchError
from pl_grouprl.types import SamplingConfig
from pl_grouprl.utilities.distributed import derive_seed

SAMPLING = SamplingConfig(max_new_tokens=3, stop_token_ids=(4,))
PROMPTS = [[1, 2, 3], [4], [5, 6], [7, 8, 9, 10], [11], [12, 13], [14]]


@pytest.fixture(autouse=True)
def _no_long_pauses(monkeypatch):
    monkeypatch.setattr(server_module, "_LONGEST_WAIT", 0.1)
    monkeypatch.setattr(distribution_module, "_FIRST_PAUSE", 0.01)
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
        *("describe", "pause", "update_weight_version", "begin_update", "start_weight_update"),
        *("update_weights" for _ in range(sent)),
        *("finish_weight_update", "refresh_stale_weights", "reset_prefix_cache", "weight_checksums"),
        *("update_weight_version", "resume"),
    ]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("shared", [True, False])
def test_buckets_go_through_shared_memory_or_http(policy, servers, tmp_path, monkeypatch, shared):
    server = servers(folder=str(tmp_path if shared else tmp_path / "on another machine"))
    ways = []
    monkeypatch.setattr(server, "load", lambda info: ways.append(sorted(info)) or FakeSampler.load(server, info))
    make_engine(policy, server).update_weights(weights(policy), version=1)
    assert {tuple(way) for way in ways} == {("owner", "path" if shared else "safetensors")}


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


def test_a_full_memory_is_not_filled_further(policy, servers, tmp_path, monkeypatch):
    monkeypatch.setattr(fleet_module, "_SPARE", 1 << 60)
    server = servers(folder=str(tmp_path))
    make_engine(policy, server).update_weights(weights(policy), version=1)
    assert len(server.weights) == len(list(policy.parameters()))


def test_the_request_that_is_sent(policy, servers):
    server = servers()
    engine = make_engine(policy, server)
    engine.update_weights(weights(policy), version=3)
    engine.generate(PROMPTS[:1], SAMPLING, num_generations=2, seed=9)
    common = {
        **{"max_tokens": 3, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "logprobs": 0},
        **{"stop_token_ids": [4], "ignore_eos": True, "detokenize": False, "logit_bias": None},
    }
    asked = sorted(server.asked, key=lambda told: told["sampling_params"]["seed"])
    assert len({told.pop("request_id") for told in asked}) == 2
    assert asked == [
        {"token_ids": [1, 2, 3], "sampling_params": {**common, "seed": seed}, "stream": False}
        for seed in sorted(derive_seed(9, 0, number) for number in range(2))
    ]


def test_rollouts_know_their_weights(policy, servers):
    server = servers()
    engine = make_engine(policy, server)
    for version in (3, 7):
        engine.update_weights(weights(policy), version=version)
        ((rollout,),) = engine.generate(PROMPTS[:1], SAMPLING, num_generations=1, seed=9)
        assert rollout.weight_versions == [version] * 3


def test_each_prompt_has_its_limit(policy, servers):
    first, second = servers(), servers()
    engine = make_engine(policy, first, second)
    engine.update_weights(weights(policy), version=1)
    limits = [3, 1, 2, 2, 1, 3, 2]
    groups = engine.generate(PROMPTS, SAMPLING, num_generations=2, seed=9, max_new_tokens=limits)
    assert [[len(found) for found in group] for group in tokens(groups)] == [[limit, limit] for limit in limits]
    asked = {tuple(told["token_ids"]): told["sampling_params"]["max_tokens"] for told in first.asked + second.asked}
    assert [asked[tuple(prompt)] for prompt in PROMPTS] == limits
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
    first.before = lambda path: (
        time.sleep(0.2) if path == "/inference/v1/generate" else None
    )  # the other has time for more
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


def test_a_server_that_restarts_in_a_rollout_is_lost(policy, servers):
    server = servers()
    engine = make_engine(policy, server)
    engine.update_weights(weights(policy), version=1)

    def restart(path):
        if path == "/inference/v1/generate" and len(server.asked) == 3:
            server.restart()
            raise ConnectionAbortedError

    server.before = restart
    with pytest.raises(SamplerLostError, match="It was restarted"):
        engine.generate(PROMPTS, SAMPLING, num_generations=1, seed=0)


def test_a_connection_that_breaks_is_no_loss(policy, servers):
    server = servers()
    engine = make_engine(policy, server)
    engine.update_weights(weights(policy), version=1)
    expected = engine.generate(PROMPTS, SAMPLING, num_generations=1, seed=0)

    def cut(path):
        if path == "/inference/v1/generate" and len(server.asked) == 10:
            server.before = lambda path: None
            raise ConnectionAbortedError

    server.before = cut
    assert engine.generate(PROMPTS, SAMPLING, num_generations=1, seed=0) == expected


@pytest.mark.parametrize(
    "answer",
    [
        (503, {"error": {"message": "the engine is dead"}}),
        (200, b'data: {"error": {"message": "the engine is dead"}}\n\n'),
        (200, b"data: [DONE]\n\n"),
    ],
)
def test_rollouts_that_always_break_off_end_the_run(policy, servers, answer):
    server = servers()
    engine = make_engine(policy, server)
    engine.bind(policy, Letters())
    engine.update_weights(weights(policy), version=1)
    server.before = lambda path: answer if path == "/inference/v1/generate" else None
    said = "the answer ended before its rollout did" if b"DONE" in str(answer).encode() else "the engine is dead"
    with pytest.raises(RuntimeError, match=f"broke off a rollout 5 times, most recently: .*{said}"):
        engine.generate([[1]], SamplingConfig(stop=("z",)), num_generations=1, seed=0)


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


def test_another_trainer_in_a_rollout_is_noticed(policy, servers):
    server = servers()
    engine, other = make_engine(policy, server), make_engine(policy, server)
    engine.update_weights(weights(policy), version=1)

    def intrude(path):
        if path == "/inference/v1/generate":
            server.before = lambda path: None
            other.update_weights(weights(policy), version=1)

    server.before = intrude
    with pytest.raises(WeightsMismatchError, match="Does another trainer use this server"):
        engine.generate(PROMPTS, SAMPLING, num_generations=1, seed=0)


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
        assert server.calls.count("pause") == 2
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


def test_generate_in_a_thread_with_an_event_loop(policy, servers):
    engine = make_engine(policy, servers())
    engine.update_weights(weights(policy), version=1)

    async def main():
        return engine.generate(PROMPTS, SAMPLING, num_generations=1, seed=0)

    assert asyncio.run(main()) == engine.generate(PROMPTS, SAMPLING, num_generations=1, seed=0)


def test_an_interruption_ends_what_is_sampled(policy, servers):
    server = servers()
    engine = make_engine(policy, server)
    engine.update_weights(weights(policy), version=1)
    server.before = lambda path: time.sleep(1) if path == "/inference/v1/generate" else None
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    try:
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            engine.generate(PROMPTS, SAMPLING, num_generations=1, seed=0)
    finally:
        signal.signal(signal.SIGINT, before)


def test_closing_ends_what_other_threads_sample(policy, servers):
    server = servers()
    engine = make_engine(policy, server)
    engine.update_weights(weights(policy), version=1)
    asked, answer = threading.Event(), threading.Event()

    def hang(path):
        if path == "/inference/v1/generate":
            asked.set()
            answer.wait(30)

    server.before = hang
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(engine.generate, PROMPTS, SAMPLING, num_generations=1, seed=0)
        asked.wait(30)
        engine.close()
        with pytest.raises(RuntimeError, match="the engine was closed while it sampled"):
            call.result(20)
        answer.set()


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


class Letters:
    """Token i is the i-th letter."""

    eos_token_id = None

    def decode(self, token_ids, skip_special_tokens=False):
        return "".join(chr(ord("a") + token % 26) for token in token_ids)


def test_stop_strings_are_found_here(policy, servers):
    """The server is told to end the sequence, and says which weights it is from."""
    server = servers()
    engine = make_engine(policy, server)
    engine.bind(policy, Letters())
    engine.update_weights(weights(policy), version=1)
    logprobs = [{"content": [{"token_id": token, "logprob": -float(token)}]} for token in range(6)]
    parts = [{"token_ids": [token], "logprobs": logprobs[token], "finish_reason": None} for token in range(5)]
    spans = [{"version": server.label, "start": 0, "end": 5}]
    parts.append({"token_ids": [], "logprobs": None, "finish_reason": "abort", "weight_versions": spans})
    answer = b"".join(b"data: " + json.dumps({"choices": [part]}).encode() + b"\n\n" for part in parts)
    server.before = lambda path: (200, answer) if path == "/inference/v1/generate" else None
    ((rollout,),) = engine.generate([[1]], SamplingConfig(stop=("bc",)), num_generations=1, seed=0)
    assert (rollout.token_ids, rollout.logprobs) == ([0, 1, 2], [0.0, -1.0, -2.0])
    assert (rollout.finish_reason, rollout.text, rollout.weight_versions) == ("stop", "abc", [1, 1, 1])
    assert server.calls[-1] == "inference_v1_abort_requests"


def test_logits_that_are_not_finite(policy, servers):
    server = servers()
    engine = make_engine(policy, server)
    engine.update_weights(weights(policy), version=1)
    choice = {
        **{"token_ids": [1], "finish_reason": "length", "weight_versions": []},
        "logprobs": {"content": [{"token_id": 1, "logprob": -9999.0}]},  # vLLM's NaN
    }
    server.before = lambda path: {"choices": [choice]} if path == "/inference/v1/generate" else None
    with pytest.raises(FloatingPointError, match="not finite"):
        engine.generate([[1]], SAMPLING, num_generations=1, seed=0)


def test_tokens_of_unknown_weights_are_refused(policy, servers):
    server = servers()
    engine = make_engine(policy, server)
    engine.update_weights(weights(policy), version=1)
    choice = {
        **{"token_ids": [1], "finish_reason": "length", "weight_versions": None},
        "logprobs": {"content": [{"token_id": 1, "logprob": -1.0}]},
    }
    server.before = lambda path: {"choices": [choice]} if path == "/inference/v1/generate" else None
    with pytest.raises(WeightsMismatchError, match="does not report which weights sampled its tokens"):
        engine.generate([[1]], SAMPLING, num_generations=1, seed=0)


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
    with pytest.raises(ValueError, match="of which two are the same server; leave one out"):
        engine.update_weights(weights(policy), version=1)


def test_transfer_must_be_that_of_the_server(policy, servers):
    with pytest.raises(ValueError, match="has backend 'pl_grouprl', not 'nccl'; start it with --transfer nccl"):
        make_engine(policy, servers(), transfer="nccl").update_weights(weights(policy), version=1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_nccl_needs_a_gpu(policy, servers):
    server = servers(backend="nccl")
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
            one({"names": self.last, "dtype_names": [], "shapes": []})

    def close(self):
        pass


@pytest.mark.parametrize("place", ["/update_weights", "/init_weight_transfer_engine"])
def test_nccl_with_a_server_that_dies_or_hangs(policy, servers, monkeypatch, place):
    from pl_grouprl.rollout.server import nccl

    monkeypatch.setattr(nccl, "check_device", lambda: None)
    monkeypatch.setattr(nccl, "Broadcaster", Broadcaster)
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

    engine = make_engine(policy, server, transfer="nccl")
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"urls": []}, "urls is .*; it must be at least one url, each once"),
        ({"urls": 2 * ["http://127.0.0.1:1"]}, "urls is .*; it must be at least one url, each once"),
        ({"timeout": 0}, "timeout is 0; it must be larger than 0"),
        ({"transfer": "ipc"}, "transfer is 'ipc'; it must be 'http' or 'nccl'"),
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
