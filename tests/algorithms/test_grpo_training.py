"""Whole short runs of GRPO through the Trainer."""

from __future__ import annotations

import pytest
import torch
from helpers.rollouts import per_rollout_means
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from pl_grouprl.algorithms import GRPO, OptimizerConfig


class History(Callback):
    """The metrics of every step."""

    def __init__(self):
        self.steps = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.steps.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def same(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def close(left, right, tolerance):
    return max((a - b).abs().max().item() for a, b in zip(left, right, strict=True)) <= tolerance


@pytest.mark.parametrize(
    ("gradient_checkpointing", "steps"), [(False, 10), (True, 6), pytest.param(False, 50, marks=pytest.mark.slow)]
)
def test_sharing_on_and_off_give_the_same_trajectory(
    make_module, make_data, make_trainer, tiny_policy, gradient_checkpointing, steps
):
    losses = {}
    for sharing in ("shared", "repeated"):
        history = History()
        module = make_module(
            policy=tiny_policy(gradient_checkpointing), sharing={"mode": sharing, "verify": True},
            num_mini_batches=2, beta=0.05,
            optimizer=OptimizerConfig(learning_rate=1e-3),
        )  # fmt: skip
        make_trainer(max_steps=steps, callbacks=[history]).fit(module, make_data())
        losses[sharing] = [step["loss"] for step in history.steps]
        ratio = history.steps[-1]["prefix/token_ratio"]
        assert (ratio > 2) if sharing == "shared" else (ratio <= 1)
    assert len(losses["shared"]) == steps
    assert max(abs(a - b) for a, b in zip(losses["shared"], losses["repeated"], strict=True)) < 1e-4
    assert max(map(abs, losses["shared"])) > 1e-3


# Each batch of rollouts serves 2 passes of 2 mini-batches, and 2 batches are an epoch.
@pytest.mark.parametrize("resumed_at", [(1, 2, 4, 9), pytest.param(range(1, 10), marks=pytest.mark.slow)], ids=str)
def test_resume_at_every_step_is_exact(
    make_module, make_data, make_trainer, tiny_policy, parameters, tmp_path, resumed_at
):
    steps = 10

    def fit(checkpoint=None, callbacks=()):
        module = make_module(num_iterations=2, num_mini_batches=2, beta=0.1)
        trainer = make_trainer(max_steps=steps, callbacks=list(callbacks))
        trainer.fit(module, make_data(train_size=8), ckpt_path=checkpoint, weights_only=True)
        assert trainer.global_step == steps
        return module

    saving = ModelCheckpoint(dirpath=tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    undisturbed = fit(callbacks=[saving])
    assert not same(parameters(undisturbed), list(tiny_policy().load().parameters()))
    for step in resumed_at:
        resumed = fit(tmp_path / f"step={step}.ckpt")
        assert same(parameters(undisturbed), parameters(resumed)), f"resumed after step {step}"
        assert resumed.num_tokens == undisturbed.num_tokens


def test_checkpoint_holds_the_buffer_only_where_updates_remain(make_module, make_data, make_trainer, tmp_path):
    saving = ModelCheckpoint(dirpath=tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    module = make_module(num_mini_batches=2, beta=0.1)
    make_trainer(max_steps=2, callbacks=[saving]).fit(module, make_data())
    first, second = (torch.load(tmp_path / f"step={step}.ckpt", weights_only=True) for step in (1, 2))
    (rollouts,) = first["pl_grouprl"]["rollouts"]
    assert rollouts["updates_done"] == 1
    assert second["pl_grouprl"]["rollouts"] == [None]
    assert not any(name.startswith("reference") for name in first["state_dict"])


def test_old_logprobs_cost_no_forward_when_on_policy(make_module, make_data, make_trainer, monkeypatch):
    scored = []
    original = GRPO.score_rollouts
    monkeypatch.setattr(
        GRPO, "score_rollouts", lambda self, *args, **kw: scored.append(1) or original(self, *args, **kw)
    )
    make_trainer(max_steps=2).fit(make_module(), make_data())
    assert scored == []
    history = History()
    make_trainer(max_steps=4, callbacks=[history]).fit(make_module(num_iterations=2), make_data())
    assert scored == [1, 1]
    # The first pass is on-policy whether old log-probabilities were scored or taken over: no token is clipped.
    assert history.steps[0]["clip_ratio/region_mean"] == 0


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo", "gspo"])
def test_accumulated_mini_batches_are_one_batch(
    make_module, make_data, make_trainer, scripted_engine, parameters, loss_type
):
    def fit(**kwargs):
        accumulate = kwargs.pop("accumulate_grad_batches", 1)
        # With so large an eps a step of AdamW is nearly the gradient itself.
        optimizer = OptimizerConfig(learning_rate=1.0, eps=1.0)
        module = make_module(engine=scripted_engine, loss_type=loss_type, optimizer=optimizer, **kwargs)
        make_trainer(max_steps=1, accumulate_grad_batches=accumulate).fit(module, make_data(shuffle=False))
        return parameters(module)

    start, whole, cut = make_module().policy_source.load(), fit(), fit(num_mini_batches=3, accumulate_grad_batches=3)
    assert not close(list(start.parameters()), whole, 1e-3)
    assert close(whole, cut, 1e-5)


def test_gradient_clipping_by_the_trainer(make_module, make_data, make_trainer, scripted_engine, parameters):
    module = make_module(engine=scripted_engine, optimizer=OptimizerConfig(learning_rate=1.0, eps=1.0))
    before = list(module.policy_source.load().parameters())
    make_trainer(max_steps=1, gradient_clip_val=1e-3).fit(module, make_data())
    change = torch.cat([(a - b).flatten() for a, b in zip(before, parameters(module), strict=True)])
    assert 0.9e-3 < change.norm().item() <= 1.001e-3


@pytest.mark.parametrize("rewards", [0.7, None])
def test_nothing_to_learn_changes_nothing(make_module, make_data, make_trainer, tiny_policy, parameters, rewards):
    def constant(completions, **columns):
        return [rewards for _ in completions]

    history = History()
    module = make_module(rewards=constant)
    make_trainer(max_steps=2, callbacks=[history]).fit(module, make_data())
    assert same(parameters(module), list(tiny_policy().load().parameters()))
    assert all(step["loss"] == 0 and step["grad_norm"] == 0 for step in history.steps)


def test_rollouts_without_a_reward_are_not_trained(make_module, make_data, make_trainer, scripted_engine, parameters):
    def some(completions, **columns):
        return [None if "e" in text else float(len(text)) for text in completions]

    module = make_module(rewards=some, engine=scripted_engine)
    make_trainer(max_steps=1).fit(module, make_data())
    buffer = module.last_rollouts
    for group, mask, advantages in zip(
        buffer.groups, buffer.tokens["loss_mask"], buffer.tokens["advantages"], strict=True
    ):
        expected = [bit for r in group.rollouts for bit in [r.reward is not None] * len(r.token_ids)]
        assert mask.tolist() == expected
        assert not advantages[~mask].any()
    assert not all(mask.all() for mask in buffer.tokens["loss_mask"])


def test_reference_stays_the_initial_policy(make_module, make_data, make_trainer, tiny_policy, parameters):
    history = History()
    module = make_module(beta=0.1)
    make_trainer(max_steps=3, callbacks=[history]).fit(module, make_data())
    initial = list(tiny_policy().load().parameters())
    assert same(list(module.reference.parameters()), initial)
    assert not same(parameters(module), initial)
    assert history.steps[0]["kl"] == pytest.approx(0, abs=1e-6)
    assert history.steps[-1]["kl"] > 1e-4


def test_another_reference_on_resume_is_refused(make_module, make_data, make_trainer, tiny_policy, tmp_path):
    saving = ModelCheckpoint(dirpath=tmp_path, filename="{step}", every_n_train_steps=1)
    make_trainer(max_steps=1, callbacks=[saving]).fit(make_module(beta=0.1), make_data())
    other = make_module(beta=0.1, policy=tiny_policy(seed=5))
    with pytest.raises(ValueError, match="is a different model"):
        make_trainer(max_steps=2).fit(other, make_data(), ckpt_path=tmp_path / "step=1.ckpt", weights_only=True)


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
def test_bf16(make_module, make_data, make_trainer, precision):
    history = History()
    module = make_module(num_mini_batches=2, beta=0.1, sharing={"verify": True})
    make_trainer(max_steps=4, precision=precision, callbacks=[history]).fit(module, make_data())
    assert module.policy.dtype == (torch.bfloat16 if precision == "bf16-true" else torch.float32)
    assert module.last_rollouts.tokens["advantages"][0].dtype == torch.float32
    assert module.last_rollouts.tokens["old_logprobs"][0].dtype == torch.float32
    assert all(torch.isfinite(torch.tensor(step["loss"])) for step in history.steps)


class BrokenLoss(GRPO):
    broken_updates: tuple[int, ...] = ()

    def compute_loss(self, batch):
        terms = super().compute_loss(batch)
        broken = self.last_rollouts.rollout_number in self.broken_updates
        if broken:
            terms.losses["policy"] = (terms.losses["policy"][0] * float("nan"), terms.losses["policy"][1])
        return terms


def test_a_step_that_is_not_finite_is_skipped(make_module, make_data, make_trainer, parameters):
    class Weights(Callback):
        def __init__(self):
            self.seen, self.exp_avg = [], []

        def on_train_batch_end(self, trainer, module, *args):
            self.seen.append(parameters(module))
            state = trainer.optimizers[0].state
            self.exp_avg.append([s["exp_avg"].clone() for s in state.values()])

    weights = Weights()
    module = make_module(BrokenLoss)
    module.broken_updates = (1,)
    make_trainer(max_steps=3, callbacks=[weights]).fit(module, make_data())
    assert same(weights.seen[0], weights.seen[1])
    assert same(weights.exp_avg[0], weights.exp_avg[1])
    assert not same(weights.seen[1], weights.seen[2])
    assert module.optimization.nonfinite_steps == 0


def test_too_many_steps_that_are_not_finite_end_the_run(make_module, make_data, make_trainer):
    module = make_module(BrokenLoss, guards={"max_nonfinite_steps": 2})
    module.broken_updates = (1, 2)
    with pytest.raises(RuntimeError, match=r"2 steps in a row .* \(guards.max_nonfinite_steps=2\)"):
        make_trainer(max_steps=5).fit(module, make_data())


def test_metrics_have_the_names_of_trl(make_module, make_data, make_trainer):
    history = History()
    make_trainer(max_steps=1, callbacks=[history]).fit(make_module(beta=0.1), make_data())
    (metrics,) = history.steps
    expected = {
        "reward", "reward_std", "frac_reward_zero_std", "rewards/share_of_letters/mean", "rewards/share_of_letters/std",
        "completions/mean_length", "completions/min_length", "completions/max_length", "completions/clipped_ratio",
        "kl", "entropy", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean", "num_tokens", "loss",
        "grad_norm", "prefix/token_ratio", "sampling/sampling_logp_difference/mean",
    }  # fmt: skip
    assert expected <= metrics.keys()
    assert metrics["sampling/sampling_logp_difference/mean"] < 1e-5  # sampler and trainer agree
    assert metrics["num_tokens"] == 16 * 20 + 16 * metrics["completions/mean_length"]
    assert 3.0 < metrics["entropy"] < 3.2959  # a random policy is nearly uniform over 27 tokens; log 27 = 3.2958


def test_validate_and_test(make_module, make_data, make_trainer, scripted_engine):
    module = make_module(engine=scripted_engine, evaluation={"num_generations": 3})
    data = make_data(val=True, val_batch_size=3)
    (metrics,) = make_trainer().validate(module, data, verbose=False)
    assert {f"val/most_frequent_digit/{name}@3" for name in ("mean", "best", "maj")} <= metrics.keys()
    assert metrics["val/reward"] == pytest.approx(metrics["val/most_frequent_digit/mean@3"])
    assert metrics["val/reward"] <= metrics["val/most_frequent_digit/best@3"]
    assert metrics["val/rewards/share_of_letters/mean"] == pytest.approx(metrics["val/reward"])


def test_fewer_groups_than_mini_batches_train_what_is_there(make_module, make_data, make_trainer):
    # 5 prompts in batches of 4: the second batch of rollouts has one group for 3 updates.
    history = History()
    module = make_module(num_mini_batches=3)
    data = make_data(train_size=5, drop_last=False)
    make_trainer(max_epochs=1, callbacks=[history]).fit(module, data)
    norms = [step["grad_norm"] for step in history.steps]
    assert len(norms) == 6
    assert sorted(norms[3:])[:2] == [0, 0]
    assert max(norms[3:]) > 0


def test_subclass_changes_one_thing(make_module, make_data, make_trainer, scripted_engine):
    class LongestIsBest(GRPO):
        def compute_advantages(self, groups):
            return torch.tensor([float(len(r.token_ids)) for group in groups for r in group.rollouts])

    module = make_module(LongestIsBest, engine=scripted_engine)
    make_trainer(max_steps=1).fit(module, make_data())
    buffer = module.last_rollouts
    means = per_rollout_means(buffer, "advantages")
    assert means == [[float(len(r.token_ids)) for r in group.rollouts] for group in buffer.groups]


def test_models_are_restored_after_the_fit(make_module, make_data, make_trainer):
    module = make_module(beta=0.1)
    make_trainer(max_steps=1).fit(module, make_data())
    assert {model.config._attn_implementation for model in (module.policy, module.reference)} == {"sdpa"}


@pytest.mark.parametrize("sharing", ["shared", "repeated"])
def test_an_unknown_backend_is_an_error_at_once(make_module, sharing):
    with pytest.raises(ValueError, match="backend is 'magic'; choose one of auto, cascade"):
        make_module(sharing={"backend": "magic", "mode": sharing})


def test_more_mini_batches_than_prompts(make_module, make_data, make_trainer):
    with pytest.raises(ValueError, match="num_mini_batches is 5 with batch_size=4"):
        make_trainer(max_steps=1).fit(make_module(num_mini_batches=5), make_data())


def test_load_from_checkpoint(make_module, make_data, make_trainer, tiny_policy, parameters, tmp_path):
    saving = ModelCheckpoint(dirpath=tmp_path, filename="{step}", every_n_train_steps=1)
    module = make_module(beta=0.1, num_mini_batches=2)
    make_trainer(max_steps=1, callbacks=[saving]).fit(module, make_data())
    loaded = GRPO.load_from_checkpoint(
        tmp_path / "step=1.ckpt",
        weights_only=True,
        policy=tiny_policy(),
        rewards=module.rewards,
        num_mini_batches=2,
        beta=0.1,
    )
    assert same(parameters(module), parameters(loaded))
    assert loaded.last_rollouts.updates_done == 1
