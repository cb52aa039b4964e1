"""Whole GRPO steps of a pretrained model, by this package and by TRL's trainer.

The task is sums of two numbers, after enough worked examples to reach the prompt's length.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from benchmarks.measure import now
from benchmarks.methods import missing
from benchmarks.step_parts import StepParts
from pl_grouprl.attention import shared_prefix
from pl_grouprl.models.policy import policy_of_path

ROWS = ("shared", "repeated", "TRL", "TRL, shared_prefix")
"""Rows of the table: the option `sharing.mode` of GRPO, or TRL's trainer without and with shared prefixes."""


@dataclass(frozen=True)
class Task:
    """Sums after worked examples.

    Attributes:
        path: Folder, hub name or GGUF file of the model.
        prompt: Minimum length of a prompt, in tokens.
        rollout: Maximum length of a rollout, in tokens.
        group_size: Number of rollouts of a prompt.
        groups: Number of prompts of a step.
    """

    path: str
    prompt: int
    rollout: int
    group_size: int
    groups: int

    @cached_property
    def policy(self) -> Any:
        """A source of the policy that loads it once for all rows of the table."""
        source = policy_of_path(self.path)
        return _LoadedOnce(source.load(), source.load_tokenizer())

    def prompts(self) -> list[dict[str, Any]]:
        """Prompts as messages, each with its answer."""
        examples = 3
        while self._length(self._make_prompt(0, examples)["prompt"]) < self.prompt:
            examples += 1
        return [self._make_prompt(number, examples) for number in range(self.groups)]

    def _length(self, messages: list[dict[str, str]]) -> int:
        text = self.policy.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return len(self.policy.tokenizer(text, add_special_tokens=False)["input_ids"])

    @staticmethod
    def _make_prompt(number: int, examples: int) -> dict[str, Any]:
        messages = []
        for index in range(examples):
            a, b = 1 + 7 * index % 20, 1 + 11 * index % 20
            messages += [_message("user", f"What is {a} + {b}?"), _message("assistant", f"Answer: {a + b}")]
        a, b = 3 + number, 9 + number
        return {"prompt": [*messages, _message("user", f"What is {a} + {b}?")], "answer": str(a + b)}


@dataclass(frozen=True)
class _LoadedOnce:
    """A policy source that returns copies of a loaded model."""

    model: Any
    tokenizer: Any

    def load(self) -> Any:
        return copy.deepcopy(self.model)

    def load_tokenizer(self) -> Any:
        return copy.deepcopy(self.tokenizer)


def contains_answer(completions: Any, answer: Any, **columns: Any) -> list[float]:
    """Reward 1 for a completion with the answer, minus a little for its length, so rewards in a group differ."""
    texts = [text if isinstance(text, str) else text[-1]["content"] for text in completions]
    return [float(expected in text) - 0.001 * len(text) for text, expected in zip(texts, answer, strict=True)]


def measure_steps(task: Task, options: argparse.Namespace, end: float) -> dict[str, Any]:
    """Time whole steps: rollouts, rewards, update. The first step of each row is not counted.

    The learning rate is 0, so every step samples from the same weights.

    Args:
        task: What is trained.
        options: `rows`, `rounds`, `clock` and `minutes` of the command line.
        end: No row starts after this time of `time.monotonic()`.
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
        contains_answer,
        num_generations=task.group_size,
        sampling=SamplingConfig(max_new_tokens=task.rollout),
        optimizer=OptimizerConfig(learning_rate=0.0),
        sharing={"mode": name, "verify": False},
    )
    parts = StepParts(options.clock)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            accelerator="cpu", devices=1, max_steps=1 + options.rounds, max_epochs=-1, default_root_dir=folder,
            logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            callbacks=[parts],
        )  # fmt: skip
        trainer.fit(module, PromptDataModule(task.prompts(), batch_size=task.groups, shuffle=False))
    steps = parts.steps[1:]
    length = float(trainer.callback_metrics["completions/mean_length"])
    return {"seconds": [step["step"] for step in steps], "parts": steps, "mean_length": length}


def _trl_steps(task: Task, name: str, options: argparse.Namespace) -> dict[str, Any]:
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class Clock(TrainerCallback):
        """Measures the seconds of each step."""

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
            reward_funcs=contains_answer,
            args=config,
            train_dataset=Dataset.from_list(task.prompts()),
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


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
