import pytest

from pl_grouprl.distributed.checksum import WeightsMismatchError
from pl_grouprl.episodes.loop import EpisodeLimits
from pl_grouprl.harnesses.gateway import RoundRequests, check_sampling, check_version
from pl_grouprl.rollout.engine import SamplerLostError
from pl_grouprl.types import SamplingConfig


def sampled(limits=None, **options):
    sampling = SamplingConfig(max_new_tokens=10, temperature=0.7, top_k=5, repetition_penalty=1.2)
    return RoundRequests(sampling, "run:1", limits or EpisodeLimits(), **{"end_ids": [2], "vocab_size": 50, **options})


def ask(token_ids, seed=7, **params):
    return {"model": "policy", "token_ids": token_ids, "sampling_params": {"seed": seed, "logprobs": 1, **params}}


def answer(token_ids, reason="length", version="run:1", logprob=-1.0):
    content = [{"token_id": token, "logprob": logprob} for token in token_ids]
    spans = None if version is None else [{"version": version, "start": 0, "end": len(token_ids)}]
    choice = {"token_ids": token_ids, "finish_reason": reason, "logprobs": {"content": content}}
    return {"choices": [{**choice, "weight_versions": spans}]}


def test_the_run_decides_how_turns_are_sampled():
    sent = sampled(never=[9]).request("a", ask([3, 4], temperature=0.1, stop_token_ids=[6, 99], max_tokens=500))
    assert sent["token_ids"] == [3, 4]
    params = sent["sampling_params"]
    assert (params["temperature"], params["top_k"], params["max_tokens"]) == (0.7, 5, 10)
    assert params["repetition_penalty"] == 1.2
    assert params["stop_token_ids"] == [2, 6]  # 99 is not in the vocabulary
    assert params["logit_bias"] == {9: -100.0}  # JSON makes the key a string
    assert params["ignore_eos"] is True
    assert "model" not in sent
    assert sampled(model="policy-3").request("a", ask([3]))["model"] == "policy-3"


def test_each_turn_has_its_seed():
    requests = sampled()
    seeds = [requests.request("a", ask(ids, seed))["sampling_params"]["seed"] for ids, seed in
             [([3], 7), ([3, 4], 7), ([3], 8), ([3], 7)]]  # fmt: skip
    assert len(set(seeds)) == 4
    again = sampled()
    assert again.request("b", ask([3, 4], 7))["sampling_params"]["seed"] == seeds[1]  # whatever came before


def test_an_episode_writes_no_more_than_the_run_allows():
    requests = sampled(EpisodeLimits(max_turn_tokens=6))
    assert requests.request("a", ask([3] * 5))["sampling_params"]["max_tokens"] == 6
    requests.answer("a", [3] * 5, answer([4] * 6))
    assert requests.request("a", ask([3] * 12))["sampling_params"]["max_tokens"] == 4  # of 10
    assert requests.request("b", ask([3]))["sampling_params"]["max_tokens"] == 6
    requests.answer("a", [3] * 12, answer([4] * 4))
    assert not requests.ran_out("a")
    with pytest.raises(ValueError, match="the run's limits leave the episode no room for a token after 17"):
        requests.request("a", ask([3] * 17))
    assert requests.ran_out("a")
    assert not requests.ran_out("b")


@pytest.mark.parametrize(
    ("limits", "options", "room"),
    [(EpisodeLimits(max_tokens=8), {}, 3), (EpisodeLimits(), {"max_model_len": 12}, 2)],
)
def test_sequences_stay_within_limits(limits, options, room):
    requests = sampled(limits, **options)
    requests.request("a", ask([3] * 5))
    requests.answer("a", [3] * 5, answer([4]))
    assert requests.request("a", ask([3] * 10))["sampling_params"]["max_tokens"] == room


def test_tokens_that_would_kill_the_server_are_refused():
    pictured = {**ask([3]), "content_parts": [{"type": "image_url"}]}
    for asked, message in ((ask([3, 50]), "vocab_size=50"), (ask([]), "0 token ids"), (pictured, "only text")):
        with pytest.raises(ValueError, match=message):
            sampled().request("a", asked)


def test_answers_are_in_the_form_of_renderers():
    requests = sampled()
    requests.request("a", ask([3, 4]))
    choice = requests.answer("a", [3, 4], answer([5, 6], logprob=-0.5))["choices"][0]
    assert choice["token_ids"] == [5, 6]
    assert [(entry["token"], entry["logprob"]) for entry in choice["logprobs"]["content"]] == [
        ("token_id:5", -0.5),
        ("token_id:6", -0.5),
    ]
    assert requests.was_sampled([3, 4, 5, 6])
    assert not requests.was_sampled([3, 4, 5])
    assert not requests.was_sampled([3, 4, 5, 7])


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"version": "other:1"}, WeightsMismatchError),
        *(({"version": version}, SamplerLostError) for version in ("default", "run:lost")),
        # Without a token, there is no version either.
        *(({"reason": "abort", "version": version}, SamplerLostError) for version in ("run:1", None)),
        ({"version": None}, WeightsMismatchError),
        ({"logprob": -9999.0}, FloatingPointError),
    ],
)
def test_tokens_of_other_weights_are_refused(options, error):
    requests = sampled()
    requests.request("a", ask([3]))
    with pytest.raises(error):
        requests.answer("a", [3], answer([4], **options))
    check_version("run:1", "run:1")


def test_sampling_that_cannot_be_passed_on_is_refused():
    check_sampling(SamplingConfig(stop_token_ids=(4,)))
    for options in ({"stop": ("x",)}, {"temperature": 0.001}):
        with pytest.raises(ValueError, match=rf"SamplingConfig.{next(iter(options))} is"):
            check_sampling(SamplingConfig(**options))
