"""apply_rewards: the three signatures, the weighted sum, failures, and what stands in the rollouts then."""

import asyncio
import functools
import gc
import itertools
import math
import multiprocessing
import os
import sys
import threading
import weakref
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from helpers.hostile_graders import NoException
from helpers.rewards import group_of, returning, rewards_of

from pl_grouprl.rewards import RewardConfigurationError, Weighted, apply_rewards, check_columns, prepare_rewards
from pl_grouprl.types import Prompt, Rollout, RolloutGroup

NAN, INF = math.nan, math.inf


def length(completions, **columns):
    return [float(len(completion)) for completion in completions]


# Signatures.


def test_trls_function_gets_all_rollouts_in_one_call_with_columns_repeated():
    seen, messages = {}, [{"role": "user", "content": "hi"}]

    def spy(prompts, completions, completion_ids, answer, **columns):
        seen.update(prompts=prompts, completions=completions, ids=completion_ids, answer=answer, rest=columns)
        return [1.0, 2.0, 3.0]

    groups = [group_of("ab", "c", answer="x", level=1), group_of("def", prompt=messages, answer="y")]
    apply_rewards(groups, spy)
    assert seen == {
        "prompts": ["p", "p", messages],
        "completions": ["ab", "c", [{"role": "assistant", "content": "def"}]],
        "ids": [[7, 7], [7], [7, 7, 7]],
        "answer": ["x", "x", "y"],
        "rest": {"level": [1, 1, None]},
    }
    assert rewards_of(*groups) == [1.0, 2.0, 3.0]
    assert groups[0].rollouts[1].rewards == {"spy": 2.0}


def test_verls_function_gets_ground_truth_and_its_extra_numbers_are_logged():
    calls = []

    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        calls.append((data_source, solution_str, ground_truth, extra_info))
        score = float(solution_str == ground_truth)
        return {"score": score, "format": 1 + score, "prediction": solution_str}

    groups = [
        group_of("4", "5", reward_model={"style": "rule", "ground_truth": "4"}, extra_info={"index": 0}, answer="5"),
        group_of("9", ground_truth="9"),
        group_of("x", answer="x"),
    ]
    groups[1].data_source = "source"
    metrics = apply_rewards(groups, compute_score)
    assert calls == [
        *(("default", "4", "4", {"index": 0}), ("default", "5", "4", {"index": 0})),
        *(("source", "9", "9", None), ("default", "x", "x", None)),
    ]
    assert rewards_of(*groups) == [1.0, 0.0, 1.0, 1.0]
    assert metrics["rewards/compute_score/format"] == 7 / 4
    assert "rewards/compute_score/prediction" not in metrics


def test_functions_of_groups_get_those_that_have_rollouts():
    def lengths(groups):
        return [[float(len(g.prompt_ids) * 10 + len(r.token_ids)) for r in g.rollouts] for g in groups]

    async def grade(groups):
        return [torch.tensor([1.0, NAN]), (None,)]

    groups = [group_of("a", "bb"), group_of(), group_of("c")]
    assert prepare_rewards(lengths)[0].convention == "groups"
    metrics = apply_rewards(groups, [lengths, Weighted(grade, 0.0)])
    assert rewards_of(*groups) == [11.0, 12.0, 11.0]
    assert (metrics["rewards/grade/none"], metrics["rewards/grade/invalid"]) == (1.0, 1.0)


def needs(completions, difficulty):
    return [0.0] * len(completions)


def grade_groups(groups, judge):
    return []


def strange(queries, labels):
    return []


