"""A token budget that cannot be kept is refused before a rollout."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pl_grouprl.demo.tasks import digit_tokenizer
from pl_grouprl.types import SamplingConfig

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

from models_table import select
from tiny_families import build


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens_per_micro_batch": 19}, "is 19 .*, but a prompt of the training data has 20"),
        (
            {"max_tokens_per_micro_batch": 30, "sampling": SamplingConfig(max_new_tokens=31)},
            r"is 30 .*, but a rollout may have \(sampling.max_new_tokens\) 31",
        ),
        (
            {"max_tokens_per_micro_batch": 24, "sharing": {"mode": "repeated"}},
            "is 24 .*, but a prompt with its rollout may have 25",
        ),
        ({"max_tokens_per_micro_batch": 0}, "max_tokens_per_micro_batch is 0; it must be at least 1"),
        ({"sharing": {"sequence_parallel_size": 2}}, "sequence_parallel_size=2 does not divide the 1 ranks"),
    ],
)
def test_a_budget_that_is_too_small_is_refused(make_module, make_data, make_trainer, options, message):
    with pytest.raises(ValueError, match=message):
        make_trainer(max_steps=1).fit(make_module(**options), make_data())


def test_the_smallest_budget_trains(make_module, make_data, make_trainer):
    module = make_module(max_tokens_per_micro_batch=20)
    trainer = make_trainer(max_steps=2)
    with pytest.warns(UserWarning, match=r"is 20 tokens \(not rollouts\), and a prompt with one rollout may have 25"):
        trainer.fit(module, make_data())
    assert trainer.global_step == 2


def test_a_budget_of_a_prompt_with_a_rollout_is_no_warning(make_module, make_data, make_trainer, recwarn):
    make_trainer(max_steps=1).fit(make_module(max_tokens_per_micro_batch=25), make_data())
    assert not [warning for warning in recwarn if "max_tokens_per_micro_batch" in str(warning.message)]


class SelectingPolicy:
    """Its layers select tokens, so they get dense masks of whole rows."""

    def load(self):
        return build(next(family for family in select(["deepseek_v32"]) if family.name == "deepseek_v32")).train()

    def load_tokenizer(self):
        return digit_tokenizer()


def test_a_group_that_cannot_be_split_must_fit(make_module, make_data, make_trainer, scripted_engine):
    options = {"policy": SelectingPolicy(), "engine": scripted_engine}
    message = r"is 39, but a group may have 40 tokens \(a prompt of 20 and 4 rollouts of 5\), and policy cannot"
    with pytest.raises(ValueError, match=message):
        make_trainer(max_steps=1).fit(make_module(max_tokens_per_micro_batch=39, **options), make_data())
    trainer = make_trainer(max_steps=1)
    trainer.fit(make_module(max_tokens_per_micro_batch=40, **options), make_data())
    assert trainer.global_step == 1
