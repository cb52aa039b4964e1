"""Run by test_grpo_estimators.py: one step of each case on as many ranks as asked for; each rank writes what it had."""

import sys
from pathlib import Path

import torch
from lightning.pytorch import Trainer

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from conftest import ScriptedEngine, TinyPolicy, share_of_letters
from helpers.branching_engine import BranchingEngine

from pl_grouprl.algorithms import GRPO, OptimizerConfig
from pl_grouprl.data import PromptDataModule
from pl_grouprl.demo import MostFrequentDigit
from pl_grouprl.rewards import Weighted
from pl_grouprl.utilities.distributed import num_ranks, own_rank


class PlainEngine(ScriptedEngine):
    """Reports log-probabilities that are off by more, the longer the completion."""

    def generate(self, prompts, sampling, *, num_generations, seed):
        """Sample as scripted."""
        rollouts = super().generate(prompts, sampling, num_generations=num_generations, seed=seed)
        for rollout in (rollout for own in rollouts for rollout in own):
            rollout.logprobs = [-3.3 - 0.1 * i * len(rollout.token_ids) for i in range(len(rollout.token_ids))]
        return rollouts


def two_or_three(prompt):
    """Return how many rollouts of a prompt share a beginning."""
    return 2 + sum(prompt) % 2


BRANCHED = {"engine": BranchingEngine(PlainEngine(), two_or_three)}


class ContradictoryEngine(BranchingEngine):
    """On the last rank alone, two rollouts differ in tokens that they share according to their paths."""

    def generate(self, prompts, sampling, *, num_generations, seed):
        """Sample, and change one of the shared tokens."""
        groups = super().generate(prompts, sampling, num_generations=num_generations, seed=seed)
        if own_rank() == num_ranks() - 1:
            for _, second, *_ in groups:
                second.token_ids[0] = 4
        return groups


def some(completions, **columns):
    """Return the share of letters, and nothing for completions of four characters."""
    shares = share_of_letters(completions)
    return [None if len(text) == 4 else share for text, share in zip(completions, shares, strict=True)]


def brevity(completions, **columns):
    """Reward short completions."""
    return [-float(len(text)) for text in completions]


def letters_where_few(completion_ids, completions, prompts):
    """Reward each letter of some prompts' completions; tokens of others, of whole ranks perhaps, have no rewards."""
    return [
        [None if token < 12 else float(token % 4) for token in ids] if sum(map(int, prompt)) % 3 else float(len(ids))
        for ids, prompt in zip(completion_ids, prompts, strict=True)
    ]


KL = {"beta": 0.5, "kl": {"place": "reward", "type": "k1"}}
CASES = {
    "grpo": {},
    "rloo": {"advantage_estimator": "rloo"},
    "opo": {"advantage_estimator": "opo"},
    "grpo_passk": {"advantage_estimator": "grpo_passk"},
    "remax": {"advantage_estimator": "remax"},
    "reinforce_plus_plus": {"advantage_estimator": "reinforce_plus_plus", "advantage_options": {"gamma": 0.9}},
    "reinforce_plus_plus_baseline": {"advantage_estimator": "reinforce_plus_plus_baseline"},
    "tree": {**BRANCHED, "advantage_estimator": "tree", "loss_agg_mode": "seq-mean-token-sum"},
    "vine": {**BRANCHED, "advantage_estimator": "vine", "loss_type": "dr_grpo"},
    "gpg": {"advantage_estimator": "gpg", "policy_loss": "gpg"},
    "optimal_token_baseline": {"advantage_estimator": "optimal_token_baseline", "policy_loss": "dro"},
    "batch": {"scale_rewards": "batch"},
    "normalize_then_sum": {
        "rewards": [some, Weighted(brevity, 2.0)],
        "multi_objective_aggregation": "normalize_then_sum",
    },
    "process": {"rewards": [Weighted(letters_where_few, 0.5), some], "scale_rewards": "batch"},
    "process_reinforce": {"rewards": [letters_where_few, some], "advantage_estimator": "reinforce_plus_plus"},
    "kl": KL,
    "token_kl": {**KL, "advantage_estimator": "reinforce_plus_plus"},
    "token_truncate": {"importance_sampling": {"mode": "token_truncate", "high": 1.2}},
    "sequence_mask": {"importance_sampling": {"mode": "sequence_mask", "low": 0.5}},
    "adaptive": {"beta": 0.5, "kl": {"target": 1.0, "horizon": 50}},
}


REFUSED = {
    "of_rollouts": {"rewards": [letters_where_few, some], "advantage_estimator": "rloo"},
    "of_tokens": {"rewards": [letters_where_few, some], "advantage_estimator": "reinforce_plus_plus_baseline"},
    "of_branches": {"engine": ContradictoryEngine(PlainEngine()), "advantage_estimator": "tree"},
}


def run(devices: int, folder: Path, options: dict) -> tuple[GRPO, Trainer]:
    """Train one step of five prompts: one of two ranks has three of them."""
    task = MostFrequentDigit(prompt_length=20, majority_share=0.4, train_size=5)
    defaults = {"rewards": some, "optimizer": OptimizerConfig(learning_rate=1e-3), "engine": PlainEngine()}
    module = GRPO(TinyPolicy(), num_generations=4, sharing={"verify": False}, **{**defaults, **options})
    module.configure_model()
    if module.reference is not None:
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in module.reference.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    trainer = Trainer(
        accelerator="cpu", devices=devices, strategy="ddp" if devices > 1 else "auto", max_steps=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(module, PromptDataModule(task, batch_size=5, shuffle=False))
    return module, trainer


def main(devices: int, folder: Path, cases: list[str]) -> None:
    """Train each case."""
    results = {}
    for case in cases:
        if case in REFUSED:
            try:
                run(devices, folder, REFUSED[case])
            except (ValueError, RuntimeError) as error:
                results[case] = str(error)
            continue
        module, trainer = run(devices, folder, CASES[case])
        buffer = module.last_rollouts
        advantages = {
            " ".join(map(str, group.prompt_ids)): own.tolist()
            for group, own in zip(buffer.groups, buffer.tokens["advantages"], strict=True)
        }
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        results[case] = {"advantages": advantages, "metrics": metrics, "beta": module.beta}
    torch.save(results, folder / f"{trainer.global_rank}.pt")


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
