"""Builds the objects of a run from a file in configs/ without the command line's packages.

Options that are dataclasses stay mappings, which constructors convert.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch import Trainer, seed_everything

from pl_grouprl.rewards import Weighted

CONFIGS = Path(__file__).resolve().parent.parent / "configs"


def read_config(name: str) -> dict[str, Any]:
    """The content of `configs/{name}.yaml`, or of the file at that path."""
    path = Path(name) if name.endswith(".yaml") else CONFIGS / f"{name}.yaml"
    return yaml.safe_load(path.read_text())


def build_run(config: Mapping[str, Any], **trainer_options: Any) -> tuple[Trainer, Any, Any]:
    """Create the Trainer, the module and the data module of a config.

    Args:
        config: Result of `read_config`.
        trainer_options: Arguments of the Trainer that replace those of the config.
    """
    seed_everything(config["seed_everything"], verbose=False)
    options = config["trainer"] | trainer_options
    trainer = Trainer(**{name: build(value) for name, value in options.items()})
    return trainer, build(config["model"]), build(config["data"])


def build(value: Any, option: str = "") -> Any:
    """Convert a YAML value to a constructor's argument.

    Args:
        value: A number, a string, a list, or a mapping; one with a `class_path` becomes an instance.
        option: Name of the argument that it is for.
    """
    if isinstance(value, list):
        return [Weighted(**build(own)) if option == "rewards" and "function" in own else build(own) for own in value]
    if not isinstance(value, Mapping):
        return value
    options = {name: build(own, name) for name, own in value.get("init_args", value).items() if name != "class_path"}
    if "class_path" in value:
        module, name = value["class_path"].rsplit(".", 1)
        return getattr(importlib.import_module(module), name)(**options)
    return options
