"""The command line called in this process, and pieces of small configurations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from pl_grouprl.cli import main

ROOT = Path(__file__).resolve().parents[2]
LAYER = (
    "{model_type: qwen3, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1, num_attention_heads: 2, "
    "num_key_value_heads: 1, head_dim: 8}"
)
"""An architecture."""

SIZES = "prompt_length: 20, train_size: 16, val_size: 4, test_size: 4"
TASK = f"{{class_path: pl_grouprl.demo.MostFrequentDigit, init_args: {{{SIZES}}}}}"


def warm_started(folder: Any, steps: int = 2, more: str = "") -> str:
    """A policy in YAML's flow style."""
    return (
        f"{{class_path: pl_grouprl.demo.WarmStartedPolicy, init_args: {{demonstrations: {TASK}, architecture: {LAYER}, "
        f"steps: {steps}, batch_size: 4, cache_dir: {folder}/cache, progress_bar: false{more}}}}}"
    )


def printed(capsys: Any, *arguments: Any) -> str:
    """What a command prints that ends the process well."""
    with pytest.raises(SystemExit) as stop:
        main([*map(str, arguments)])
    output = capsys.readouterr()
    assert stop.value.code in (0, None), output.err
    return output.out


def print_config(capsys: Any, *arguments: Any) -> tuple[dict[str, Any], str]:
    """The configuration of a command, and its text without DeepSpeed's log."""
    lines = printed(capsys, *arguments, "--print_config").splitlines()
    text = "\n".join(line for line in lines if not line.startswith("[20"))
    return yaml.safe_load(text), text


def config_of(capsys: Any, *files: Any) -> dict[str, Any]:
    """The configuration of `fit` with these files."""
    return print_config(capsys, "fit", *(part for file in files for part in ("--config", file)))[0]


def usage_error(capsys: Any, *arguments: Any) -> str:
    """What a command prints that is a usage error."""
    with pytest.raises(SystemExit) as stop:
        main([*map(str, arguments)])
    assert stop.value.code == 2
    return capsys.readouterr().err
