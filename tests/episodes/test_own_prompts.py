"""Runs without data: the environment writes the prompts."""

import pytest
from lightning.pytorch import Trainer

from pl_grouprl import GRPO, OptimizerConfig, PromptDataModule, SamplingConfig
from tests.helpers.chance_episodes import ChancePolicy
from tests.helpers.chat_tokenizers import qwen_tokenizer
from tests.helpers.scripted_engine import ScriptedEngine

STARTS = []


class Numbering:
    """Asks for the number of its reset, and takes no columns."""

    def reset(self):
        STARTS.append(len(STARTS))
        return f"Say {STARTS[-1]}."

    def get_reward(self):
        return 1.0


@pytest.fixture
def fit(tmp_path):
    def fit(max_epochs, **options):
        tokenizer = qwen_tokenizer()
        answer = tokenizer.encode("Yes<|im_end|>", add_special_tokens=False)
        module = GRPO(
            ChancePolicy(max_position_embeddings=4096),
            num_generations=2,
            sampling=SamplingConfig(max_new_tokens=16),
            engine=ScriptedEngine(lambda prompt_ids, index, turn: answer),
            optimizer=OptimizerConfig(learning_rate=0.0),
            sharing={"verify": False},
            environment_factory=Numbering,
            episodes={"chat_template": "qwen3"},
        )
        trainer = Trainer(
            accelerator="cpu",
            max_epochs=max_epochs,
            default_root_dir=tmp_path,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, PromptDataModule(**options))
        return module, trainer

    STARTS.clear()
    return fit


def test_reset_writes_the_first_message_and_an_epoch_has_as_many_batches_as_it_should(fit):
    module, trainer = fit(2, batch_size=3, steps_per_epoch=4)
    assert (trainer.global_step, trainer.current_epoch) == (8, 2)
    assert len(STARTS) == 8 * 3 * 2
    rollouts = [rollout for group in module.last_rollouts.groups for rollout in group.rollouts]
    assert [rollout.prompt for rollout in rollouts] == [
        [{"role": "user", "content": f"Say {number}."}] for number in range(42, 48)
    ]


def test_an_epoch_is_one_batch_by_default(fit):
    _, trainer = fit(2, batch_size=2)
    assert trainer.global_step == 2


@pytest.mark.parametrize(
    ("options", "value"), [({"steps_per_epoch": 0}, 0), ({"train": [{}], "steps_per_epoch": 2}, 2)]
)
def test_steps_per_epoch_is_only_for_runs_without_data(options, value):
    with pytest.raises(
        ValueError, match=rf"PromptDataModule.steps_per_epoch is {value}; it must be at least 1, and None"
    ):
        PromptDataModule(**options)
