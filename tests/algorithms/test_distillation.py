"""Distillation: its gradient, sharing, resuming, task rewards, adapters, and what is refused."""

from __future__ import annotations

import pytest
import torch
from helpers.tiny_runs import AHEAD, RaggedEngine, ScriptedEngine, TinyPolicy, largest_difference, same

from pl_grouprl.algorithms import Distillation, OptimizerConfig
from pl_grouprl.demo import TwoStepLookup
from pl_grouprl.functional.advantages import group_relative_advantages
from pl_grouprl.models import LoRAAdapter
from pl_grouprl.rewards import Weighted


def wide(seed=7, cls=TinyPolicy):
    """A teacher that is wider than its student."""
    return cls(seed=seed, hidden_size=48, initializer_range=0.2)


@pytest.fixture
def fit_student(fit):
    def run(rewards=None, **options):
        defaults = {"teacher": wide(), "optimizer": OptimizerConfig(1e-3)}
        return fit(Distillation, rewards=rewards, **{**defaults, **options})

    return run


def sequence_logprobs(model, group, rollout):
    """Of a rollout's tokens, by a plain forward of the whole sequence."""
    ids = torch.tensor([group.prompt_ids + rollout.token_ids])
    logits = model(input_ids=ids).logits[0, len(group.prompt_ids) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(rollout.token_ids)[:, None])[:, 0]


@pytest.mark.parametrize("gamma", [0.0, 1.0])
def test_the_gradient_is_the_policy_gradient_of_the_reverse_kl(fit_student, gamma):
    run = fit_student(engine=RaggedEngine(), gamma=gamma)
    module = run.module
    student, teacher = module.policy_source.load().double(), module.teacher_source.load().double()
    total, kls = [], []
    for group in run.buffer.groups:
        for rollout in (own for own in group.rollouts if own.token_ids):
            own = sequence_logprobs(student, group, rollout)
            mask = torch.tensor(rollout.loss_mask or [1] * len(own), dtype=torch.double)
            rewards = (sequence_logprobs(teacher, group, rollout) - own).detach() * mask
            advantages = rewards.flip(0).cumsum(0).flip(0) if gamma else rewards
            total.append(-(advantages * own * mask).sum())
            kls += (-rewards)[mask.bool()].tolist()
    (torch.stack(total).sum() / len(kls)).backward()
    for name, parameter in student.named_parameters():
        gradient = run.gradients[0][f"policy.{name}"]
        torch.testing.assert_close(gradient.double(), parameter.grad, rtol=1e-4, atol=1e-6)
    assert run.buffer.metrics["distillation/reverse_kl"] == pytest.approx(sum(kls) / len(kls), abs=1e-5)
    assert same(teacher.float().state_dict(), module.teacher.state_dict())
    assert all(parameter.grad is None for parameter in module.teacher.parameters())


def test_shared_repeated_and_sliced_prefixes_train_the_same(fit_student):
    repeated, *others = (
        fit_student(engine=RaggedEngine(), steps=4, num_mini_batches=2, **options)
        for options in (
            {"sharing": {"mode": "repeated"}},
            {"sharing": {"verify": True}},
            {"max_tokens_per_micro_batch": 32},
        )
    )
    for run in others:
        for name in ("loss", "distillation/reverse_kl"):
            assert [s[name] for s in run.steps] == pytest.approx([s[name] for s in repeated.steps], abs=1e-5)
        assert largest_difference(run.weights[-1], repeated.weights[-1]) < 1e-4
    assert max(abs(step["loss"]) for step in repeated.steps) > 1e-3