def verls(result):
    """A function of verl's signature that returns this."""

    def given(data_source, solution_str, ground_truth):
        return result

    return given


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (returning(1.0), "'given' returned 1 rewards for 2 completions"),
        (lambda completions: 1.0, "'reward_1' returned a float"),
        (lambda completions: {"rewards": [1.0]}, "'reward_1' returned a dict"),
        (returning("1.0", 1.0), "'given' .* of type str"), (returning([1.0, "1.0"], 1.0), "of type str"),
        (returning([1.0, [1.0]], 1.0), "of type list"), (returning([1.0, {}], 1.0), "of type dict"),
        *(
            (returning(0.0, row), f"{len(row)} rewards for a completion of 3")
            for row in ([1], [1] * 4, np.zeros(2), [])
        ),
        (verls({"reward": 1.0}), r"'given' .* \['reward'\]"),
        (verls((1.0, True)), "'given' returned the tuple"),  # as long as a completion, or not
        (lambda groups: [[1.0, 2.0, 3.0]], r"'reward_1' returned \[3\] rewards for groups of \[2\]"),
        (lambda groups: [1.0], r"'reward_1' returned \['float'\]"),
        (lambda groups: 3.0, "'reward_1' returned a float"),
        (lambda groups: [[1.0, "x"]], "'reward_1' .* of type str"), (needs, r"'needs' requires \['difficulty'\]"),
        (grade_groups, r"'grade_groups' requires \['judge'\]"), (strange, "'strange' has the signature"),
        ([length, length], "named 'length'"), ([], "rewards has weight 0"),
        ([Weighted(length, 0.0), Weighted(needs, 0.0)], r"weight 0 for all of \['length', 'needs'\]"),
    ],
)  # fmt: skip
def test_what_cannot_be_a_reward_ends_the_run(function, message):
    with pytest.raises(ValueError, match=message):
        apply_rewards([group_of("ab", "cde")], function, max_failed_share=1.0)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (needs, r"train, prompt 1: .*requires \['difficulty'\]"),
        (verls(1.0), r"train, prompt 2: .*requires a ground_truth.*\['difficulty'\]"),
    ],
)
def test_a_missing_column_is_named_with_its_prompt_at_setup(function, message):
    columns = [{"answer": "a", "difficulty": 1}, {"answer": "b"}, {"difficulty": 2}]
    prompts = [Prompt([1], columns=own) for own in columns]
    with pytest.raises(ValueError, match=message):
        check_columns(prompts, function, "train")
    check_columns(prompts[:1], function, "train")


@pytest.mark.parametrize(("option", "value"), [("retries", -1), ("max_failed_share", 1.5), ("timeout", 0)])
def test_options_out_of_range(option, value):
    with pytest.raises(ValueError, match=f"{option} is {value}"):
        apply_rewards([group_of("a")], length, **{option: value})


# Numbers.


def test_weighted_sum_and_metrics():
    groups = [group_of("a", "bbb"), group_of("cccccc", "")]
    metrics = apply_rewards(
        groups,
        [
            Weighted(length, 2.0),
            Weighted(returning(10, None, True, 0), 0.5, name="other"),
            Weighted(lambda completions: [100.0] * 4, 0.0),
        ],
    )
    assert rewards_of(*groups) == [2 * 1 + 5, 2 * 3, 2 * 6 + 0.5, 0.0]
    assert groups[0].rollouts[1].rewards == {"length": 3.0, "other": None, "reward_3": 100.0}
    # lengths 1, 3, 6, 0: mean 2.5, squared deviations 2.25 + 0.25 + 12.25 + 6.25 = 21
    assert metrics["rewards/length/mean"] == 2.5
    assert metrics["rewards/length/std"] == pytest.approx(math.sqrt(21 / 3))
    assert metrics["rewards/other/mean"] == pytest.approx(11 / 3)
    assert (metrics["rewards/other/none"], metrics["rewards/other/invalid"]) == (1.0, 0.0)


def test_none_everywhere_leaves_the_rollout_without_reward():
    group = group_of("a", "b")
    metrics = apply_rewards([group], returning(None, None))
    assert rewards_of(group) == [None, None]
    assert math.isnan(metrics["rewards/given/mean"])
    assert math.isnan(metrics["rewards/given/std"])
    assert metrics["rewards/given/none"] == 2.0


