"""Runs `sharded_run.py` and reads what it wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from helpers.scripts import run_script
from torch import Tensor

SCRIPT = Path(__file__).with_name("sharded_run.py")


class Run(NamedTuple):
    """What came of a fit."""

    folder: Path
    weights: dict[str, Tensor]
    steps: list[dict[str, float]]


def run(folder: Path, strategy: str, **case: Any) -> Run:
    """Fit on two ranks under a strategy."""
    folder.mkdir()
    ranks = 1 if strategy == "auto" else 2
    run_script(SCRIPT, strategy, folder, json.dumps(case), ranks=ranks, cwd=folder, timeout=200)
    weights = torch.load(folder / "weights.pt", weights_only=True)
    return Run(folder, weights, json.loads((folder / "metrics.json").read_text()))


def largest_difference(left: Run, right: Run) -> float:
    """Between the weights of two runs."""
    assert left.weights.keys() == right.weights.keys()
    return max((left.weights[name] - right.weights[name]).abs().max().item() for name in left.weights)


def exported_difference(own: Run) -> float:
    """Between the exported model's weights and those at the end of the run."""
    from transformers import AutoModelForCausalLM

    loaded = dict(AutoModelForCausalLM.from_pretrained(own.folder / "export").named_parameters())
    return max((own.weights[name] - loaded[name].detach()).abs().max().item() for name in loaded)
