"""apply_rewards: both signatures, the weighted sum, what happens to rewards that are missing or wrong."""

import asyncio
import functools
import gc
import itertools
import math
import threading
import weakref
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from pl_grouprl.rewards import Weighted, apply_rewards, prepare_rewards
from pl_grouprl.types import Rollout, RolloutGroup


def make_groups(*texts_per_group, columns=None, prompts=None):
    return [
        RolloutGroup(
            prompt_ids=[1],
            rollouts=[Rollout([7] * len(text), text=text) for text in texts],
            columns={"answer": f"a{number}"} if columns is None else columns[number],
            prompt="p" if prompts is None else prompts[number],
            data_source=f"source{number}",
        )
        for number, texts in enumerate(texts_per_group)
    ]


def rewards_of(groups):
    return [rollout.reward for group in groups for rollout in group.rollouts]


def length(completions, **columns):
    return [float(len(completion)) for completion in completions]


def test_trl_function_gets_all_rollouts_in_one_call_with_columns_repeated():
    seen = {}

    def spy(prompts, completions, completion_ids, answer, **columns):
        seen.update(prompts=prompts, completions=completions, ids=completion_ids, answer=answer, rest=columns)
        return [1.0, 2.0, 3.0]

    groups = make_groups(["ab", "c"], ["def"], columns=[{"answer": "x", "level": 1}, {"answer": "y"}])
    apply_rewards(groups, spy)
    assert seen == {
        "prompts": ["p", "p", "p"],
        "completions": ["ab", "c", "def"],
        "ids": [[7, 7], [7], [7, 7, 7]],
        "answer": ["x", "x", "y"],
        "rest": {"level": [1, 1, None]},
    }
    assert rewards_of(groups) == [1.0, 2.0, 3.0]
    assert groups[0].rollouts[1].rewards == {"spy": 2.0}


def test_trl_function_gets_messages_for_a_conversational_prompt():
    seen = []
    messages = [{"role": "user", "content": "hi"}]

    def spy(prompts, completions):
        seen.extend([prompts, completions])
        return [0.0, 0.0]

    apply_rewards(make_groups(["a"], ["b"], prompts=[messages, "plain"]), spy)
    assert seen == [[messages, "plain"], [[{"role": "assistant", "content": "a"}], "b"]]


def test_verl_function_gets_ground_truth_and_its_extra_numbers_are_logged():
    calls = []

    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        calls.append((data_source, solution_str, ground_truth, extra_info))
        score = float(solution_str == ground_truth)
        return {"score": score, "format": 1 + score, "prediction": solution_str}

    columns = [
        {"reward_model": {"style": "rule", "ground_truth": "4"}, "extra_info": {"index": 0}},
        {"reward_model": {"style": "rule", "ground_truth": "9"}},
    ]
    groups = make_groups(["4", "5"], ["9"], columns=columns)
    metrics = apply_rewards(groups, compute_score)
    assert calls == [
        ("source0", "4", "4", {"index": 0}),
        ("source0", "5", "4", {"index": 0}),
        ("source1", "9", "9", None),
    ]
    assert rewards_of(groups) == [1.0, 0.0, 1.0]
    assert metrics["rewards/compute_score/format"] == pytest.approx(5 / 3)
    assert "rewards/compute_score/prediction" not in metrics


@pytest.mark.parametrize("columns", [{"ground_truth": "x"}, {"answer": "x"}])
def test_verl_function_reads_plain_columns_too(columns):
    groups = make_groups(["x"], columns=[columns])
    apply_rewards(groups, lambda data_source, solution_str, ground_truth: float(solution_str == ground_truth))
    assert rewards_of(groups) == [1.0]


def test_weighted_sum_and_metrics():
    groups = make_groups(["a", "bbb"], ["cccccc", ""])
    metrics = apply_rewards(
        groups,
        [
            Weighted(length, 2.0),
            Weighted(lambda completions, **columns: [10, None, True, 0], 0.5, name="other"),
            Weighted(lambda completions, **columns: [100.0] * 4, 0.0, name="watched"),
        ],
    )
    assert rewards_of(groups) == [2 * 1 + 5, 2 * 3, 2 * 6 + 0.5, 0.0]
    assert groups[0].rollouts[1].rewards == {"length": 3.0, "other": None, "watched": 100.0}
    # lengths 1, 3, 6, 0: mean 2.5, squared deviations 2.25 + 0.25 + 12.25 + 6.25 = 21
    assert metrics["rewards/length/mean"] == 2.5
    assert metrics["rewards/length/std"] == pytest.approx(math.sqrt(21 / 3))
    assert metrics["rewards/other/mean"] == pytest.approx(11 / 3)
    assert (metrics["rewards/other/none"], metrics["rewards/other/invalid"]) == (1.0, 0.0)


