"""`python -m benchmarks NAME ...`: the entry point of all benchmarks.

Nothing is imported before the name is known, so listing them is instant.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from benchmarks.allocator import keep_freed

COMMANDS = {
    "attention": "attention of one layer, each backend against the prompt repeated",
    "scoring": "log-probabilities of groups without gradient: time, memory, share of the ideal",
    "update": "forward, backward and AdamW on groups: time, memory, share of the ideal",
    "forests": "trees of any depth: time, memory and operations, against repeated rows and the ideal",
    "shared-rows": "the search for common prefixes in padded rows",
    "operators": "where that time goes, by kind of operator, and what the host waits for",
    "head": "log-probabilities from hidden states: time, memory, accuracy",
    "rollouts": "sampling with each engine and with generate",
    "step": "a training step, model work and everything else",
    "token-groups": "finding the token groups of GROUP PPO, against a forward pass",
    "growth": "time and memory as groups grow, compared with a straight line",
    "sweep": "time, operations and memory against P/R for several P and G, as a figure",
    "critic-update": "PPO and GROUP PPO: the critic's update and the whole step, by part",
    "real-model": "scoring, updates and GRPO steps of a pretrained model, against repeated rows and TRL's trainer",
    "packing": "how full the rows of a token budget are, by counting",
    "balance": "time of two ranks against the estimated cost of their groups",
    "scaling-check": "a predicted step of two processes (`plan --gpus`) against a measured one",
    "credit": "bias and variance of gradients from branched rollouts, on a table of logits",
    "branching": "training and its gradients with branched episodes, against independent ones",
    "staleness": "training with rollouts sampled ahead, against on-policy training: step times and validation",
    "vs-trl": "a GRPO step by this package and by TRL, on the same rollouts",
    "gpu-stages": "one stage of the unattended run on a GPU",
    "unattended": "all of them in a few minutes; on a GPU, what matters most first, and its tests",
}
"""Names and descriptions."""

FUNCTIONS = {"scoring": "passes.scoring", "update": "passes.update"}
"""The function of a command, unless it is `main` in the module with its name."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a benchmark with the arguments after its name."""
    name, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name in ("-h", "--help"):
        print(f"{usage()}\nEach takes --help.")
        return
    if name not in COMMANDS:
        raise SystemExit(f"{name!r} is not a benchmark.\n{usage()}")
    sys.argv[0] = f"python -m benchmarks {name}"  # shown in its usage line
    module, _, function = FUNCTIONS.get(name, f"{name.replace('-', '_')}.main").partition(".")
    getattr(importlib.import_module(f"benchmarks.{module}"), function)(rest)


def usage() -> str:
    """The list of benchmarks."""
    lines = [f"  {name:14} {line}" for name, line in COMMANDS.items()]
    return "\n".join(["usage: python -m benchmarks NAME [options]", "", *lines])


if __name__ == "__main__":
    keep_freed()
    main()
