"""Policy and critic in one optimizer: rates, schedules, clipping, critic warm-up, empty and broken steps."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path

import pytest
import torch
from helpers.scripts import run_script
from helpers.sweeps import sweep, sweep_pairs
from lightning.pytorch import Callback

from pl_grouprl.algorithms import PPO, GroupPPO, OptimizerConfig
from pl_grouprl.models import PolicyCopyCritic, SharedTrunkCritic
from pl_grouprl.models.critic import LoRACritic

CRITICS = {
    "copy": PolicyCopyCritic(head_std=0.1),
    "shared": SharedTrunkCritic(head_std=0.1),
    "shared, detached": SharedTrunkCritic(detach=True, head_std=0.1),
    "lora": LoRACritic(r=4, head_std=0.1),
}
WARM_UP_SCRIPT = Path(__file__).with_name("warm_up_ranks.py")


class Optimizer(Callback):
    """Rates and moments after every step, by the name of the parameter group."""

    def __init__(self):
        self.rates, self.moments = [], []

    def on_train_batch_end(self, trainer, module, *args):
        (optimizer,) = trainer.optimizers
        self.rates.append({group["name"]: group["lr"] for group in optimizer.param_groups})
        self.moments.append([v.clone() for own in optimizer.state.values() for v in own.values()])


def part(weights, prefix):
    return {name: value for name, value in weights.items() if name.startswith(prefix)}


def same(left, right, prefix=""):
    left, right = part(left, prefix), part(right, prefix)
    assert left
    return all(torch.equal(value, right[name]) for name, value in left.items())


def norm(gradients, prefix):
    return torch.cat([g.flatten() for g in part(gradients, prefix).values()]).norm().item()


@pytest.fixture
def initial():
    """Weights of a module before its fit."""

    def read(module):
        module.configure_model()
        return {name: p.detach().clone() for name, p in module.named_parameters()}

    return read


@pytest.mark.parametrize("critic", CRITICS)
def test_every_trained_weight_is_in_one_named_group(make_module, make_data, make_trainer, critic):
    module = make_module(
        PPO, critic=CRITICS[critic], optimizer=OptimizerConfig(learning_rate=1e-3, weight_decay=0.1),
        critic_optimizer=OptimizerConfig(learning_rate=1e-2),
    )  # fmt: skip
    trainer = make_trainer(max_steps=1)
    trainer.fit(module, make_data())
    groups = {group["name"]: group for group in trainer.optimizers[0].param_groups}
    assert list(groups) == ["policy", "policy_no_decay", "critic"]
    assert {name: group["weight_decay"] for name, group in groups.items()} == {
        "policy": 0.1, "policy_no_decay": 0.0, "critic": 0.0,
    }  # fmt: skip
    listed = [id(p) for group in groups.values() for p in group["params"]]
    assert sorted(listed) == sorted({id(p) for p in module.parameters() if p.requires_grad})
    policy = {id(p) for p in module.policy.parameters()}
    assert {id(p) for name in ("policy", "policy_no_decay") for p in groups[name]["params"]} == policy
    if CRITICS[critic].__class__ is SharedTrunkCritic:
        assert len(groups["critic"]["params"]) == 2  # weight and bias of the head


def test_rates_and_schedules_are_separate(make_module, make_data, make_trainer):
    seen = Optimizer()
    module = make_module(
        PPO, optimizer=OptimizerConfig(learning_rate=1e-3, schedule="linear"),
        critic_optimizer=OptimizerConfig(learning_rate=4e-3, warmup_steps=3),
    )  # fmt: skip
    make_trainer(max_steps=4, callbacks=[seen]).fit(module, make_data())
    # What the next step has: a line from 1e-3 down to 0 in 4 steps; 4 steps of warm-up up to 4e-3.
    assert [rates["policy"] for rates in seen.rates] == pytest.approx([7.5e-4, 5e-4, 2.5e-4, 0])
    assert [rates["critic"] for rates in seen.rates] == pytest.approx([2e-3, 3e-3, 4e-3, 4e-3])


def test_the_critic_has_the_options_of_the_policy_by_default(make_module, make_data, make_trainer):
    seen = Optimizer()
    make_trainer(max_steps=1, callbacks=[seen]).fit(make_module(PPO, optimizer=OptimizerConfig(5e-4)), make_data())
    assert seen.rates == [{"policy": 5e-4, "critic": 5e-4}]


CLIPS = [
    # policy's own limit, critic's own limit, the trainer's; what the norms may be at most: policy, critic, both
    (1e-3, None, None, (1e-3, None, None)),
    (None, 2e-3, None, (None, 2e-3, None)),
    (1e-3, 2e-3, None, (1e-3, 2e-3, None)),
    (None, None, 3e-3, (None, None, 3e-3)),
    (1e-3, None, 3e-3, (1e-3, 3e-3, None)),
    (None, 2e-3, 3e-3, (3e-3, 2e-3, None)),
]


@pytest.mark.parametrize(("policy", "critic", "trainer", "limits"), CLIPS)
def test_clipping_is_separate(
    make_module, make_data, make_trainer, history, scripted_engine, policy, critic, trainer, limits
):
    record = history(keep_tensors=True)
    module = make_module(
        PPO, engine=scripted_engine, critic=CRITICS["copy"], optimizer=OptimizerConfig(max_grad_norm=policy),
        critic_optimizer=OptimizerConfig(max_grad_norm=critic),
    )  # fmt: skip
    make_trainer(max_steps=1, gradient_clip_val=trainer, callbacks=[record]).fit(module, make_data(shuffle=False))
    norms = [norm(record.gradients[0], prefix) for prefix in ("policy", "critic", "")]
    before = [record.steps[0][name] for name in ("grad_norm/policy", "grad_norm/critic", "grad_norm")]
    for after, unclipped, limit in zip(norms[:2], before[:2], limits[:2], strict=True):
        assert unclipped > 5e-3
        if limit is not None:
            assert after == pytest.approx(limit, rel=2e-3)
        elif limits[2] is None:
            assert after == pytest.approx(unclipped, rel=1e-5)
    if limits[2] is not None:
        assert norms[2] == pytest.approx(limits[2], rel=2e-3)
        # Clipped together, the two keep their proportion.
        assert norms[0] / norms[1] == pytest.approx(before[0] / before[1], rel=1e-4)


def test_a_trainer_limit_with_nothing_left_to_clip_is_refused(make_module, make_data, make_trainer):
    module = make_module(PPO, optimizer=OptimizerConfig(max_grad_norm=1.0))  # the critic's too
    with pytest.raises(ValueError, match=r"gradient_clip_val is 0.5, but every part has its own max_grad_norm"):
        make_trainer(max_steps=1, gradient_clip_val=0.5).fit(module, make_data())


def test_clipping_by_value_with_a_separate_limit(make_module, make_data, make_trainer, history, scripted_engine):
    record = history(keep_tensors=True)
    module = make_module(
        PPO, engine=scripted_engine, critic=CRITICS["copy"], optimizer=OptimizerConfig(),
        critic_optimizer=OptimizerConfig(max_grad_norm=1e-2),
    )  # fmt: skip
    trainer = make_trainer(max_steps=1, gradient_clip_val=1e-4, gradient_clip_algorithm="value", callbacks=[record])
    trainer.fit(module, make_data(shuffle=False))
    largest = {
        name: max(g.abs().max() for g in part(record.gradients[0], name).values()) for name in ("policy", "critic")
    }
    assert largest["policy"] == pytest.approx(1e-4)
    assert largest["critic"] > 1e-4
    assert norm(record.gradients[0], "critic") == pytest.approx(1e-2, rel=2e-3)


@pytest.mark.parametrize(
    ("cls", "critic"),
    sweep_pairs(
        itertools.product([PPO, GroupPPO], CRITICS),
        quick=[(PPO, "shared"), (PPO, "lora"), (GroupPPO, "copy"), (GroupPPO, "shared, detached")],
    ),
)
def test_critic_warm_up(make_module, make_data, make_trainer, history, initial, cls, critic):
    record = history(keep_tensors=True)
    module = make_module(
        cls, critic=CRITICS[critic], critic_warmup_steps=3, cliprange_value=None, num_mini_batches=2, entropy_coef=0.01,
        optimizer=OptimizerConfig(learning_rate=1e-2, weight_decay=0.1),
    )  # fmt: skip
    start = initial(module)
    make_trainer(max_steps=6, callbacks=[record]).fit(module, make_data())
    weights = [start, *record.weights]
    for step in range(6):
        assert same(weights[step], weights[step + 1], "policy") == (step < 3), step
        if critic == "lora":
            own = [{n: v for n, v in w.items() if "lora" in n or "head" in n} for w in weights[step : step + 2]]
            assert not same(*own), step
        else:
            assert not same(weights[step], weights[step + 1], "critic"), step
    for step, metrics in enumerate(record.steps):
        assert (metrics["grad_norm/policy"] == 0) == (step < 3)
        assert metrics["grad_norm/critic"] > 0


def test_warm_up_counts_optimizer_steps(make_module, make_data, make_trainer, history, initial):
    record = history(keep_tensors=True)
    module = make_module(PPO, critic_warmup_steps=1, num_mini_batches=2)
    start = initial(module)
    make_trainer(max_steps=2, accumulate_grad_batches=2, callbacks=[record]).fit(module, make_data())
    assert same(start, record.weights[1], "policy")
    assert not same(record.weights[1], record.weights[3], "policy")


def test_warm_up_does_not_change_what_comes_after(make_module, make_data, make_trainer, history):
    """The policy's first real step has the moments of a fresh AdamW: the sign of the gradient times the rate."""
    record = history(keep_tensors=True)
    module = make_module(PPO, critic_warmup_steps=2, optimizer=OptimizerConfig(learning_rate=1e-3, eps=1e-30))
    make_trainer(max_steps=3, callbacks=[record], precision="64-true").fit(module, make_data())
    for name, gradient in part(record.gradients[2], "policy").items():
        change = record.weights[2][name] - record.weights[1][name]
        torch.testing.assert_close(change, -1e-3 * gradient.sign(), atol=1e-12, rtol=1e-6)


