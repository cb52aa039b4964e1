"""Runs at the edge: nothing to train in a step, other options on resume, compiled modules, missing columns."""

from __future__ import annotations

import copy

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from pl_grouprl.data import PromptDataModule
from pl_grouprl.types import SamplingConfig
from tests.algorithms.conftest import ScriptedEngine, TinyPolicy

TURNS = "{% for m in messages %}{{ m.content }}<pad>{% endfor %}"


class States(Callback):
    """Weights and optimizer state after every step."""

    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, module, *args):
        weights = [p.detach().clone() for p in module.policy.parameters()]
        moments = [copy.deepcopy(s) for s in trainer.optimizers[0].state.values()]
        self.seen.append(weights + [value for own in moments for value in own.values()])


def same(left, right):
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_a_step_without_trained_tokens_leaves_weights_and_optimizer_as_they_are(make_module, make_data, make_trainer):
    # 5 prompts in batches of 4: the second batch of rollouts has one group for 3 updates, so two are empty.
    states = States()
    module = make_module(num_mini_batches=3)
    make_trainer(max_epochs=1, callbacks=[states]).fit(module, make_data(train_size=5, drop_last=False))
    assert len(states.seen) == 6
    moved = [not same(states.seen[step - 1], states.seen[step]) for step in (3, 4, 5)]
    assert sorted(moved) == [False, False, True]
    assert module.optimization.nonfinite_steps == 0


def test_a_batch_without_any_reward_is_warned_about(make_module, make_data, make_trainer):
    module = make_module(rewards=lambda completions, **columns: [None] * len(completions))
    with pytest.warns(UserWarning, match="no rollout of a batch has a reward"):
        make_trainer(max_steps=1).fit(module, make_data())


@pytest.fixture
def checkpoints(make_module, make_data, make_trainer, tmp_path):
    """After step 1 rollouts are unfinished, after step 2 they are done."""
    saving = ModelCheckpoint(dirpath=tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    make_trainer(max_steps=2, callbacks=[saving]).fit(make_module(num_mini_batches=2), make_data())
    return tmp_path


CHANGES = [
    ({"num_generations": 3}, "num_generations is 3, .* made with 4; keep that value"),
    ({"seed": 5}, "seed is 5, .* made with 0"),
    ({"sampling": SamplingConfig(max_new_tokens=5, temperature=0.5)}, "sampling.temperature is 0.5, .* made with 1.0"),
    ({"beta": 0.1}, "beta is 0.1, .* made with 0.0"),
]


@pytest.mark.parametrize(("change", "message"), CHANGES, ids=lambda change: next(iter(change), None))
def test_other_options_between_updates_are_refused(checkpoints, make_module, make_data, make_trainer, change, message):
    module = make_module(num_mini_batches=2, **change)
    with pytest.raises(ValueError, match=message):
        make_trainer(max_steps=3).fit(module, make_data(), ckpt_path=checkpoints / "step=1.ckpt", weights_only=True)


@pytest.mark.parametrize("change", [{"seed": 5}, {"num_generations": 3}, {"beta": 0.1}])
def test_other_options_at_a_rollout_boundary_are_warned_of(checkpoints, make_module, make_data, make_trainer, change):
    module, trainer = make_module(num_mini_batches=2, **change), make_trainer(max_steps=3)
    with pytest.warns(UserWarning, match=f"other options[^;]*{next(iter(change))} "):
        trainer.fit(module, make_data(), ckpt_path=checkpoints / "step=2.ckpt", weights_only=True)
    assert trainer.global_step == 3


def test_the_same_options_resume_without_a_word(checkpoints, make_module, make_data, make_trainer, caplog):
    for step in (1, 2):
        module = make_module(num_mini_batches=2)
        path = checkpoints / f"step={step}.ckpt"
        make_trainer(max_steps=3).fit(module, make_data(), ckpt_path=path, weights_only=True)
    assert "other options" not in caplog.text


def test_a_compiled_policy_is_refused(make_module, make_data, make_trainer):
    module = make_module()
    module.configure_model()
    module.policy.compile()
    with pytest.raises(ValueError, match=r"module\.policy is compiled"):
        make_trainer(max_steps=1).fit(module, make_data())
    module = make_module()
    module.configure_model()
    module.policy = torch.compile(module.policy)
    with pytest.raises(ValueError, match=r"module\.policy is compiled"):
        make_trainer(max_steps=1).fit(module, make_data())


def test_a_compiled_module_is_refused(make_module, make_data, make_trainer):
    with pytest.raises(ValueError, match="module is compiled"):
        make_trainer(max_steps=1).fit(torch.compile(make_module()), make_data())


def test_a_missing_column_ends_the_run_before_a_rollout(make_module, make_data, make_trainer):
    module = make_module(rewards=lambda completions, level: [0.0] * len(completions))
    with pytest.raises(ValueError, match=r"train, row 0: .*requires \['level'\]"):
        make_trainer(max_steps=1).fit(module, make_data())
    assert module.last_rollouts is None


def test_accumulating_several_passes_in_one_step_is_refused(make_module, make_data, make_trainer):
    with pytest.raises(ValueError, match="accumulate_grad_batches is 2 with num_mini_batches=1 and num_iterations=2"):
        make_trainer(max_steps=1, accumulate_grad_batches=2).fit(make_module(num_iterations=2), make_data())


@pytest.mark.parametrize(
    ("option", "template"),
    [(None, TURNS), (TURNS, None), ("chat_template_kwargs", None), (None, "{{ messages[0].content }}")],
)
def test_completions_end_with_the_turn_of_the_chat_template(make_module, make_trainer, option, template):
    """Its token is not the tokenizer's EOS token, as with a base model; every engine is told."""
    seen, kwargs = [], {"chat_template": TURNS} if option == "chat_template_kwargs" else {}

    class Policy(TinyPolicy):
        def load_tokenizer(self):
            tokenizer = super().load_tokenizer()
            tokenizer.chat_template = template
            return tokenizer

    class Engine(ScriptedEngine):
        def generate(self, prompts, sampling, **options):
            seen.append(sampling.stop_token_ids)
            return super().generate(prompts, sampling, **options)

    rows = [{"prompt": "12"}, {"prompt": "345"}]
    data = PromptDataModule(rows, rows, batch_size=2, chat_template_kwargs=kwargs)
    own = {"episodes": {"chat_template": option}} if option == TURNS else {}
    module = make_module(policy=Policy(), engine=Engine(), sampling=SamplingConfig(5, stop_token_ids=(7,)), **own)
    make_trainer(max_steps=1).fit(module, data)
    assert set(seen) == {(7,) if template == "{{ messages[0].content }}" else (7, 0)}
    assert module.sampling.stop_token_ids == (7,)