@pytest.mark.parametrize("bad", [NAN, INF, -1e300, 10**400])
def test_a_number_that_is_not_finite_masks_the_rollout(bad):
    group = group_of("a", "bb", "ccc")
    watched = Weighted(returning(1.0, bad, 1.0), 0.0, name="watched")  # it masks nothing
    metrics = apply_rewards([group], [length, Weighted(returning(bad, 1.0, 1.0), name="odd"), watched])
    assert rewards_of(group) == [None, 3.0, 4.0]
    assert group.rollouts[0].rewards == {"length": 1.0, "odd": None, "watched": 1.0}
    assert group.rollouts[0].failed_rewards == ["odd"]
    assert (metrics["rewards/odd/invalid"], metrics["rewards/odd/mean"]) == (1.0, 1.0)
    with pytest.raises(RuntimeError, match=r"'given' gave NaN, .* 2 of 3 rollouts, .*max_failed_share=0.5"):
        apply_rewards([group], returning(bad, bad, 1.0))


def test_the_largest_float32_is_a_reward_and_its_double_is_not():
    largest = 3.4028234663852886e38
    group = group_of("a", "b")
    metrics = apply_rewards([group], returning(largest, -largest))
    assert rewards_of(group) == [largest, -largest]
    assert metrics["rewards/given/std"] == pytest.approx(largest * math.sqrt(2))
    apply_rewards([group], Weighted(returning(largest, 1.0), weight=2.0))
    assert rewards_of(group) == [None, 2.0]


@pytest.mark.parametrize("result", [np.array([1.0, 2.0], dtype=np.float32), (1, np.float64(2)), [np.int64(1), 2.0]])
def test_arrays_and_numpy_numbers_are_numbers(result):
    group = group_of("a", "b")
    apply_rewards([group], lambda completions: result)
    assert rewards_of(group) == [1.0, 2.0]


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
    metrics = apply_rewards([group_of("a")], returning({"score": 1.0, "extra": value}))
    assert metrics["rewards/given/extra"] == number


def test_no_key_of_a_dictionary_is_lost():
    keys = ["mean", "mean_", "std", "none", "invalid", "bleu/mean", "a_std", 7, "\x1b[2J"]

    def grade(solution_str, **columns):
        return {"score": 0.0, "broken": NAN, "late": None} | {key: i + 1 for i, key in enumerate(keys)}

    sometimes = returning({"score": 1.0, "extra": 2.0}, {"score": 0.0}, {"score": None, "extra": 5.0})
    metrics = apply_rewards([group_of("a", "b", "c")], [grade, sometimes])
    names = ["mean_", "mean__", "std_", "none_", "invalid_", "bleu/mean", "a_std", "7", "\\x1b[2J"]
    assert [metrics[f"rewards/grade/{name}"] for name in names] == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert [metrics[f"rewards/grade/{name}"] for name in ("mean", "std", "none", "invalid")] == [0, 0, 0, 0]
    assert not {"rewards/grade/broken", "rewards/grade/late"} & metrics.keys()
    assert metrics["rewards/given/extra"] == 3.5


# Failures.


def test_a_call_that_raises_is_repeated_and_costs_its_own_rollouts():
    attempts = []

    def flaky(completions, **columns):
        attempts.append(len(completions))
        if len(attempts) == 1:
            raise ConnectionError("try again")
        return [1.0] * len(completions)

    def grade(data_source, solution_str, ground_truth):
        attempts.append(solution_str)
        return 1 / len(solution_str)

    group = group_of("a", "", "bb")
    assert apply_rewards([group], flaky)["rewards/flaky/invalid"] == 0.0
    assert apply_rewards([group], grade, retries=2)["rewards/grade/invalid"] == 1.0
    assert rewards_of(group) == [1.0, None, 0.5]
    assert attempts == [3, 3, "a", "", "", "", "bb"]
    apply_rewards([group], grade, max_failed_share=1 / 3)  # inclusive
    with pytest.raises(RuntimeError, match=r"'grade' raised ZeroDivisionError: .*1 of 3 rollouts.*=0\.3") as caught:
        apply_rewards([group], grade, max_failed_share=0.3)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def no_exception():
    raise NoException


