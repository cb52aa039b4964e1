"""Single steps that must be the same on one rank and on two; also a script, which runs cases on several ranks.

python tests/helpers/rank_cases.py DEVICES FOLDER CASE ...: each rank writes FOLDER/RANK.pt.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from helpers.branching_engine import BranchingEngine
from helpers.tiny_runs import (
    AHEAD,
    PLAIN,
    History,
    RaggedEngine,
    ScriptedEngine,
    TinyPolicy,
    fit,
    make_data,
    make_module,
    saving,
    share_of_letters,
)
from lightning.pytorch import seed_everything
from lightning.pytorch.strategies import ModelParallelStrategy

from pl_grouprl.algorithms import GRPO, PPO, Distillation, GroupPPO, OptimizerConfig
from pl_grouprl.data import PromptDataModule
from pl_grouprl.models import PolicyCopyCritic, SharedTrunkCritic
from pl_grouprl.models.critic import LoRACritic
from pl_grouprl.rewards import Weighted
from pl_grouprl.types import Rollout, SamplingConfig
from pl_grouprl.utilities.distributed import num_ranks, own_rank

Options = dict[str, Any]


def train(folder: Path, devices: int, cls: Any = GRPO, *, trainer: Options | None = None, **options: Any) -> History:
    """Train on so many ranks, without shuffling."""
    seed_everything(1, verbose=False)
    options.setdefault("data", {"train_size": 5, "batch_size": 5, "shuffle": False})
    ranks: Options = {"devices": devices, "strategy": "ddp" if devices > 1 else "auto"}
    return fit(folder, cls, trainer={**ranks, **(trainer or {})}, **options)


# The gradient of one optimizer step, whose denominators are the step's however it is cut.

COMMON: Options = {"beta": 0.1, "kl": {"type": "k1"}, "entropy_coef": 0.05}
PPO_OPTIONS: Options = COMMON | {"critic": PolicyCopyCritic(head_std=0.3), "gamma": 0.98, "critic_lam": 0.7}


def rewards_with_a_gap(completions: list[str], **columns: Any) -> list[float | None]:
    """Differ in a group; some rollouts have none."""
    return [None if len(text) == 7 else len(set(text)) / 5 - 0.3 * (len(text) % 2) for text in completions]


def late_rewards(completion_ids: list[list[int]], **columns: Any) -> list[Any]:
    """A reward of a late token."""
    return [[*[None] * (len(ids) - 1), float(ids[-1] % 5)] if len(ids) > 3 else None for ids in completion_ids]


CASES: dict[str, tuple[Any, Options]] = {
    "grpo token-mean": (GRPO, COMMON | {"loss_agg_mode": "token-mean"}),
    "grpo seq-mean-token-sum": (GRPO, COMMON | {"loss_agg_mode": "seq-mean-token-sum"}),
    "grpo seq-mean-token-mean": (GRPO, COMMON | {"loss_agg_mode": "seq-mean-token-mean", "scale_rewards": "batch"}),
    "dr_grpo": (GRPO, COMMON | {"loss_type": "dr_grpo"}),
    "gspo": (GRPO, COMMON | {"loss_type": "gspo"}),
    "grpo truncated importance": (
        GRPO,
        {**COMMON, "importance_sampling": {"mode": "token_truncate"}, "kl": {"type": "k3"}},
    ),
    "vespo": (GRPO, {**COMMON, "loss_type": "vespo", "importance_sampling": {"mode": "token_truncate"}}),
    "high entropy, masked": (
        GRPO,
        {
            **COMMON,
            "importance_sampling": {"off_policy_mask_threshold": -0.01},
            "kl": {"use_bias_correction": True},
            "entropy_coef": {"coef": 0.05, "top_quantile": 0.3},
        },
    ),
    "reinforce_plus_plus": (
        GRPO,
        {**COMMON, "advantage_estimator": "reinforce_plus_plus", "kl": {"type": "k1", "place": "reward"}},
    ),
    "ppo": (PPO, PPO_OPTIONS),
    "ppo seq-mean-token-mean": (
        PPO,
        {**PPO_OPTIONS, "loss_agg_mode": "seq-mean-token-mean", "kl": {"type": "k1", "place": "reward"}},
    ),
    "ppo lora": (PPO, {**PPO_OPTIONS, "critic": LoRACritic(r=4, head_std=0.3), "whiten_advantages": False}),
    "ppo shared, detached": (PPO, {**PPO_OPTIONS, "critic": SharedTrunkCritic(detach=True, head_std=0.3)}),
    "ppo shared": (PPO, {**PPO_OPTIONS, "critic": SharedTrunkCritic(head_std=0.3)}),  # cannot accumulate
    "group_ppo": (GroupPPO, {**PPO_OPTIONS, "bootstrap_truncated": True}),
    "group_ppo endpoint": (GroupPPO, {**PPO_OPTIONS, "advantage_mode": "endpoint", "group_variance_threshold": 2.0}),
    "group_ppo sketch": (GroupPPO, {**PPO_OPTIONS, "score_norm": "sketch", "critic_positions": "all"}),
}
ROW_CASES = {
    **{name: case for name, case in CASES.items() if name != "ppo shared"},
    "grpo process supervision": (
        GRPO, {**COMMON, "loss_agg_mode": "seq-mean-token-mean", "rewards": [late_rewards, rewards_with_a_gap]},
    ),
    "grpo masked sequences": (
        GRPO, {**COMMON, "loss_agg_mode": "token-mean", "importance_sampling": {"mode": "sequence_mask"}},
    ),
    "reinforce_plus_plus discounted": (
        GRPO, {**COMMON, "advantage_estimator": "reinforce_plus_plus", "advantage_options": {"gamma": 0.9}},
    ),
    "opo, truncated masked": (GRPO, {**COMMON, "advantage_estimator": "opo", "mask_truncated_completions": True}),
}  # fmt: skip


class RowsEngine(RaggedEngine):
    """The rollouts of `RaggedEngine`, where asked cut into two rows: the second has the first one's tokens as context.

    Args:
        rows: Whether to cut them; otherwise they stay as they are.
        at_gaps: Cut only before a gap of the loss mask.
        logprobs: As for `RaggedEngine`.
    """

    def __init__(self, rows: bool, at_gaps: bool = False, logprobs: bool = False) -> None:
        super().__init__(logprobs)
        self.rows, self.at_gaps = rows, at_gaps

    def _group(self, number: int, longest: int) -> list[Rollout]:
        whole = super()._group(number, longest)
        return [row for name, rollout in enumerate(whole) for row in self._rows(rollout, name)] if self.rows else whole

    def _rows(self, rollout: Rollout, name: int) -> list[Rollout]:
        length, mask = len(rollout.token_ids), rollout.loss_mask or [1] * len(rollout.token_ids)
        cut = 2 if self.at_gaps else length // 2
        if length < 2 or (self.at_gaps and 0 not in mask):
            return [rollout]
        first = Rollout(
            rollout.token_ids[:cut], rollout.logprobs and rollout.logprobs[:cut], mask[:cut], "length", episode=name
        )
        return [first, replace(rollout, loss_mask=[0] * cut + mask[cut:], episode=name)]


def step_of(name: str, folder: Path, *, devices: int = 1, cut: int = 1, **options: Any) -> History:
    """Cut one batch of rollouts into mini-batches and accumulate them all, in float64."""
    cls, of_case = ROW_CASES.get(name) or CASES[name]
    defaults = {
        "engine": RaggedEngine(logprobs="importance_sampling" in of_case), "rewards": rewards_with_a_gap,
        "sampling": SamplingConfig(max_new_tokens=12), "optimizer": OptimizerConfig(learning_rate=1e-3),
    }  # fmt: skip
    trainer = {"precision": "64-true", "accumulate_grad_batches": cut}
    return train(folder, devices, cls, trainer=trainer, num_mini_batches=cut, **{**defaults, **of_case, **options})


def step_of_rows(name: str, folder: Path, *, rows: bool, **options: Any) -> History:
    """The same with episodes of one rollout each, or of two rows with the same tokens."""
    cls, of_case = ROW_CASES[name]
    engine = RowsEngine(rows, cls is GroupPPO, "importance_sampling" in of_case)
    turns = {"boundary_at_turn_ends": True} if cls is GroupPPO else {}
    return step_of(name, folder, **{"engine": engine, **turns, **options})


def gradients_of(run: History) -> dict[str, Any]:
    """What the optimizer got, by parameter, and with it where the threshold of token groups went."""
    found = run.gradients[-1]
    if isinstance(run.module, GroupPPO):
        found["threshold"] = torch.tensor(run.module.threshold_controller.threshold, dtype=torch.float64)
    return found


def gradients_of_a_step(name: str, folder: Path, **options: Any) -> dict[str, Any]:
    return gradients_of(step_of(name, folder, **options))


# Advantages: one of two ranks has three of five prompts, the other two.


class LogprobsEngine(ScriptedEngine):
    """Reports log-probabilities that are off by more, the longer the completion."""

    def generate(self, prompts, sampling, *, num_generations, seed):
        rollouts = super().generate(prompts, sampling, num_generations=num_generations, seed=seed)
        for rollout in (rollout for own in rollouts for rollout in own):
            rollout.logprobs = [-3.3 - 0.1 * i * len(rollout.token_ids) for i in range(len(rollout.token_ids))]
        return rollouts


class ContradictoryEngine(BranchingEngine):
    """On the last rank alone, two rollouts differ in tokens that they share according to their paths."""

    def generate(self, prompts, sampling, *, num_generations, seed):
        groups = super().generate(prompts, sampling, num_generations=num_generations, seed=seed)
        if own_rank() == num_ranks() - 1:
            for _, second, *_ in groups:
                second.token_ids[0] = 4
        return groups


def some(completions, **columns):
    """The share of letters, and nothing for completions of four characters."""
    shares = share_of_letters(completions)
    return [None if len(text) == 4 else share for text, share in zip(completions, shares, strict=True)]


def brevity(completions, **columns):
    return [-float(len(text)) for text in completions]


def letters_where_few(completion_ids, completions, prompts):
    """Rewards each letter of some prompts' completions; tokens of others, of whole ranks perhaps, have no rewards."""
    return [
        [None if token < 12 else float(token % 4) for token in ids] if sum(map(int, prompt)) % 3 else float(len(ids))
        for ids, prompt in zip(completion_ids, prompts, strict=True)
    ]


