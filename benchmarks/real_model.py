"""Scoring, updates and whole GRPO steps of a pretrained model, against repeated rows and against TRL's trainer.

README.md says how to read the tables.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks.cases import Case
from benchmarks.compare import Measured, Plan, compare
from benchmarks.methods import BASELINE, find_method
from benchmarks.options import begin_on, make_parser, positive, write_json
from benchmarks.passes import table
from benchmarks.real_steps import ROWS, Task, measure_steps
from pl_grouprl.models.policy import policy_of_path

METHODS = ("repeated, padded", BASELINE, "cascade")


@dataclass(frozen=True)
class RealCase(Case):
    """A case with a pretrained model, whose vocabulary tokens are drawn from.

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


def _sizes(text: str) -> tuple[int, int]:
    prompt, _, rollout = text.partition(":")
    return positive(prompt), positive(rollout)
