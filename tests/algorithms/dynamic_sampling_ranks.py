"""Run by test_dynamic_sampling.py: dynamic sampling on as many ranks as asked for; each rank writes what it had."""

import sys
from pathlib import Path

import torch
from lightning.pytorch import Trainer

sys.path.insert(0, str(Path(__file__).parent))

from conftest import TinyPolicy

from pl_grouprl.algorithms import GRPO, OptimizerConfig
from pl_grouprl.data import PromptDataModule
from pl_grouprl.types import Rollout

CASES = {
    "refill": {},
    "one_rank_keeps_none": {"guards": {"max_generation_batches": 1}},
    "batch_scale": {"guards": {"max_generation_batches": 1}, "scale_rewards": "batch"},
    "pooled_baseline": {"guards": {"max_generation_batches": 1}, "advantage_estimator": "remax"},
    "mini_batches": {"guards": {"max_generation_batches": 1}, "num_mini_batches": 2, "accumulate_grad_batches": 2},
    "nothing": {"guards": {"max_generation_batches": 2}},
    "one_sampler_reports": {"guards": {"max_generation_batches": 1}},
}


class Engine:
    """Completions of 1 to 4 letters; counts the prompts of each call.

    Args:
        silent_rank: The rank that reports no log-probabilities, if any.
    """

    def __init__(self, silent_rank: int | None = None) -> None:
        self.calls = []
        self.silent_rank = silent_rank

    def bind(self, model, tokenizer=None):
        """Nothing to bind."""

    def generate(self, prompts, sampling, *, num_generations, seed):
        """Sample as scripted."""
        self.calls.append(len(prompts))
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        logprob = None if rank == self.silent_rank else -3.0
        return [[self._rollout(sum(prompt), g, logprob) for g in range(num_generations)] for prompt in prompts]

    @staticmethod
    def _rollout(number, g, logprob):
        logprobs = None if logprob is None else [logprob] * (1 + g)
        return Rollout([14 + number % 8] * (1 + g), logprobs=logprobs, finish_reason="stop")


def lengths(completions, useful, **columns):
    """Reward the length of useful prompts' completions, with a further number; the others all get 7."""
    return [
        {"score": float(len(text)), "number": len(text) % 3} if own else 7.0
        for text, own in zip(completions, useful, strict=True)
    ]


def run(case: str, devices: int, folder: Path) -> tuple[dict, int]:
    """Train one batch of four prompts; those with an odd number teach nothing, and in one case none does."""
    options = dict(CASES[case])
    accumulate = options.pop("accumulate_grad_batches", 1)
    rows = [{"prompt": f"{i:02d}{i * 37 % 100:02d}", "useful": i % 2 == 0 and case != "nothing"} for i in range(16)]
    engine = Engine(silent_rank=1 if case == "one_sampler_reports" else None)
    module = GRPO(
        TinyPolicy(), lengths, num_generations=4, engine=engine, optimizer=OptimizerConfig(learning_rate=1.0, eps=1.0),
        sharing={"verify": False}, dynamic_sampling=True, **options,
    )  # fmt: skip
    trainer = Trainer(
        accelerator="cpu", devices=devices, strategy="ddp" if devices > 1 else "auto", max_steps=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
        accumulate_grad_batches=accumulate,
    )  # fmt: skip
    trainer.fit(module, PromptDataModule(rows, batch_size=4, shuffle=False))
    return {
        "calls": engine.calls,
        "kept": [int(group.prompt[:2]) for group in module.last_rollouts.groups],
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "weights": [parameter.detach() for parameter in module.policy.parameters()],
        "start": list(TinyPolicy().load().parameters()),
    }, trainer.global_rank


def main(devices: int, folder: Path) -> None:
    """Run each case."""
    results = {case: run(case, devices, folder) for case in CASES}
    (rank,) = {rank for _, rank in results.values()}
    torch.save({case: own for case, (own, _) in results.items()}, folder / f"{rank}.pt")


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
