"""The plan of a run: memory, what fits, what sharing saves, and the minimum time of a step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pl_grouprl.models import ModelCost
from pl_grouprl.packing import Sharing
from pl_grouprl.planning.memory import (
    GIB,
    METHODS,
    SEQUENCE,
    USABLE,
    Footprint,
    Hardware,
    PlannedModels,
    divided,
    footprint_of_method,
    plan_models,
)
from pl_grouprl.planning.scaling import UTILIZATION, Lengths, Rates, StepModel, table
from pl_grouprl.rollout import HFRolloutEngine
from pl_grouprl.utilities.device_defaults import DEVICES, Checkpointing, sequences_at_once

_SAMPLE = 256
"""Number of prompts, evenly spaced by length, over which operations are averaged."""


@dataclass(frozen=True)
class Workload:
    """A step: one batch of rollouts and its updates. All responses are assumed to have the same length.

    Attributes:
        prompt_lengths: Tokens of each prompt of the training data, in ascending order.
        batch_size: Prompts per rollout, over all devices.
        processes: Devices.
        num_generations: Rollouts per prompt. Leaves of the largest tree for branching rollouts, each counted in full.
        response: Tokens of a response.
        num_mini_batches: Updates per pass over the rollouts.
        num_iterations: Passes over the rollouts.
        max_tokens: Token budget of a micro-batch; None for no limit.
        max_sequences: Sequences decoded at once on a device; None for all, or as many as the free memory holds.
        shares: Whether the run encodes a prompt once per group.
        caches: Whether the trainer's process holds the KV caches of rollouts.
    """

    prompt_lengths: Sequence[int]
    batch_size: int
    processes: int
    num_generations: int
    response: int
    num_mini_batches: int = 1
    num_iterations: int = 1
    max_tokens: int | None = None
    max_sequences: int | None = None
    shares: bool = True
    caches: bool = True

    @classmethod
    def of(cls, module: Any, data: Any, processes: int) -> Workload:
        """Read the options of a module, and the prompt lengths of a data module that is set up."""
        lengths = sorted(prompt.num_tokens for prompt in data.prompts["train"])
        return cls(
            prompt_lengths=lengths,
            batch_size=data.batch_size,
            processes=processes,
            num_generations=module.max_rollouts,
            response=module.sampling.max_new_tokens,
            num_mini_batches=module.num_mini_batches,
            num_iterations=module.num_iterations,
            max_tokens=module.max_tokens_per_micro_batch,
            max_sequences=getattr(module.engine, "max_sequences", None),
            shares=module.sharing.mode == "shared",
            caches=isinstance(module.engine, HFRolloutEngine),
        )

    @property
    def mean_prompt(self) -> float:
        """Mean tokens of a prompt."""
        return sum(self.prompt_lengths) / len(self.prompt_lengths)

    def tokens(self, sharing: Sharing) -> float:
        """Mean number of tokens that a forward pass over a batch of rollouts encodes, on all devices."""
        copies = self.num_generations if sharing == "repeated" else 1
        return self.batch_size * (copies * self.mean_prompt + self.num_generations * self.response)

    def operations(self, cost: ModelCost, sharing: Sharing) -> float:
        """Operations of one forward pass over a batch of rollouts, on all devices."""
        step = max(1, len(self.prompt_lengths) // _SAMPLE)
        lengths = self.prompt_lengths[step // 2 :: step]
        groups = [(length, [self.response] * self.num_generations) for length in lengths]
        return sum(cost.of_groups(groups, sharing)) * self.batch_size / len(lengths)

    @property
    def longest_micro_batch(self) -> int:
        """Maximum tokens of a micro-batch on one device: a mini-batch of the longest prompts, or the budget."""
        copies = 1 if self.shares else self.num_generations
        longest = self.prompt_lengths[-1] * copies + self.num_generations * self.response
        groups = math.ceil(math.ceil(self.batch_size / self.num_mini_batches) / self.processes)
        everything = groups * longest
        return everything if self.max_tokens is None else min(self.max_tokens, everything)

    @property
    def smallest_budget(self) -> int:
        """The smallest `max_tokens_per_micro_batch` that this data allows."""
        longest = self.prompt_lengths[-1]
        return max(longest, self.response) if self.shares else longest + self.response

    @property
    def sequences(self) -> int:
        """Number of sequences that a device decodes at once."""
        everything = math.ceil(self.batch_size / self.processes) * self.num_generations
        return everything if self.max_sequences is None else min(self.max_sequences, everything)

    @property
    def bounds_itself(self) -> bool:
        """Whether the engine samples fewer sequences at once where the free memory asks for it."""
        return self.caches and self.max_sequences is None

    @property
    def cached_tokens(self) -> int:
        """Maximum tokens in a device's KV caches: each prompt once, and all response tokens of each sequence."""
        if not self.caches:
            return 0
        prompts = math.ceil(self.sequences / self.num_generations)
        return prompts * self.prompt_lengths[-1] + self.sequences * self.response


