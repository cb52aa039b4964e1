"""On-policy distillation and GRPO with the same student and prompts: accuracy by sampled tokens.

    python cli.py fit --config grpo_pg.yaml                     # trains the teacher, once
    python examples/compare_distillation.py                     # 2 algorithms x 3 seeds, on the CPU
    python examples/compare_distillation.py --only GRPO         # one of them, for another process
    python examples/compare_distillation.py --resume            # only the runs that are missing, and the report

Distillation is configs/distillation.yaml, whose task reward has a weight of 0. GRPO is the same file without the
teacher, with a weight of 1, and with the clipping and KL penalty of grpo_pg.yaml. `compare_algorithms.py` runs both and
writes its files to the output folder. Next to them, `distillation.png` and `distillation.json` have the number of
tokens that each run sampled until a validation was within 0.05 of the teacher's accuracy on the same prompts.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # run as a script
    sys.path.insert(0, str(ROOT))

from examples import compare_algorithms  # noqa: E402
from examples.compare_report import COLORS, Run, conditions, table  # noqa: E402
from pl_grouprl.cli import RLCLI, find_config  # noqa: E402

LABELS = ("Distillation", "GRPO")
METRIC = "val/rewards/exact_match/mean"
WITHIN = 0.05
"""The largest difference from the teacher's accuracy that counts as reaching it."""

GRPO_OPTIONS = {"epsilon": 0.2, "epsilon_high": 0.28, "beta": 0.01}
"""Clipping and KL penalty of grpo_pg.yaml."""


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the requested algorithms and write the report."""
    options = parse(arguments)
    configs = configurations(options.config, options.teacher)
    algorithms = [f"{label}={json.dumps(configs[label])}" for label in options.only]
    steps = ["--steps", str(options.steps)] if options.steps else []
    threads = ["--threads", str(options.threads)] if options.threads else []
    resume = ["--resume"] if options.resume else []
    common = ["--metric", METRIC, "--output", str(options.output), *steps, *threads, *resume]
    runs = compare_algorithms.main(["--algorithms", *algorithms, "--seeds", *map(str, options.seeds), *common])
    accuracy = teacher_accuracy(
        configs["GRPO"], options.teacher or configs["Distillation"]["model"]["init_args"]["teacher"]
    )
    return write_report(runs, accuracy, options.output)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=LABELS, default=list(LABELS), help="default: both")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="default: 0 1 2")
    parser.add_argument("--steps", type=int, help="optimizer steps; default: those of the configuration")
    parser.add_argument("--threads", type=int, help="PyTorch's number of threads; default: PyTorch's own")
    parser.add_argument("--config", default="distillation.yaml", help="default: %(default)s")
    parser.add_argument("--teacher", help="folder of the teacher; default: that of the configuration")
    parser.add_argument(
        "--output", type=Path, default=Path("runs/distillation_comparison"), help="default: %(default)s"
    )
    parser.add_argument("--resume", action="store_true", help="read the runs whose results are in the folder")
    return parser.parse_args(arguments)


def configurations(config: str, teacher: str | None) -> dict[str, dict[str, Any]]:
    """Complete configurations by label, which differ only where the algorithms do."""
    distillation = yaml.safe_load(Path(find_config(config)).read_text(encoding="utf-8"))
    if teacher is not None:
        distillation["model"]["init_args"]["teacher"] = teacher
    grpo = copy.deepcopy(distillation)
    grpo["model"]["class_path"] = "pl_grouprl.GRPO"
    options = grpo["model"]["init_args"]
    for name in ("teacher", "distillation_coef", "gamma"):
        options.pop(name, None)
    for reward in options["rewards"]:
        reward["weight"] = 1.0
    options |= GRPO_OPTIONS
    return {"Distillation": distillation, "GRPO": grpo}


def teacher_accuracy(grpo: dict[str, Any], teacher: str) -> float:
    """Accuracy of the teacher on the validation prompts, sampled like the students'."""
    config = copy.deepcopy(grpo)
    config["model"]["init_args"]["policy"] = teacher
    config["trainer"] |= {"logger": False, "callbacks": [], "enable_progress_bar": False, "enable_checkpointing": False}
    trainer = RLCLI(["validate", "--config", json.dumps(config)]).trainer
    return float(trainer.callback_metrics[METRIC])


