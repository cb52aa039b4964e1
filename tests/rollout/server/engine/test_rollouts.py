"""What the engine samples from servers that have no model."""

import asyncio
import json
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from helpers.server_engines import GENERATE, PROMPTS, after, at, make_engine, sample, started, tokens, weights

from pl_grouprl.distributed.checksum import WeightsMismatchError
from pl_grouprl.rollout.engine import SamplerLostError
from pl_grouprl.types import SamplingConfig
from pl_grouprl.utilities.distributed import derive_seed


def test_the_request_that_is_sent(policy, servers):
    server = servers()
    ((first, _),) = sample(started(policy, server, version=3), PROMPTS[:1], num_generations=2, seed=9)
    assert first.weight_versions == [3] * 3
    common = {
        **{"max_tokens": 3, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0},
        **{"repetition_penalty": 1.0, "logprobs": 0},
        **{"stop_token_ids": [4], "ignore_eos": True, "detokenize": False, "logit_bias": None},
    }
    asked = sorted(server.asked, key=lambda told: told["sampling_params"]["seed"])
    assert len({told.pop("request_id") for told in asked}) == 2
    assert asked == [
        {"token_ids": [1, 2, 3], "sampling_params": {**common, "seed": seed}, "stream": False}
        for seed in sorted(derive_seed(9, 0, number) for number in range(2))
    ]


def test_each_prompt_has_its_limit(policy, servers):
    first, second = servers(), servers()
    engine, limits = started(policy, first, second), [3, 1, 2, 2, 1, 3, 2]
    found = tokens(sample(engine, num_generations=2, seed=9, max_new_tokens=limits))
    asked = {tuple(told["token_ids"]): told["sampling_params"]["max_tokens"] for told in first.asked + second.asked}
    assert [asked[tuple(prompt)] for prompt in PROMPTS] == limits
    whole = tokens(sample(engine, num_generations=2, seed=9))
    assert found == [[own[:limit] for own in group] for group, limit in zip(whole, limits, strict=True)]


