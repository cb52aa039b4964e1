"""Prompts that the model cannot take, or that were dropped: found, counted and named before anything is sampled."""

from __future__ import annotations

import json

import pytest

from pl_grouprl.callbacks import RunSummary
from pl_grouprl.data import PromptDataModule
from pl_grouprl.models import PretrainedPolicy
from pl_grouprl.types import SamplingConfig

# The tiny policy has 64 positions, and completions have up to 5 tokens.


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


def test_training_prompts_that_are_too_long_are_found_at_setup(make_module, make_trainer, file):
    data = PromptDataModule(file("x.jsonl", 4, 4, 59, 60, 4, 70), batch_size=2)
    with pytest.raises(
        ValueError,
        match=r"x\.jsonl, line 4: the prompt has 60 tokens, which with 5 new ones exceeds the model's max_position_"
        r"embeddings=64, as 2 of 6 prompts of `train` do \(the longest has 70\); set max_prompt_length=59 of "
        r"PromptDataModule .*lower sampling\.max_new_tokens",
    ):
        make_trainer(max_steps=1).fit(make_module(engine=NothingSampled()), data)


@pytest.mark.parametrize(("method", "split"), [("fit", "val"), ("validate", "val"), ("test", "test")])
def test_validation_and_test_prompts_that_are_too_long_are_found_at_setup(
    make_module, make_trainer, file, method, split
):
    data = PromptDataModule(file("x.jsonl", 4, 4), batch_size=2, **{split: file("y.jsonl", 4, 50)})
    module = make_module(engine=NothingSampled(), evaluation={"sampling": SamplingConfig(max_new_tokens=15)})
    message = (
        rf"y\.jsonl, line 2: .* 50 tokens, which with 15 .* of `{split}` do.*lower evaluation.sampling\.max_new_tokens"
    )
    with pytest.raises(ValueError, match=message):
        getattr(make_trainer(max_steps=1), method)(module, datamodule=data)


def test_a_config_is_checked_before_the_weights_are_loaded(
    make_module, make_trainer, file, tiny_policy, tmp_path, monkeypatch
):
    tiny_policy().load().save_pretrained(tmp_path / "policy")
    tiny_policy().load_tokenizer().save_pretrained(tmp_path / "policy")
    monkeypatch.setattr(PretrainedPolicy, "load", lambda self: pytest.fail("the weights were loaded"))
    module = make_module(policy=str(tmp_path / "policy"))
    with pytest.raises(ValueError, match=r"x\.jsonl, line 1: .*max_position_embeddings=64, as 1 of 2"):
        make_trainer(max_steps=1).fit(module, PromptDataModule(file("x.jsonl", 60, 4), batch_size=2))


def test_an_engine_that_reserves_no_room_may_get_longer_prompts(make_module, make_trainer, file, scripted_engine):
    for length, refused in ((63, False), (64, True)):
        module = make_module(engine=scripted_engine, rewards=lambda completions, **columns: [1.0] * len(completions))
        data = PromptDataModule(file("x.jsonl", 4), file("y.jsonl", length), batch_size=1, drop_last=False)
        trainer = make_trainer(max_steps=1, limit_val_batches=0)
        if refused:
            with pytest.raises(ValueError, match="64 tokens, which with 1 new ones exceeds"):
                trainer.fit(module, data)
        else:
            trainer.fit(module, data)


def test_a_token_that_the_model_does_not_know_is_found_at_setup(make_module, make_trainer, file):
    class Other:
        chat_template = None

        def __call__(self, texts, add_special_tokens):
            return {"input_ids": [[3, 900] if text == "1111" else [3] for text in texts]}

    data = PromptDataModule(file("x.jsonl", 1, 4), batch_size=2, tokenizer=Other())
    with pytest.raises(ValueError, match=r"x\.jsonl, line 2: the prompt has token id 900, .* vocab_size=\d+"):
        make_trainer(max_steps=1).fit(make_module(engine=NothingSampled()), data)


def test_counts_of_the_data_are_metrics_of_the_run(make_module, make_trainer, file, scripted_engine, capsys):
    summary = RunSummary()
    data = PromptDataModule(
        file("x.jsonl", *[4] * 5, *[9] * 3),
        file("y.jsonl", 4, 4, 9),
        batch_size=2,
        max_prompt_length=8,
    )
    trainer = make_trainer(max_epochs=1, callbacks=[summary], enable_checkpointing=False)
    trainer.fit(make_module(engine=scripted_engine), data)
    expected = {
        "data/dropped_prompts": 3.0,
        "data/truncated_prompts": 0.0,
        "data/val_dropped_prompts": 1.0,
        "data/val_truncated_prompts": 0.0,
    }
    assert {name: summary.history.statistics(name)["last"] for name in expected} == expected
    printed = capsys.readouterr().out
    assert "  training prompts    3 dropped, 0 truncated (too long)\n" in printed
    assert "  validation prompts  1 dropped, 0 truncated (too long)\n" in printed
