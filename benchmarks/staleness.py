"""Runs with `max_staleness` against on-policy ones: seconds per step by part, staleness, and validation by step.

    python -m benchmarks staleness --output runs/staleness                            # HFRolloutEngine, 3 seeds
    python -m benchmarks staleness --output runs/server --engine rollout/vllm_server.yaml --max-staleness 0 1 2

Each run is `python cli.py fit --config grpo_pg.yaml` with the loss corrected by the sampler's log-probabilities
(`importance_sampling.mode: token_truncate`), also for 0. Seconds are those of a clock on the wall, since sampling and
updates run at the same time: nothing else should use the machine. Its result is a file in the folder OUTPUT, and is
read if it exists; OUTPUT.json has all of them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.branching import RecordedRun, Recorder
from benchmarks.options import add_common, begin_on, positive, write_json

METRIC = "val/rewards/exact_match/mean"
PARTS = ("step", "rollout", "wait_for_rollouts", "weight_sync", "update")


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Parse the command line, run what is missing, print the table and the curves, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-staleness", nargs="+", type=int, default=[0, 1], help="default: 0 1")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="default: 0 1 2")
    parser.add_argument("--steps", type=positive, default=180, help="default: 180")
    parser.add_argument("--every", type=positive, default=20, help="steps between validations (default: 20)")
    parser.add_argument("--run", default="grpo_pg.yaml", help="configuration of the run (default: grpo_pg.yaml)")
    parser.add_argument("--engine", nargs="+", default=[], help="configurations of an engine, merged over the run's")
    add_common(parser)
    options = parser.parse_args(arguments)
    if options.output is None:
        parser.error("--output is missing; pass a path such as runs/staleness.")
    conditions = begin_on("cpu", options)
    runs = [run_or_read(*chosen, options) for chosen in itertools.product(options.seeds, options.max_staleness)]
    rows = [row_of(value, [run for run in runs if run["max_staleness"] == value]) for value in options.max_staleness]
    for row in rows:
        print(", ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    for run in runs:
        points = ", ".join(f"{step}: {reward:.3f}" for step, reward in run["curve"])
        print(f"max_staleness {run['max_staleness']}, seed {run['seed']}: {points}", flush=True)
    write_json(options.output, conditions, content := {"rows": rows, "runs": runs})
    return content


def share_of_even_ids(completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[float]:
    """Reward of a model with random weights, whose completions rarely earn another one: share of even token ids."""
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def run_or_read(seed: int, max_staleness: int, options: argparse.Namespace) -> dict[str, Any]:
    """Run once, unless the result is in the folder.

    Raises:
        SystemExit: If the result there is from other options.
    """
    told = {"steps": options.steps, "every": options.every, "run": options.run, "engine": list(options.engine)}
    file = options.output / f"staleness{max_staleness}-seed{seed}.json"
    if file.is_file():
        run = json.loads(file.read_text(encoding="utf-8"))
        if run["told"] != told:
            raise SystemExit(f"{file} is from a run with other options; remove it.")
        return run
    points = fit(seed, max_staleness, options)
    run = {"max_staleness": max_staleness, "seed": seed, "told": told, **summary(points)}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(run) + "\n", encoding="utf-8")
    return run


def fit(seed: int, max_staleness: int, options: argparse.Namespace) -> dict[str, dict[int, float]]:
    """Run `cli.py fit` in this process; return the logged metrics by step."""
    trainer = {
        "max_steps": options.steps,
        "val_check_interval": options.every,
        "default_root_dir": str(options.output / "runs"),
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "callbacks": [{"class_path": "pl_grouprl.callbacks.ValidateAtStart"}],
    }
    ahead = {"max_staleness": max_staleness, "importance_sampling": {"mode": "token_truncate"}, "seed": seed}
    parts = {
        "seed_everything": seed,
        "model": {"init_args": ahead},
        "data": {"init_args": {"seed": seed}},
        "trainer": trainer,
    }
    recorder = Recorder(keep_gradients=False)
    told = [options.run, *options.engine, json.dumps(parts)]
    RecordedRun(["fit", *(text for own in told for text in ("--config", own))], recorder)
    return {name: dict(points) for name, points in recorder.summary.history.points.items()}


def summary(points: Mapping[str, Mapping[int, float]]) -> dict[str, Any]:
    """Medians of the seconds of steps but the first, which loads and compares; staleness; the curve of validation."""
    seconds = {part: list(points.get(f"time/{part}", {}).values())[1:] for part in PARTS}
    ages = list(points.get("rollout/staleness/mean", {}).values()) or [0.0]
    return {
        "seconds": {part: statistics.median(values) if values else 0.0 for part, values in seconds.items()},
        "staleness": statistics.fmean(ages),
        "dropped": sum(points.get("rollout/dropped_stale", {}).values()),
        "curve": sorted(points[METRIC].items()),
    }


def row_of(max_staleness: int, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Medians and means over the seeds."""
    seconds = {part: round(statistics.median(run["seconds"][part] for run in runs), 3) for part in PARTS}
    return {
        "max_staleness": max_staleness,
        **{f"{part} s": value for part, value in seconds.items()},
        "staleness": round(statistics.fmean(run["staleness"] for run in runs), 3),
        "dropped": sum(run["dropped"] for run in runs),
        "last": [run["curve"][-1][1] for run in runs],
        "seeds": len(runs),
    }
