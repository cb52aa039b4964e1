"""Distillation: its gradient, sharing, resuming, task rewards, adapters, and what is refused."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import pl_grouprl
from pl_grouprl.algorithms import Distillation, OptimizerConfig
from pl_grouprl.demo import TwoStepLookup
from pl_grouprl.functional.advantages import group_relative_advantages
from pl_grouprl.models import LoRAAdapter
from pl_grouprl.rewards import Weighted


@pytest.fixture
def make_student(make_module, tiny_policy):
    """A module whose teacher is wider than its student."""

    def make(rewards=None, **kwargs):
        defaults = {
            "teacher": tiny_policy(seed=7, hidden_size=48, initializer_range=0.2),
            "optimizer": OptimizerConfig(1e-3),
        }
        return make_module(Distillation, rewards=rewards, **{**defaults, **kwargs})

    return make


def sequence_logprobs(model, group, rollout):
    """Of a rollout's tokens, by a plain forward of the whole sequence."""
    ids = torch.tensor([group.prompt_ids + rollout.token_ids])
    logits = model(input_ids=ids).logits[0, len(group.prompt_ids) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(rollout.token_ids)[:, None])[:, 0]


def weights(module):
    return [parameter.detach().clone() for parameter in module.policy.parameters()]


def largest(left, right):
    return max((a - b).abs().max().item() for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("gamma", [0.0, 1.0])
def test_the_gradient_is_the_policy_gradient_of_the_reverse_kl(
    make_student, make_data, make_trainer, ragged_engine, history, gamma
):
    record, module = history(keep_tensors=True), make_student(engine=ragged_engine(), gamma=gamma)
    make_trainer(max_steps=1, callbacks=[record]).fit(module, make_data())
    student, teacher = module.policy_source.load().double(), module.teacher_source.load().double()
    total, kls = [], []
    for group in module.last_rollouts.groups:
        for rollout in (own for own in group.rollouts if own.token_ids):
            own = sequence_logprobs(student, group, rollout)
            mask = torch.tensor(rollout.loss_mask or [1] * len(own), dtype=torch.double)
            rewards = (sequence_logprobs(teacher, group, rollout) - own).detach() * mask
            advantages = rewards.flip(0).cumsum(0).flip(0) if gamma else rewards
            total.append(-(advantages * own * mask).sum())
            kls += (-rewards)[mask.bool()].tolist()
    (torch.stack(total).sum() / len(kls)).backward()
    for name, parameter in student.named_parameters():
        gradient = record.gradients[0][f"policy.{name}"]
        torch.testing.assert_close(gradient.double(), parameter.grad, rtol=1e-4, atol=1e-6)
    metrics = module.last_rollouts.metrics
    assert metrics["distillation/reverse_kl"] == pytest.approx(sum(kls) / len(kls), abs=1e-5)
    before = teacher.float().state_dict()
    assert all(torch.equal(value, before[name]) for name, value in module.teacher.state_dict().items())
    assert all(parameter.grad is None for parameter in module.teacher.parameters())


def test_shared_repeated_and_sliced_prefixes_train_the_same(
    make_student, make_data, make_trainer, ragged_engine, history
):
    losses, kls, ends = {}, {}, {}
    cases = {
        "repeated": {"sharing": {"mode": "repeated"}},
        "shared": {"sharing": {"verify": True}},
        "sliced": {"max_tokens_per_micro_batch": 32},
    }
    for name, options in cases.items():
        record = history()
        module = make_student(engine=ragged_engine(), num_mini_batches=2, **options)
        make_trainer(max_steps=4, callbacks=[record]).fit(module, make_data())
        losses[name] = [step["loss"] for step in record.steps]
        kls[name] = [step["distillation/reverse_kl"] for step in record.steps]
        ends[name] = weights(module)
    for name in ("shared", "sliced"):
        assert losses[name] == pytest.approx(losses["repeated"], abs=1e-5)
        assert kls[name] == pytest.approx(kls["repeated"], abs=1e-5)
        assert largest(ends[name], ends["repeated"]) < 1e-4
    assert max(map(abs, losses["repeated"])) > 1e-3


def test_task_and_teacher_are_added(make_student, make_data, make_trainer, scripted_engine):
    def length(completions, **columns):
        return [float(len(text)) for text in completions]

    module = make_student(length, engine=scripted_engine, distillation_coef=0.25)
    make_trainer(max_steps=1).fit(module, make_data())
    buffer = module.last_rollouts
    rewards = torch.tensor([rollout.reward for group in buffer.groups for rollout in group.rollouts])
    task = group_relative_advantages(rewards, torch.arange(4).repeat_interleave(4))
    teacher = buffer.joined("teacher_logprobs") - buffer.joined("old_logprobs")
    expected = task.repeat_interleave(buffer.rollout_lengths) + 0.25 * teacher
    torch.testing.assert_close(buffer.joined("advantages"), expected)
    assert task.abs().max() > 0.5


def test_without_a_task_reward_every_rollout_is_trained(make_student, make_data, make_trainer, scripted_engine):
    def length(completions, **columns):
        return [float(len(text)) for text in completions]

    ends = []
    for rewards in (None, [Weighted(length, 0.0)]):
        module = make_student(rewards, engine=scripted_engine)
        make_trainer(max_steps=1).fit(module, make_data(shuffle=False))
        buffer = module.last_rollouts
        assert buffer.joined("loss_mask").all()
        assert {rollout.reward for group in buffer.groups for rollout in group.rollouts} == {0.0}
        ends.append(weights(module))
    assert largest(*ends) == 0
    assert buffer.metrics["rewards/length/mean"] > 0  # measured only


def test_resume_is_exact_and_holds_no_teacher(make_student, make_data, make_trainer, tiny_policy, tmp_path):
    options = {"num_iterations": 2, "max_staleness": 1, "importance_sampling": {"mode": "token_truncate"}, "gamma": 0.5}

    def fit(checkpoint=None, callbacks=(), **more):
        module = make_student(**options, **more)
        trainer = make_trainer(max_steps=6, callbacks=list(callbacks))
        trainer.fit(module, make_data(train_size=8), ckpt_path=checkpoint, weights_only=True)
        return module

    saving = ModelCheckpoint(dirpath=tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    whole = fit(callbacks=[saving])
    for step in (1, 4):  # between the updates of a rollout; at the end of an epoch
        assert largest(weights(fit(tmp_path / f"step={step}.ckpt")), weights(whole)) == 0
    saved = torch.load(tmp_path / "step=1.ckpt", weights_only=True)
    assert not any("teacher" in name for name in saved["state_dict"])
    with pytest.raises(ValueError, match=r"teacher=.* is a different model"):
        fit(tmp_path / "step=1.ckpt", teacher=tiny_policy(seed=8, hidden_size=48, initializer_range=0.2))
    with pytest.warns(UserWarning, match="distillation_coef +1.0 +2.0"):
        fit(tmp_path / "step=1.ckpt", distillation_coef=2.0)


def test_adapters(make_student, make_data, make_trainer, tiny_policy, history):
    pytest.importorskip("peft")

    class Adapted(tiny_policy):
        def load(self):
            model = LoRAAdapter(r=4, alpha=16).add_to(super().load())
            for name, parameter in model.named_parameters():
                if "lora_B" in name and self.seed:  # a trained adapter
                    torch.nn.init.normal_(parameter, std=0.5, generator=torch.Generator().manual_seed(self.seed))
            return model

    for teacher in (tiny_policy(seed=7, initializer_range=0.2), Adapted(seed=7, initializer_range=0.2)):
        record = history()
        module = make_student(policy=Adapted(), teacher=teacher, sharing={"verify": True})
        make_trainer(max_steps=2, callbacks=[record]).fit(module, make_data())
        assert record.steps[0]["distillation/reverse_kl"] > 0.01
        assert not any(parameter.requires_grad for parameter in module.teacher.parameters())
    with pytest.raises(ValueError, match="teacher is the model that policy starts from"):
        make_trainer(max_steps=1).fit(make_student(policy=Adapted(), teacher=tiny_policy()), make_data())


def test_validation(make_student, make_data, make_trainer):
    trainer = make_trainer()
    (metrics,) = trainer.validate(make_student(), make_data(val=True), verbose=False)
    assert metrics["val/reward"] == 0


def test_teachers_that_cannot_teach_are_refused(make_student, make_data, make_trainer, tiny_policy):
    class OtherTokenizer(tiny_policy):
        def load_tokenizer(self):
            return TwoStepLookup().tokenizer()

    class Short(tiny_policy):
        def load(self):
            model = super().load()
            model.resize_token_embeddings(20)
            return model

    class Narrow(tiny_policy):
        def load(self):
            model = super().load()
            model.config.max_position_embeddings = 24
            return model

    cases = {
        r"teacher has max_position_embeddings=24, but sequences may have 25 tokens": Narrow(seed=7),
        "teacher is the model that policy starts from.*set beta": tiny_policy(),
        r"teacher has another tokenizer than policy: \d+ tokens differ": OtherTokenizer(seed=7),
        r"teacher has logits for 20 tokens and policy for \d+": Short(seed=7),
    }
    for message, teacher in cases.items():
        with pytest.raises(ValueError, match=message):
            make_trainer(max_steps=1).fit(make_student(teacher=teacher), make_data())


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"distillation_coef": 0.0}, ValueError, "distillation_coef is 0.0"),
        ({"gamma": 1.5}, ValueError, r"gamma is 1.5; it must be in \[0, 1\]"),
        ({"dynamic_sampling": True}, ValueError, "dynamic_sampling=True drops groups"),
    ],
)
def test_options_out_of_range_are_refused(make_student, options, error, message):
    with pytest.raises(error, match=message):
        make_student(**options)


def test_the_teacher_is_required(tiny_policy):
    with pytest.raises(TypeError, match="teacher"):
        pl_grouprl.Distillation(tiny_policy())