BRANCHED: Options = {"engine": BranchingEngine(LogprobsEngine(), lambda prompt: 2 + sum(prompt) % 2)}
KL: Options = {"beta": 0.5, "kl": {"place": "reward", "type": "k1"}}
ESTIMATORS: dict[str, Options] = {
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
        "rewards": [some, Weighted(brevity, 2.0)], "multi_objective_aggregation": "normalize_then_sum",
    },
    "process": {"rewards": [Weighted(letters_where_few, 0.5), some], "scale_rewards": "batch"},
    "process_reinforce": {"rewards": [letters_where_few, some], "advantage_estimator": "reinforce_plus_plus"},
    "kl": KL,
    "token_kl": {**KL, "advantage_estimator": "reinforce_plus_plus"},
    "token_truncate": {"importance_sampling": {"mode": "token_truncate", "high": 1.2}},
    "sequence_mask": {"importance_sampling": {"mode": "sequence_mask", "low": 0.5}},
    "adaptive": {"beta": 0.5, "kl": {"target": 1.0, "horizon": 50}},
}  # fmt: skip
REFUSED: dict[str, Options] = {
    "of_rollouts": {"rewards": [letters_where_few, some], "advantage_estimator": "rloo"},
    "of_tokens": {"rewards": [letters_where_few, some], "advantage_estimator": "reinforce_plus_plus_baseline"},
    "of_branches": {"engine": ContradictoryEngine(LogprobsEngine()), "advantage_estimator": "tree"},
}


