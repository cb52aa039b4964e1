"""Branched episodes with `tree` against independent ones with `grpo`, at about as many sampled tokens per step.

    python -m benchmarks branching --output runs/branching                 # 3 seeds of each; continues if killed
    python -m benchmarks branching --output runs/branching --seeds 0       # one seed; a later call adds the others

`gradients`: optimizer steps with a learning rate of 0, so that all of them see the base policy. *Noise* is the trace of
the covariance of their gradients over the squared norm of the mean, both estimated without bias; like all that follows
from new prompts and rollouts, it falls in proportion to the tokens of a step. `training`: validation against sampled
tokens. Each run is `python cli.py fit --config grpo_tree.yaml` with the options of `ARMS`. Its result is a file in the
folder OUTPUT, and is read if it exists; OUTPUT.json and OUTPUT.png have all of them, each run with its own conditions.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor

from benchmarks.figure import draw_branching
from benchmarks.measure import Conditions
from benchmarks.options import add_common, begin_on, positive, write_json
from pl_grouprl.callbacks import RunSummary
from pl_grouprl.cli import RLCLI
from pl_grouprl.training.metrics import count_sampled

ARMS: dict[str, dict[str, Any]] = {
    "tree": {},
    "grpo": {
        "episodes": {"branching": None},
        "advantage_estimator": "grpo",
        "advantage_options": None,
        "num_generations": 14,
    },
}
"""Options over those of `configs/grpo_tree.yaml`."""

METRIC = "val/rewards/exact_match/mean"


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Parse the command line, run what is missing, print the tables, and write JSON and the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="default: all")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="default: 0 1 2")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default: both")
    parser.add_argument("--steps", type=positive, default=40, help="of training (default: 40)")
    parser.add_argument("--every", type=positive, default=5, help="steps between validations (default: 5)")
    parser.add_argument("--gradients", type=positive, default=48, help="steps for the noise (default: 48)")
    parser.add_argument("--config", nargs="+", default=[], help="configurations merged over each run's")
    add_common(parser)
    options = parser.parse_args(arguments)
    if options.output is None:
        parser.error("--output is missing; pass a path such as runs/branching.")
    if options.clock != "wall":
        parser.error(f"--clock is {options.clock}, but a run measures its steps in wall time; leave it out.")
    conditions = begin_on("cpu", options)
    runs = [run_or_read(*chosen, options) for chosen in itertools.product(options.parts, options.seeds, options.arms)]
    rows = [own for part in options.parts for own in TABLES[part]([run for run in runs if run["part"] == part])]
    for row in rows:
        print(", ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    content = {"rows": rows, "runs": runs}
    write_json(options.output, conditions, content)
    draw_branching([run for run in runs if run["part"] == "training"], str(conditions), options.output)
    return content


def run_or_read(part: str, seed: int, arm: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run one arm with one seed, unless its result is in the folder.

    Raises:
        SystemExit: If the result there is from other options.
    """
    told = {"steps": options.steps if part == "training" else options.gradients, "config": list(options.config)}
    told |= {"options": ARMS[arm]} | ({"every": options.every} if part == "training" else {})
    file = options.output / f"{part}-{arm}-seed{seed}.json"
    if file.is_file():
        run = json.loads(file.read_text(encoding="utf-8"))
        if run["told"] != told:
            raise SystemExit(f"{file} is from a run with other options; remove it.")
        return run
    conditions = asdict(Conditions.here("cpu", options.clock))
    run = {"part": part, "arm": arm, "seed": seed, "told": told, "conditions": conditions}
    run |= PARTS[part](arm, seed, options)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(run) + "\n", encoding="utf-8")
    return run


