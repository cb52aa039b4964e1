"""Seconds of the critic's update and of the whole step, for PPO and for GROUP PPO on the same rollouts.

GROUP PPO trains its critic only at the first tokens of token groups. That saves head and loss at the other tokens, and
the backbone after the last start in each rollout; the backbone still runs on all tokens before it. So compression (the
share of tokens that are not starts) says little about time, and both are shown here.

README.md says how to read the tables.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from benchmarks.cases import QWEN3_0_6B, Case
from benchmarks.measure import Timing, cuda_peak_mib, time_in_turns
from benchmarks.options import add_shape, begin, change, make_parser, positive, write_json
from benchmarks.rollout_data import compression_of, draw_rollouts
from benchmarks.training_steps import CriticUpdate, MeasuredGroupPPO, MeasuredPPO, Models, WholeStep
from pl_grouprl.training import SharingOptions

PARTS = (
    "old scores", "reference scores", "values", "groups, advantages", "policy update", "critic update", "other",
)  # fmt: skip
CPU_CASE = Case(
    "Qwen3 shape", prefix=512, rollout=256, group_size=8, groups=4, hidden=256, heads=4, kv_heads=2, intermediate=768
)


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Parse the command line, measure, print, and write JSON after each case."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    options = parse(arguments)
    case = make_case(options)
    conditions = begin(options)
    end = time.monotonic() + 60 * options.minutes
    print(f"{case}, backend {options.backend}", flush=True)
    data = draw_rollouts(case)
    thresholds = {target: data.find_threshold(target, options.max_size) for target in options.targets}
    result: dict[str, Any] = {
        "case": asdict(case),
        "backend": options.backend,
        "mini_batches": options.mini_batches,
        "beta": options.beta,
        "max_size": options.max_size,
        "thresholds": [
            {
                "target": target,
                "threshold": tau,
                "compression": compression_of(data.cut(tau, options.max_size).starts, data.mask),
            }
            for target, tau in thresholds.items()
        ],
    }
    for cut in result["thresholds"]:
        print("target {target:g}: threshold {threshold:.3f}, compression {compression:.3f}".format(**cut), flush=True)
    models = Models.of(case, data, options.clock)
    counts = sorted({1, options.mini_batches}) if "steps" in options.measure else []
    if "critic" in options.measure:
        deadline = _share(end, 1 + 3 * len(counts))  # a step takes longer than the critic's part of it
        result["critic_update"] = measure_critic(models, thresholds, options, deadline)
        print(critic_table(result["critic_update"]), flush=True)
        write_json(options.output, conditions, result)
    for number, count in enumerate(counts):
        if time.monotonic() > end:
            print(f"\nsteps with {count} update(s) left out: --minutes {options.minutes:g} are over.")
            break
        deadline = _share(end, len(counts) - number)
        rows = measure_steps(models, thresholds[options.step_target], count, options, deadline)
        result.setdefault("steps", []).extend(rows)
        print(step_table(rows), flush=True)
        write_json(options.output, conditions, result)
    return result


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Options of the command line; those that describe a case override the profile's."""
    parser = make_parser(__doc__, minutes=6.0)
    parser.add_argument("--measure", nargs="+", choices=("critic", "steps"), default=["critic", "steps"])
    parser.add_argument("--targets", nargs="+", type=float, default=[0.5, 0.75, 0.9], help="of the compression")
    parser.add_argument("--step-target", type=float, default=0.75, help="the target of the whole steps, one of those")
    parser.add_argument("--max-size", type=positive, default=16, help="most tokens of a token group (default: 16)")
    parser.add_argument(
        "--mini-batches", type=positive, default=4, help="updates per rollout, in addition to one (default: 4)"
    )
    parser.add_argument("--beta", type=float, default=0.0, help="KL coefficient; above 0 a reference is scored too")
    parser.add_argument("--backend", default="cascade", help="of the shared prefix (default: cascade)")
    add_shape(parser, CPU_CASE)
    options = parser.parse_args(arguments)
    if options.step_target not in options.targets:
        parser.error(f"--step-target is {options.step_target:g}; it must be one of --targets {options.targets}.")
    return options


def make_case(options: argparse.Namespace) -> Case:
    """The profile's case with the command line's changes.

    Raises:
        SystemExit: If there are fewer groups than mini-batches, which hold whole groups.
    """
    gpu_case = replace(QWEN3_0_6B, prefix=4096, group_size=8, groups=4)
    case = change(CPU_CASE if options.profile == "cpu" else gpu_case, options)
    if case.groups < options.mini_batches:
        raise SystemExit(f"--mini-batches is {options.mini_batches}, more than --groups {case.groups}; raise --groups.")
    return case