def test_task_and_teacher_are_added(fit_student):
    def length(completions, **columns):
        return [float(len(text)) for text in completions]

    run = fit_student(length, engine=ScriptedEngine(), distillation_coef=0.25)
    rewards = torch.tensor([rollout.reward for rollout in run.rollouts])
    task = group_relative_advantages(rewards, torch.arange(4).repeat_interleave(4))
    teacher = run.buffer.joined("teacher_logprobs") - run.buffer.joined("old_logprobs")
    expected = task.repeat_interleave(run.buffer.rollout_lengths) + 0.25 * teacher
    torch.testing.assert_close(run.buffer.joined("advantages"), expected)
    assert task.abs().max() > 0.5
    # Without a task reward every rollout is trained; one of weight 0 is measured only.
    none, measured = (
        fit_student(own, engine=ScriptedEngine(), data={"shuffle": False}) for own in (None, [Weighted(length, 0.0)])
    )
    for run in (none, measured):
        assert run.buffer.joined("loss_mask").all()
        assert {rollout.reward for rollout in run.rollouts} == {0.0}
    assert same(none.weights[-1], measured.weights[-1])
    assert measured.buffer.metrics["rewards/length/mean"] > 0


def test_resume_is_exact_and_holds_no_teacher(fit_student, tmp_path):
    options = {"steps": 6, "num_iterations": 2, "gamma": 0.5, "data": {"train_size": 8}, **AHEAD}
    whole = fit_student(save=True, **options)
    for step in (1, 4):  # between the updates of a rollout; at the end of an epoch
        assert same(whole.weights[-1], fit_student(resume=step, **options).weights[-1], "policy")
    saved = torch.load(tmp_path / "step=1.ckpt", weights_only=True)
    assert not any("teacher" in name for name in saved["state_dict"])
    with pytest.raises(ValueError, match=r"teacher=.* is a different model"):
        fit_student(resume=1, teacher=wide(8), **options)
    with pytest.warns(UserWarning, match="distillation_coef +1.0 +2.0"):
        fit_student(resume=4, distillation_coef=2.0, **options)


class Adapted(TinyPolicy):
    def load(self):
        model = LoRAAdapter(r=4, alpha=16).add_to(super().load())
        for name, parameter in model.named_parameters():
            if "lora_B" in name and self.seed:  # a trained adapter
                torch.nn.init.normal_(parameter, std=0.5, generator=torch.Generator().manual_seed(self.seed))
        return model


def test_adapters_and_validation(fit_student, make_data, make_trainer):
    pytest.importorskip("peft")
    for teacher in (wide(), wide(cls=Adapted)):
        run = fit_student(policy=Adapted(), teacher=teacher, sharing={"verify": True})
        assert run.steps[0]["distillation/reverse_kl"] > 0.01
        assert not any(parameter.requires_grad for parameter in run.module.teacher.parameters())
    (metrics,) = make_trainer().validate(run.module, make_data(val=True), verbose=False)
    assert metrics["val/reward"] == 0
    with pytest.raises(ValueError, match="teacher is the model that policy starts from"):
        fit_student(policy=Adapted(), teacher=TinyPolicy())


class OtherTokenizer(TinyPolicy):
    def load_tokenizer(self):
        return TwoStepLookup().tokenizer()


class Short(TinyPolicy):
    def load(self):
        model = super().load()
        model.resize_token_embeddings(20)
        return model


class Narrow(TinyPolicy):
    def load(self):
        model = super().load()
        model.config.max_position_embeddings = 24
        return model


@pytest.mark.parametrize(
    ("teacher", "message"),
    [
        (Narrow(seed=7), "teacher has max_position_embeddings=24, but sequences may have 25 tokens"),
        (TinyPolicy(), "teacher is the model that policy starts from"),
        (OtherTokenizer(seed=7), r"teacher has another tokenizer than policy: \d+ tokens differ"),
        (Short(seed=7), r"teacher has logits for 20 tokens and policy for \d+"),
    ],
)
def test_teachers_that_cannot_teach_are_refused(fit_student, teacher, message):
    with pytest.raises(ValueError, match=message):
        fit_student(teacher=teacher)


def test_options_that_are_refused(make_module):
    for options in ({"distillation_coef": 0.0}, {"gamma": 1.5}, {"dynamic_sampling": True}):
        with pytest.raises(ValueError, match=next(iter(options))):
            make_module(Distillation, rewards=None, teacher=wide(), **options)
    with pytest.raises(TypeError, match="teacher"):
        Distillation(TinyPolicy())