def with_another_reference(module: Any, noise: float = 0.1) -> Any:
    """The module, with models; its reference, if any, is not the policy."""
    module.configure_model()
    if module.reference is not None:
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in module.reference.parameters():
                parameter.add_(noise * torch.randn(parameter.shape, generator=generator))
    return module


def advantages_of(options: Options, folder: Path, devices: int) -> Options:
    defaults = {"rewards": some, "optimizer": OptimizerConfig(1e-3), "engine": LogprobsEngine()}
    sampling = {"sampling": SamplingConfig()}
    run = train(folder, devices, module=with_another_reference(make_module(**{**defaults, **sampling, **options})))
    pairs = zip(run.buffer.groups, run.buffer.tokens["advantages"], strict=True)
    by_prompt = {" ".join(map(str, group.prompt_ids)): own.tolist() for group, own in pairs}
    return {"advantages": by_prompt, "metrics": run.steps[-1], "beta": run.module.beta}


def error_of(options: Options, folder: Path, devices: int) -> Options:
    try:
        advantages_of(options, folder, devices)
    except (ValueError, RuntimeError) as error:
        return {"error": str(error)}
    return {"error": ""}


# Dynamic sampling: prompts with an odd number teach nothing.

DYNAMIC: dict[str, Options] = {
    "refill": {},
    "one_rank_keeps_none": {"guards": {"max_generation_batches": 1}},
    "batch_scale": {"guards": {"max_generation_batches": 1}, "scale_rewards": "batch"},
    "pooled_baseline": {"guards": {"max_generation_batches": 1}, "advantage_estimator": "remax"},
    "mini_batches": {
        "guards": {"max_generation_batches": 1},
        "num_mini_batches": 2,
        "trainer": {"accumulate_grad_batches": 2},
    },
    "nothing": {"guards": {"max_generation_batches": 2}},
    "one_sampler_reports": {"guards": {"max_generation_batches": 1}},
}