TWO_RANKS_QUICK = ("shared", "lora")


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """What each rank found of a critic; those of the fast tests run together, and so do the others."""

    @functools.cache
    def run(*critics):
        folder = tmp_path_factory.mktemp("warm_up")
        run_script(WARM_UP_SCRIPT, folder, *critics, ranks=2, cwd=folder)
        return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(2)]

    def found(critic):
        quick = critic in TWO_RANKS_QUICK
        return [own[critic] for own in run(*(name for name in CRITICS if (name in TWO_RANKS_QUICK) == quick))]

    return found


@pytest.mark.parametrize("critic", sweep(CRITICS, quick=TWO_RANKS_QUICK))
def test_warm_up_on_two_ranks(two_ranks, critic):
    first, second = two_ranks(critic)
    for left, right in zip(first, second, strict=True):
        assert same(left, right)
    before, warm, after = first
    assert same(before, warm, "policy")
    assert not same(before, warm, "critic")
    assert not same(warm, after, "policy")
    assert not same(warm, after, "critic")


@pytest.mark.parametrize("critic", sweep(CRITICS, quick=["shared", "lora"]))
def test_an_empty_step_moves_neither(make_module, make_data, make_trainer, history, critic):
    # 5 prompts in batches of 4: the second batch of rollouts has one group for 3 updates, so two are empty.
    record, seen = history(keep_tensors=True), Optimizer()
    module = make_module(
        PPO, critic=CRITICS[critic], num_mini_batches=3, optimizer=OptimizerConfig(1e-2, weight_decay=0.1)
    )
    trainer = make_trainer(max_epochs=1, callbacks=[record, seen])
    trainer.fit(module, make_data(train_size=5, drop_last=False))
    assert len(record.weights) == 6
    empty = [step for step in (3, 4, 5) if record.steps[step]["grad_norm"] == 0]
    assert len(empty) == 2
    (full,) = {3, 4, 5} - set(empty)
    assert not same(record.weights[full - 1], record.weights[full], "policy")
    assert not same(record.weights[full - 1], record.weights[full], "critic.head")
    for step in empty:
        assert same(record.weights[step - 1], record.weights[step])
        assert all(torch.equal(a, b) for a, b in zip(seen.moments[step - 1], seen.moments[step], strict=True))