def test_none_everywhere_leaves_the_rollout_without_reward():
    groups = make_groups(["a", "b"])
    metrics = apply_rewards(groups, lambda completions, **columns: [None, None])
    assert rewards_of(groups) == [None, None]
    assert math.isnan(metrics["rewards/reward_1/mean"])
    assert math.isnan(metrics["rewards/reward_1/std"])
    assert metrics["rewards/reward_1/none"] == 2.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_masks_the_rollout(bad):
    groups = make_groups(["a", "bb"])
    metrics = apply_rewards(groups, [length, Weighted(lambda completions, **columns: [bad, 1.0], name="odd")])
    assert rewards_of(groups) == [None, 3.0]
    assert groups[0].rollouts[0].rewards == {"length": 1.0, "odd": None}
    assert groups[0].rollouts[0].failed_rewards == ["odd"]
    assert metrics["rewards/odd/invalid"] == 1.0
    assert metrics["rewards/odd/mean"] == 1.0


def test_an_observer_that_fails_masks_nothing():
    groups = make_groups(["a", "bb"])
    apply_rewards(groups, [length, Weighted(lambda completions, **columns: [math.nan, 1.0], 0.0, name="watched")])
    assert rewards_of(groups) == [1.0, 2.0]


@pytest.mark.parametrize("result", [np.array([1.0, 2.0], dtype=np.float32), (1, np.float64(2)), [np.int64(1), 2.0]])
def test_arrays_and_numpy_numbers_are_numbers(result):
    groups = make_groups(["a", "b"])
    apply_rewards(groups, lambda completions: result)
    assert rewards_of(groups) == [1.0, 2.0]


def test_wrong_length_names_function_lengths_and_remedy():
    def short(completions, **columns):
        return [1.0]

    with pytest.raises(ValueError, match=r"'short' returned 1 rewards for 3 completions"):
        apply_rewards(make_groups(["a", "b"], ["c"]), short)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (1.0, "'wrong' returned a float"),
        ({"rewards": [1.0]}, "'wrong' returned a dict"),
        (["1.0"], "'wrong' returned '1.0' of type str"),
    ],
)
def test_wrong_type_names_function(result, message):
    def wrong(completions):
        return result

    with pytest.raises(ValueError, match=message):
        apply_rewards(make_groups(["a"]), wrong)


def test_dictionaries_in_a_list_are_scores_with_extra_numbers():
    def grade(completions, **columns):
        return [{"score": 1.0, "tokens": 4}, {"score": None, "tokens": 2, "why": "short"}, 0.5]

    def steps(groups):
        return [[{"score": [None, 2.0], "steps": 1}, 0.0, None]]

    group = RolloutGroup([1], [Rollout([7, 8], text=text) for text in "abc"])
    metrics = apply_rewards([group], [grade, steps])
    assert [rollout.rewards for rollout in group.rollouts] == [
        {"grade": 1.0, "steps": 2.0}, {"grade": None, "steps": 0.0}, {"grade": 0.5, "steps": None}
    ]  # fmt: skip
    assert (metrics["rewards/grade/tokens"], metrics["rewards/grade/none"], metrics["rewards/steps/steps"]) == (3, 1, 1)
    assert "rewards/grade/why" not in metrics


@pytest.mark.parametrize(
    ("value", "number"),
    [(np.bool_(True), 1.0), (np.float32(0.5), 0.5), (np.array([2]), 2.0), (np.array(3.0), 3.0), (True, 1.0),
     (torch.tensor(0.5), 0.5), (torch.tensor([True]), 1.0), (torch.tensor(2.0, requires_grad=True).bfloat16(), 2.0),
     (Decimal("0.5"), 0.5), (Fraction(1, 2), 0.5)],
)  # fmt: skip
def test_every_kind_of_number_in_a_dictionary_is_logged(value, number):
    metrics = apply_rewards(make_groups(["a"]), lambda completions, **columns: [{"score": 1.0, "extra": value}])
    assert metrics["rewards/reward_1/extra"] == number