class CountingEngine:
    """Completions of 1 to 4 letters; counts the prompts of each call, and reports log-probabilities on some ranks."""

    def __init__(self, silent_rank: int | None = None) -> None:
        self.calls: list[int] = []
        self.silent_rank = silent_rank

    def bind(self, model, tokenizer=None):
        pass

    def generate(self, prompts, sampling, *, num_generations, seed):
        self.calls.append(len(prompts))
        silent = self.silent_rank is not None and own_rank() == self.silent_rank
        return [[self._rollout(sum(prompt), g, silent) for g in range(num_generations)] for prompt in prompts]

    @staticmethod
    def _rollout(number, g, silent):
        logprobs = None if silent else [-3.0] * (1 + g)
        return Rollout([14 + number % 8] * (1 + g), logprobs=logprobs, finish_reason="stop")


def lengths(completions, useful, **columns):
    """The length of useful prompts' completions, with a further number; the others all get 7."""
    return [
        {"score": float(len(text)), "number": len(text) % 3} if own else 7.0
        for text, own in zip(completions, useful, strict=True)
    ]


def kept_of(case: str, folder: Path, devices: int) -> Options:
    rows = [{"prompt": f"{i:02d}{i * 37 % 100:02d}", "useful": i % 2 == 0 and case != "nothing"} for i in range(16)]
    run = train(
        folder, devices, rewards=lengths, dynamic_sampling=True, optimizer=PLAIN, sampling=SamplingConfig(),
        engine=CountingEngine(1 if case == "one_sampler_reports" else None),
        data=PromptDataModule(rows, batch_size=4, shuffle=False), **DYNAMIC[case],
    )  # fmt: skip
    kept = [int(group.prompt[:2]) for group in run.buffer.groups]
    return {"calls": run.module.engine.calls, "kept": kept, "metrics": run.steps[-1], "weights": run.weights[-1]}


# Whole runs.

CRITICS = {
    "copy": PolicyCopyCritic(head_std=0.1),
    "shared": SharedTrunkCritic(head_std=0.1),
    "shared, detached": SharedTrunkCritic(detach=True, head_std=0.1),
    "lora": LoRACritic(r=4, head_std=0.1),
}
SCALED: Options = {"loss_type": "grpo", "scale_rewards": "batch", "beta": 0.1}
RUNS: dict[str, Options] = {
    "plain": SCALED,
    "sequence parallel": {**SCALED, "sharing": {"sequence_parallel_size": 2}, "max_tokens_per_micro_batch": 40},
    "distilled": {"distillation_coef": 0.5, "gamma": 0.9, "scale_rewards": "batch"},
}


