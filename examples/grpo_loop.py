"""GRPO in a plain PyTorch loop, without Lightning, from the building blocks of `pl_grouprl.GRPO`.

Sampling, rewards, packing, shared prefixes and exact loss denominators come from the package; the loop, the advantage
and the optimizer are written out here, to read and change. Trains a tiny random model on short prompts, in seconds:

    python examples/grpo_loop.py
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pl_grouprl import RolloutGroup, SamplingConfig
from pl_grouprl.attention import shared_prefix
from pl_grouprl.data import PromptBatch, PromptDataModule
from pl_grouprl.demo import MostFrequentDigit, WarmStartedPolicy
from pl_grouprl.functional.advantages import group_relative_advantages
from pl_grouprl.models.score import score
from pl_grouprl.training.collector import Collector
from pl_grouprl.training.metrics import StepTimer
from pl_grouprl.training.micro_batches import MicroBatch, MicroBatcher
from pl_grouprl.training.objective import KLPenalty, LossSums, PolicyObjective
from pl_grouprl.training.rewarder import Rewarder
from pl_grouprl.training.run import Accumulation, PlainRun
from pl_grouprl.training.sampler import Sampler
from pl_grouprl.training.update import Optimization, Updater


def share_of_letters(completions: list[str], **columns: Any) -> list[float]:
    """Reward with TRL's signature: the share of letters in a completion."""
    return [sum(character.isalpha() for character in text) / max(len(text), 1) for text in completions]


def grpo_advantages(groups: list[RolloutGroup]) -> Tensor:
    """Reward minus the group's mean, over its standard deviation, shape [B] (arXiv:2402.03300, section 4.1.2)."""
    rewards_B = torch.tensor([rollout.reward for group in groups for rollout in group.rollouts])
    group_B = torch.tensor([index for index, group in enumerate(groups) for _ in group.rollouts])
    return group_relative_advantages(rewards_B, group_B)


def main(steps: int = 20, num_generations: int = 8, cache_dir: str = ".cache/examples") -> list[float]:
    """Train; return the mean reward of each step."""
    torch.manual_seed(0)
    task = MostFrequentDigit(prompt_length=64, majority_share=0.4, train_size=64)
    architecture = {
        "model_type": "qwen3", "hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    }  # fmt: skip
    source = WarmStartedPolicy(task, architecture, steps=0, cache_dir=cache_dir)  # 0 steps: random weights
    sampling = SamplingConfig(max_new_tokens=6)
    data = PromptDataModule(task, batch_size=4, tokenizer=source.load_tokenizer())
    data.setup("fit")
    prompts = data.prompts["train"]

    # The building blocks, each with what it needs.
    run = PlainRun(source.load().train(), source.load_tokenizer())
    rewarder = Rewarder(share_of_letters, run)
    collector = Collector(run, Sampler(run), rewarder, StepTimer(), sampling=sampling, num_generations=num_generations)
    objective = PolicyObjective(
        "ppo", {}, loss_agg_mode="token-mean", kl=KLPenalty(), max_new_tokens=sampling.max_new_tokens
    )

    def compute_loss(batch: MicroBatch) -> LossSums:
        scores = score(run.policy, batch.scoring, temperature=sampling.temperature, **objective.score_options)
        return objective.loss(batch, scores)

    optimization = Optimization()
    micro_batcher = MicroBatcher(run, max_tokens=512)  # tokens per forward pass, counting shared ones once
    updater = Updater(run, micro_batcher, optimization)
    parts = {"policy": list(run.policy.parameters())}
    optimizer = torch.optim.AdamW(run.policy.parameters(), lr=1e-2)

    rewards = []
    with shared_prefix(run.policy):
        for step in range(steps):
            batch = PromptBatch([prompts[(4 * step + place) % len(prompts)] for place in range(4)], step)
            buffer = collector.finish(collector.collect(batch))
            buffer.put_per_rollout("advantages", grpo_advantages(buffer.groups))

            how = Accumulation(), compute_loss, objective.denominators
            loss, metrics = updater.update(buffer, buffer.members(0), *how)
            loss.backward()  # of the last micro-batch; the updater ran the earlier ones
            norms = optimization.before_step(parts, run.support, accumulated=1, device=run.device, step=run.global_step)
            optimizer.step()
            optimizer.zero_grad()
            run.global_step += 1

            rewards.append(buffer.metrics["reward"])
            ratio, norm = metrics["prefix/token_ratio"], float(norms["grad_norm"])
            print(f"step {step:3}  reward {rewards[-1]:.3f}  gradient norm {norm:.2f}  token ratio {ratio:.2f}")
    return rewards


if __name__ == "__main__":
    main()
