"""Draws what a response is trained by: the advantages of its tokens with GRPO, and the token groups of GROUP PPO.

Both algorithms train a tiny random model to count on from the last digit of the prompt, with a reward for each token
that is one more than the digit before it. Takes about two minutes on one core of a CPU:

    python examples/draw_a_response.py --output docs/images   # writes advantages.png and token_groups.png
"""

from __future__ import annotations

import argparse
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from pl_grouprl import GRPO, GroupPPO, OptimizerConfig, PromptDataModule, SamplingConfig
from pl_grouprl.demo import MostFrequentDigit, WarmStartedPolicy
from pl_grouprl.demo.tasks import digit_tokenizer
from pl_grouprl.functional.advantages import generalized_advantages
from pl_grouprl.functional.masked import to_rows
from pl_grouprl.plots import plot_advantages, plot_token_groups, token_texts

TOKENIZER = digit_tokenizer()


def steps_right(prompts: list[str], completion_ids: list[list[int]], **columns: Any) -> list[list[float]]:
    """Reward, with TRL's signature: 1 for each token that is one more than the digit before it, 0 for any other."""
    texts = [[prompt[-1], *token_texts(ids, TOKENIZER)] for prompt, ids in zip(prompts, completion_ids, strict=True)]
    return [[float(a.isdigit() and b == str(int(a) + 1)[-1]) for a, b in pairwise(own)] for own in texts]


def train(algorithm: type[GRPO] | type[GroupPPO], steps: int, cache_dir: str, **options: Any) -> Any:
    """Return the module after `steps` optimizer steps; it keeps the last rollouts."""
    pl.seed_everything(0, verbose=False)
    task = MostFrequentDigit(prompt_length=8, majority_share=0.4, train_size=256)  # only its prompts are used
    architecture = {
        "model_type": "qwen3", "hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    }  # fmt: skip
    module = algorithm(
        WarmStartedPolicy(task, architecture, steps=0, cache_dir=cache_dir),  # 0 steps: random weights
        steps_right,
        num_generations=8,
        sampling=SamplingConfig(max_new_tokens=24),
        optimizer=OptimizerConfig(learning_rate=5e-3),
        **options,
    )
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_steps=steps, max_epochs=-1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, datamodule=PromptDataModule(task, batch_size=8))
    return module


def chosen(module: Any) -> tuple[int, Any, list[str]]:
    """Index, prompt and tokens of the rollout whose advantages differ most."""
    buffer = module.last_rollouts
    rollouts = [(group.prompt, own) for group in buffer.groups for own in group.rollouts]
    advantages = buffer.joined("advantages").split(buffer.rollout_lengths.tolist())
    index = max(range(len(rollouts)), key=lambda number: float(advantages[number].max() - advantages[number].min()))
    prompt, rollout = rollouts[index]
    return index, prompt, token_texts(rollout.token_ids, TOKENIZER)


def draw_advantages(module: Any, path: Path) -> None:
    """Draw the advantages of one response."""
    index, prompt, tokens = chosen(module)
    advantages = module.last_rollouts.joined("advantages").split(module.last_rollouts.rollout_lengths.tolist())
    plot_advantages(tokens, advantages[index], title=f"GRPO, a reward per token: {prompt} → …").savefig(path, dpi=110)


def draw_token_groups(module: Any, path: Path) -> None:
    """Draw the token groups of one response, with their advantages and those that PPO would have."""
    buffer = module.last_rollouts
    index, prompt, tokens = chosen(module)
    names = ("advantages", "token_rewards", "values", "loss_mask")
    by_group, rewards, values, mask = (to_rows(buffer.joined(name), buffer.rollout_lengths) for name in names)
    by_token, _ = generalized_advantages(rewards, values, mask, gamma=module.gamma, lam=module.lam)
    shown = {"per token group": by_group[index], "per token (PPO)": by_token[index]}
    figure = plot_token_groups(
        tokens,
        module.token_groups,
        {name: own[: len(tokens)] for name, own in shown.items()},
        row=index,
        title=f"The token groups of a response: {prompt} → …",
    )
    figure.savefig(path, dpi=110)


def main(output: Path, steps: int = 60, cache_dir: str = ".cache/examples") -> None:
    """Train both and draw."""
    draw_advantages(train(GRPO, steps, cache_dir), output / "advantages.png")
    options = {"target_compression": 0.75, "threshold_lr": 0.5, "whiten_advantages": False}
    draw_token_groups(train(GroupPPO, steps, cache_dir, **options), output / "token_groups.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, default=Path(), help="folder of the two pictures")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps of each (60)")
    main(**vars(parser.parse_args()))
