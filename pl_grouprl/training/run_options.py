"""Records the options that decide what a run optimizes, for comparison when it is resumed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import lightning.pytorch as pl

from pl_grouprl.rewards import prepare_rewards
from pl_grouprl.training.trainer_options import accumulation_schedule
from pl_grouprl.types import SamplingConfig
from pl_grouprl.utilities.describe import describe, identity, plain
from pl_grouprl.utilities.run_options import options_of

FREE_OPTIONS = frozenset(
    {
        "policy",  # its base model, adapter and weights are compared elsewhere
        "engine",
        "sharing",
        "share_across_groups",
        "attention_backend",
        "verify",
        "max_nonfinite_steps",
        "max_unrewarded_batches",
        "allow_changed",
        "val_num_generations",
        "val_sampling",
        "pass_threshold",
        "reward_workers",
        "reward_timeout",
        "reward_memory_limit_mb",
        "reward_retries",
        "max_failed_share",
        "tool_timeout",
        "tool_workers",
        "max_tokens_per_micro_batch",
        "sequence_parallel_size",
        # How a critic was initialized and how it runs: its weights come from the checkpoint.
        *(
            f"critic.{name}"
            for name in (
                "path",
                "gguf_file",
                "revision",
                "trust_remote_code",
                "dtype",
                "attn_implementation",
                "head_std",
                "seed",
            )
        ),
        "critic.gradient_checkpointing",
        # These select among the same rows; the loader refuses changes that it cannot resume with.
        "data.max_prompt_length",
        "data.overlong_prompts",
    }
)
"""Constructor options that may differ when a run is resumed; all others are compared."""

PASSED_ON = frozenset(
    {
        "rewards",
        "sampling",
        "engine",
        "harness",
        "seed",
        "num_generations",
        "branching",
        "num_mini_batches",
        "sharing",
        "share_across_groups",
        "attention_backend",
        "verify",
        "max_tokens_per_micro_batch",
        "sequence_parallel_size",
        "mask_truncated_completions",
        "dynamic_sampling",
        "max_staleness",
    }
)
"""Constructor options that were passed on to parts of the run, so setting the attribute later would have no effect."""

_OF_OPTIMIZER_STATE = re.compile(
    r"(\w+_)?optimizer\.(learning_rate|weight_decay|betas|eps|state_bits|optim|optim_args(\..+)?)"
)
"""Options stored in the optimizer's state; `compare_optimizers` refuses changes to them."""


def note_options(module: Any, options: Mapping[str, Any]) -> None:
    """Record constructor arguments as plain values, before anything can change them."""
    noted = module.__dict__.setdefault("_noted_options", {})
    for name, value in options.items():
        for former in [key for key in noted if key == name or key.startswith(f"{name}.")]:
            del noted[former]
        if name == "engine":  # may hold secrets of servers
            noted[name] = None if value is None else identity(type(value))
        else:
            noted |= _describe_rewards(value) if name == "rewards" else describe(name, value)


def recorded_options(module: Any) -> dict[str, Any]:
    """Everything that decides what a run optimizes, by name, as plain values.

    The constructors' arguments, `rollout_options` and, once a Trainer is attached, its gradient options and the
    `resume_facts()` of its data module.
    """
    noted = module.__dict__.get("_noted_options", {})
    noted = {name: value for name, value in noted.items() if _is_compared(name, module.free_options)}
    # Derived entries such as `beta > 0` add nothing to `beta`.
    more = {name: value for name, value in module.rollout_options().items() if name.split(" ")[0] not in noted}
    trainer = getattr(module, "_trainer", None)
    of_trainer = {} if trainer is None else _trainer_options(trainer) | _data_options(trainer)
    options = {"model": type(module).__name__} | more | noted | of_trainer
    return {name: value for name, value in options.items() if name not in module.free_options}


def evaluation_options(module: Any) -> dict[str, Any]:
    """What decides the metrics of validation and test, except data and rewards, by name, as plain values."""
    sampling = {
        f"val_sampling.{field.name}": getattr(module.val_sampling, field.name) for field in fields(SamplingConfig)
    }
    own = {"val_num_generations": module.val_num_generations, "pass_threshold": module.evaluator.pass_threshold}
    return own | {name: plain(value) for name, value in sampling.items()}


def all_options(module: pl.LightningModule) -> dict[str, Any]:
    """All options of a run as plain values, to tell it from others: the module's, and the Trainer's most important.

    Args:
        module: Attached to its Trainer. Of one that is no `RLModule`, those that it saves by `save_hyperparameters`.
    """
    trainer = module.trainer
    noted = module.__dict__.get("_noted_options", {})
    hparams = {key: plain for name, value in module.hparams.items() for key, plain in describe(name, value).items()}
    of_trainer = {name: getattr(trainer, name) for name in ("max_steps", "max_epochs", "precision", "world_size")}
    of_trainer["strategy"] = type(trainer.strategy).__name__
    named = {f"trainer.{name}": value for name, value in of_trainer.items()}
    return hparams | options_of(module) | noted | _trainer_options(trainer) | named


def _is_compared(name: str, free: frozenset[str]) -> bool:
    """Whether no dotted prefix of the name is free, and the optimizer's state does not bring it along."""
    parts = name.split(".")
    is_free = any(".".join(parts[:end]) in free for end in range(1, len(parts) + 1))
    return not is_free and not _OF_OPTIMIZER_STATE.fullmatch(name)


def _trainer_options(trainer: pl.Trainer) -> dict[str, Any]:
    clips = trainer.gradient_clip_val or None
    algorithm = None if clips is None else str(getattr(trainer.gradient_clip_algorithm, "value", None) or "norm")
    schedule = accumulation_schedule(trainer)
    return {
        "trainer.gradient_clip_val": clips,
        "trainer.gradient_clip_algorithm": algorithm,
        "trainer.accumulate_grad_batches": schedule[0] if len(schedule) == 1 else sorted(map(list, schedule.items())),
        "trainer.overfit_batches": getattr(trainer, "overfit_batches", 0),
    }


def _data_options(trainer: pl.Trainer) -> dict[str, Any]:
    """The data module's `resume_facts`, if it has any."""
    facts = getattr(getattr(trainer, "datamodule", None), "resume_facts", dict)
    return {f"data.{name.removeprefix('data.')}": value for name, value in facts().items()}


def _describe_rewards(rewards: Any) -> dict[str, Any]:
    """Describe reward functions by their names in metrics, each with its weight."""
    try:
        weighted = prepare_rewards(rewards)
    except (TypeError, ValueError):
        return {}  # the constructor refuses them
    described: dict[str, Any] = {"rewards": [reward.name for reward in weighted]}
    for reward in weighted:
        described |= describe(f"rewards.{reward.name}", reward.function)
        described[f"rewards.{reward.name}.weight"] = reward.weight
    return described