def test_results_do_not_depend_on_servers_or_ranks(policy, servers):
    """A seed depends on the seed of the call, the index of the prompt and the rollout."""
    one = started(policy, servers())
    three = started(policy, *(servers() for _ in range(3)), max_concurrent_requests=1)
    whole = sample(one, num_generations=3, seed=5)
    assert len({tuple(found) for group in tokens(whole) for found in group}) == 21
    assert sample(three, num_generations=3, seed=5) == whole
    ranks = [
        sample(one, PROMPTS[rank::2], num_generations=3, seed=5, prompt_indices=range(rank, 7, 2)) for rank in (0, 1)
    ]
    assert [ranks[place % 2][place // 2] for place in range(7)] == whole
    seeds = [derive_seed(6, 20 + place, 0) for place in range(7)]
    for engine in (one, three):
        for chosen in (range(7), [6, 2, 4], [3], [5, 6, 0, 1]):
            indices = [20 + place for place in chosen]
            groups = sample(engine, [PROMPTS[place] for place in chosen], seed=6, prompt_indices=indices)
            for place, (found,) in zip(chosen, tokens(groups), strict=True):
                assert found == [sum(PROMPTS[place]) % 61, seeds[place] % 61, seeds[place] // 61 % 61]


def test_no_prompts_ask_no_server(policy, servers):
    """Ranks without an open episode go through a turn with the others."""
    server = servers()
    engine = started(policy, server)
    server.close()
    for options in ({}, {"prompt_indices": []}, {"prompt_indices": [], "max_new_tokens": []}):
        assert sample(engine, [], **options) == []


def test_the_longest_sequence_is_that_of_all_servers(policy, servers):
    engine = make_engine(policy, servers(), servers(max_model_len=20), servers(max_model_len=30))
    assert engine.max_model_len is None
    engine.update_weights(weights(policy), version=1)
    assert engine.max_model_len == 20
    assert len(sample(engine, [[1] * 17])) == 1
    with pytest.raises(ValueError, match=r"prompts\[1\].*max_model_len=20"):
        sample(engine, [[1], [1] * 18], max_new_tokens=[4, 3])


def test_servers_share_the_prompts(policy, servers):
    first, second = servers(), servers()
    first.before = at(GENERATE, lambda: time.sleep(0.2))  # the other has time for more
    sample(started(policy, first, second, max_concurrent_requests=1), seed=5)
    assert 1 <= len(first.asked) < len(second.asked)
    assert len(first.asked) + len(second.asked) == 7


def test_a_server_that_restarts_in_a_rollout_is_lost(policy, servers):
    server = servers()
    engine = started(policy, server)

    def restart():
        server.restart()
        raise ConnectionAbortedError

    server.before = after(server, 3, restart)
    with pytest.raises(SamplerLostError, match="restarted"):
        sample(engine)


def test_a_connection_that_breaks_is_no_loss(policy, servers):
    server = servers()
    engine = started(policy, server)
    expected = sample(engine)

    def cut():
        raise ConnectionAbortedError

    server.before = after(server, 3, cut)
    assert sample(engine) == expected


def letters(token_ids, skip_special_tokens=False):
    return "".join(chr(ord("a") + token % 26) for token in token_ids)


LETTERS = SimpleNamespace(eos_token_id=None, decode=letters)
"""Token i is the i-th letter."""


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((503, {"error": {"message": "the engine is dead"}}), "the engine is dead"),
        ((200, b'data: {"error": {"message": "the engine is dead"}}\n\n'), "the engine is dead"),
        ((200, b"data: [DONE]\n\n"), "the answer ended"),
    ],
)
def test_rollouts_that_always_break_off_end_the_run(policy, servers, answer, said):
    server = servers()
    engine = started(policy, server)
    engine.bind(policy, LETTERS)
    server.before = at(GENERATE, lambda: answer)
    with pytest.raises(RuntimeError, match=f"broke off a rollout 5 times, .*{said}"):
        sample(engine, [[1]], SamplingConfig(stop=("z",)))


def test_another_trainer_in_a_rollout_is_noticed(policy, servers):
    server = servers()
    engine, other = started(policy, server), make_engine(policy, server)
    engine.update_weights(weights(policy), version=2)

    def intrude():
        other.update_weights(weights(policy), version=2)

    server.before = after(server, 0, intrude)
    with pytest.raises(WeightsMismatchError, match="another trainer"):
        sample(engine)


def test_generate_in_a_thread_with_an_event_loop(policy, servers):
    engine = started(policy, servers())

    async def main():
        return sample(engine)

    assert asyncio.run(main()) == sample(engine)


def test_an_interruption_ends_what_is_sampled(policy, servers):
    server = servers()
    engine = started(policy, server)
    server.before = at(GENERATE, lambda: time.sleep(1))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    try:
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            sample(engine)
    finally:
        signal.signal(signal.SIGINT, before)


def test_closing_ends_what_other_threads_sample(policy, servers):
    server = servers()
    engine = started(policy, server)
    asked, answer = threading.Event(), threading.Event()
    server.before = at(GENERATE, lambda: asked.set() or (answer.wait(30) and None))
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(sample, engine)
        asked.wait(30)
        engine.close()
        with pytest.raises(RuntimeError, match="closed"):
            call.result(20)
        answer.set()


def test_stop_strings_are_found_here(policy, servers):
    """The server is told to end the sequence, and says which weights it is from."""
    server = servers()
    engine = started(policy, server)
    engine.bind(policy, LETTERS)
    logprobs = [{"content": [{"token_id": token, "logprob": -float(token)}]} for token in range(6)]
    parts = [{"token_ids": [token], "logprobs": logprobs[token], "finish_reason": None} for token in range(5)]
    spans = [{"version": server.label, "start": 0, "end": 5}]
    parts.append({"token_ids": [], "logprobs": None, "finish_reason": "abort", "weight_versions": spans})
    answer = b"".join(b"data: " + json.dumps({"choices": [part]}).encode() + b"\n\n" for part in parts)
    server.before = at(GENERATE, lambda: (200, answer))
    ((rollout,),) = sample(engine, [[1]], SamplingConfig(stop=("bc",)))
    assert (rollout.token_ids, rollout.logprobs) == ([0, 1, 2], [0.0, -1.0, -2.0])
    assert (rollout.finish_reason, rollout.text, rollout.weight_versions) == ("stop", "abc", [1, 1, 1])
    assert server.calls[-1] == "inference_v1_abort_requests"


@pytest.mark.parametrize(
    ("logprob", "spans", "error"),
    [(-9999.0, [], FloatingPointError), (-1.0, None, WeightsMismatchError)],  # vLLM's NaN
)
def test_tokens_of_no_number_or_of_unknown_weights_are_refused(policy, servers, logprob, spans, error):
    server = servers()
    engine = started(policy, server)
    choice = {"token_ids": [1], "finish_reason": "length", "weight_versions": spans}
    choice["logprobs"] = {"content": [{"token_id": 1, "logprob": logprob}]}
    server.before = at(GENERATE, lambda: {"choices": [choice]})
    with pytest.raises(error):
        sample(engine, [[1]])