def run_of(case: str, folder: Path, devices: int, resume: int | None = None) -> Options:
    """Two updates of one batch of rollouts, saved, and a validation."""
    options, cls = dict(RUNS[case]), GRPO
    if case == "distilled":
        cls, options["teacher"] = Distillation, TinyPolicy(seed=7, hidden_size=48, initializer_range=0.2)
    if devices == 1:
        options.pop("sharing", None)
    saves = [] if resume else [saving(folder / case)]
    run = train(
        folder, devices, cls, steps=2, engine=ScriptedEngine(), optimizer=PLAIN, num_iterations=2,
        sampling=SamplingConfig(max_new_tokens=8), evaluation={"num_generations": 2}, callbacks=saves,
        data=make_data(10, batch_size=5, val=True, val_size=5, val_batch_size=2, shuffle=False),
        trainer={"val_check_interval": 2, "num_sanity_val_steps": 0},
        resume=resume and folder / case / f"step={resume}.ckpt", **options,
    )  # fmt: skip
    metrics = {name: float(value) for name, value in run.trainer.callback_metrics.items()}
    return {"weights": run.weights[-1], "metrics": metrics}


def warm_up_of(critic: str, folder: Path, devices: int) -> Options:
    """Two steps of warm-up and two after it: weights before, after the warm-up, and at the end."""
    module = make_module(
        PPO, critic=CRITICS[critic], engine=RaggedEngine(), critic_warmup_steps=2, num_mini_batches=2,
        optimizer=OptimizerConfig(learning_rate=1e-2, weight_decay=0.1),
    )  # fmt: skip
    module.configure_model()
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    run = train(folder, devices, module=module, steps=4, data={"train_size": 3, "batch_size": 3, "shuffle": False})
    return {"weights": [before, run.weights[1], run.weights[3]]}


def ahead_of(strategy: str, folder: Path, devices: int, resume: int | None = None) -> Options:
    """Three rollouts, the next one beside each update."""
    trainer = (
        {}
        if strategy == "ddp" or devices == 1
        else {"strategy": ModelParallelStrategy(2, 1, save_distributed_checkpoint=False)}
    )
    own = folder / strategy
    run = train(
        folder, devices, steps=3, optimizer=PLAIN, trainer=trainer, callbacks=[] if resume else [saving(own)],
        data={}, resume=resume and own / f"step={resume}.ckpt", **AHEAD,
    )  # fmt: skip
    assert run.trainer.callback_metrics["rollout/staleness/mean"] == 1
    return {"weights": [weight.clone() for _, weight in run.module.support.named_weights(run.module.policy)]}


def result_of(case: str, folder: Path, devices: int = 1) -> Options:
    """What a case gave, by `kind:name` or `kind:name:number`."""
    kind, name, *rest = case.split(":")
    if kind == "estimator":
        return advantages_of(ESTIMATORS[name], folder, devices)
    if kind == "refused":
        return error_of(REFUSED[name], folder, devices)
    if kind == "dynamic":
        return kept_of(name, folder, devices)
    if kind == "run":
        return run_of(name, folder, devices, *map(int, rest))
    if kind == "warm_up":
        return warm_up_of(name, folder, devices)
    if kind == "ahead":
        return ahead_of(name, folder, devices, *map(int, rest))
    if kind == "rows":
        run = step_of_rows(name, folder, rows=True, devices=devices)
        return {"gradients": gradients_of(run), "metrics": run.steps[-1]}
    return {"gradients": gradients_of_a_step(name, folder, devices=devices, cut=int(rest[0]))}  # step


if __name__ == "__main__":
    devices, target = int(sys.argv[1]), Path(sys.argv[2])
    results = {case: result_of(case, target, devices) for case in sys.argv[3:]}
    torch.save(results, target / f"{own_rank()}.pt")
