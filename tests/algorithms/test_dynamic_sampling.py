"""Which rollouts are trained: groups without spread are replaced, truncated completions are left out."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import torch
from helpers.rollouts import per_rollout_means
from helpers.scripts import run_script
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from pl_grouprl.algorithms import OptimizerConfig
from pl_grouprl.data import PromptDataModule
from pl_grouprl.data.loaders import TrainPromptLoader
from pl_grouprl.functional.advantages import (
    BranchPaths,
    gpg_advantages,
    group_relative_advantages,
    grpo_passk_advantages,
    optimal_token_baseline_advantages,
    remax_advantages,
    rloo_advantages,
    tree_advantages,
)
from pl_grouprl.functional.masked import masked_whiten
from pl_grouprl.training.buffer import rewards_differ, without_rewards
from pl_grouprl.training.metrics import rollout_metrics, summarize
from pl_grouprl.types import Rollout, RolloutGroup

PLAIN = OptimizerConfig(learning_rate=1.0, eps=1.0)
"""With so large an eps a step of AdamW is nearly the gradient itself."""


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


def number_of(group):
    return int(group.prompt[:2])


class Steps(Callback):
    """Metrics, weights, optimizer state and kept prompts after every step."""

    def __init__(self):
        self.metrics, self.weights, self.moments, self.kept = [], [], [], []

    def on_train_batch_end(self, trainer, module, *args):
        self.metrics.append({name: float(value) for name, value in trainer.callback_metrics.items()})
        self.weights.append([p.detach().clone() for p in module.policy.parameters()])
        self.moments.append(copy.deepcopy([own["exp_avg"] for own in trainer.optimizers[0].state.values()]))
        self.kept.append([number_of(group) for group in module.last_rollouts.groups])


def same(left, right):
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def close(left, right, tolerance=1e-5):
    return max((a - b).abs().max().item() for a, b in zip(left, right, strict=True)) <= tolerance


@pytest.fixture
def fit(make_module, make_trainer):
    """Fit on prompts of which some are useful, four in a batch; returns engine, module and the steps."""

    def run(useful, max_steps=1, batch_size=4, shuffle=False, trainer=None, checkpoint=None, callbacks=(), **options):
        steps = Steps()
        defaults = {"engine": Engine(), "rewards": lengths_where_useful, "dynamic_sampling": True, "optimizer": PLAIN}
        module = make_module(**{**defaults, **options})
        data = PromptDataModule(rows(useful), batch_size=batch_size, shuffle=shuffle)
        trainer = {"enable_checkpointing": bool(callbacks), **(trainer or {})}
        own = make_trainer(max_steps=max_steps, callbacks=[steps, *callbacks], **trainer)
        own.fit(module, data, ckpt_path=checkpoint, weights_only=True)
        return module.engine, module, steps

    return run


def test_groups_without_spread_are_replaced(fit):
    useful = [i % 2 == 0 for i in range(12)]
    engine, module, steps = fit(useful)
    (kept,), (metrics,) = steps.kept, steps.metrics
    assert kept[:2] == [0, 2]  # of the regular batch, 0 to 3
    assert len(kept) == 4
    assert all(useful[number] for number in kept)
    # What is missing is drawn, no more: 4 prompts, then 2, then what those did not give.
    assert engine.calls[:2] == [4, 2]
    loader = TrainPromptLoader(list(range(12)), batch_size=4, shuffle=False)
    expected, missing, attempt = [4], 2, 1
    while missing:
        drawn = loader.draw_extra(missing, rollout_number=0, attempt=attempt)
        expected.append(len(drawn))
        missing -= sum(useful[number] for number in drawn)
        attempt += 1
    assert engine.calls == expected
    assert metrics["dynamic_sampling/kept_groups"] == 4
    assert metrics["dynamic_sampling/generated_groups"] == sum(expected)
    assert metrics["dynamic_sampling/generation_batches"] == len(expected)
    # The rewards that are logged are those of all rollouts: a useful group has 1 + 2 + 3 + 4, the others have 0.
    assert metrics["reward"] == pytest.approx(4 * 10 / (4 * sum(expected)))
    assert metrics["frac_reward_zero_std"] == pytest.approx(1 - 4 / sum(expected))
    assert module.last_rollouts.joined("loss_mask").all()
    assert module.last_rollouts.num_tokens == sum(expected) * (4 * 4 + 10)


def test_what_a_reward_function_reports_is_averaged_over_all_rollouts(make_module, make_trainer):
    """The refill of one prompt weighs a quarter of the batch of four."""

    def grade(data_source, solution_str, ground_truth):
        return {"score": len(solution_str) if ground_truth == "spread" else 0.0, "spread": ground_truth == "spread"}

    data = [{"prompt": f"{i:02d}", "ground_truth": "same" if i == 3 else "spread"} for i in range(8)]
    steps, engine = Steps(), Engine()
    module = make_module(engine=engine, rewards=grade, dynamic_sampling=True, guards={"max_generation_batches": 2})
    trainer = make_trainer(max_steps=1, callbacks=[steps], enable_checkpointing=False)
    trainer.fit(module, PromptDataModule(data, batch_size=4, shuffle=False))
    assert engine.calls == [4, 1]
    kept = steps.metrics[0]["dynamic_sampling/kept_groups"]
    assert steps.metrics[0]["rewards/grade/spread"] == pytest.approx(kept / 5)  # not the mean of 3/4 and the other's


def test_without_it_they_are_trained_as_they_are(fit):
    engine, _, steps = fit([i % 2 == 0 for i in range(12)], dynamic_sampling=False)
    assert steps.kept == [[0, 1, 2, 3]]
    assert engine.calls == [4]
    assert not any(name.startswith("dynamic_sampling") for name in steps.metrics[0])


def test_a_full_batch_costs_nothing_more(fit):
    engine, _, steps = fit([True] * 8)
    assert engine.calls == [4]
    assert steps.metrics[0]["dynamic_sampling/generation_batches"] == 1


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_max_generation_batches(fit, limit):
    engine, _, steps = fit([i == 2 for i in range(40)], guards={"max_generation_batches": limit})
    assert engine.calls == [4, 3, 3][:limit]
    assert steps.kept == [[2]]
    assert steps.metrics[0]["dynamic_sampling/kept_groups"] == 1
    assert steps.metrics[0]["dynamic_sampling/generation_batches"] == limit
    assert steps.metrics[0]["grad_norm"] > 0


def test_dropped_groups_leave_the_denominator(fit):
    # One group of four: the same step as a batch that holds this group alone.
    _, _, dropped = fit([True, False, False, False], guards={"max_generation_batches": 1})
    _, _, alone = fit([True], batch_size=1)
    assert close(dropped.weights[0], alone.weights[0], 1e-6)


def test_keeping_nothing_changes_nothing_and_the_run_continues(fit, tiny_policy):
    _, module, steps = fit([False] * 8, max_steps=3, guards={"max_generation_batches": 2}, beta=0.1, entropy_coef=0.1)
    assert same(steps.weights[-1], list(tiny_policy().load().parameters()))
    assert [own["dynamic_sampling/kept_groups"] for own in steps.metrics] == [0, 0, 0]
    assert [own["grad_norm"] for own in steps.metrics] == [0, 0, 0]
    assert all(math.isfinite(value) for own in steps.metrics for value in own.values())
    assert not module.last_rollouts.joined("loss_mask").any()
    assert module.optimization.nonfinite_steps == 0


def test_nothing_kept_after_a_step_leaves_the_momentum(fit):
    # Prompts 0 to 3 of the first batch are useful, and none of those of the second.
    _, _, steps = fit([True] * 4 + [False] * 4, max_steps=2, guards={"max_generation_batches": 1})
    assert steps.metrics[0]["grad_norm"] > 0
    assert same(steps.weights[0], steps.weights[1])
    assert same(steps.moments[0], steps.moments[1])


def test_a_data_set_of_one_batch(fit):
    # Nothing else to draw: the batch's own prompts are sampled again, those that do not help too.
    engine, _, steps = fit([True, False, True], batch_size=3, guards={"max_generation_batches": 4})
    assert engine.calls[0] == 3
    assert set(steps.kept[0]) <= {0, 2}
    assert steps.kept[0][:2] == [0, 2]
    assert steps.metrics[0]["dynamic_sampling/generation_batches"] <= 4


def test_more_mini_batches_than_groups_are_kept(fit):
    options = {"num_mini_batches": 3, "guards": {"max_generation_batches": 1}}
    _, _, steps = fit([False, True, False, False, True, True, True, True], max_steps=6, **options)
    norms = [own["grad_norm"] for own in steps.metrics]
    assert norms[0] > 0
    assert norms[1:3] == [0, 0]
    assert same(steps.weights[0], steps.weights[2])
    assert same(steps.moments[0], steps.moments[2])
    assert all(norm > 0 for norm in norms[3:])
    assert all(math.isfinite(value) for own in steps.metrics for value in own.values())


def test_accumulated_mini_batches_of_few_groups_are_one_batch(fit):
    useful = [True, False, True, False]
    _, _, whole = fit(useful, guards={"max_generation_batches": 1}, beta=0.1)
    _, _, cut = fit(
        useful,
        guards={"max_generation_batches": 1},
        beta=0.1,
        num_mini_batches=4,
        trainer={"accumulate_grad_batches": 4},
    )
    assert not same(whole.weights[0], cut.weights[0])
    assert close(whole.weights[0], cut.weights[-1])


def test_resume_is_exact(fit, tmp_path):
    # The engine is the real one: rollouts come from seeds, refills included, and rewards differ within most groups.
    saving = ModelCheckpoint(dirpath=tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    useful = [i % 3 != 0 for i in range(9)]
    options = {
        "engine": None, "max_steps": 5, "num_mini_batches": 2, "shuffle": True, "guards": {"max_generation_batches": 3},
        "optimizer": OptimizerConfig(learning_rate=1e-2), "mask_truncated_completions": True,
    }  # fmt: skip

    def letters(completions, useful, **columns):
        return [sum(c.isalpha() for c in text) * float(own) for text, own in zip(completions, useful, strict=True)]

    _, whole, steps = fit(useful, rewards=letters, callbacks=[saving], **options)
    assert max(own["dynamic_sampling/generation_batches"] for own in steps.metrics) > 1
    for step in range(1, 5):
        _, resumed, _ = fit(useful, rewards=letters, checkpoint=tmp_path / f"step={step}.ckpt", **options)
        assert same(list(whole.policy.parameters()), list(resumed.policy.parameters())), step
        assert resumed.num_tokens == whole.num_tokens


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([0.0, 1.0], True),
        ([0.5, 0.5, 0.5], False),
        ([0.5, None, 0.5], False),
        ([0.5, None, 0.6], True),
        ([None, None], False),
        ([math.nan, 1.0], False),
        ([1.0], False),
        ([0.1 + 0.2, 0.3], False),
        ([0.1 + 0.2 - 0.3, 0.0], False),
        ([float(torch.tensor(0.7) + torch.tensor(0.1)), 0.8], False),  # one in float32
        ([3.3e9, 3.3e9 + 0.001], False),
        ([1e6, 1e6 + 1], True),
        ([0.0, 1e-6], True),
    ],
)
def test_selection_advantages_and_metrics_agree_on_whether_rewards_differ(rewards, expected):
    group = RolloutGroup([1], [Rollout([5], reward=reward, finish_reason="stop") for reward in rewards])
    assert rewards_differ(group) is expected
    assert rollout_metrics(summarize([group]))["frac_reward_zero_std"] == 1 - expected
    tensor = torch.tensor([math.nan if reward is None else reward for reward in rewards], dtype=torch.float64)
    mask = torch.ones(len(rewards), 1)
    for estimate in (group_relative_advantages, rloo_advantages, gpg_advantages, grpo_passk_advantages):
        assert bool(estimate(tensor, [0] * len(rewards)).any()) is expected, estimate.__name__
    assert bool(remax_advantages(tensor, tensor.nanmean().expand(len(rewards))).any()) is expected
    assert bool(masked_whiten(tensor[:, None], mask * ~tensor.isnan()[:, None]).any()) is expected
    branches = BranchPaths([()] * len(rewards), [()] * len(rewards))
    assert bool(tree_advantages(tensor, [0] * len(rewards), mask, branches).any()) is expected
    norms = torch.ones(len(rewards), 1)
    assert bool(optimal_token_baseline_advantages(tensor[:, None], [0] * len(rewards), mask, norms).any()) is expected


def test_a_group_left_untrained_is_a_copy_without_rewards():
    group = RolloutGroup([1], [Rollout([5, 6], reward=2.0), Rollout([7], reward=2.0)])
    untrained = without_rewards(group)
    assert [rollout.reward for rollout in untrained.rollouts] == [None, None]
    assert [rollout.token_ids for rollout in untrained.rollouts] == [[5, 6], [7]]
    assert [rollout.reward for rollout in group.rollouts] == [2.0, 2.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dynamic_sampling": True, "num_generations": 1, "advantage_estimator": "remax"}, "would drop every prompt"),
        ({"guards": {"max_generation_batches": 0}}, "guards.max_generation_batches is 0; it must be at least 1"),
    ],
)
def test_refused(make_module, options, message):
    with pytest.raises(ValueError, match=message):
        make_module(**options)


def test_custom_loaders_cannot_refill(make_module, make_data, make_trainer):
    module = make_module(dynamic_sampling=True)
    with pytest.raises(ValueError, match="dynamic_sampling=True needs more prompts than a batch holds"):
        make_trainer(max_steps=1).fit(module, train_dataloaders=[1, 2, 3])


# Truncated completions.


def test_truncated_completions_count_in_their_group_and_are_not_trained(fit):
    _, module, steps = fit([True] * 4, dynamic_sampling=False, mask_truncated_completions=True)
    buffer = module.last_rollouts
    for mask in buffer.tokens["loss_mask"]:
        assert mask.tolist() == [True] * (1 + 2 + 3) + [False] * 4
    expected = group_relative_advantages(torch.tensor([1.0, 2.0, 3.0, 4.0]), [0] * 4)
    for own in per_rollout_means(buffer, "advantages"):
        assert own == pytest.approx(expected.tolist(), abs=1e-6)
    assert steps.metrics[0]["completions/clipped_ratio"] == 0.25
    assert steps.metrics[0]["reward"] == 2.5


def test_truncated_completions_have_no_gradient(fit):
    # Other tokens in the completions that were cut: the same step, with KL penalty and entropy bonus, and no other.
    options = {"dynamic_sampling": False, "beta": 0.1, "entropy_coef": 0.05}
    runs = {
        (masked, shift): fit([True] * 4, mask_truncated_completions=masked, engine=Engine(shift), **options)[2]
        for masked in (True, False)
        for shift in (0, 3)
    }
    assert close(runs[True, 0].weights[0], runs[True, 3].weights[0], 1e-6)
    assert not close(runs[False, 0].weights[0], runs[False, 3].weights[0], 1e-4)
    assert runs[True, 0].metrics[0]["grad_norm"] > 1e-3


@pytest.mark.parametrize("estimator", ["reinforce_plus_plus_baseline", "opo"])
def test_truncated_completions_count_for_other_estimators_too(fit, estimator):
    options = {"dynamic_sampling": False, "advantage_estimator": estimator}
    _, masked, _ = fit([True] * 4, mask_truncated_completions=True, **options)
    means = torch.tensor(per_rollout_means(masked.last_rollouts, "advantages"))[:, :3]
    # Baselines of the rewards 1 to 4: 2.5, or 30 / 10 where rollouts weigh by their length.
    centred = torch.tensor([1.0, 2.0, 3.0]) - (2.5 if estimator != "opo" else 3.0)
    if estimator != "opo":  # whitened over the tokens: 1, 2 and 3 of them in each of four groups
        tokens = centred.repeat_interleave(torch.tensor([1, 2, 3])).repeat(4)
        centred = (centred - tokens.mean()) / (tokens.std() + 1e-8)
    assert torch.allclose(means, centred.expand(4, 3), atol=1e-5)


def test_only_truncated_completions_move_nothing(make_module, make_data, make_trainer, tiny_policy, parameters):
    class Cut(Engine):
        def _rollout(self, number, g, num_generations):
            return Rollout([14 + g] * 5, finish_reason="length")

    module = make_module(engine=Cut(), mask_truncated_completions=True, rewards=lambda completions, **columns: [
        float(index % 4) for index in range(len(completions))
    ])  # fmt: skip
    make_trainer(max_steps=2).fit(module, make_data())
    assert same(parameters(module), list(tiny_policy().load().parameters()))


# Two ranks.

SCRIPT = Path(__file__).with_name("dynamic_sampling_ranks.py")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each of one rank, and of two ranks, ended with, by case."""
    results = []
    for devices in (1, 2):
        folder = tmp_path_factory.mktemp(f"dynamic{devices}")
        run_script(SCRIPT, devices, folder, ranks=devices, cwd=folder)
        results.append([torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(devices)])
    return results