GPUS = (24, 48, 80, 141)
"""Memory in GiB."""

_REMEDIES = {
    "AdamW": "",
    "8-bit AdamW": "optimizer.state_bits: 8",
    "LoRA": "policy dtype: bfloat16, adapter: {r: 16}",
    "4 bits and LoRA": "policy dtype: bfloat16, adapter: {r: 16}, quantization: {quant_type: nf4}",
}


@dataclass(frozen=True)
class RunPlan:
    """Estimates for a run; `str` gives the page that `cli.py plan` prints.

    Attributes:
        algorithm: The module's class.
        models: The models that it loads.
        workload: The workload of a step.
        hardware: Where it runs.
        passes: Forward passes over a batch of rollouts besides the updates: old and reference log-probabilities.
        gpus: Numbers of GPUs to predict a step for.
        rates: Measured rates for that.
        max_staleness: The run's; predicted besides 0 and 1.
    """

    algorithm: str
    models: PlannedModels
    workload: Workload
    hardware: Hardware
    passes: int
    gpus: tuple[int, ...] = ()
    rates: Rates = field(default_factory=Rates)
    max_staleness: int = 0

    @property
    def footprint(self) -> Footprint:
        """Memory of one device under the run's strategy."""
        return divided(self.models.footprint, self.hardware.strategy, self.hardware.processes)

    @property
    def memory(self) -> dict[str, int]:
        """Bytes on one device by part, with the longest prompts and responses."""
        held, work, checkpointing = self.footprint, self.workload, self.models.checkpointing
        tokens = work.longest_micro_batch
        prompts = math.ceil(work.sequences / work.num_generations)
        caches = held.layers.caches(prompts, work.prompt_lengths[-1], work.sequences, work.response)
        return {
            "weights": held.policy.weights,
            "gradients": held.policy.gradients,
            "moments": held.policy.moments,
            "reference": held.reference,
            "critic": held.critic.resident,
            "copies": held.copies,
            "activations": held.activations(tokens, checkpointing),
            "logits": held.logits(tokens, checkpointing),
            "caches": caches if work.caches else 0,
            "gathered": held.gathered,
            "sampling copy": held.sampling_copy,
        }

    @property
    def update_bytes(self) -> int:
        """Peak memory of an update, in bytes."""
        memory = self.memory
        return self.footprint.resident + memory["copies"] + memory["activations"] + memory["logits"]

    @property
    def rollout_bytes(self) -> int:
        """Peak memory of a rollout, in bytes, with `workload.sequences` decoded at once."""
        memory = self.memory
        return self.footprint.resident + memory["caches"] + memory["gathered"] + memory["sampling copy"]

    def room(self, gib: float) -> tuple[int, int]:
        """Largest `max_tokens_per_micro_batch`, and the number of sequences sampled at once, that fit on a device."""
        return room_for(self.workload, self.footprint, gib, self.models.checkpointing)

    def fits(self, gib: float) -> bool:
        """Whether the run as configured fits on a device with a tenth of its memory left free."""
        usable = gib * GIB * USABLE
        rolls_out = self.room(gib)[1] > 0 if self.workload.bounds_itself else self.rollout_bytes <= usable
        return self.update_bytes <= usable and rolls_out

    def step_operations(self) -> tuple[float, float]:
        """Floating-point operations of all devices for a batch of rollouts: sampling; scoring and updates."""
        sampled = self.workload.operations(self.models.cost, "shared")
        return sampled, sum(self._trained_operations())

    def _trained_operations(self) -> tuple[float, float]:
        """Of scoring and updates: those outside attention, and those of attention."""
        work, models = self.workload, self.models
        # A backward pass costs two forwards, one of them for gradients of weights, which frozen weights do not need.
        # Checkpointing adds one forward, or only its part outside attention.
        update = 2 if models.has_adapter else 3

        def total(part: ModelCost, recomputes: bool) -> float:
            forward = work.operations(part, "shared" if work.shares else "repeated")
            critic = (1 + update + recomputes) * models.has_critic
            return forward * (self.passes + (update + recomputes) * work.num_iterations + critic)

        outside = total(replace(models.cost, per_pair={}), bool(models.checkpointing))
        attention = replace(models.cost, per_token=0.0, per_prediction=0.0)
        return outside, total(attention, models.checkpointing is True)

    def step_seconds(self, *, newest_flash: bool = False) -> tuple[float, float] | None:
        """Minimum seconds for rollouts, and for scoring and updates, at the data sheet's rates; None without rates.

        Attention in scoring and updates runs at the published rate of FlashAttention. A decoding step takes at least
        the time to read all weights and the KV caches of its sequences.

        Args:
            newest_flash: Whether FlashAttention-3 is installed, which Hopper runs instead of FlashAttention-2.
        """
        if self.hardware.device is None or not self.hardware.precision.startswith(("bf16", "16")):
            return None
        rates, work = DEVICES[self.hardware.device], self.workload
        rate = rates.operations * self.hardware.processes
        sampled, (outside, attention) = self.step_operations()[0] / rate, self._trained_operations()
        trained = (outside + attention / rates.flash[newest_flash]) / rate
        all_sequences = math.ceil(work.batch_size / work.processes) * work.num_generations
        waves = math.ceil(all_sequences / work.sequences)
        prompts = all_sequences / work.num_generations * work.mean_prompt
        read: float = self.models.footprint.policy.weights * waves * work.response
        read += self.footprint.layers.cache * work.response * (prompts + all_sequences * work.response / 2)
        return max(sampled, read / rates.bandwidth), trained

    def step_model(self) -> StepModel:
        """What a step needs on one GPU, from the shapes and the rates; `StepModel` divides it among several.

        Operations count what rollouts share once, as the logged MFU does.

        Raises:
            ValueError: If the device is not known, or rates in a precision that the data sheet's are not about.
        """
        if self.hardware.device is None:
            raise ValueError(f"gpus needs to know which ones; pass device: {', '.join(DEVICES)}.")
        device, rates, cost = DEVICES[self.hardware.device], self.rates, self.models.cost
        precision, scored = self.hardware.precision, self.passes + self.models.has_critic
        needed = ["decode_step", "decode_sequence", *["scoring_mfu"] * bool(scored), "update_mfu"]
        unknown = [f"rates.{name}" for name in needed if getattr(rates, name) is None]
        if unknown and not precision.startswith(("bf16", "16")):
            raise ValueError(f"gpus has no rates in {precision}; pass {', '.join(unknown)}, or precision bf16-mixed.")
        lengths = Lengths.of(rates, self.workload.response)
        mean = lengths.mean
        work = replace(self.workload, response=round(mean))
        forward = work.operations(cost, "shared")
        trained = forward * (2 if self.models.has_adapter else 3) * work.num_iterations * (1 + self.models.has_critic)
        weights = 2.0 * self.models.num_parameters  # samplers compute in 16 bits
        sequence = (cost.per_token + cost.per_prediction) / device.operations
        sequence += self.footprint.layers.cache * (work.mean_prompt + mean / 2) / device.bandwidth

        def given(measured: float | None, ideal: float) -> float:
            return ideal / UTILIZATION if measured is None else measured

        return StepModel(
            prompts=work.batch_size,
            num_generations=work.num_generations,
            lengths=lengths,
            decode_step=given(rates.decode_step, weights / device.bandwidth + sequence),
            decode_sequence=given(rates.decode_sequence, sequence),
            scoring=forward * scored / device.operations / (rates.scoring_mfu or UTILIZATION),
            update=trained / device.operations / (rates.update_mfu or UTILIZATION),
            gradient_bytes=self.models.footprint.policy.gradients * work.num_mini_batches * work.num_iterations,
            transfer=weights / rates.transfer,
            own_weights=work.caches,
            max_sequences=work.max_sequences,
            node=rates.node,
            network=rates.network,
        )

    def suggestion(self, gib: float) -> str:
        """What to set so that the run fits on a device with this many GiB."""
        work, held = self.workload, self.footprint
        if self.fits(gib):
            return "fits as configured"
        if all(room := self.room(gib)):
            return self._settings(*room)
        if held.critic.weights == 0 and self.hardware.processes == 1:  # the first more frugal method that leaves room
            for method in (method for method in METHODS if not method.has_reference):
                method_held = footprint_of_method(self.models.config, replace(method, has_reference=held.reference > 0))
                if method_held.resident < held.resident and all(room := room_for(work, method_held, gib, True)):
                    settings = self._settings(*room)
                    return f"{method.name}: {_REMEDIES[method.name]}, gradient_checkpointing: true, {settings}"
        for devices in (2, 4, 8, 16, 32, 64):
            sharded = divided(self.models.footprint, "fsdp2", devices)
            if all(room_for(replace(work, processes=devices), sharded, gib, True)):
                return f"strategy/fsdp2.yaml on {devices} of them, with gradient_checkpointing: true"
        return "no room on 64 of them; shorten the responses, or choose a smaller model"

    def _settings(self, budget: int, sequences: int) -> str:
        """A budget if a micro-batch would be too long, `max_sequences` if the caches would not fit."""
        parts = []
        if budget < self.workload.longest_micro_batch:
            parts.append(f"max_tokens_per_micro_batch: {rounded(budget)}")
        if sequences < self.workload.sequences and not self.workload.bounds_itself:
            parts.append(f"engine max_sequences: {sequences}")
        return ", ".join(parts) or "no further limit"

    def __str__(self) -> str:
        """The printed page."""
        models, where = self.models, self.hardware
        trained = "an adapter" if models.has_adapter else "all weights"
        devices = "1 device" if where.processes == 1 else f"{where.processes} devices, {where.strategy}"
        size = models.num_parameters
        count = f"{size / 1e9:.2f}e9" if size >= 1e7 else f"{size:,}"
        lines = [
            f"{self.algorithm}, {models.name} with {count} parameters, trains {trained}; {where.precision}, {devices}.",
            "Counted from the shapes of the models; nothing is loaded or measured.",
        ]
        if not models.footprint.layers.is_counted:
            lines.append(f"Activations are an upper estimate: those of {models.name} could not be counted.")
        if not self.workload.caches:
            lines.append("The memory of the sampling engine is not included; only that of HFRolloutEngine is known.")
        for section in (_memory_lines, _fit_lines, _sharing_lines, _time_lines):
            lines += ["", *section(self)]
        if self.gpus:
            lines += ["", *table(self.step_model(), self.gpus, (0, 1, max(1, self.max_staleness)))]
        return "\n".join(lines)


