"""Where the time of a training step goes: model work, and everything else.

`python -m benchmarks step` trains the configs of the default runs, with the Trainer and the callbacks that they name,
and prints the parts of a step. README.md says what belongs to which part.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.config_file import build_run, read_config
from benchmarks.options import add_common, begin_on, positive, write_json
from benchmarks.step_parts import MODEL_WORK, OVERHEAD, TOKEN_GROUPS, StepParts

LARGER = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8}
"""Changes of `--model larger` to the configs' architecture."""


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Parse the command line, measure, print, and write JSON."""
    options = parse(arguments)
    conditions = begin_on(options.device, options)
    result: dict[str, Any] = {"runs": []}
    for model in options.model:
        for name in options.config:
            run = measure(name, model, options)
            result["runs"].append(run)
            print(table(run), flush=True)
            write_json(options.output, conditions, result)
    return result


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--config",
        nargs="+",
        default=["grpo_pg", "ppo", "group_ppo"],
        help="names in configs/, or paths (default: grpo_pg ppo group_ppo)",
    )
    parser.add_argument(
        "--model",
        nargs="+",
        choices=["default", "larger"],
        default=["default"],
        help=f"the config's architecture, or one with {LARGER}",
    )
    parser.add_argument("--steps", type=positive, default=30, help="steps that are measured (default: 30)")
    parser.add_argument("--warm-up", type=int, default=5, help="steps before them (default: 5)")
    parser.add_argument("--base-steps", type=int, default=600, help="of the base policy's training (default: 600)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="default: cpu")
    add_common(parser)
    return parser.parse_args(arguments)


def measure(name: str, model: str, options: argparse.Namespace) -> dict[str, Any]:
    """Train with a config, and summarize the steps after the warm-up.

    Validation is left out, since it is not part of a step. Checkpoints and tables are written when due; the figure of
    the whole run, which comes after all steps and needs matplotlib, is not drawn.
    """
    config = read_config(name)
    source = config["model"]["init_args"]["policy"]["init_args"]
    source |= {"steps": options.base_steps if model == "default" else 0, "progress_bar": False}
    if model == "larger":
        source["architecture"] |= LARGER
    for callback in config["trainer"].get("callbacks", ()):
        if callback["class_path"] == "pl_grouprl.callbacks.RunSummary":
            callback["init_args"] = callback.get("init_args", {}) | {"curves_filename": None}
    parts = StepParts(options.clock)
    with tempfile.TemporaryDirectory() as folder:
        for logger in config["trainer"]["logger"]:
            logger["init_args"]["save_dir"] = folder
        trainer, module, data = build_run(
            config,
            accelerator="gpu" if options.device == "cuda" else "cpu",
            devices=1,
            max_steps=options.warm_up + options.steps,
            limit_val_batches=0,
            default_root_dir=folder,
        )
        trainer.callbacks.insert(0, parts)
        trainer.fit(module, datamodule=data)
    parameters = sum(parameter.numel() for parameter in module.policy.parameters())
    return {"config": name, "model": model, "parameters": parameters} | summarize(parts.steps[options.warm_up :])


def summarize(steps: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Medians of the parts and of their shares.

    Returns:
        `steps`: the seconds of each part in each step. `seconds`: the median of each. `everything_else`: share of
        a step that is not model work, as median, smallest and largest over the steps, and over all steps (`mean`).
        `token_groups`: the same of finding token groups and of their advantages.
    """
    seconds = {part: statistics.median(step.get(part, 0.0) for step in steps) for part in (*MODEL_WORK, *OVERHEAD)}
    return {
        "seconds": seconds | {"step": statistics.median(step["step"] for step in steps)},
        "everything_else": share(steps, OVERHEAD),
        "token_groups": share(steps, (TOKEN_GROUPS,)),
        "steps": [dict(step) for step in steps],
    }


def share(steps: Sequence[Mapping[str, float]], parts: Sequence[str]) -> dict[str, float]:
    """The share of a step that some parts take."""
    own = [sum(step.get(part, 0.0) for part in parts) for step in steps]
    whole = [step["step"] for step in steps]
    shares = [part / step for part, step in zip(own, whole, strict=True)]
    return {
        "median": statistics.median(shares),
        "smallest": min(shares),
        "largest": max(shares),
        "mean": sum(own) / sum(whole),
    }


def table(run: Mapping[str, Any]) -> str:
    """The report of one run."""
    seconds = run["seconds"]
    lines = [
        f"{run['config']}, {run['model']} model ({run['parameters'] / 1e6:.2f} M parameters), {len(run['steps'])} steps"
    ]
    for kind, parts in (("model work", MODEL_WORK), ("everything else", OVERHEAD)):
        lines.append(f"  {kind}")
        for part in parts:
            if seconds[part]:
                lines.append(
                    f"    {part:<15} {1000 * seconds[part]:9.2f} ms {100 * seconds[part] / seconds['step']:6.2f} %"
                )
    lines.append(f"  {'step':<17} {1000 * seconds['step']:9.2f} ms")
    for label, key in (("everything else", "everything_else"), ("token groups", "token_groups")):
        found = {name: 100 * value for name, value in run[key].items()}
        if found["mean"]:
            lines.append(
                f"  {label}: {found['median']:.2f} % of a step ({found['smallest']:.2f} to {found['largest']:.2f}), "
                f"{found['mean']:.2f} % of all of them together"
            )
    return "\n".join(lines)
