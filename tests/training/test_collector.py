"""Which rollouts are trained: groups without spread are replaced, truncated completions left out, levels chosen."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.rollouts import per_rollout_means
from helpers.tiny_runs import AHEAD, PLAIN, TinyPolicy, largest_difference, same

from pl_grouprl.algorithms import OptimizerConfig
from pl_grouprl.callbacks import Curriculum
from pl_grouprl.data import PromptDataModule
from pl_grouprl.data.loaders import TrainPromptLoader
from pl_grouprl.demo.tasks import digit_tokenizer
from pl_grouprl.functional.advantages import (
    group_relative_advantages,
)
from pl_grouprl.types import Rollout


class Engine:
    """Completions of 1 to 4 letters; counts the prompts of each call. The last rollout of a prompt is cut."""

    def __init__(self, shift=0):
        self.calls = []
        self.shift = shift

    def bind(self, model, tokenizer=None):
        pass

    def generate(self, prompts, sampling, *, num_generations, seed):
        self.calls.append(len(prompts))
        return [[self._rollout(sum(prompt), g, num_generations) for g in range(num_generations)] for prompt in prompts]

    def _rollout(self, number, g, num_generations):
        is_cut = g == num_generations - 1
        first = 14 + (number + self.shift * is_cut) % 8
        return Rollout([first] * (1 + g % 4), finish_reason="length" if is_cut else "stop")


def lengths_where_useful(completions, useful, **columns):
    return [float(len(text)) if own else 0.0 for text, own in zip(completions, useful, strict=True)]


def rows(useful):
    return [{"prompt": f"{i:02d}{i * 37 % 100:02d}", "useful": flag} for i, flag in enumerate(useful)]


def numbers_of(groups):
    return [int(group.prompt[:2]) for group in groups]


@pytest.fixture
def fit_on(fit):
    """Fit on prompts of which some are useful, four in a batch."""

    def run(useful, batch_size=4, shuffle=False, **options):
        defaults = {"engine": Engine(), "rewards": lengths_where_useful, "dynamic_sampling": True, "optimizer": PLAIN}
        data = PromptDataModule(rows(useful), batch_size=batch_size, shuffle=shuffle)
        return fit(data=data, **{**defaults, **options})

    return run


def test_groups_without_spread_are_replaced(fit_on):
    useful = [i % 2 == 0 for i in range(12)]
    run = fit_on(useful)
    kept, metrics, calls = numbers_of(run.groups[0]), run.steps[0], run.module.engine.calls
    assert kept[:2] == [0, 2]  # of the regular batch, 0 to 3
    assert len(kept) == 4
    assert all(useful[number] for number in kept)
    # What is missing is drawn, no more: 4 prompts, then 2, then what those did not give.
    assert calls[:2] == [4, 2]
    loader = TrainPromptLoader(list(range(12)), batch_size=4, shuffle=False)
    expected, missing, attempt = [4], 2, 1
    while missing:
        drawn = loader.draw_extra(missing, rollout_number=0, attempt=attempt)
        expected.append(len(drawn))
        missing -= sum(useful[number] for number in drawn)
        attempt += 1
    assert calls == expected
    assert metrics["dynamic_sampling/kept_groups"] == 4
    assert metrics["dynamic_sampling/generated_groups"] == sum(expected)
    assert metrics["dynamic_sampling/generation_batches"] == len(expected)
    # The rewards that are logged are those of all rollouts: a useful group has 1 + 2 + 3 + 4, the others have 0.
    assert metrics["reward"] == pytest.approx(4 * 10 / (4 * sum(expected)))
    assert metrics["frac_reward_zero_std"] == pytest.approx(1 - 4 / sum(expected))
    assert run.buffer.joined("loss_mask").all()
    assert run.buffer.num_tokens == sum(expected) * (4 * 4 + 10)
    plain = fit_on(useful, dynamic_sampling=False)
    assert numbers_of(plain.groups[0]) == [0, 1, 2, 3]
    assert plain.module.engine.calls == [4]
    assert not any(name.startswith("dynamic_sampling") for name in plain.steps[0])


def test_what_a_reward_function_reports_is_averaged_over_all_rollouts(fit):
    """The refill of one prompt weighs a quarter of the batch of four."""

    def grade(data_source, solution_str, ground_truth):
        return {"score": len(solution_str) if ground_truth == "spread" else 0.0, "spread": ground_truth == "spread"}

    data = [{"prompt": f"{i:02d}", "ground_truth": "same" if i == 3 else "spread"} for i in range(8)]
    run = fit(
        engine=Engine(), rewards=grade, dynamic_sampling=True, guards={"max_generation_batches": 2},
        data=PromptDataModule(data, batch_size=4, shuffle=False),
    )  # fmt: skip
    assert run.module.engine.calls == [4, 1]
    kept = run.steps[0]["dynamic_sampling/kept_groups"]
    assert run.steps[0]["rewards/grade/spread"] == pytest.approx(kept / 5)  # not the mean of 3/4 and the other's


@pytest.mark.parametrize(
    ("useful", "batch_size", "limit", "calls", "kept"),
    [
        ([True] * 8, 4, 10, [4], [0, 1, 2, 3]),
        *(([i == 2 for i in range(40)], 4, limit, [4, 3, 3][:limit], [2]) for limit in (1, 2, 3)),
        ([True, False, True], 3, 4, [3], [0, 2]),  # nothing else to draw: the batch's own prompts are sampled again
    ],
)
def test_prompts_are_drawn_until_the_batch_is_full_or_the_limit(fit_on, useful, batch_size, limit, calls, kept):
    run = fit_on(useful, batch_size, guards={"max_generation_batches": limit})
    assert run.module.engine.calls[: len(calls)] == calls
    found = numbers_of(run.groups[0])
    assert found[: len(kept)] == kept
    assert set(found) == set(kept)
    assert len(run.module.engine.calls) == run.steps[0]["dynamic_sampling/generation_batches"] <= limit
    assert run.steps[0]["dynamic_sampling/kept_groups"] == len(found)
    assert run.steps[0]["grad_norm"] > 0


def test_dropped_groups_leave_the_denominator(fit_on):
    dropped = fit_on([True, False, False, False], guards={"max_generation_batches": 1})
    alone = fit_on([True], batch_size=1)  # the same step as a batch that holds this group alone
    assert largest_difference(dropped.weights[0], alone.weights[0]) <= 1e-6


def test_keeping_nothing_changes_nothing_and_the_run_continues(fit_on):
    options = {"guards": {"max_generation_batches": 1}, "beta": 0.1, "entropy_coef": 0.1}
    run = fit_on([True] * 4 + [False] * 8, steps=3, **options)
    assert [own["dynamic_sampling/kept_groups"] for own in run.steps] == [4, 0, 0]
    assert [own["grad_norm"] > 0 for own in run.steps] == [True, False, False]
    assert same(run.weights[0], run.weights[2])
    assert same(run.moments[0], run.moments[2])
    assert all(math.isfinite(value) for own in run.steps for value in own.values())
    assert not run.buffer.joined("loss_mask").any()
    assert run.module.optimization.nonfinite_steps == 0


def test_more_mini_batches_than_groups_are_kept(fit_on):
    useful = [False, True, False, False, True, True, True, True]
    run = fit_on(useful, steps=6, num_mini_batches=3, guards={"max_generation_batches": 1})
    norms = [own["grad_norm"] for own in run.steps]
    assert norms[0] > 0
    assert norms[1:3] == [0, 0]
    assert same(run.weights[0], run.weights[2])
    assert same(run.moments[0], run.moments[2])
    assert all(norm > 0 for norm in norms[3:])
    assert all(math.isfinite(value) for own in run.steps for value in own.values())


def test_accumulated_mini_batches_of_few_groups_are_one_batch(fit_on):
    options = {"useful": [True, False, True, False], "guards": {"max_generation_batches": 1}, "beta": 0.1}
    whole = fit_on(**options)
    cut = fit_on(**options, num_mini_batches=4, trainer={"accumulate_grad_batches": 4})
    assert largest_difference(whole.weights[0], cut.weights[0]) > 1e-3
    assert largest_difference(whole.weights[0], cut.weights[-1]) <= 1e-5


def test_resume_is_exact(fit_on):
    """The engine is the real one: rollouts come from seeds, refills included, and rewards differ in most groups."""

    def letters(completions, useful, **columns):
        return [sum(c.isalpha() for c in text) * float(own) for text, own in zip(completions, useful, strict=True)]

    options = {
        "useful": [i % 3 != 0 for i in range(9)], "engine": None, "num_mini_batches": 2, "shuffle": True, "steps": 5,
        "guards": {"max_generation_batches": 3}, "optimizer": OptimizerConfig(1e-2), "mask_truncated_completions": True,
        "rewards": letters,
    }  # fmt: skip
    whole = fit_on(save=True, **options)
    assert max(own["dynamic_sampling/generation_batches"] for own in whole.steps) > 1
    for step in (1, 2, 3):
        resumed = fit_on(resume=step, **options)
        assert same(whole.weights[-1], resumed.weights[-1]), step
        assert resumed.module.num_tokens == whole.module.num_tokens


def test_what_cannot_be_refilled_is_refused(fit, make_module):
    with pytest.raises(ValueError, match="would drop every prompt"):
        make_module(dynamic_sampling=True, num_generations=1, advantage_estimator="remax")
    with pytest.raises(ValueError, match="max_generation_batches"):
        make_module(guards={"max_generation_batches": 0})
    with pytest.raises(ValueError, match="dynamic_sampling=True needs more prompts than a batch holds"):
        fit(dynamic_sampling=True, data=[1, 2, 3])


# Truncated completions.


@pytest.mark.parametrize("estimator", ["grpo", "reinforce_plus_plus_baseline", "opo"])
def test_truncated_completions_count_in_their_group_and_are_not_trained(fit_on, estimator):
    options = {"dynamic_sampling": False, "advantage_estimator": estimator}
    run = fit_on([True] * 4, mask_truncated_completions=True, **options)
    for mask in run.buffer.tokens["loss_mask"]:
        assert mask.tolist() == [True] * (1 + 2 + 3) + [False] * 4
    means = torch.tensor(per_rollout_means(run.buffer, "advantages"))
    if estimator == "grpo":
        expected = group_relative_advantages(torch.tensor([1.0, 2.0, 3.0, 4.0]), [0] * 4)
        torch.testing.assert_close(means, expected.expand(4, 4), atol=1e-6, rtol=0)
        assert run.steps[0]["completions/clipped_ratio"] == 0.25
        assert run.steps[0]["reward"] == 2.5
        return
    # Baselines of the rewards 1 to 4: 2.5, or 30 / 10 where rollouts weigh by their length.
    centered = torch.tensor([1.0, 2.0, 3.0]) - (2.5 if estimator != "opo" else 3.0)
    if estimator != "opo":  # whitened over the tokens: 1, 2 and 3 of them in each of four groups
        tokens = centered.repeat_interleave(torch.tensor([1, 2, 3])).repeat(4)
        centered = (centered - tokens.mean()) / (tokens.std() + 1e-8)
    assert torch.allclose(means[:, :3], centered.expand(4, 3), atol=1e-5)


def test_truncated_completions_have_no_gradient(fit_on):
    """Other tokens in the completions that were cut: the same step, with KL penalty and entropy bonus, and no other."""
    options = {"dynamic_sampling": False, "beta": 0.1, "entropy_coef": 0.05}
    masked, masked_shifted, plain, shifted = (
        fit_on([True] * 4, mask_truncated_completions=masks, engine=Engine(shift), **options)
        for masks in (True, False)
        for shift in (0, 3)
    )
    assert largest_difference(masked.weights[0], masked_shifted.weights[0]) <= 1e-6
    assert largest_difference(plain.weights[0], shifted.weights[0]) > 1e-4
    assert masked.steps[0]["grad_norm"] > 1e-3


def test_only_truncated_completions_move_nothing(fit):
    class Cut(Engine):
        def _rollout(self, number, g, num_generations):
            return Rollout([14 + g] * 5, finish_reason="length")

    def by_place(completions, **columns):
        return [float(index % 4) for index in range(len(completions))]

    run = fit(engine=Cut(), mask_truncated_completions=True, rewards=by_place)
    assert same(run.module.policy.parameters(), list(TinyPolicy().load().parameters()))


# Levels that follow the reward.

LEVELS = [
    {"prompt": f"{number}{level}{number}", "answer": "two", "level": level}
    for number in range(6)
    for level in (0, 1, 2)
]
OPTIONS = {"threshold": 0.5, "window": 2, "fall_below": 0.49}


def by_hand(rewards, ahead, threshold, window, fall_below):
    """The level of each rollout, from the rewards of all."""
    levels, level, counted = [0] * (1 + ahead), 0, []
    for number, reward in enumerate(rewards):
        if levels[number] == level:
            counted.append(reward)
        if len(counted) >= window:
            mean = sum(counted[-window:]) / window
            change = (mean > threshold and level < 2) - (mean < fall_below and level > 0)
            level, counted = level + change, [] if change else counted
        levels.append(level)
    return levels[: len(rewards)]


def levels_of(run):
    """By the second digit of the prompts: rollouts that were resumed have no columns."""
    digits = {digit_tokenizer()(str(level))["input_ids"][0]: level for level in (0, 1, 2)}
    return [{digits[group.prompt_ids[1]] for group in groups} for groups in run.groups]


@pytest.fixture
def fit_levels(fit):
    def run(steps=8, curriculum=OPTIONS, callbacks=(), **options):
        data = PromptDataModule(LEVELS, batch_size=2)
        return fit(steps=steps, data=data, callbacks=[Curriculum(**curriculum), *callbacks], **options)

    return run


@pytest.mark.parametrize("options", [{}, AHEAD, {"num_mini_batches": 2}], ids=["", "ahead", "two updates"])
def test_levels_follow_the_rewards_and_resume_exactly(fit_levels, options):
    whole = fit_levels(save=True, **options)
    if "num_mini_batches" not in options:
        levels = by_hand([step["reward"] for step in whole.steps], len(options) // 2, **OPTIONS)
        assert levels_of(whole) == [{level} for level in levels]
        assert [step["curriculum/level"] for step in whole.steps] == levels
    assert len(set().union(*levels_of(whole))) > 1
    for step in (3, 6):
        resumed = fit_levels(resume=step, **options)
        assert levels_of(resumed) == levels_of(whole)[step:]
        assert [own["curriculum/level"] for own in resumed.steps] == [
            own["curriculum/level"] for own in whole.steps[step:]
        ]
        assert same(whole.weights[-1], resumed.weights[-1])


def test_a_later_run_with_the_same_data_has_all_levels_again(fit):
    data = PromptDataModule(LEVELS, batch_size=2)
    assert set().union(*levels_of(fit(steps=4, data=data, callbacks=[Curriculum()]))) == {0}
    assert set().union(*levels_of(fit(steps=6, data=data))) == {0, 1, 2}


def test_a_metric_that_rollouts_lack_and_rows_without_levels(fit_levels):
    with pytest.raises(ValueError, match=r"Curriculum.metric is 'rewards/exact'"):
        fit_levels(1, curriculum={"metric": "rewards/exact"})
    with pytest.raises(ValueError, match="train, row 0: column 'stage' is None"):
        fit_levels(1, curriculum={"column": "stage"})