def measure_training(arm: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Validation at the sampled tokens so far, and the median of the steps' seconds."""
    trainer = {"max_steps": options.steps, "val_check_interval": options.every}
    recorder = Recorder(keep_gradients=False)
    points = fit(arm, seed, {"trainer": trainer}, recorder, options)
    sampled = [0, *itertools.accumulate(recorder.sampled)]
    curve = [{"step": step, "tokens": sampled[step], "reward": reward} for step, reward in points[METRIC].items()]
    return {"curve": curve, "seconds": statistics.median(points["time/step"].values())}


def measure_gradients(arm: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Noise of the gradients of a fixed policy, and sampled tokens per step.

    Raises:
        SystemExit: If all gradients are 0.
    """
    still = {"model": {"init_args": {"optimizer": {"learning_rate": 0.0}}}}
    recorder = Recorder(keep_gradients=True)
    fit(arm, seed, {"trainer": {"max_steps": options.gradients, "limit_val_batches": 0}, **still}, recorder, options)
    gradients_KD = torch.stack(recorder.gradients).double()
    if not gradients_KD.any():
        raise SystemExit("all gradients are 0, because the rewards of each group are equal; take another --config.")
    noise, error = noise_with_error(gradients_KD @ gradients_KD.T)
    return {"tokens": statistics.fmean(recorder.sampled), "noise": noise, "error": error}


PARTS = {"gradients": measure_gradients, "training": measure_training}
"""What is measured, by name."""


def fit(
    arm: str, seed: int, overrides: dict[str, Any], recorder: Recorder, options: argparse.Namespace
) -> dict[str, dict[int, float]]:
    """Run `cli.py fit` in this process; return the logged metrics by step."""
    trainer = {
        "max_epochs": -1,
        "default_root_dir": str(options.output / "runs"),
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "callbacks": [{"class_path": "pl_grouprl.callbacks.ValidateAtStart"}],
    }
    seeded = {"init_args": {"seed": seed}}
    parts = [{"seed_everything": seed, "model": seeded, "data": seeded, "trainer": trainer}]
    parts += [{"model": {"init_args": ARMS[arm]}}, overrides]
    told = ["grpo_tree.yaml", *options.config, *map(json.dumps, parts)]
    RecordedRun(["fit", *(text for own in told for text in ("--config", own))], recorder)
    return {name: dict(points) for name, points in recorder.summary.history.points.items()}


class RecordedRun(RLCLI):
    """The command line of a run, with a recorder."""

    def __init__(self, args: Sequence[str], recorder: Recorder) -> None:
        self.recorder = recorder
        super().__init__(args)

    def before_fit(self) -> None:
        """Add the recorder."""
        self.trainer.callbacks += [self.recorder, self.recorder.summary]


class Recorder(pl.Callback):
    """Keeps the sampled tokens of each step and, if asked, its gradients before they are clipped."""

    def __init__(self, keep_gradients: bool) -> None:
        self.keep_gradients = keep_gradients
        self.summary = RunSummary(summary_filename=None, curves_filename=None, options_filename=None)
        self.sampled: list[int] = []
        self.gradients: list[Tensor] = []

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Copy the gradients."""
        if self.keep_gradients:
            grads = [own.grad for own in pl_module.parameters() if own.grad is not None]
            self.gradients.append(torch.cat([grad.flatten() for grad in grads]))

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
        """Count what was sampled for each prompt."""
        groups = [group.rollouts for group in pl_module.last_rollouts.groups]
        self.sampled.append(sum(count_sampled(own) or sum(sum(r.loss_mask or ()) for r in own) for own in groups))


def noise_with_error(gram_KK: Tensor) -> tuple[float, float]:
    """Noise of K gradients with inner products [K, K], and its standard error (jackknife)."""
    count = len(gram_KK)
    others = [[j for j in range(count) if j != i] for i in range(count)]
    left_out = torch.tensor([noise(gram_KK[own][:, own]) for own in others])
    return noise(gram_KK), float(((count - 1) * left_out.var(correction=0)) ** 0.5)


def noise(gram_KK: Tensor) -> float:
    """Trace of the covariance over the squared norm of the mean, each estimated without bias."""
    count, total, own = len(gram_KK), float(gram_KK.sum()), float(gram_KK.trace())
    between = (total - own) / (count * (count - 1))  # the squared norm of the mean
    return (own / count - between) / between


def gradient_rows(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Means over the seeds; `at equal tokens` is noise times tokens, that of `grpo` with the same seeds being 1."""
    rows = []
    for arm, own in by_arm(runs).items():
        means = {name: statistics.fmean(run[name] for run in own) for name in ("tokens", "noise")}
        error = sum(run["error"] ** 2 for run in own) ** 0.5 / len(own)
        rows.append({"part": "gradients", "arm": arm, **means, "error": error, "seeds": len(own)})
    base = next((row["noise"] * row["tokens"] for row in rows if row["arm"] == "grpo"), None)
    return [{**row, "at equal tokens": row["noise"] * row["tokens"] / base if base else None} for row in rows]


def training_rows(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Validation before and after training, and its mean over as many sampled tokens as all runs have."""
    limit = min((run["curve"][-1]["tokens"] for run in runs), default=0)
    return [
        {
            "part": "training",
            "arm": arm,
            "first": statistics.fmean(run["curve"][0]["reward"] for run in own),
            "last": [run["curve"][-1]["reward"] for run in own],
            f"mean over {limit} tokens": [area(run["curve"], limit) for run in own],
            "tokens": [run["curve"][-1]["tokens"] for run in own],
            "seconds": statistics.median(run["seconds"] for run in own),
        }
        for arm, own in by_arm(runs).items()
    ]


TABLES = {"gradients": gradient_rows, "training": training_rows}
"""Rows that sum up the runs of each part."""


def area(curve: Sequence[dict[str, float]], limit: float) -> float:
    """Mean of a curve over its first `limit` sampled tokens, with straight lines between validations."""
    places = [at["tokens"] for at in curve]
    grid = [*(place for place in places if place < limit), limit]
    rewards = np.interp(grid, places, [at["reward"] for at in curve])
    return float(np.diff(grid) @ (rewards[1:] + rewards[:-1])) / 2 / limit


def by_arm(runs: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The runs of each arm."""
    return {arm: [run for run in runs if run["arm"] == arm] for arm in dict.fromkeys(run["arm"] for run in runs)}