def plan_run(
    module: Any, data: Any, hardware: Hardware, *, gpus: Sequence[int] = (), rates: Rates | None = None
) -> RunPlan:
    """Plan a run from configs, tokenizer and prompts; no weights are loaded.

    Args:
        module: An `RLModule` whose models are not loaded.
        data: Its data module, set up for `fit`.
        hardware: Where it runs.
        gpus: Numbers of GPUs to predict a step for.
        rates: Measured rates for that.

    Raises:
        TypeError: If a module or data of this kind cannot be planned.
    """
    if not hasattr(module, "policy_source") or not getattr(data, "prompts", {}).get("train"):
        given = f"{type(module).__name__} and {type(data).__name__}"
        raise TypeError(f"plan needs a module of pl_grouprl and a PromptDataModule with `train`, not {given}.")
    models, work = plan_models(module, hardware), Workload.of(module, data, hardware.processes)
    scores_before = module.updates_per_rollout > 1 or module.kl_penalty.needs_old_logprobs
    passes = (scores_before or module.objective.selects_tokens) + module.kl_penalty.is_used
    passes += hasattr(module, "teacher_source")
    return RunPlan(
        type(module).__name__,
        models,
        work,
        hardware,
        passes,
        tuple(sorted(gpus)),
        rates or Rates(),
        module.max_staleness,
    )


