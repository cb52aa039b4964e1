"""Training steps with the tools and environments of TRL's own tests: the rollouts and metrics are those of TRL."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.chance_episodes import ChancePolicy
from helpers.qwen_tokenizer import qwen_tokenizer
from helpers.sampled_episodes import mask_of, prompt_of
from helpers.scripted_engine import ScriptedEngine
from helpers.tool_cases import FROM_TRL, ToolCase
from lightning.pytorch import Trainer

from pl_grouprl.algorithms import GRPO, OptimizerConfig
from pl_grouprl.data import PromptDataModule
from pl_grouprl.types import SamplingConfig

RECORDED = json.loads(Path(__file__).with_name("trl_tools.json").read_text(encoding="utf-8"))


def longest(completions: Any, **columns: Any) -> list[float]:
    """Rewards that differ within a group."""
    return [float(len(completion[-1]["content"])) for completion in completions]


def train_a_step(case: ToolCase, folder: Path) -> tuple[Any, dict[str, float]]:
    """The rollouts of one step, and its metrics."""
    tokenizer = qwen_tokenizer()
    answers = [[tokenizer.encode(answer, add_special_tokens=False) for answer in turns] for turns in case.answers]
    module = GRPO(
        ChancePolicy(max_position_embeddings=4096),
        longest,
        num_generations=case.num_generations,
        sampling=SamplingConfig(max_new_tokens=case.max_completion_length),
        engine=ScriptedEngine(lambda prompt_ids, index, turn: answers[index][turn]),
        optimizer=OptimizerConfig(learning_rate=0.0),
        sharing={"verify": False},
        tools=list(case.tools) or None,
        environment_factory=case.environment_factory,
        episodes={"chat_template": "qwen3"},
    )
    owns_data = not any(case.rows)
    rows = None if owns_data else list(case.rows)
    data = PromptDataModule(rows, batch_size=len(case.rows), shuffle=False, split_special_tokens=False)  # as in TRL
    trainer = Trainer(
        **{"accelerator": "cpu", "max_epochs": 1, "max_steps": 1, "default_root_dir": folder, "log_every_n_steps": 1},
        **{"logger": False, "enable_checkpointing": False},
        **{"enable_progress_bar": False, "enable_model_summary": False},
    )
    trainer.fit(module, data)
    return module.last_rollouts.groups, {name: float(value) for name, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize("name", [name for name, case in FROM_TRL.items() if case.num_generations > 1])
def test_a_step_trains_the_rollouts_of_trl(name: str, tmp_path: Path) -> None:
    case, recorded = FROM_TRL[name], RECORDED["cases"][name]
    groups, metrics = train_a_step(case, tmp_path)
    pairs = [(group, rollout) for group in groups for rollout in group.rollouts]
    tokenizer = qwen_tokenizer()
    for (group, rollout), theirs in zip(pairs, recorded["rollouts"], strict=True):
        assert tokenizer.decode(prompt_of(group, rollout)) == RECORDED["prompts"][theirs["prompt"]]
        assert rollout.completion_ids == theirs["completion_ids"]
        assert "".join(map(str, mask_of(rollout))) == theirs["mask"]
        assert rollout.rewards["longest"] == len(theirs["messages"][-1]["content"])
        assert {key: rollout.rewards[key] for key in theirs["reward"]} == theirs["reward"]
    check_metrics(metrics, recorded, len(pairs))


def check_metrics(metrics: dict[str, float], recorded: dict[str, Any], rollouts: int) -> None:
    if recorded["calls"]:
        assert metrics["tools/failure_frequency"] == pytest.approx(recorded["failures"] / recorded["calls"])
    assert metrics["tools/call_frequency"] == pytest.approx(recorded["calls"] / rollouts)
    sampled = [rollout["mask"].count("1") for rollout in recorded["rollouts"]]
    assert metrics["completions/mean_length"] == pytest.approx(sum(sampled) / rollouts)
    for name in recorded["rollouts"][0]["reward"]:
        rewards = [rollout["reward"][name] for rollout in recorded["rollouts"]]
        assert metrics[f"rewards/{name}/mean"] == pytest.approx(sum(rewards) / rollouts)
