"""What the engine samples from servers that have no model."""

import asyncio
import json
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers.server_engines import PROMPTS, SAMPLING, make_engine, tokens, weights

from pl_grouprl.distributed.checksum import WeightsMismatchError
from pl_grouprl.rollout.engine import SamplerLostError
from pl_grouprl.types import SamplingConfig
from pl_grouprl.utilities.distributed import derive_seed


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