def room_for(work: Workload, held: Footprint, gib: float, checkpointing: Checkpointing) -> tuple[int, int]:
    """Largest token budget of a micro-batch, and number of sequences sampled at once, that fit on a device.

    The budget is 0 if that is less than the data needs. A prompt counts once per sequence, as in a split group; there
    are at most the sequences of a step, and where the engine sets the number, its own rule applies.
    """
    budget = held.largest_budget(gib, checkpointing)
    if budget < max(work.smallest_budget, min(SEQUENCE, work.longest_micro_batch)):
        budget = 0
    per_sequence = work.prompt_lengths[-1] + work.response
    everything = math.ceil(work.batch_size / work.processes) * work.num_generations
    cached = held.cached_tokens(gib)
    sequences = max(0, min(cached // per_sequence, everything))
    if work.bounds_itself and sequences:
        free = cached * held.layers.cache
        sequences = min(sequences, sequences_at_once(everything, per_sequence * held.layers.cache, lambda: free))
    return budget, sequences


def rounded(tokens: int) -> int:
    """Round down to two significant digits."""
    digits = 10 ** max(len(str(tokens)) - 2, 0)
    return tokens // digits * digits


def _memory_lines(plan: RunPlan) -> Iterator[str]:
    work, memory = plan.workload, plan.memory
    checkpointing = "gradient checkpointing" if plan.models.checkpointing else "no gradient checkpointing"
    checkpointing += ", attention saved" if plan.models.checkpointing == "attention" else ""
    labels = {
        "weights": "weights",
        "gradients": "gradients",
        "moments": "AdamW moments",
        "reference": "reference or teacher",
        "critic": "critic: weights, gradients, moments",
        "copies": "weights in another dtype (updates)",
        "activations": f"activations of {work.longest_micro_batch:,} tokens, {checkpointing} (updates)",
        "logits": "logits beyond the peak of the layers (updates)",
        "caches": f"KV caches of {work.sequences} sequences, {work.cached_tokens:,} tokens (rollouts)",
        "gathered": "weights gathered from other devices (rollouts)",
        "sampling copy": "copy of the weights in the sampling dtype (rollouts)",
    }
    unit, name = (GIB, "GiB") if max(plan.update_bytes, plan.rollout_bytes) >= GIB else (2**20, "MiB")
    yield f"{'Memory per device, with the longest prompts and responses':<70}{name:>9}"
    rows = {labels[part]: size for part, size in memory.items() if size}
    at_once = ", all sequences at once" if work.bounds_itself else ""
    rows |= {"peak in updates": plan.update_bytes, f"peak in rollouts{at_once}": plan.rollout_bytes}
    yield from (f"  {label:<68}{size / unit:>9.2f}" for label, size in rows.items())
    if work.bounds_itself:
        needed = f"{memory['caches'] / unit:,.2f} {name}"
        yield f"All {work.sequences:,} sequences at once need {needed} of KV caches. HFRolloutEngine samples as many as"
        yield "half of the free memory holds, then the rest; its option max_sequences sets another number."


def _fit_lines(plan: RunPlan) -> Iterator[str]:
    yield "What fits, with 10 % of the memory kept free"
    yield f"  {'device':<9}{'largest budget':>15}{'sequences':>11}   suggestion"
    for gib in GPUS:
        budget, sequences = plan.room(gib)
        row = f"{f'{rounded(budget):,}' if budget else '-':>15}{sequences or '-':>11}"
        yield f"  {f'{gib} GB':<9}{row}   {plan.suggestion(gib)}"


def _sharing_lines(plan: RunPlan) -> Iterator[str]:
    work, lengths, cost = plan.workload, plan.workload.prompt_lengths, plan.models.cost
    yield f"{len(lengths):,} prompts of {lengths[0]} to {lengths[-1]} tokens, {work.mean_prompt:.0f} on average"
    yield f"tokens of a batch: {work.batch_size} prompts with {work.num_generations} rollouts each, over all devices"
    yield f"  {'response':>8}{'repeated':>12}{'shared':>12}{'token ratio':>13}{'expected speedup':>18}"
    for response in dict.fromkeys(max(1, work.response // part) for part in (1, 2, 4)):
        variant = replace(work, response=response)
        repeated, shared = variant.tokens("repeated"), variant.tokens("shared")
        speedup = variant.operations(cost, "repeated") / variant.operations(cost, "shared")
        yield f"  {response:>8}{repeated:>12,.0f}{shared:>12,.0f}{repeated / shared:>13.2f}{speedup:>18.2f}"
    yield "The speedup is for scoring and updates, by operations; rollouts encode each prompt once in any case."


def _time_lines(plan: RunPlan) -> Iterator[str]:
    (sampled, trained), seconds = plan.step_operations(), plan.step_seconds()
    updates = plan.workload.num_mini_batches * plan.workload.num_iterations
    yield f"One batch of rollouts, with responses of {plan.workload.response} tokens; updates: {updates}"
    yield f"  {sampled:.2e} operations for rollouts, {trained:.2e} for scoring and updates"
    if seconds is None:
        reason = "this device's rates are not known" if plan.hardware.device is None else "rates are for 16-bit floats"
        yield f"  no time estimate: {reason}; --device takes {', '.join(DEVICES)}, for a 16-bit precision"
        return
    rollout, update = seconds
    yield f"  at least {rollout:.2g} s for rollouts and {update:.2g} s for scoring and updates,"
    yield f"  at the peak rates in {plan.hardware.device}'s data sheet, of which runs reach a fraction"
    _, newest = plan.step_seconds(newest_flash=True) or seconds
    if newest < update:
        yield f"  and attention at FlashAttention-2's; with FlashAttention-3 installed, {newest:.2g} s for the latter"