def test_ranks_refill_with_the_prompts_of_a_single_one(ranks):
    alone, (first, second) = ranks[0][0]["refill"], (own["refill"] for own in ranks[1])
    # Ranks take turns in the batch: 0 and 2 are of the first rank, 1 and 3, which teach nothing, of the second. Both
    # are drawn anew, one by each rank.
    assert first["calls"][:2] == [2, 1]
    assert second["calls"][:2] == [2, 1]
    kept = first["kept"] + second["kept"]  # groups are dealt to the ranks anew once all are there
    assert {0, 2} <= set(kept)
    assert sorted(kept) == sorted(alone["kept"])
    for own in (first, second):
        for name in ("kept_groups", "generated_groups", "generation_batches"):
            assert own["metrics"][f"dynamic_sampling/{name}"] == alone["metrics"][f"dynamic_sampling/{name}"]
        assert own["metrics"]["rewards/lengths/number"] == alone["metrics"]["rewards/lengths/number"]
    assert same(first["weights"], second["weights"])
    assert close(alone["weights"], first["weights"])


@pytest.mark.parametrize("case", ["one_rank_keeps_none", "batch_scale", "pooled_baseline", "mini_batches"])
def test_a_rank_that_keeps_nothing_changes_nothing(ranks, case):
    (one,), (first, second) = ranks
    assert first[case]["kept"] == [0, 2]
    assert first[case]["metrics"]["dynamic_sampling/kept_groups"] == 2
    assert same(first[case]["weights"], second[case]["weights"])
    assert close(one[case]["weights"], first[case]["weights"])
    for name in ("loss", "grad_norm", "reward", "sampling/importance_sampling_ratio/min"):
        expected = one[case]["metrics"][name]
        if case != "mini_batches" or name == "reward":  # the groups of a mini-batch depend on the ranks
            assert first[case]["metrics"][name] == pytest.approx(expected, abs=1e-5), name


def test_what_one_sampler_reports_is_left_out_on_all_ranks(ranks):
    """Otherwise the ranks would wait for each other with metrics of different numbers."""
    (one,), both = ranks
    assert "sampling/importance_sampling_ratio/min" in one["one_sampler_reports"]["metrics"]
    for own in both:
        assert not any(name.startswith("sampling/") for name in own["one_sampler_reports"]["metrics"])
        assert close(one["one_sampler_reports"]["weights"], own["one_sampler_reports"]["weights"])


def test_no_rank_keeps_anything(ranks):
    for own in ranks[1]:
        case = own["nothing"]
        assert case["metrics"]["dynamic_sampling/kept_groups"] == 0
        assert case["calls"] == [2, 2]
        assert same(case["weights"], case["start"])
        assert all(math.isfinite(value) for value in case["metrics"].values())
