"""What limited a run, and which option would help: one sentence, from its times and a few facts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pl_grouprl.attention.backends.saved import checkpointing_of
from pl_grouprl.models.kernels import is_fused
from pl_grouprl.utilities.device_defaults import Checkpointing

WAITS = 0.2
"""Share of the time above which a wait, weight sync, or what callbacks do stands out."""

WORK = 0.5
"""Share above which rollouts or updates do."""

LONG = 2.0
"""Longest over mean completion above which rollouts wait mostly for the longest."""

UNUSED = 0.4
"""Share of a GPU's memory that must be unused to advise against recomputation."""


@dataclass(frozen=True)
class RunFacts:
    """What a run's advice depends on, besides its times.

    Attributes:
        device: Type of the policy's device, such as `cuda`.
        engine: Class of the rollout engine.
        max_staleness: The module's option.
        reward_workers: `reward_calls.workers`.
        sends_adapter: Whether the engine takes an adapter by itself; None if the policy has none.
        recomputes: Which activations the policy recomputes: none, all, or all but those of `attention`.
        fused: Whether its layers run fused kernels.
        unused_memory: Share of the GPU's memory that the run never used.
        longest: A step's longest completion over the mean.
    """

    device: str = "cpu"
    engine: str = "HFRolloutEngine"
    max_staleness: int = 0
    reward_workers: int = 0
    sends_adapter: bool | None = None
    recomputes: Checkpointing = False
    fused: bool = False
    unused_memory: float = 0.0
    longest: float = 1.0

    @classmethod
    def of(cls, module: Any, mean_length: float, max_length: float) -> RunFacts:
        """Read them from an `RLModule` at the end of a fit.

        Args:
            module: The module.
            mean_length: Mean tokens of a completion.
            max_length: Tokens of a step's longest completion, mean over steps.
        """
        device, unused = module.device, 0.0
        if device.type == "cuda":
            free, total = torch.cuda.mem_get_info(device)
            unused = (free + torch.cuda.memory_reserved(device) - torch.cuda.max_memory_reserved(device)) / total
        engine, adapter = module.engine, getattr(module.policy, "peft_config", None)
        return cls(
            device=device.type,
            engine=type(engine).__name__,
            max_staleness=module.max_staleness,
            reward_workers=module.reward_calls.workers,
            sends_adapter=None if adapter is None else getattr(engine, "adapter", "merged") == "separate",
            recomputes=checkpointing_of(module.policy),
            fused=is_fused(module.policy),
            unused_memory=unused,
            longest=max_length / max(mean_length, 1.0),
        )


def find_bottleneck(seconds: Mapping[str, float], outside: float, facts: RunFacts) -> str | None:
    """Say what limited a run and which option would help.

    Args:
        seconds: Seconds of the parts of all steps by the names of `time/*`, with their sum, `step`.
        outside: Seconds of the run outside its steps, from the first one on.
        facts: Device, engine and options.

    Returns:
        A sentence on the longest part that stands out and that an option would shorten; None if there
        is none.
    """
    step = seconds.get("step", 0.0)
    found = [advice for advice in _advice(seconds, step, outside, facts) if advice[0] > advice[1]]
    return max(found)[2] if found else None


def _advice(
    seconds: Mapping[str, float], step: float, outside: float, facts: RunFacts
) -> Iterator[tuple[float, float, str]]:
    """Share, threshold and sentence of each part for which an option would help."""

    def share(*names: str) -> tuple[float, str]:
        part = sum(seconds.get(name, 0.0) for name in names) / max(step, 1e-9)
        return part, f"{100 * part:.0f}% of a step"

    on_server, of_step = facts.engine == "VLLMServerRolloutEngine", share("rollout", "wait_for_rollouts")
    rollouts = f"Rollouts took {of_step[1]}"
    if facts.engine == "HFRolloutEngine" and facts.device == "cuda":
        config = "vllm_server" if facts.max_staleness else "vllm_colocate"
        yield of_step[0], WORK, f"{rollouts}; vLLM (--config rollout/{config}.yaml) would shorten them."
    elif facts.engine == "VLLMRolloutEngine" or (on_server and not facts.max_staleness):
        how = "max_staleness: 1" if on_server else "vLLM on other GPUs (rollout/vllm_server.yaml) with max_staleness: 1"
        if facts.longest > LONG:
            rollouts += f", mostly waiting for the longest, of {facts.longest:.1f} times the mean length"
        yield of_step[0], WORK, f"{rollouts}; {how} would train meanwhile (docs/rollouts.md#rollouts-ahead)."
    elif on_server:
        yield of_step[0], WAITS, f"Waiting for rollouts took {of_step[1]}; more servers (engine urls) would shorten it."

    part, text = share("reward")
    how = "reward_calls.workers (now 0) would compute them during scoring"
    if facts.reward_workers:
        how = f"more reward_calls.workers (now {facts.reward_workers}) would shorten it"
    yield part, WAITS, f"Waiting for rewards took {text}; {how}."

    part, text = share("update")
    if facts.recomputes and facts.unused_memory > UNUSED:
        yield (
            part,
            WORK,
            f"Updates took {text} and recompute activations, about a quarter of their work, while "
            f"{100 * facts.unused_memory:.0f}% of the GPU's memory was never used; gradient_checkpointing: false of "
            "the policy would save that.",
        )
    elif facts.device == "cuda" and not facts.fused:
        yield part, WORK, f"Updates took {text}; fused layers (pip install 'pl-grouprl[liger]') would shorten them."
    elif facts.recomputes is True:
        yield part, WORK, f"Updates took {text}; gradient_checkpointing: attention of the policy would shorten them."

    part, text = share("wait_for_ranks")
    yield part, WAITS, f"Waiting for ranks with longer rollouts took {text}; a larger batch_size would even them out."

    part, text = share("weight_sync")
    how = "a larger batch_size would send them less often"
    if facts.sends_adapter is False:
        how = "adapter: separate of the engine would send the adapter alone"
    yield part, WAITS, f"Sending weights to the sampler took {text}; {how}."

    part = outside / max(step + outside, 1e-9)
    yield (
        part,
        WAITS,
        (
            f"Validation, checkpoints and logging took {100 * part:.0f}% of the run after its start; a larger "
            "trainer.val_check_interval, or every_n_train_steps of SafeCheckpoint, would shorten them."
        ),
    )
