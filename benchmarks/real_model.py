"""Scoring, updates and whole GRPO steps of a pretrained model, against repeated rows and against TRL's trainer.

The task is sums of two numbers, after as many worked examples as the prompt's length asks for. README.md says how to
read the tables.
"""

from __future__ import annotations

import argparse
import copy
import logging
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch

from benchmarks.cases import Case
from benchmarks.compare import Measured, Plan, compare
from benchmarks.measure import now
from benchmarks.methods import BASELINE, find_method, missing
from benchmarks.options import begin_on, make_parser, positive, write_json
from benchmarks.passes import table
from benchmarks.step_parts import StepParts
from pl_grouprl.attention import shared_prefix
from pl_grouprl.models.policy import policy_of_path

METHODS = ("repeated, padded", BASELINE, "cascade")
ROWS = ("shared", "repeated", "TRL", "TRL, shared_prefix")


@dataclass(frozen=True)
class RealCase(Case):
    """A case whose model is loaded, and whose tokens are drawn from its vocabulary.

    Attributes:
        path: Folder, hub name or GGUF file.
    """

    path: str = ""

    @classmethod
    def of(cls, path: str, **sizes: Any) -> RealCase:
        """Take the model's sizes from its config."""
        config = policy_of_path(path).load_config()
        return cls(
            path,
            path=path,
            hidden=config.hidden_size,
            layers=config.num_hidden_layers,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            intermediate=config.intermediate_size,
            vocabulary=config.vocab_size,
            **sizes,
        )

    def make_model(self, seed: int = 0) -> Any:
        """Load the model, or build it without storage."""
        if self.device != "meta":
            return policy_of_path(self.path).load().train()
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(policy_of_path(self.path).load_config())


@dataclass(frozen=True)
class Task:
    """Sums after worked examples.

    Attributes:
        path: Of the model.
        prompt: Shortest prompt, in tokens.
        rollout: Longest rollout, in tokens.
        group_size: Rollouts of a prompt.
        groups: Prompts of a step.
    """

    path: str
    prompt: int
    rollout: int
    group_size: int
    groups: int

    @cached_property
    def policy(self) -> Any:
        """The policy, as it is loaded once for all rows."""
        return _Loaded(policy_of_path(self.path).load(), policy_of_path(self.path).load_tokenizer())

    def rows(self) -> list[dict[str, Any]]:
        """Prompts as messages, each with its answer."""
        examples = 3
        while len(self._tokens(examples)) < self.prompt:
            examples += 1
        return [self._row(number, examples) for number in range(self.groups)]

    def _tokens(self, examples: int) -> list[int]:
        messages = self._row(0, examples)["prompt"]
        text = self.policy.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return self.policy.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _row(self, number: int, examples: int) -> dict[str, Any]:
        messages = []
        for place in range(examples):
            one, other = 1 + 7 * place % 20, 1 + 11 * place % 20
            messages += [_message("user", f"What is {one} + {other}?"), _message("assistant", f"Answer: {one + other}")]
        one, other = 3 + number, 9 + number
        return {"prompt": [*messages, _message("user", f"What is {one} + {other}?")], "answer": str(one + other)}


@dataclass(frozen=True)
class _Loaded:
    """Hands out copies of a loaded model."""

    model: Any
    tokenizer: Any

    def load(self) -> Any:
        return copy.deepcopy(self.model)

    def load_tokenizer(self) -> Any:
        return copy.deepcopy(self.tokenizer)