def measure_critic(
    models: Models, thresholds: dict[float, float], options: argparse.Namespace, deadline: float
) -> list[dict[str, Any]]:
    """Time the critic's update on one mini-batch: PPO and GROUP PPO at each threshold, prompts repeated and shared."""
    updates: dict[tuple[str, str], CriticUpdate] = {}
    for sharing in ("repeated", "shared"):
        own = SharingOptions(sharing, backend=options.backend, verify=False)
        common = {"sharing": own, "num_mini_batches": options.mini_batches}
        updates[sharing, "PPO"] = CriticUpdate(models, models.module(MeasuredPPO, **common))
        for target, threshold in thresholds.items():
            module = models.module(MeasuredGroupPPO, **common, **_fixed(threshold, options))
            updates[sharing, f"GROUP PPO, target {target:g}"] = CriticUpdate(models, module)
    tokens = {key: update.count_tokens() for key, update in updates.items()}  # also warms up
    peaks = {key: cuda_peak_mib(update.run) for key, update in updates.items() if models.policy.device.type == "cuda"}
    functions = {" ".join(key): update.run for key, update in updates.items()}
    timings = time_in_turns(functions, options.rounds, deadline, options.clock)
    rows = []
    for (sharing, algorithm), update in updates.items():
        timing = timings[f"{sharing} {algorithm}"]
        rows.append(
            {
                "prompt": sharing,
                "algorithm": algorithm,
                "compression": update.compression,
                "positions": update.positions,
                "tokens_run": tokens[sharing, algorithm],
                "loss": update.loss,
                "peak_mib": peaks.get((sharing, algorithm)),
                "seconds": timing.seconds,
                "ratio_to_ppo": _ratio(timing, timings[f"{sharing} PPO"]),
                "ratio_to_repeated_ppo": _ratio(timing, timings["repeated PPO"]),
            }
        )
    return rows


def measure_steps(
    models: Models, threshold: float, num_mini_batches: int, options: argparse.Namespace, deadline: float
) -> list[dict[str, Any]]:
    """Time whole steps with this many updates per rollout."""
    common = {"num_mini_batches": num_mini_batches, "beta": options.beta}
    shared, repeated = (SharingOptions(mode, backend=options.backend, verify=False) for mode in ("shared", "repeated"))
    group_ppo = {"sharing": shared, **common, **_fixed(threshold, options)}
    steps = {
        "PPO, prompt repeated": WholeStep(models, models.module(MeasuredPPO, sharing=repeated, **common)),
        "PPO": WholeStep(models, models.module(MeasuredPPO, sharing=shared, **common)),
        "GROUP PPO": WholeStep(models, models.module(MeasuredGroupPPO, **group_ppo)),
    }
    peaks: dict[str, float] = {}
    for name, step in steps.items():  # also warms up
        if models.policy.device.type == "cuda":
            peaks[name] = cuda_peak_mib(step.run)
        else:
            step.run()
        step.parts.clear()
    functions = {name: step.run for name, step in steps.items()}
    timings = time_in_turns(functions, options.rounds, deadline, options.clock)
    return [
        {
            "algorithm": name,
            "updates_per_rollout": num_mini_batches,
            "compression": step.compression,
            "peak_mib": peaks.get(name),
            "seconds": timings[name].seconds,
            "parts": {part: [own.get(part, 0.0) for own in step.parts] for part in PARTS},
            "ratio_to_ppo": _ratio(timings[name], timings["PPO"]),
        }
        for name, step in steps.items()
    ]


def _share(end: float, parts: int) -> float:
    """When an equal share of the remaining time ends."""
    now = time.monotonic()
    return now + max(end - now, 0.0) / parts


def _fixed(threshold: float, options: argparse.Namespace) -> dict[str, Any]:
    return {
        "adaptive_threshold": False,
        "group_variance_threshold": threshold,
        "group_max_size": options.max_size,
    }


def _ratio(own: Timing, base: Timing) -> tuple[float, float, float]:
    """Ratio to the base's seconds, round by round: median, smallest, largest."""
    return base.speedup_over(own)


def critic_table(rows: Sequence[dict[str, Any]]) -> str:
    """The critic's updates as text."""
    lines = [
        "",
        "critic's update of one mini-batch (packing, forward, head, loss, backward, AdamW)",
        f"{'prompt':9} {'algorithm':24} {'compression':>11} {'positions':>9} {'tokens run':>10} {'loss':>9} "
        f"{'seconds':>8} {'fastest':>8} {'slowest':>8} {'/ PPO':>6} {'(rounds)':>11} {'/ PPO repeated':>14}",
    ]
    for row in rows:
        middle, low, high = row["ratio_to_ppo"]
        timing = Timing(row["seconds"])
        lines.append(
            f"{row['prompt']:9} {row['algorithm']:24} {row['compression']:11.3f} {row['positions']:9,} "
            f"{row['tokens_run']:10,} {row['loss']:9.6f} {timing.median:8.3f} {min(timing.seconds):8.3f} "
            f"{max(timing.seconds):8.3f} {middle:6.2f} {f'{low:.2f}-{high:.2f}':>11} "
            f"{row['ratio_to_repeated_ppo'][0]:14.2f}"
        )
    return "\n".join(lines)


def step_table(rows: Sequence[dict[str, Any]]) -> str:
    """Whole steps by part, as text."""
    parts = [part for part in PARTS if any(any(row["parts"][part]) for row in rows)]
    lines = [
        "",
        f"whole step, {rows[0]['updates_per_rollout']} update(s) per rollout, median seconds",
        f"{'algorithm':21} {'compression':>11} "
        + " ".join(f"{part:>{max(len(part), 8)}}" for part in parts)
        + f" {'all':>8} {'(rounds)':>15} {'/ PPO':>6} {'(rounds)':>11}",
    ]
    for row in rows:
        middle, low, high = row["ratio_to_ppo"]
        own = " ".join(f"{Timing(row['parts'][part]).median:{max(len(part), 8)}.3f}" for part in parts)
        seconds = row["seconds"]
        lines.append(
            f"{row['algorithm']:21} {row['compression']:11.3f} {own} {Timing(seconds).median:8.3f} "
            f"{f'{min(seconds):.2f}-{max(seconds):.2f}':>15} {middle:6.2f} {f'{low:.2f}-{high:.2f}':>11}"
        )
    return "\n".join(lines)
