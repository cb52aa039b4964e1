"""What a run refuses before its first rollout: prompts, budgets, loaders, monitors, dropout, compiled parts."""

from __future__ import annotations

import json
import math
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from helpers.tiny_models import tiny_model
from helpers.tiny_runs import ScriptedEngine, TinyPolicy, constant
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.utils.data import DataLoader

from pl_grouprl import PPO
from pl_grouprl.callbacks import RunSummary, SafeCheckpoint
from pl_grouprl.data import PromptDataModule
from pl_grouprl.demo.tasks import digit_tokenizer
from pl_grouprl.models import PretrainedPolicy
from pl_grouprl.models.critic import Critic, ValueHead
from pl_grouprl.training import checks
from pl_grouprl.training.checks import refuse_dropout
from pl_grouprl.types import SamplingConfig

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

from models_table import select
from tiny_families import build


class SelectingPolicy:
    """Its layers select tokens, so they get dense masks of whole rows."""

    def load(self):
        return build(next(family for family in select(["deepseek_v32"]) if family.name == "deepseek_v32")).train()

    def load_tokenizer(self):
        return digit_tokenizer()


class NothingSampled:
    """An engine that must not be asked."""

    reserves_max_new_tokens = True

    def bind(self, model, tokenizer=None):
        pass

    def generate(self, prompts, sampling, *, num_generations, seed):
        raise AssertionError("a rollout began")


@pytest.fixture
def file(tmp_path):
    def write(name, *lengths):
        path = tmp_path / name
        path.write_text("".join(json.dumps({"prompt": "1" * length}) + "\n" for length in lengths))
        return str(path)

    return write


def test_prompts_that_are_too_long_are_found_at_setup(fit, make_module, make_trainer, file):
    """The tiny policy has 64 positions, and completions have up to 5 tokens."""
    data = PromptDataModule(file("x.jsonl", 4, 4, 59, 60, 4, 70), batch_size=2)
    message = (
        r"x\.jsonl, line 4: the prompt has 60 tokens, .*max_position_embeddings=64, as 2 of 6 prompts of `train` "
        r"do \(the longest has 70\); set max_prompt_length=59"
    )
    with pytest.raises(ValueError, match=message):
        fit(engine=NothingSampled(), data=data)
    for method, split in (("fit", "val"), ("validate", "val"), ("test", "test")):
        data = PromptDataModule(file("x.jsonl", 4, 4), batch_size=2, **{split: file("y.jsonl", 4, 50)})
        module = make_module(engine=NothingSampled(), evaluation={"sampling": SamplingConfig(max_new_tokens=15)})
        with pytest.raises(ValueError, match=rf"y\.jsonl, line 2: .* 50 tokens, which with 15 .* of `{split}`"):
            getattr(make_trainer(max_steps=1), method)(module, datamodule=data)


def test_a_config_is_checked_before_the_weights_are_loaded(fit, file, tmp_path, monkeypatch):
    TinyPolicy().load().save_pretrained(tmp_path / "policy")
    TinyPolicy().load_tokenizer().save_pretrained(tmp_path / "policy")
    monkeypatch.setattr(PretrainedPolicy, "load", lambda self: pytest.fail("the weights were loaded"))
    with pytest.raises(ValueError, match=r"x\.jsonl, line 1: .*max_position_embeddings=64, as 1 of 2"):
        fit(policy=str(tmp_path / "policy"), data=PromptDataModule(file("x.jsonl", 60, 4), batch_size=2))


def test_an_engine_that_reserves_no_room_may_get_longer_prompts(fit, file):
    for length, refused in ((63, False), (64, True)):
        data = PromptDataModule(file("x.jsonl", 4), file("y.jsonl", length), batch_size=1, drop_last=False)
        with pytest.raises(ValueError, match="64 tokens, which with 1 new ones") if refused else nullcontext():
            fit(engine=ScriptedEngine(), rewards=constant(1.0), data=data, trainer={"limit_val_batches": 0})


def test_a_token_that_the_model_does_not_know_is_found_at_setup(fit, file):
    class Other:
        chat_template = None

        def __call__(self, texts, add_special_tokens):
            return {"input_ids": [[3, 900] if text == "1111" else [3] for text in texts]}

    data = PromptDataModule(file("x.jsonl", 1, 4), batch_size=2, tokenizer=Other())
    with pytest.raises(ValueError, match=r"x\.jsonl, line 2: the prompt has token id 900, .* vocab_size"):
        fit(engine=NothingSampled(), data=data)


def test_counts_of_the_data_are_metrics_of_the_run(fit, file, capsys):
    summary, lengths = RunSummary(), file("x.jsonl", *[4] * 5, *[9] * 3)
    data = PromptDataModule(lengths, file("y.jsonl", 4, 4, 9), batch_size=2, max_prompt_length=8)
    fit(engine=ScriptedEngine(), data=data, callbacks=[summary], trainer={"max_steps": -1, "max_epochs": 1})
    expected = {"dropped_prompts": 3, "truncated_prompts": 0, "val_dropped_prompts": 1, "val_truncated_prompts": 0}
    assert {name: summary.history.statistics(f"data/{name}")["last"] for name in expected} == expected
    printed = capsys.readouterr().out
    assert "  training prompts    3 dropped, 0 truncated (too long)\n" in printed
    assert "  validation prompts  1 dropped, 0 truncated (too long)\n" in printed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens_per_micro_batch": 19}, "is 19 .*, but a prompt of the training data has 20"),
        ({"max_tokens_per_micro_batch": 30, "sampling": SamplingConfig(max_new_tokens=31)}, "is 30 .* may have .* 31"),
        (
            {"max_tokens_per_micro_batch": 24, "sharing": {"mode": "repeated"}},
            "is 24 .*, but a prompt with its rollout .* 25",
        ),
        ({"max_tokens_per_micro_batch": 0}, "max_tokens_per_micro_batch"),
        ({"sharing": {"sequence_parallel_size": 2}}, "sequence_parallel_size"),
    ],
)
def test_a_budget_that_is_too_small_is_refused(fit, options, message):
    with pytest.raises(ValueError, match=message):
        fit(**options)