class BrokenLoss(PPO):
    """Breaks one of the losses at a step."""

    broken_part: str = ""

    def compute_loss(self, batch):
        terms = super().compute_loss(batch)
        if self.global_step == 1:
            numerator, count = terms.losses[self.broken_part]
            terms.losses[self.broken_part] = (numerator * float("nan"), count)
        return terms


@pytest.mark.parametrize("critic", ["copy", "shared"])
@pytest.mark.parametrize("broken", ["policy", "critic"])
def test_a_step_that_is_not_finite_moves_neither(make_module, make_data, make_trainer, history, broken, critic):
    record, seen = history(keep_tensors=True), Optimizer()
    module = make_module(BrokenLoss, critic=CRITICS[critic], optimizer=OptimizerConfig(1e-2, weight_decay=0.1))
    module.broken_part = broken
    make_trainer(max_steps=3, callbacks=[record, seen]).fit(module, make_data())
    assert same(record.weights[0], record.weights[1])
    assert all(torch.equal(a, b) for a, b in zip(seen.moments[0], seen.moments[1], strict=True))
    for prefix in ("policy", "critic"):
        assert not same(record.weights[1], record.weights[2], prefix)
    assert module.optimization.nonfinite_steps == 0


def test_broken_steps_in_a_row_end_the_run(make_module, make_data, make_trainer):
    class AlwaysBroken(BrokenLoss):
        def compute_loss(self, batch):
            terms = PPO.compute_loss(self, batch)
            terms.losses["critic"] = (terms.losses["critic"][0] * float("inf"), terms.losses["critic"][1])
            return terms

    with pytest.raises(RuntimeError, match=r"2 steps in a row .* \(guards.max_nonfinite_steps=2\)"):
        make_trainer(max_steps=5).fit(make_module(AlwaysBroken, guards={"max_nonfinite_steps": 2}), make_data())
