"""Metrics of rollouts and of an evaluation, worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.episodes import make_episode, make_group, turns_of

from pl_grouprl.rewards import ExactMatch, NumericAnswer, prepare_rewards
from pl_grouprl.training.evaluation import EvaluationOptions, Evaluator
from pl_grouprl.training.metrics import FAILURES, count_tokens, rollout_metrics, summarize
from pl_grouprl.types import Rollout, RolloutGroup


def group(rewards, texts=None, source="default", prompt=(1, 2, 3)):
    texts = texts or ["x"] * len(rewards)
    rollouts = [
        Rollout([4] * (i + 1), reward=reward, rewards={"f": reward}, text=text, finish_reason="length" if i else "stop")
        for i, (reward, text) in enumerate(zip(rewards, texts, strict=True))
    ]
    return RolloutGroup(list(prompt), rollouts, data_source=source)


def evaluate(groups, *rewards, **options):
    evaluator = Evaluator(prepare_rewards(rewards) if rewards else (), EvaluationOptions(**options))
    for own in groups:  # a batch each
        evaluator.groups = [own]
        evaluator.record()
    metrics = evaluator.metrics("val", torch.device("cpu"))
    assert math.isnan(evaluator.metrics("val", torch.device("cpu"))["val/reward"])  # it has started over
    return metrics


def test_rollout_metrics_by_hand():
    records = summarize([group([1.0, 3.0]), group([2.0, 2.0]), group([5.0, None])])
    metrics = rollout_metrics(records)
    assert metrics["reward"] == pytest.approx(13 / 5)
    assert metrics["reward_std"] == pytest.approx(math.sqrt(2) / 3)  # sqrt(2), 0 and, of one reward alone, 0
    assert (metrics["reward_min"], metrics["reward_max"]) == (1.0, 5.0)
    assert metrics["frac_reward_zero_std"] == pytest.approx(2 / 3)
    assert metrics["rewards/f/mean"] == pytest.approx(13 / 5)
    assert metrics["rewards/f/std"] == pytest.approx(math.sqrt((1.6**2 + 0.4**2 + 0.6**2 * 2 + 2.4**2) / 4))
    assert [metrics[f"completions/{name}_length"] for name in ("mean", "min", "max")] == [1.5, 1, 2]
    assert metrics["completions/clipped_ratio"] == 0.5
    assert count_tokens(records) == 3 * (2 * 3 + 1 + 2)


def test_the_lowest_and_highest_reward_are_of_the_finite_ones_of_all_ranks():
    by_rank = [[group([None, -2.0])], [group([math.nan, 0.5]), group([None, math.inf])]]
    metrics = rollout_metrics([record for part in by_rank for record in summarize(part)])
    assert (metrics["reward_min"], metrics["reward_max"]) == (-2.0, 0.5)
    metrics = rollout_metrics(summarize([group([None, None])]))
    assert all(math.isnan(metrics[name]) for name in ("reward", "reward_min", "reward_max"))


def with_numbers(*numbers):
    rollouts = [Rollout([4], reward=1.0, rewards={"f": 1.0}, reward_numbers=own) for own in numbers]
    return RolloutGroup([1], rollouts)


def test_a_further_number_is_the_mean_over_the_rollouts_that_have_it_however_they_are_split():
    groups = [with_numbers({"f/a": 1.0}, {"f/a": 1.0}, {}), with_numbers({}), with_numbers({"f/a": 7.0, "f/b": 2.0})]
    by_rank = [record for part in (groups[:1], groups[1:]) for record in summarize(part)]
    metrics = rollout_metrics(by_rank)
    assert (metrics["rewards/f/a"], metrics["rewards/f/b"]) == ((1 + 1 + 7) / 3, 2.0)
    evaluated = evaluate(groups)  # a batch each
    assert (evaluated["val/rewards/f/a"], evaluated["val/rewards/f/b"]) == ((1 + 1 + 7) / 3, 2.0)
    assert [name for name in evaluated if name.startswith("val/rewards/")] == [
        f"val/rewards/f/{key}" for key in ("mean", "a", "b")
    ]


def test_evaluation_by_hand():
    groups = [
        group([1.0, 0.0, 1.0], ["a", "b", " a"], source="math"),
        group([0.0, 0.0, 1.0], ["b", "b ", "c"], source="math"),
        group([0.5, None, 0.5], source="code"),
    ]
    assert evaluate(groups) == pytest.approx(
        {
            "val/reward": (2 / 3 + 1 / 3 + 1 / 2) / 3,
            "val/rewards/f/mean": 4 / 8,
            "val/math/mean@3": 1 / 2,
            "val/math/best@3": 1.0,
            "val/math/maj@3": 1 / 2,
            "val/math/pass@1": 1 / 2,
            "val/math/pass@2": (1 + 2 / 3) / 2,
            "val/code/mean@2": 1 / 2,
            "val/code/best@2": 1 / 2,
            "val/code/maj@2": 1 / 2,
            "val/code/pass@1": 0.0,
            "val/code/pass@2": 0.0,
        }
    )


def test_names_from_data_reach_the_terminal_as_text_and_stay_apart():
    sources = ["\x1b]0;owned\x07", "\\x1b]0;owned\\x07", "a\nb", "a\\nb", "数学", "C:\\data", "\u202e"]
    names = evaluate([group([1.0], source=source) for source in sources]).keys()
    assert all(name.isprintable() for name in names)
    assert len([name for name in names if name.endswith("/mean@1")]) == len(sources)
    assert {"val/\\x1b]0;owned\\x07/mean@1", "val/数学/mean@1", "val/C:\\data/mean@1"} <= names


@pytest.mark.parametrize(("threshold", "expected"), [(1.2, 0.0), (1.1, 0.5), (0.7 + 0.3, 0.5), (0.05, 0.75), (-1, 1.0)])
def test_the_pass_threshold(threshold, expected):
    metrics = evaluate([group([1.1 - 1e-9, 0.1 * 11, 0.1, 0.0])], pass_threshold=threshold)
    assert metrics["val/default/pass@1"] == expected
    with pytest.raises(ValueError, match="pass_threshold"):
        EvaluationOptions(pass_threshold=math.nan)


def test_pass_at_k_is_over_prompts_with_k_rewards():
    metrics = evaluate([group([0.0, 1.0, 0.0, 0.0]), group([None, 0.0, None, None]), group([1.0, None, None, 0.0])])
    assert [metrics[f"val/default/pass@{k}"] for k in (1, 2, 4)] == [(0.25 + 0.0 + 0.5) / 3, (0.5 + 1.0) / 2, 1.0]
    for num, ks in ((1, [1]), (3, [1, 2]), (8, [1, 2, 4, 8]), (12, [1, 2, 4, 8])):
        names = evaluate([group([1.0] * num)])
        assert [name for name in names if "pass@" in name] == [f"val/default/pass@{k}" for k in ks]
        assert not [name for name in names if "tools/" in name or "episode/" in name]
    assert math.isnan(evaluate([group([None])])["val/reward"])


def episode_groups():
    """Two groups of episodes: 4 tokens of the model each, one of them with an observation of 3 and a failed call."""
    failing = {"calls": 3.0, "seconds": 1.5, "timeout": 1.0, "raised": 1.0}
    long = make_episode(observation=3, tool_counts=failing, finish_reason="length", reward=1.0)
    short = make_episode(
        token_ids=[1, 2],
        logprobs=None,
        loss_mask=None,
        messages=turns_of()[2:],
        tool_counts={"seconds": 0.0},
        reward=0.0,
    )
    return [make_group(long, short), make_group(make_episode(reward=1.0))]


def test_episodes_by_hand():
    records = summarize(episode_groups())
    metrics = rollout_metrics(records)
    assert [metrics[f"completions/{name}_length"] for name in ("mean", "min", "max")] == [pytest.approx(10 / 3), 2, 4]
    assert metrics["completions/clipped_ratio"] == pytest.approx(1 / 3)
    assert count_tokens(records) == 3 * 2 + (9 + 2) + 6
    of_episodes = {name: value for name, value in metrics.items() if name.startswith(("tools/", "episode/"))}
    assert of_episodes == pytest.approx(
        {
            "tools/call_frequency": 4 / 3,
            "tools/failure_frequency": 2 / 4,
            **dict.fromkeys((f"tools/failures/{kind}" for kind in FAILURES), 0.0),
            "tools/failures/timeout": 1.0,
            "tools/failures/raised": 1.0,
            "episode/turns": (2 + 1 + 2) / 3,
            "episode/tool_seconds": (1.5 + 0.0 + 0.5) / 3,
            "episode/context_tokens": (3 + 2 + 0 + 2) / 3,
            # Turns end 6 and 9, 2, 3 and 6 tokens after the prompt of 2; the groups have 13 and 8 tokens.
            "episode/token_ratio": ((2 + 6) + (2 + 9) + (2 + 2) + (2 + 3) + (2 + 6)) / (13 + 8),
        }
    )
    evaluated = evaluate(episode_groups())
    assert {name: evaluated[f"val/{name}"] for name in of_episodes} == of_episodes


def test_episodes_without_a_call_have_the_same_metrics():
    silent = make_episode(messages=turns_of()[2:], loss_mask=None, tool_counts={"calls": 0.0, "seconds": 0.0})
    metrics = rollout_metrics(summarize([make_group(silent)]))
    assert metrics["tools/call_frequency"] == metrics["tools/failure_frequency"] == 0.0
    assert metrics.keys() == rollout_metrics(summarize(episode_groups())).keys()


def test_episodes_vote_by_their_last_message():
    texts = ["41 so 42", "42 so 42", "42"]  # of all messages; those with the same answer vote together
    answers = ["42", "42 ", "41"]
    rollouts = [
        make_episode(text=text, messages=turns_of(answer=answer), reward=reward, rewards={})
        for text, answer, reward in zip(texts, answers, (0.5, 1.0, 0.0), strict=True)
    ]
    metrics = evaluate([make_group(*rollouts)])
    assert metrics["val/default/maj@3"] == pytest.approx((0.5 + 1.0) / 2)


TEXTS = ["so #### 1,000", "#### 2 is it", "yes #### 1000.0", "no", "2"]


SCORES = [1.0, 0.0, 1.0, 0.0, 0.0]


def test_the_answer_in_worked_text_votes():
    apart = evaluate([group(SCORES, TEXTS)])["val/default/maj@5"]
    together = evaluate([group(SCORES, TEXTS)], lambda completions: [], NumericAnswer())["val/default/maj@5"]
    assert (apart, together) == (pytest.approx(2 / 5), pytest.approx((1.0 + 0.0) / 2))  # 1000 and no answer tie


class OfTheRow:
    """Votes by the text without what its row says."""

    def __call__(self, completions, **kwargs):
        return [1.0] * len(completions)

    def extract_answer(self, text, columns):
        return text.removeprefix(columns["opening"]) or None


def test_an_extractor_may_read_the_columns_of_the_row():
    own = group([1.0, 0.0, 0.0], ["a: 1", "1", "a: 2"])
    own.columns = {"opening": "a: "}
    for rewards, answers in (
        ([ExactMatch(), OfTheRow()], ["a: 1", "1", "a: 2"]),  # the first one extracts
        ([OfTheRow(), ExactMatch()], ["1", "1", "2"]),
    ):
        evaluator = Evaluator(prepare_rewards(rewards))
        evaluator.groups = [own]
        assert evaluator.record() == [answers]
    with pytest.warns(UserWarning, match="extract_answer of .*'OfTheRow' raised KeyError"):
        metrics = evaluate([group([1.0, 0.0, 0.0], ["a", "b", "c"])], OfTheRow())
    assert metrics["val/default/maj@3"] == pytest.approx(1 / 3)


def test_answers_as_text():
    texts = {
        "#### 42.0": "42",
        "####-0.0": "0",
        "#### $1,200.50": "1200.5",
        "#### 00": "0",
        "#### 100": "100",
        "7": None,
    }
    assert {text: NumericAnswer().extract_answer(text) for text in texts} == texts
    assert NumericAnswer("flexible").extract_answer("6 or 7.") == "7"
    assert ExactMatch(ignore_case=True).extract_answer(" Two\n") == "two"