def tokens_at(run: Run) -> list[int]:
    """Tokens sampled for training before each validation."""
    sums = [0, *accumulate(run["tokens"])]
    return [int(sums[point["step"]]) for point in run["curve"]]


def tokens_to_reach(run: Run, threshold: float) -> int | None:
    """Tokens sampled before the first validation at the threshold or above; None if there is none."""
    reached = zip(tokens_at(run), run["curve"], strict=True)
    return next((tokens for tokens, point in reached if point["reward"] >= threshold), None)


def write_report(runs: Sequence[Run], accuracy: float, folder: Path) -> dict[str, Any]:
    """Write figure and numbers, print the table, and return the numbers."""
    threshold = accuracy - WITHIN
    summary: dict[str, Any] = {"teacher": accuracy, "threshold": threshold, "conditions": conditions(runs)}
    labels = list(dict.fromkeys(run["label"] for run in runs))
    for label in labels:
        summary[label] = summarize([run for run in runs if run["label"] == label], threshold)
    (folder / "distillation.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    draw(summary, folder / "distillation.png")
    rows = [[label, *_cells(summary[label])] for label in labels]
    print(f"Teacher {accuracy:.3f}, so the threshold is {threshold:.3f}.\n")
    print("\n".join(table(["", "final", "over the seeds", "tokens to the threshold, by seed"], rows)), flush=True)
    return summary


def summarize(runs: Sequence[Run], threshold: float) -> dict[str, Any]:
    """The numbers of one algorithm's runs, a list entry per seed."""
    return {
        "seeds": [run["seed"] for run in runs],
        "steps": runs[0]["curve"][-1]["step"],
        "before": runs[0]["curve"][0]["reward"],
        "final": [run["curve"][-1]["reward"] for run in runs],
        "tokens": [tokens_at(run)[-1] for run in runs],
        "tokens_to_threshold": [tokens_to_reach(run, threshold) for run in runs],
        "curves": [list(zip(tokens_at(run), (p["reward"] for p in run["curve"]), strict=True)) for run in runs],
    }


def _cells(summary: dict[str, Any]) -> list[str]:
    """An algorithm's row of the printed table."""
    final, reached = summary["final"], summary["tokens_to_threshold"]
    tokens = "; ".join("not reached" if count is None else f"{count:,}" for count in reached)
    return [f"{statistics.fmean(final):.3f}", f"{min(final):.3f} to {max(final):.3f}", tokens]


def draw(summary: dict[str, Any], path: Path) -> None:
    """Draw accuracy over sampled tokens: a thin line per seed, and a thick one for their mean."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for label, color in zip(LABELS, COLORS, strict=False):
        curves = summary.get(label, {}).get("curves", [])
        for curve in curves:
            axes.plot(*zip(*curve, strict=True), color=color, linewidth=0.8, alpha=0.5)
        if curves:
            mean = [
                [statistics.fmean(coordinate) for coordinate in zip(*points, strict=True)]
                for points in zip(*curves, strict=True)
            ]
            axes.plot(*zip(*mean, strict=True), color=color, linewidth=2.2, label=label)
    axes.axhline(summary["teacher"], color="black", linewidth=1)
    axes.axhline(summary["threshold"], color="black", linewidth=1, linestyle=":")
    axes.text(0, summary["teacher"], " teacher", va="bottom", fontsize=8)
    axes.text(0, summary["threshold"], f" teacher - {WITHIN}", va="top", fontsize=8)
    axes.set_xlim(left=0)
    axes.set_ylim(top=1.04)
    axes.set_xlabel("tokens sampled for training")
    axes.set_ylabel("validation accuracy, sampled")
    axes.legend(loc="lower right", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