def test_no_key_of_a_dictionary_is_lost():
    keys = ["mean", "mean_", "std", "none", "invalid", "bleu/mean", "a_std", 7, "\x1b[2J"]

    def grade(solution_str, **columns):
        return {"score": 0.0, "broken": math.nan, "late": None} | {key: i + 1 for i, key in enumerate(keys)}

    def sometimes(completions, **columns):
        return [{"score": 1.0, "extra": 2.0}, {"score": 0.0}, {"score": None, "extra": 5.0}]

    metrics = apply_rewards(make_groups(["a", "b", "c"]), [grade, sometimes])
    names = ["mean_", "mean__", "std_", "none_", "invalid_", "bleu/mean", "a_std", "7", "\\x1b[2J"]
    assert [metrics[f"rewards/grade/{name}"] for name in names] == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert [metrics[f"rewards/grade/{name}"] for name in ("mean", "std", "none", "invalid")] == [0, 0, 0, 0]
    assert not {"rewards/grade/broken", "rewards/grade/late"} & metrics.keys()
    assert metrics["rewards/sometimes/extra"] == 3.5


def test_verl_dictionary_without_score_is_refused():
    def grade(data_source, solution_str, ground_truth):
        return {"reward": 1.0}

    with pytest.raises(ValueError, match=r"'grade' returned a dictionary with the keys \['reward'\]"):
        apply_rewards(make_groups(["a"]), grade)


def test_a_required_column_that_is_missing_is_named():
    def needs(completions, difficulty):
        return [0.0] * len(completions)

    with pytest.raises(ValueError, match=r"'needs' requires \['difficulty'\]"):
        apply_rewards(make_groups(["a"]), needs)


def test_a_missing_ground_truth_is_named():
    def grade(data_source, solution_str, ground_truth):
        return 1.0

    with pytest.raises(ValueError, match=r"'grade' requires a ground_truth.*\['level'\]"):
        apply_rewards(make_groups(["a"], columns=[{"level": 1}]), grade)


def test_unknown_signature_is_refused_before_a_run():
    def strange(queries, labels):
        return []

    with pytest.raises(ValueError, match=r"'strange' has the signature \(queries, labels\)"):
        prepare_rewards(strange)


def test_a_call_that_raises_is_repeated():
    attempts = []

    def flaky(completions, **columns):
        attempts.append(len(completions))
        if len(attempts) == 1:
            raise ConnectionError("try again")
        return [1.0] * len(completions)

    groups = make_groups(["a", "b"])
    metrics = apply_rewards(groups, flaky)
    assert attempts == [2, 2]
    assert rewards_of(groups) == [1.0, 1.0]
    assert metrics["rewards/flaky/invalid"] == 0.0


def test_a_verl_call_that_raises_costs_one_rollout():
    attempts = []

    def grade(data_source, solution_str, ground_truth):
        attempts.append(solution_str)
        return 1 / len(solution_str)

    groups = make_groups(["a", "", "bb"])
    assert apply_rewards(groups, grade, retries=2)["rewards/grade/invalid"] == 1.0
    assert rewards_of(groups) == [1.0, None, 0.5]
    assert attempts == ["a", "", "", "", "bb"]


def test_too_many_failures_end_the_run_with_the_cause():
    def broken(completions, **columns):
        raise KeyError("level")

    with pytest.raises(RuntimeError, match=r"'broken' raised KeyError: 'level'.*4 of 4 rollouts.*=0\.5") as caught:
        apply_rewards(make_groups(["a", "b"], ["c", "d"]), broken)
    assert isinstance(caught.value.__cause__, KeyError)


def test_the_allowed_share_is_inclusive():
    def grade(data_source, solution_str, ground_truth):
        return {"a": 1.0}[solution_str]

    groups = make_groups(["a", "b"])
    apply_rewards(groups, grade, max_failed_share=0.5)
    assert rewards_of(groups) == [1.0, None]
    with pytest.raises(RuntimeError, match="1 of 2 rollouts"):
        apply_rewards(make_groups(["a", "b"]), grade, max_failed_share=0.4)