def test_a_loader_without_rollouts_is_refused(make_module, make_trainer):
    with pytest.raises(TypeError, match="the loader yields int"):
        make_trainer(max_steps=1).fit(make_module(), torch.utils.data.DataLoader([1, 2, 3], batch_size=None))


def test_the_smallest_budget_trains(fit, recwarn):
    fit(max_tokens_per_micro_batch=25)
    assert not [warning for warning in recwarn if "max_tokens_per_micro_batch" in str(warning.message)]
    with pytest.warns(UserWarning, match=r"is 20 tokens \(not rollouts\), and a prompt with one rollout may have 25"):
        assert fit(max_tokens_per_micro_batch=20).trainer.global_step == 1


def test_a_group_that_cannot_be_split_must_fit(fit):
    options = {"policy": SelectingPolicy(), "engine": ScriptedEngine()}
    with pytest.raises(ValueError, match=r"is 39, but a group may have 40 tokens"):
        fit(max_tokens_per_micro_batch=39, **options)
    assert fit(max_tokens_per_micro_batch=40, **options).trainer.global_step == 1


ROWS = [{"prompt": "1 2", "answer": "1"}] * 4


@pytest.mark.parametrize("data", [DataLoader(ROWS), ROWS, DataLoader([1, 2, 3], batch_size=None)])
def test_loaders_of_rows_are_refused(data, fit):
    with pytest.raises(TypeError, match="PromptBatch"):
        fit(data=data)


def test_a_missing_column_ends_the_run_before_a_rollout(fit, make_module):
    module = make_module(rewards=lambda completions, level: [0.0] * len(completions))
    with pytest.raises(ValueError, match=r"train, row 0: .*\['level'\]"):
        fit(module=module)
    assert module.last_rollouts is None


def test_a_process_group_unknown_to_the_trainer_is_refused(monkeypatch, fit):
    monkeypatch.setattr(checks, "num_ranks", lambda: 2)
    with pytest.raises(ValueError, match="process group of 2 ranks"):
        fit()


def test_the_lowest_reward_is_never_the_best(fit, make_module, make_trainer):
    for kind, monitor in (
        (EarlyStopping, "val/reward"),
        (ModelCheckpoint, "rewards/length/mean"),
        (SafeCheckpoint, "val/gsm8k/pass@4"),
    ):
        with pytest.raises(ValueError, match="mode='min'"):
            fit(callbacks=[kind(monitor=monitor)])
    fit(callbacks=[ModelCheckpoint(monitor="reward", mode="max"), ModelCheckpoint(monitor="reward_std", mode="min")])


def test_what_the_trainer_is_asked_that_cannot_be_done_is_refused(fit):
    for trainer, options, message in (
        ({"accumulate_grad_batches": 2}, {"num_iterations": 2}, "accumulate_grad_batches is 2 with num_mini_batches=1"),
        ({}, {"num_mini_batches": 5}, "num_mini_batches is 5 with batch_size=4"),
        ({"gradient_clip_val": math.nan}, {}, "trainer.gradient_clip_val is nan"),
        ({"gradient_clip_val": -1.0}, {}, "trainer.gradient_clip_val is -1.0"),
        ({}, {"beta": 0.5, "kl": {"target": 1.0, "horizon": 3}}, "kl.horizon is 3 with 4 prompts of 4 rollouts"),
    ):
        with pytest.raises(ValueError, match=message):
            fit(trainer=trainer, **options)


@pytest.mark.parametrize("part", ["policy", "critic"])
def test_compiled_models_are_refused(fit, make_module, part):
    for compiled in (lambda own: own.compile() or own, torch.compile):
        module = make_module(PPO)
        module.configure_model()
        setattr(module, part, compiled(getattr(module, part)))
        with pytest.raises(ValueError, match=rf"module\.{part} is compiled"):
            fit(module=module)
    with pytest.raises(ValueError, match="module is compiled"):
        fit(module=torch.compile(make_module()))


@pytest.mark.parametrize(
    ("family", "option", "named"),
    [
        ("llama", "attention_dropout", "model.layers.0.self_attn.attention_dropout"),
        ("gpt2", "attn_pdrop", "transformer.h.0.attn.attn_dropout.p"),
        ("gpt2", "resid_pdrop", "transformer.h.0.attn.resid_dropout.p"),
        ("gpt2", "embd_pdrop", "transformer.drop.p"),
        ("opt", "dropout", "model.decoder.dropout"),
        ("opt", "layerdrop", "model.decoder.layerdrop"),
    ],
)
def test_dropout_is_refused_before_the_first_step(family, option, named):
    model = tiny_model(family, **({"dropout": 0.0} if family == "opt" else {}) | {option: 0.25})
    with pytest.raises(ValueError, match=rf"^policy has dropout \({named}=0.25\).*\(disable_dropout=True of Pret"):
        refuse_dropout("policy", model.train())
    for safe in (model.eval(), tiny_model("llama").train()):
        refuse_dropout("policy", safe)


def test_dropout_of_a_critics_head_is_refused():
    trunk = tiny_model("llama").model
    head = ValueHead(trunk.config.hidden_size)
    head.dropout = torch.nn.Dropout(1)  # an integer
    with pytest.raises(ValueError, match=r"^critic has dropout \(head.dropout.p=1\)"):
        refuse_dropout("critic", Critic(trunk, head))
