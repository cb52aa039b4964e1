"""Run by test_branching_ranks.py: the cases of episode_ranks.py with branching rollouts, without environments.

Arguments: a folder, and cases by name as JSON: `strategy`, `branching`, and `copied`.
"""

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import episode_ranks
from helpers.chance_episodes import STOPS, ChancePolicy, chance_rows, double, register_chance_calls

from pl_grouprl import GRPO, PromptDataModule, SamplingConfig
from pl_grouprl.algorithms import OptimizerConfig


def share_of_letters(completions: list[Any], **columns: Any) -> list[float]:
    """Reward: how much of a completion is letters."""
    texts = [own if isinstance(own, str) else "".join(message["content"] for message in own) for own in completions]
    return [sum(c.isalpha() for c in text) / max(len(text), 1) for text in texts]


def make_module(case: dict[str, Any], engine: Any) -> Any:
    """GRPO; without tools, every second token ends a rollout, so that ranks have different numbers of rounds."""
    has_tools = case["branching"]["points"] == "turn"
    limits = episode_ranks.LIMITS if has_tools else {}
    register_chance_calls()
    return GRPO(
        ChancePolicy(eos_token_id=1),
        share_of_letters,
        num_generations=2,
        episodes={"branching": case["branching"], **limits},
        tools=[double] if has_tools else None,
        num_mini_batches=2,
        sampling=SamplingConfig(max_new_tokens=30 if has_tools else 8, stop_token_ids=STOPS if has_tools else HALF),
        optimizer=OptimizerConfig(learning_rate=1e-2, eps=1e-4),
        engine=engine,
        sharing={"verify": False},
    )


HALF = tuple(range(140))


def make_data(case: dict[str, Any]) -> PromptDataModule:
    """Batches of five prompts, in order: every second one is sampled by rank 1, which has none in validation."""
    return PromptDataModule(chance_rows(15), chance_rows(1), batch_size=5, shuffle=False)


if __name__ == "__main__":
    episode_ranks.make_module, episode_ranks.make_data = make_module, make_data
    episode_ranks.main(Path(sys.argv[1]), json.loads(sys.argv[2]))
