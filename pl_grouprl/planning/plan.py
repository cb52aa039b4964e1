"""The plan of a run: does it fit, with which options, how long does a step take, and how sure is that."""

from __future__ import annotations

import copy
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, NamedTuple

from pl_grouprl.data import PromptDataModule
from pl_grouprl.data.rows import read_source
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
    plan_models,
)
from pl_grouprl.planning.scaling import UTILIZATION, Lengths, Rates, StepModel, StepTimes
from pl_grouprl.rollout import HFRolloutEngine
from pl_grouprl.utilities.device_defaults import DEVICES, sequence_bytes, sequences_at_once

_PROMPTS = 1024
"""Number of prompts to tokenize, evenly spaced by length, or a batch if that is larger."""

_SAMPLE = 256
"""Number of prompts, evenly spaced by length, over which operations are averaged."""


@dataclass(frozen=True)
class Workload:
    """A step: one batch of rollouts and its updates. All responses are assumed to have the same length.

    Attributes:
        prompt_lengths: Tokens of each prompt of the training data, in ascending order.
        batch_size: Prompts per rollout, over all devices.
        processes: Devices that train.
        num_generations: Rollouts per prompt. Leaves of the largest tree for branching rollouts, each counted in full.
        response: Tokens of a response.
        num_mini_batches: Updates per pass over the rollouts.
        num_iterations: Passes over the rollouts.
        max_tokens: Token budget of a micro-batch; None for no limit.
        max_sequences: Sequences decoded at once on a device; None for as many as the engine chooses.
        shares: Whether the run encodes a prompt once per group.
        caches: Whether the trainer's process holds the KV caches of rollouts.
        kept_share: Share of each device that vLLM in the process keeps during updates.
        max_staleness: Maximum number of updates between sampling rollouts and training on them.
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
    kept_share: float = 0.0
    max_staleness: int = 0

    @classmethod
    def of(cls, module: Any, data: Any, processes: int) -> Workload:
        """Read the options of a module, and the prompt lengths of a data module that is set up."""
        return cls(
            prompt_lengths=sorted(prompt.num_tokens for prompt in data.prompts["train"]),
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
            kept_share=getattr(module.engine, "kept_share", 0.0),
            max_staleness=module.max_staleness,
        )

    @property
    def updates(self) -> int:
        """Updates of a step."""
        return self.num_mini_batches * self.num_iterations

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
        """The smallest `max_tokens_per_micro_batch` that this data allows, and that is worth a micro-batch."""
        longest = self.prompt_lengths[-1]
        needed = max(longest, self.response) if self.shares else longest + self.response
        return max(needed, min(SEQUENCE, self.longest_micro_batch))

    @property
    def sequences(self) -> int:
        """Sequences that a device samples in a step."""
        return math.ceil(self.batch_size / self.processes) * self.num_generations


GPUS = (24, 48, 80, 141)
"""Memory in GiB, for a plan that names no GPU."""

SERVED = 0.92
"""Share of a GPU that a vLLM server (0.32) takes for weights, activations and caches: its `gpu_memory_utilization`."""

_REMEDIES = {
    "8-bit AdamW": "optimizer.state_bits: 8",
    "LoRA": "policy dtype: bfloat16 and adapter: {r: 16}",
    "4 bits and LoRA": "policy dtype: bfloat16, adapter: {r: 16} and quantization: {quant_type: nf4}",
}


class Remedy(NamedTuple):
    """What makes a run fit.

    Attributes:
        name: One word or two, for the table.
        options: What to set; empty if the run fits as it is.
    """

    name: str
    options: str = ""


@dataclass(frozen=True)
class RunPlan:
    """Estimates for a run; `str` gives the table that `cli.py plan` prints.

    Attributes:
        algorithm: The module's class.
        models: The models that it loads.
        workload: The workload of a step.
        hardware: Where it runs.
        passes: Forward passes over a batch of rollouts besides the updates: old and reference log-probabilities.
        rates: Measured rates of a GPU.
        layouts: The hardware of each row of the table; the plan's own if empty.
    """

    algorithm: str
    models: PlannedModels
    workload: Workload
    hardware: Hardware
    passes: int
    rates: Rates = field(default_factory=Rates)
    layouts: tuple[Hardware, ...] = ()

    @property
    def footprint(self) -> Footprint:
        """Memory of one device under the run's strategy."""
        return divided(self.models.footprint, self.hardware.strategy, self.hardware.processes)

    def on(self, hardware: Hardware) -> RunPlan:
        """The same run elsewhere; servers hold the caches."""
        work = replace(self.workload, processes=hardware.processes)
        work = replace(work, caches=False, kept_share=0.0) if hardware.servers else work
        return replace(self, hardware=hardware, workload=work)

    @property
    def gib(self) -> float:
        """Memory of a device without what vLLM in the process keeps (a share of a GPU), in GiB; 0 if not known."""
        return (self.hardware.memory or 0.0) * (1 - self.workload.kept_share * (self.hardware.device != "cpu") / USABLE)

    # Memory. A group's rollouts share the cache of its prompt wherever sequences or bytes are counted.

    def sampled_bytes(self, sequences: int) -> int:
        """Peak memory of rollouts that decode this many sequences at once: what is held, caches, logits."""
        held, work = self.footprint, self.workload
        prompts = math.ceil(sequences / work.num_generations)
        caches = held.layers.caches(prompts, work.prompt_lengths[-1], sequences, work.response)
        logits = sequences * sequence_bytes(held.layers.config, 0, held.layers.width)
        return held.resident + held.gathered + held.sampling_copy + (caches + logits if work.caches else 0)

    def most_sequences(self, gib: float) -> int:
        """Maximum number of sequences that a device of this size can decode at once; 0 if there is no room."""
        everyone = range(1, self.workload.sequences + 1)
        return bisect_right(everyone, gib * GIB * USABLE, key=self.sampled_bytes)

    def sequences(self, gib: float) -> int:
        """Sequences that a device decodes at once: `max_sequences`, or by the rule of `HFRolloutEngine`."""
        work, held = self.workload, self.footprint
        if work.max_sequences is not None or not work.caches:
            return min(work.max_sequences or work.sequences, work.sequences)
        whole = sequence_bytes(held.layers.config, work.prompt_lengths[-1] + work.response, held.layers.width)
        free = gib * GIB * USABLE - held.resident - held.gathered - held.sampling_copy
        return sequences_at_once(work.sequences, whole, lambda: max(0, int(free)))

    def micro_batch(self, gib: float) -> int:
        """Maximum tokens of a micro-batch: of a mini-batch, or the budget, which GPUs choose if it is not set."""
        work, where = self.workload, self.hardware
        chosen = work.max_tokens is None and where.device != "cpu" and where.strategy in ("single", "ddp", "fsdp2")
        most = max(self.budget(gib), work.smallest_budget) if chosen else work.longest_micro_batch
        return min(most, work.longest_micro_batch)

    def update_bytes(self, gib: float) -> int:
        """Peak memory of an update on a device of this size."""
        held, tokens, checkpointing = self.footprint, self.micro_batch(gib), self.models.checkpointing
        activations = held.activations(tokens, checkpointing) + held.logits(tokens, checkpointing)
        return held.resident + held.copies + activations

    def budget(self, gib: float) -> int:
        """Largest `max_tokens_per_micro_batch` that fits on a device, rounded down; 0 if the data needs more."""
        tokens = self.footprint.largest_budget(gib, self.models.checkpointing)
        smallest = self.workload.smallest_budget
        return max(rounded(tokens), smallest) if tokens >= smallest else 0

    def served(self, tokens: int) -> int:
        """Number of sequences of this length whose caches fit on a server's GPU with the weights."""
        layers = self.models.footprint.layers
        room = (self.hardware.gib or 0.0) * GIB * SERVED - self.models.num_parameters * layers.width
        return max(0, int(room // max(1, layers.caches(1, tokens, 1, 0))))

    def too_large(self, gib: float) -> list[str]:
        """The batches that do not fit on a device of this size, as options with the largest values that do."""
        usable, options = gib * GIB * USABLE, []
        if self.update_bytes(gib) > usable:
            options.append(f"max_tokens_per_micro_batch: {self.budget(gib)}")
        if self.sampled_bytes(self.sequences(gib)) > usable:
            options.append(f"engine.init_args.max_sequences: {self.most_sequences(gib)}")
        return options

    def remedy(self, gib: float) -> Remedy:
        """All that has to be set so that the run fits on a device of this size with a tenth of its memory left free."""
        models, held = self.models, self.footprint
        if not (options := self.too_large(gib)):
            return Remedy("yes")
        if self.budget(gib) and self.most_sequences(gib):
            return Remedy("smaller batches", " and ".join(options))
        others: list[tuple[str, str, RunPlan]] = []
        if held.critic.weights == 0 and self.hardware.processes == 1:
            mixed = "" if self.hardware.precision == "bf16-mixed" else "--trainer.precision bf16-mixed, "
            for name, option in _REMEDIES.items():
                method = next(method for method in METHODS if method.name == name)
                own = models.with_method(replace(method, has_reference=held.reference > models.teacher))
                if own.resident < held.resident:
                    run = replace(self, models=replace(models, footprint=own, checkpointing=True))
                    others.append((name, mixed + option, run))
        recomputing = replace(self, models=replace(models, checkpointing=True))
        for devices in (1, 2, 4, 8, 16, 32, 64):
            run = recomputing.on(replace(self.hardware, gpus=devices, strategy="fsdp2"))
            if devices < self.hardware.gpus or (number := run.hardware.processes) == 1:
                continue
            size = f"--trainer.devices {devices} --trainer.strategy.init_args.data_parallel_size {number}"
            others.append((f"fsdp2 on {number}", f"--config strategy/fsdp2.yaml {size}", run))
        for name, option, run in others:
            if run.budget(gib) and run.most_sequences(gib):
                recomputes = [] if models.checkpointing is True else ["gradient_checkpointing: true"]
                return Remedy(name, ", ".join([option, *recomputes, *run.too_large(gib)]))
        return Remedy("no", "a smaller model or a smaller sampling.max_new_tokens")

    def memory(self, gib: float) -> dict[str, int]:
        """Bytes by part on a device of this size, with the longest prompts and responses."""
        held, tokens, checkpointing = self.footprint, self.micro_batch(gib), self.models.checkpointing
        without_caches = held.resident + held.gathered + held.sampling_copy
        return {
            "weights": held.policy.weights,
            "gradients": held.policy.gradients,
            "moments": held.policy.moments,
            "reference weights": held.reference,
            "the critic's weights, gradients and moments": held.critic.resident,
            "weights in another dtype": held.copies,
            "activations": held.activations(tokens, checkpointing),
            "logits": held.logits(tokens, checkpointing),
            "caches": self.sampled_bytes(self.sequences(gib)) - without_caches,
            "gathered weights": held.gathered,
            "weights copied for sampling": held.sampling_copy,
        }

    # Time.

    @property
    def certainty(self) -> str:
        """Where the times come from."""
        if self.step_model() is None:
            return "none"
        given = [getattr(self.rates, name) is not None for name in self._needed]
        return "measured" if all(given) else "partly measured" if any(given) else f"{UTILIZATION} of peak"

    @property
    def _needed(self) -> list[str]:
        """The rates that a step depends on, however many GPUs there are."""
        scoring = ["scoring_mfu"] * bool(self.passes + self.models.has_critic)
        return ["decode_step", "decode_sequence", *scoring, "update_mfu"]

    def step_model(self) -> StepModel | None:
        """What a step needs on one GPU, from the shapes and the rates; None without rates.

        Operations count what rollouts share once, as the logged MFU does.

        Raises:
            ValueError: If some rates are given, and others are missing.
        """
        rates, cost, work = self.rates, self.models.cost, self.workload
        scored = self.passes + self.models.has_critic
        unknown = [f"rates.{name}" for name in self._needed if getattr(rates, name) is None]
        device = DEVICES.get(self.hardware.device or "")
        if device is None or (unknown and not self.hardware.precision.startswith(("bf16", "16"))):
            if len(unknown) == len(self._needed):
                return None
            missing = "the GPU as device" if device is None else ", ".join(unknown)
            raise ValueError(f"rates are not enough to time a step in {self.hardware.precision}; add {missing}.")
        lengths = Lengths.of(rates, work.response)
        typical = replace(work, response=round(lengths.mean))
        forward = typical.operations(cost, "shared")
        run = forward if work.shares else typical.operations(cost, "repeated")
        updates = (2 if self.models.has_adapter else 3) * work.num_iterations * (1 + self.models.has_critic)
        weights = 2.0 * self.models.num_parameters  # samplers compute in 16 bits
        sequence = (cost.per_token + cost.per_prediction) / device.operations
        sequence += self.footprint.layers.cache * (work.mean_prompt + lengths.mean / 2) / device.bandwidth

        def seconds(ideal: float, measured: float | None) -> float:
            return ideal / UTILIZATION if measured is None else measured

        def passes(number: float, mfu: float | None) -> float:
            return number * (run / UTILIZATION if mfu is None else forward / mfu) / device.operations

        return StepModel(
            prompts=work.batch_size,
            num_generations=work.num_generations,
            lengths=lengths,
            decode_step=seconds(weights / device.bandwidth + sequence, rates.decode_step),
            decode_sequence=seconds(sequence, rates.decode_sequence),
            scoring=passes(scored, rates.scoring_mfu),
            update=passes(updates, rates.update_mfu),
            gradient_bytes=self.models.footprint.policy.gradients * work.updates,
            transfer=weights / rates.transfer,
            own_weights=work.caches,
            max_sequences=work.max_sequences,
            node=rates.node,
            network=rates.network,
        )

    def step(self) -> StepTimes | None:
        """Predicted seconds of a step; None without rates."""
        model, where = self.step_model(), self.hardware
        if model is None:
            return None
        if where.gib is not None and self.workload.caches:  # not on servers
            model = replace(model, max_sequences=self.sequences(where.gib))
        return model.predict(where.processes, where.servers, self.workload.max_staleness, per_node=where.gpus)

    # The printed page.

    def __str__(self) -> str:
        """The table, and what follows from it."""
        models, work, where = self.models, self.workload, self.hardware
        size, updates, longest = models.num_parameters, work.updates, work.prompt_lengths[-1]
        count = f"{size / 1e9:.2f}e9" if size >= 1e7 else f"{size:,}"
        trained = "an adapter" if models.has_adapter else "all weights"
        recomputed = {False: "kept", True: "recomputed", "attention": "recomputed but for attention"}
        rows = [
            self.on(replace(layout, memory=gib))
            for layout in self.layouts or (where,)
            for gib in ([layout.gib] if layout.gib is not None else GPUS)
        ]
        remedies = [row.remedy(row.gib) for row in rows]
        return "\n".join(
            [
                f"{self.algorithm} trains {trained} of {models.name} ({count} parameters) in {where.precision}, "
                f"activations {recomputed[models.checkpointing]}.",
                f"A step: {work.batch_size} prompts of up to {longest:,} tokens, {work.num_generations} rollouts each "
                f"of up to {work.response:,}, {updates} update{'s' * (updates > 1)}.",
                "",
                *_table(rows, remedies),
                "GiB: peak, of what a run may use. micro-batch: tokens, at most as many as fit. at once: sequences "
                "that decode together. Times in seconds.",
                "",
                *_sentences(rows, remedies),
            ]
        )


def plan_run(
    module: Any,
    data: Any,
    hardware: Hardware,
    *,
    gpus: Sequence[int] = (),
    nodes: Sequence[int] = (),
    servers: Sequence[int] = (),
    rates: Rates | None = None,
) -> RunPlan:
    """Plan a run from configs, tokenizer and prompts; no weights are loaded.

    Args:
        module: An `RLModule` whose models are not loaded.
        data: Its data module.
        hardware: Where it runs.
        gpus: Numbers of GPUs that train on each node; defaults to the hardware's. The table has a row for each
            combination of these three.
        nodes: Numbers of nodes, likewise.
        servers: Numbers of further GPUs that only sample, likewise.
        rates: Measured rates of a GPU.

    Raises:
        TypeError: If a module or data of this kind cannot be planned.
    """
    if not hasattr(module, "policy_source") or not isinstance(data, PromptDataModule):
        given = f"{type(module).__name__} and {type(data).__name__}"
        raise TypeError(f"plan needs a module of pl_grouprl and a PromptDataModule, not {given}.")
    models = plan_models(module, hardware)
    work = Workload.of(module, tokenized(data), hardware.processes)
    scores_before = module.updates_per_rollout > 1 or module.kl_penalty.needs_old_logprobs
    passes = (scores_before or module.objective.selects_tokens) + module.kl_penalty.is_used
    passes += hasattr(module, "teacher_source")
    hardware = replace(hardware, servers=len(getattr(module.engine, "urls", ())))
    sizes = (gpus or [hardware.gpus], nodes or [hardware.nodes], servers or [hardware.servers])
    layouts = tuple(replace(hardware, gpus=g, nodes=n, servers=s) for g, n, s in product(*map(sorted, sizes)))
    return RunPlan(type(module).__name__, models, work, hardware, passes, rates or Rates(), layouts)


def tokenized(data: PromptDataModule) -> PromptDataModule:
    """The data module if it is set up, or a copy with at most twice `_PROMPTS` training prompts, with the longest."""
    if "train" in data.prompts:
        return data
    own = copy.copy(data)
    own.prompts, own.kept, own.sources = {}, {}, dict.fromkeys(data.sources) | {"train": data.sources["train"]}
    if own.sources["train"] is not None:
        column = data.encoding.prompt_column
        rows = [row.values for row in read_source(own.sources["train"], "train")]
        if (step := len(rows) // max(_PROMPTS, data.batch_size)) > 1:
            rows = sorted(rows, key=lambda row: len(str(row.get(column))), reverse=True)[::step]
        own.sources["train"] = rows
    own.setup("fit")
    return own


def rounded(tokens: int) -> int:
    """Round down to two significant digits."""
    digits = 10 ** max(len(str(tokens)) - 2, 0)
    return tokens // digits * digits


_TIMES = ("rollouts", "scoring", "update", "weights", "step")


def _table(rows: Sequence[RunPlan], remedies: Sequence[Remedy]) -> Iterator[str]:
    """A line for each row; memory in GiB, time in seconds."""
    head = ["GPU", "GPUs", "servers", "all", "strategy", "fits", "GiB", "of", "micro-batch", "at most", "at once"]
    lines = [(*head, *_TIMES, "rates")]
    for row, remedy in zip(rows, remedies, strict=True):
        where, gib, times = row.hardware, row.gib, row.step()
        at_once = row.sequences(gib)
        peak = max(row.update_bytes(gib), row.sampled_bytes(at_once)) / GIB
        cells = [
            where.label,
            f"{where.gpus}" if where.nodes == 1 else f"{where.gpus} x {where.nodes}",
            f"{where.servers}",
            f"{where.gpus * where.nodes + where.servers}",
            where.strategy,
            remedy.name,
            f"{peak:.1f}" if peak >= 0.1 else f"{peak:.2f}",
            f"{gib * USABLE:.0f}",
            f"{row.micro_batch(gib):,}",
            f"{row.budget(gib):,}",
            f"{at_once:,}" if row.workload.caches else "-",
        ]
        lines.append((*cells, *(["-"] * 5 if times is None else map(_seconds, _columns(times))), row.certainty))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        yield "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))


def _columns(times: StepTimes) -> tuple[float, ...]:
    return times.rollouts + times.longest, times.scoring, times.update, times.transfer, times.step


def _seconds(value: float) -> str:
    return "<0.01" if 0 < value < 0.01 else f"{value:.2g}" if value < 10 else f"{value:.0f}"


def describe_servers(rows: Sequence[RunPlan]) -> str:
    """What fits on a server's GPU; vLLM has to hold at least one sequence of its `max_model_len`."""
    models, layers, work = rows[0].models, rows[0].models.footprint.layers, rows[0].workload
    longest = work.prompt_lengths[-1] + work.response
    most = getattr(layers.config, "max_position_embeddings", None) or longest
    fits = {row.hardware.label: row.served(longest) for row in rows}
    said = f"With weights of {models.num_parameters * layers.width / GIB:.1f} GiB, and activations not counted, "
    said += f"{SERVED:.0%} of a server's GPU has room for sequences of {longest:,} tokens: "
    said += ", ".join(f"{number:,} on {name}" for name, number in fits.items())
    if not all(fits.values()):
        return f"{said}; where there is none, give a server more GPUs: --tensor-parallel-size 2."
    is_short = all(row.served(most) for row in rows)
    return said + ("." if is_short else f"; set --max-model-len {longest}, or vLLM needs room for one of {most:,}.")


def _sentences(rows: Sequence[RunPlan], remedies: Sequence[Remedy]) -> Iterator[str]:
    """What limits the first row, what to change first, how sure that is, and what is not counted."""
    first = rows[0]
    where, work, cost, gib = first.hardware, first.workload, first.models.cost, first.gib
    at_once, times = first.sequences(gib), first.step()
    in_update = first.update_bytes(gib) >= first.sampled_bytes(at_once)
    memory = list(first.memory(gib).items())
    parts = dict(memory[:8] if in_update else memory[:5] + memory[8:])
    largest = max(parts, key=parts.__getitem__)
    limit = f"Memory peaks in {'updates' if in_update else 'rollouts'}, {parts[largest] / sum(parts.values()):.0%}"
    limit += f" of it for {largest}"
    if times is not None:
        name, seconds = max(zip(_TIMES[:-1], _columns(times), strict=False), key=lambda column: column[1])
        limit += f"; {name} take{'s' * (not name.endswith('s'))} the most time"
        if name == "rollouts" and times.longest:
            limit += f", {times.longest / seconds:.0%} of it for the longest completion"
    yield f"{limit}."
    told = zip(rows, remedies, strict=True)
    if changes := dict.fromkeys(f"{row.hardware.label}: {own.options}" for row, own in told if own.options):
        yield f"To fit, set first on {'; on '.join(changes)}."
    elif work.caches and work.max_sequences is None and (most := first.most_sequences(gib)) > at_once:
        yield f"It fits; to sample more at once, set engine.init_args.max_sequences: {most}, the most that fits."
    else:
        yield "It fits as configured."
    if on_servers := [row for row in rows if row.hardware.servers and row.hardware.device != "cpu"]:
        yield describe_servers(on_servers)
    speedup = work.operations(cost, "repeated") / work.operations(cost, "shared")
    yield (
        f"Sharing prompts {'encodes' if work.shares else 'would encode'} {work.tokens('shared'):,.0f} tokens a pass "
        f"instead of {work.tokens('repeated'):,.0f}, with {speedup:.1f} times fewer operations."
    )
    counted = "counted from shapes" if first.models.footprint.layers.is_counted else "an upper estimate"
    if times is not None:
        sure = "from measured rates" if first.certainty == "measured" else "a guess without --rates from a short run"
    elif where.device in DEVICES:
        sure = f"unknown, because data sheets have no rates for {where.precision}"
    else:
        sure = "unknown without --device"
    yield f"Memory is {counted}, at most {USABLE:.0%} of a device; time is {sure}."
    engine = "" if work.caches or on_servers or work.kept_share else "the sampling engine's memory, "
    yield f"Not counted: {engine}prefill, tool results, images, rewards and their models."