@pytest.mark.parametrize("end", [lambda: sys.exit(3), no_exception, lambda: os._exit(0)], ids=["exit", "base", "_exit"])
@pytest.mark.parametrize("is_async", [False, True])
def test_what_would_end_the_process_is_a_failure(end, is_async):
    def grade(solution_str, ground_truth):
        return end() if solution_str == "bad" else 1.0

    async def grade_async(solution_str, ground_truth):
        await asyncio.sleep(0)
        return grade(solution_str, ground_truth)

    function = grade_async if is_async else grade
    for _ in range(2):  # the event loop goes on
        group = group_of("good", "bad")
        assert apply_rewards([group], function)[f"rewards/{function.__name__}/invalid"] == 1.0
        assert rewards_of(group) == [1.0, None]
    with pytest.raises(RuntimeError, match=f"{function.__name__!r} raised (SystemExit|NoException)"):
        apply_rewards([group_of("bad")], function)


def forked(pipe):
    pipe.send("child")
    os._exit(7)


def test_forked_children_end_as_always():
    def grade(completions, **columns):
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        child = context.Process(target=forked, args=(theirs,))
        child.start()
        said = ours.recv()
        child.join()
        return [float(said == "child" and child.exitcode == 7)]

    group = group_of("a")
    apply_rewards([group], grade)
    assert rewards_of(group) == [1.0]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RewardConfigurationError("no key for the server")])
@pytest.mark.parametrize("is_async", [False, True])
def test_an_interrupt_and_a_wrong_configuration_pass_through(error, is_async):
    def grade(groups):
        raise error

    async def grade_async(groups):
        raise error

    if is_async and error is KeyboardInterrupt:
        pytest.skip("the main thread gets it")
    with pytest.raises(error if isinstance(error, type) else type(error)):
        apply_rewards([group_of("a")], grade_async if is_async else grade, max_failed_share=1.0)


# Coroutines, text, memory.


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

    async def in_a_running_loop():
        group = group_of("a", "b")
        apply_rewards([group], [first, plain, second])
        return rewards_of(group)

    assert asyncio.run(in_a_running_loop()) == [111.0, 112.0]  # as in a notebook
    assert threads == [threading.main_thread()]


def test_async_methods_partials_and_failures():
    class Judge:
        async def __call__(self, completions, scale, **columns):
            if "poison" in completions:
                raise RuntimeError("bad completion")
            return [scale for _ in completions]

    groups, judge = (
        [group_of("a"), group_of("c")],
        Weighted(functools.partial(Judge().__call__, scale=4.0), name="judge"),
    )
    apply_rewards(groups, judge)
    assert rewards_of(*groups) == [4.0, 4.0]
    with pytest.raises(RuntimeError, match="'judge' raised RuntimeError: bad completion"):
        apply_rewards([group_of("a"), group_of("poison")], judge)


def test_text_is_decoded_once_if_missing():
    class Tokenizer:
        def decode(self, token_ids, skip_special_tokens):
            assert skip_special_tokens
            return "".join(chr(96 + token) for token in token_ids)

    group = RolloutGroup([1], [Rollout([1, 2]), Rollout([])])
    apply_rewards([group], length, tokenizer=Tokenizer())
    assert [rollout.text for rollout in group.rollouts] == ["ab", ""]
    assert rewards_of(group) == [2.0, 0.0]


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
    [(verls(1.0), 0), (fails_every_second_time(), 1), (fails_every_second_time(), 0), (fails_in_a_loop, 1)],
)
def test_rollouts_are_freed_without_a_garbage_collection(function, retries):
    groups = [group_of("a", "b"), group_of("c")]
    group = weakref.ref(groups[0])
    gc.disable()
    try:
        apply_rewards(groups, [length, Weighted(function, name="other")], retries=retries, max_failed_share=1.0)
        del groups
        assert group() is None
    finally:
        gc.enable()
