"""GRPO, PPO and GROUP PPO on the same prompts, from the same base policy: reward, positions and time by part.

    python examples/compare_algorithms.py                                  # 3 algorithms x 3 seeds, on the CPU
    python examples/compare_algorithms.py --seeds 0 --steps 20             # a look
    python examples/compare_algorithms.py --resume                         # only the runs that are missing
    python examples/compare_algorithms.py --algorithms PPO "Mine=ppo.yaml+my.yaml"  # others, with their labels

Each run is `python cli.py fit --config ...` with one seed for everything, the model and the data set, without
checkpoints and pictures. All runs share one process: each seeds everything itself, and threads are set once. They take
turns, in a different order for each seed, so a slow minute of the machine affects all algorithms. The output folder has
`comparison.png`, `comparison.md`, `comparison.json`, and a folder with the metrics of each run.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import math
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # run as a script
    sys.path.insert(0, str(ROOT))

from benchmarks.measure import Conditions  # noqa: E402
from examples.compare_report import PARTS, Run, write_report  # noqa: E402
from pl_grouprl import GRPO, PPO, Distillation, GroupPPO  # noqa: E402
from pl_grouprl.callbacks import RunSummary  # noqa: E402
from pl_grouprl.cli import RLCLI, find_config  # noqa: E402
from pl_grouprl.data import PromptBatch  # noqa: E402
from pl_grouprl.functional.token_groups import token_group_counts  # noqa: E402
from pl_grouprl.models.policy import fingerprint  # noqa: E402

ALGORITHMS = {"GRPO": "grpo_pg.yaml", "PPO": "ppo.yaml", "GROUP PPO": "group_ppo.yaml"}
"""Labels and configurations of the default comparison."""

CALLBACKS = ("ValidateAtStart", "RunSummary")


def main(arguments: Sequence[str] | None = None) -> list[Run]:
    """Run everything requested; update the report after each run."""
    options = parse(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    algorithms = dict(parse_algorithm(text) for text in options.algorithms)
    runs: list[Run] = []
    for turn, seed in enumerate(options.seeds):
        labels = list(algorithms)
        shift = turn % len(labels)
        for label in labels[shift:] + labels[:shift]:
            runs.append(run_or_read(label, algorithms[label], seed, options))
            check_same_start(runs)
            runs.sort(key=lambda run: (labels.index(run["label"]), options.seeds.index(run["seed"])))
            text = write_report(runs, options.output)
            gc.collect()
    print(text, flush=True)
    return runs


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--algorithms",
        nargs="+",
        default=list(ALGORITHMS),
        metavar="NAME",
        help=f"among {', '.join(ALGORITHMS)} (or grpo, ppo, group_ppo), or LABEL=CONFIG[+CONFIG]; default: those three",
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="default: 0 1 2")
    parser.add_argument("--steps", type=int, help="optimizer steps; default: those of each configuration")
    parser.add_argument("--threads", type=int, help="PyTorch's number of threads; default: PyTorch's own")
    parser.add_argument("--config", nargs="+", default=[], help="configurations merged over that of each algorithm")
    parser.add_argument(
        "--metric", default="val/rewards/exact_match/mean", help="what is compared; default: %(default)s"
    )
    parser.add_argument("--output", type=Path, default=Path("runs/comparison"), help="folder; default: %(default)s")
    parser.add_argument("--resume", action="store_true", help="read the runs whose results are in the folder")
    options = parser.parse_args(arguments)
    for name in ("seeds", "algorithms"):
        if len(set(getattr(options, name))) < len(getattr(options, name)):
            parser.error(f"--{name} {getattr(options, name)}: one of them is listed twice; name each once.")
    return options


def parse_algorithm(text: str) -> tuple[str, str]:
    """Label and configuration of an item of `--algorithms`."""
    label, separator, config = text.partition("=")
    known = {slug(name): name for name in ALGORITHMS}
    if not separator:
        label = known.get(slug(label), label)
        config = ALGORITHMS.get(label, "")
    if not label or not config:
        raise SystemExit(f"--algorithms {text}: pass one of {', '.join(known)}, or LABEL=CONFIG.")
    return label, config


def slug(label: str) -> str:
    """The label in file names."""
    return re.sub(r"\W+", "_", label.lower())


def run_or_read(label: str, config: str, seed: int, options: argparse.Namespace) -> Run:
    """Train, or with `--resume` read the result of an earlier run with the same options."""
    name = f"{slug(label)}-seed{seed}"
    file = options.output / "runs" / name / "result.json"
    files = [find_config(own) for own in (*config.split("+"), *options.config)]
    told = {"configs": files, "seed": seed} | {own: getattr(options, own) for own in ("steps", "threads", "metric")}
    told["digest"] = hashlib.blake2b(b"".join(_text(own) for own in files), digest_size=8).hexdigest()
    if options.resume and file.is_file():
        run = json.loads(file.read_text(encoding="utf-8"))
        if run["options"] != told:
            raise SystemExit(f"--resume: {file} is from a run with other options or configurations; remove it.")
        return run
    file.unlink(missing_ok=True)
    print(f"{label}, seed {seed}", flush=True)
    started = time.monotonic()
    run = {"label": label, "seed": seed, "options": told, **train(files, name, seed, options)}
    print(f"{label}, seed {seed}: {time.monotonic() - started:.0f} s with validation", flush=True)
    file.write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")
    return run


def train(files: Sequence[str], name: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Run `cli.py fit` in this process; return the measurements."""
    logger = {"save_dir": str(options.output), "name": "runs", "version": name}
    trainer: dict[str, Any] = {
        "logger": {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": logger},
        "callbacks": [{"class_path": f"pl_grouprl.callbacks.{own}"} for own in CALLBACKS],
        "enable_checkpointing": False,
        "enable_progress_bar": False,
    }
    if options.steps:
        trainer |= {"max_steps": options.steps, "max_epochs": -1}
    seeded = {"init_args": {"seed": seed}}
    overrides = {"seed_everything": seed, "model": seeded, "data": seeded, "trainer": trainer}
    configs = [part for own in files for part in ("--config", own)]
    return ComparedRun(["fit", *configs, "--config", json.dumps(overrides)]).result(options.metric)


class ComparedRun(RLCLI):
    """The command line of a training run, with a `Recorder` in addition to its configuration's callbacks."""

    def before_fit(self) -> None:
        """Refuse runs that the report cannot show, and add the recorder."""
        trainer = self.trainer
        if trainer.accumulate_grad_batches != 1:
            raise SystemExit(
                f"accumulate_grad_batches is {trainer.accumulate_grad_batches}, and times are logged per micro-batch; "
                "compare with 1."
            )
        every = trainer.val_check_interval
        if isinstance(every, float) or trainer.max_steps % every:
            raise SystemExit(
                f"{trainer.max_steps} steps with val_check_interval={every} may not end with a validation; pass a "
                "multiple of a whole number of steps with --steps."
            )
        device = "cuda" if trainer.strategy.root_device.type == "cuda" else "cpu"
        conditions = asdict(Conditions.here(device, "wall")) | {"lightning": pl.__version__}
        self.recorder = Recorder()
        self.recorder.record["conditions"] = conditions
        trainer.callbacks.append(self.recorder)

    def result(self, metric: str) -> dict[str, Any]:
        """Curve, seconds, counts and conditions of the finished run."""
        (summary,) = [own for own in self.trainer.callbacks if isinstance(own, RunSummary)]
        points = {name: dict(own) for name, own in summary.history.points.items()}
        if metric not in points:
            validated = [name for name in points if name.startswith("val/")]
            raise SystemExit(f"--metric {metric} was not logged; this run has {', '.join(validated)}.")
        seconds = per_step_seconds(points, self.model.updates_per_rollout)
        curve = [
            {"step": step, "seconds": sum(seconds["step"][:step]), "reward": reward}
            for step, reward in points[metric].items()
        ]
        return {"curve": curve, "seconds": seconds, **self.recorder.record}


class Recorder(pl.Callback):
    """Counts trained tokens, records the initial policy, and times the critic alone after the last step."""

    def __init__(self) -> None:
        self.record: dict[str, Any] = {
            "base_policy": None, "prompts": [], "tokens": [], "positions": [], "critic_update_seconds": []
        }  # fmt: skip

    def on_train_start(self, trainer: pl.Trainer, pl_module: GRPO | PPO) -> None:  # type: ignore[override]
        """Record the initial policy."""
        self.record |= {"algorithm": type(pl_module).__name__, "base_policy": fingerprint(pl_module.policy)}

    def on_train_batch_end(  # type: ignore[override]
        self, trainer: pl.Trainer, pl_module: GRPO | PPO, outputs: Any, batch: PromptBatch, batch_idx: int
    ) -> None:
        """Count tokens and advantage positions of new rollouts, as a share of each optimizer step."""
        if batch.update_index:
            return
        ids = [prompt.token_ids for prompt in batch.prompts]
        self.record["prompts"].append(hashlib.blake2b(json.dumps(ids).encode(), digest_size=8).hexdigest())
        tokens, positions = count_positions(pl_module)
        self.record["tokens"].append(tokens / pl_module.updates_per_rollout)
        self.record["positions"].append(positions / pl_module.updates_per_rollout)

    def on_train_end(self, trainer: pl.Trainer, pl_module: GRPO | PPO) -> None:  # type: ignore[override]
        """Time the critic while the prefixes are still shared."""
        if isinstance(pl_module, PPO):
            with trainer.precision_plugin.forward_context():
                self.record["critic_update_seconds"] = time_critic(pl_module)


def count_positions(module: GRPO | PPO) -> tuple[int, int]:
    """Trained tokens of the latest rollouts, and the number of advantages computed for them.

    GRPO computes one for each rollout, PPO and distillation one for each token, GROUP PPO one for each token group.
    """
    buffer = module.last_rollouts
    assert buffer is not None
    tokens = int(buffer.joined("loss_mask").sum())
    if isinstance(module, GroupPPO):
        assert module.token_groups is not None
        return tokens, int(token_group_counts(module.token_groups)["positions"])
    return tokens, tokens if isinstance(module, PPO | Distillation) else int(buffer.trained_episodes().sum())


def time_critic(module: PPO, rounds: int = 5) -> list[float]:
    """Seconds of the critic's forward and backward on a mini-batch of the latest rollouts, without the optimizer."""
    buffer = module.last_rollouts
    assert buffer is not None
    assert module.critic is not None
    batches = list(module.micro_batcher.for_update(buffer, buffer.members(0)))
    parameters = [parameter for parameter in module.critic.parameters() if parameter.requires_grad]
    before, module.critic_warmup_steps = module.critic_warmup_steps, module.global_step + 1  # trains the critic alone
    seconds = []
    for _ in range(1 + rounds):  # the first round warms up
        start = time.perf_counter()
        for batch in batches:
            loss, _ = module.compute_loss(batch).losses["critic"]
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
            next(gradient for gradient in gradients if gradient is not None).sum().item()  # waits for the device
        seconds.append(time.perf_counter() - start)
    module.critic_warmup_steps = before
    return seconds[1:]


def per_step_seconds(points: dict[str, dict[int, float]], updates_per_rollout: int) -> dict[str, list[float]]:
    """Seconds of each optimizer step by part, from the metrics `time/...`.

    Work before the updates of a rollout is spread evenly over them. `rest` is what none of `PARTS` covers, such as
    estimating advantages.
    """
    steps = sorted(points["time/step"])
    seconds: dict[str, list[float]] = {part: [] for part in (*PARTS, "rest", "step")}
    for start in range(0, len(steps), updates_per_rollout):
        cycle = steps[start : start + updates_per_rollout]
        mean = {part: sum(points.get(f"time/{part}", {}).get(s, 0.0) for s in cycle) / len(cycle) for part in seconds}
        mean["rest"] = mean["step"] - sum(mean[part] for part in PARTS)
        for part, own in seconds.items():
            own += [mean[part]] * len(cycle)
    return seconds


def check_same_start(runs: Sequence[Run]) -> None:
    """Refuse to compare runs from different policies, and runs of one seed on different prompts.

    Raises:
        SystemExit: If two differ; both are named.
    """
    new = runs[-1]
    for old in runs[:-1]:
        pair = f"{old['label']}, seed {old['seed']}, and {new['label']}, seed {new['seed']},"
        if not math.isclose(old["base_policy"], new["base_policy"], rel_tol=1e-6):  # a sum, whose order may differ
            raise SystemExit(f"{pair} begin with different policies; give them the same `policy`.")
        both = list(zip(old["prompts"], new["prompts"], strict=False))
        if old["seed"] == new["seed"] and any(mine != theirs for mine, theirs in both):
            raise SystemExit(f"{pair} have different prompts; give them the same `data`.")


def _text(config: str) -> bytes:
    """Content of a configuration: a file, or YAML on the command line."""
    return config.encode() if "{" in config or "\n" in config else Path(config).read_bytes()


if __name__ == "__main__":
    main()