def right(completions: Any, answer: Any, **columns: Any) -> list[float]:
    """Reward: whether the answer is in the completion, less a little for its length, so that groups differ."""
    texts = [one if isinstance(one, str) else one[-1]["content"] for one in completions]
    return [float(expected in text) - 0.001 * len(text) for text, expected in zip(texts, answer, strict=True)]


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Parse the command line, measure, print, and write JSON after each part."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    options = parse(arguments)
    conditions = begin_on("cpu", options)
    end = time.monotonic() + 60 * options.minutes
    result: dict[str, Any] = {"model": options.model, "passes": [], "steps": []}
    for prompt, rollout in options.sizes:
        case = RealCase.of(options.model, prefix=prompt, rollout=rollout, group_size=options.group_size)
        for measured in [name for name in ("scoring", "update") if name in options.measure]:
            result["passes"].append(measure_pass(case, measured, options, end))
            write_json(options.output, conditions, result)
        if "step" in options.measure:
            task = Task(options.model, prompt, rollout, options.group_size, options.groups)
            result["steps"].append(measure_steps(task, options, end))
            write_json(options.output, conditions, result)
    return result


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Options of the command line."""
    parser = make_parser(__doc__, rounds=3, minutes=60.0)
    parser.add_argument(
        "--model",
        default="data/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        help="folder, hub name or GGUF file (default: what examples/prepare_smollm2.py writes)",
    )
    parser.add_argument(
        "--measure", nargs="+", choices=("scoring", "update", "step"), default=["scoring", "update", "step"]
    )
    parser.add_argument(
        "--sizes", nargs="+", type=_sizes, default=[(160, 12), (384, 32)], help="PROMPT:ROLLOUT (160:12 384:32)"
    )
    parser.add_argument("--group-size", type=positive, default=8, help="default: 8")
    parser.add_argument("--groups", type=positive, default=1, help="prompts of a GRPO step (default: 1)")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), help="of the step")
    return parser.parse_args(arguments)


def measure_pass(case: RealCase, measured: Measured, options: argparse.Namespace, end: float) -> dict[str, Any]:
    """Time scoring or updates of one group."""
    methods = [find_method(name) for name in METHODS]
    plan = Plan(methods, measured, options.rounds, options.clock, memory=False)
    comparison = compare(case, plan, end - time.monotonic())
    print(table(comparison), flush=True)
    return asdict(comparison)


def measure_steps(task: Task, options: argparse.Namespace, end: float) -> dict[str, Any]:
    """Time whole steps: rollouts, rewards, update. The first step of each row is not counted.

    With a learning rate of 0, every step samples from the same weights.
    """
    rows = []
    for name in options.rows:
        if time.monotonic() > end:
            print(f"{name} left out: --minutes {options.minutes:g} are over.")
            continue
        note = missing("trl") if name.startswith("TRL") else None
        row = {"method": name, "note": note}
        if note is None:
            run = _trl_steps if name.startswith("TRL") else _grpo_steps
            row |= run(task, name, options)
            row["median"] = statistics.median(row["seconds"])
        rows.append(row)
        print(_line(row), flush=True)
    return {"task": asdict(task), "rows": rows}


def _grpo_steps(task: Task, name: str, options: argparse.Namespace) -> dict[str, Any]:
    from lightning.pytorch import Trainer

    from pl_grouprl.algorithms import GRPO, OptimizerConfig
    from pl_grouprl.data import PromptDataModule
    from pl_grouprl.types import SamplingConfig

    module = GRPO(
        task.policy,
        right,
        num_generations=task.group_size,
        sampling=SamplingConfig(max_new_tokens=task.rollout),
        optimizer=OptimizerConfig(learning_rate=0.0),
        sharing=name,
        verify=False,
    )
    parts = StepParts(options.clock)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            accelerator="cpu", devices=1, max_steps=1 + options.rounds, max_epochs=-1, default_root_dir=folder,
            logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            callbacks=[parts],
        )  # fmt: skip
        trainer.fit(module, PromptDataModule(task.rows(), batch_size=task.groups, shuffle=False))
    steps = parts.steps[1:]
    length = float(trainer.callback_metrics["completions/mean_length"])
    return {"seconds": [step["step"] for step in steps], "parts": steps, "mean_length": length}


def _trl_steps(task: Task, name: str, options: argparse.Namespace) -> dict[str, Any]:
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class Clock(TrainerCallback):
        """Seconds of each step."""

        def __init__(self) -> None:
            self.seconds: list[float] = []

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            self.start = now(options.clock)

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            self.seconds.append(now(options.clock) - self.start)

    model, clock = task.policy.load(), Clock()
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder, report_to="none", use_cpu=True, bf16=False, gradient_checkpointing=False,
            disable_tqdm=True, save_strategy="no", logging_steps=1, max_steps=1 + options.rounds, learning_rate=0.0,
            per_device_train_batch_size=task.groups * task.group_size, num_generations=task.group_size,
            max_completion_length=task.rollout, beta=0.0, shuffle_dataset=False,
        )  # fmt: skip
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=right,
            args=config,
            train_dataset=Dataset.from_list(task.rows()),
            processing_class=task.policy.load_tokenizer(),
            callbacks=[clock],
        )
        with shared_prefix(model) if name != "TRL" else nullcontext():
            trainer.train()
    lengths = [entry["completions/mean_length"] for entry in trainer.state.log_history if "loss" in entry]
    return {"seconds": clock.seconds[1:], "mean_length": lengths[-1]}


def _line(row: dict[str, Any]) -> str:
    if row["note"]:
        return f"{row['method']:20} not run: {row['note']}"
    low, high = min(row["seconds"]), max(row["seconds"])
    return (
        f"{row['method']:20} {row['median']:8.2f} s a step ({low:.2f}-{high:.2f}), "
        f"completions of {row['mean_length']:.1f} tokens"
    )


def _sizes(text: str) -> tuple[int, int]:
    prompt, _, rollout = text.partition(":")
    return positive(prompt), positive(rollout)


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