@pytest.mark.parametrize(("option", "value"), [("retries", -1), ("max_failed_share", 1.5)])
def test_options_out_of_range(option, value):
    with pytest.raises(ValueError, match=f"{option} is {value}"):
        apply_rewards(make_groups(["a"]), length, **{option: value})


def test_async_functions_run_side_by_side_while_plain_ones_stay_on_the_main_thread():
    # Each coroutine waits until all others have begun; run one after another they would never end.
    begun, everyone = [], threading.Event()
    threads = []

    async def meet():
        begun.append(None)
        if len(begun) == 3:
            everyone.set()
        while not everyone.is_set():
            await asyncio.sleep(0.001)

    async def first(completions, **columns):
        await meet()
        return [1.0, 2.0]

    async def second(data_source, solution_str, ground_truth):
        await meet()
        return 10.0

    def plain(completions):
        threads.append(threading.current_thread())
        return [100.0, 100.0]

    groups = make_groups(["a", "b"])
    apply_rewards(groups, [first, plain, second])
    assert rewards_of(groups) == [111.0, 112.0]
    assert threads == [threading.main_thread()]


def test_async_functions_work_inside_a_running_event_loop():
    async def grade(completions, **columns):
        await asyncio.sleep(0)
        return [3.0]

    async def notebook():
        groups = make_groups(["a"])
        apply_rewards(groups, grade)
        return rewards_of(groups)

    assert asyncio.run(notebook()) == [3.0]


def test_async_methods_partials_and_failures():
    class Judge:
        async def __call__(self, completions, scale, **columns):
            if "poison" in completions:
                raise RuntimeError("bad completion")
            return [scale for _ in completions]

    groups, judge = make_groups(["a"], ["c"]), Weighted(functools.partial(Judge().__call__, scale=4.0), name="judge")
    apply_rewards(groups, judge)
    assert rewards_of(groups) == [4.0, 4.0]
    with pytest.raises(RuntimeError, match="'judge' raised RuntimeError: bad completion"):
        apply_rewards(make_groups(["a"], ["poison"]), judge)


def test_text_is_decoded_once_if_missing():
    class Tokenizer:
        def decode(self, token_ids, skip_special_tokens):
            assert skip_special_tokens
            return "".join(chr(96 + token) for token in token_ids)

    groups = [RolloutGroup([1], [Rollout([1, 2]), Rollout([])])]
    apply_rewards(groups, length, tokenizer=Tokenizer())
    assert [rollout.text for rollout in groups[0].rollouts] == ["ab", ""]
    assert rewards_of(groups) == [2.0, 0.0]


def test_no_rollouts_give_metrics_and_no_call():
    def never(completions, **columns):
        raise AssertionError

    metrics = apply_rewards([], never)
    assert sorted(metrics) == [f"rewards/never/{key}" for key in ("invalid", "mean", "none", "std")]


def fails_every_second_time():
    called = itertools.count()

    def grade(data_source, solution_str, ground_truth=None):
        try:
            return [1.0][next(called) % 2]
        except IndexError as error:
            raise RuntimeError("as every second time") from error

    return grade


async def fails_in_a_loop(completions, **columns):
    raise RuntimeError("as always")


@pytest.mark.parametrize(
    ("function", "retries"),
    [
        (lambda data_source, solution_str, ground_truth=None: 1.0, 0),
        (fails_every_second_time(), 1),
        (fails_every_second_time(), 0),
        (lambda completions, **columns: 1 / 0, 1),
        (fails_in_a_loop, 1),
    ],
)
def test_rollouts_are_freed_without_a_garbage_collection(function, retries):
    groups = make_groups(["a", "b"], ["c"])
    group = weakref.ref(groups[0])
    gc.disable()
    try:
        apply_rewards(groups, [length, Weighted(function, name="other")], retries=retries, max_failed_share=1.0)
        del groups
        assert group() is None
    finally:
        gc.enable()


def test_lambdas_are_named_by_their_place():
    metrics = apply_rewards(
        make_groups(["a"]),
        [length, lambda completions, **columns: [2.0], lambda completions, **columns: [3.0]],
    )
    means = {name: value for name, value in metrics.items() if name.endswith("/mean")}
    assert means == {"rewards/length/mean": 1.0, "rewards/reward_2/mean": 2.0, "rewards/reward_3/mean": 3.0}
