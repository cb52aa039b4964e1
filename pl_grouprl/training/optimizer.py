"""One AdamW for all parts of a module, each with its learning rate and schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from pl_grouprl.utilities import optional
from pl_grouprl.utilities.arguments import checked_arguments
from pl_grouprl.utilities.options import check_options

Schedule = Literal["constant", "linear", "cosine"]

_NO_DECAY = "_no_decay"
"""Suffix of the parameter group of vectors, if matrices have weight decay."""

_EMBEDDINGS = "_embeddings"
"""Suffix of the parameter group of embeddings, if other moments are quantized."""


@checked_arguments
@dataclass(frozen=True)
class OptimizerConfig:
    """Options of AdamW and its learning rate schedule; steps are optimizer steps.

    Attributes:
        learning_rate: Peak learning rate.
        weight_decay: Decoupled weight decay of weight matrices; vectors (norms, biases) are never decayed.
        betas: Decay rates of the two moments.
        eps: Added to the denominator.
        warmup_steps: Steps over which the learning rate rises from 0.
        schedule: After the warm-up: `constant`, or `linear` or `cosine` decay to `final_fraction`.
        final_fraction: Fraction of the peak learning rate at the last step.
        max_grad_norm: Clips this part's gradient norm separately; None leaves it to `trainer.gradient_clip_val`, which
            clips all such parts together.
        state_bits: Bits per value of the two moments. With 8, they are quantized in blocks of 256 (bitsandbytes,
            arXiv:2110.02861) and need 2 bytes per weight instead of 8; those of embeddings and of tensors with fewer
            than 4096 numbers keep 32. Needs whole weights: a single device or DDP.

    Raises:
        ModuleNotFoundError: If `state_bits` is 8 and bitsandbytes is not installed.
        ValueError: If an option is out of range.
    """

    learning_rate: float = 1e-6
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    warmup_steps: int = 0
    schedule: Schedule = "constant"
    final_fraction: float = 0.0
    max_grad_norm: float | None = None
    state_bits: Literal[8, 32] = 32

    def __post_init__(self) -> None:
        checks: dict[str, tuple[bool, str]] = {
            "learning_rate": (0 <= self.learning_rate < math.inf, "a finite number, 0 or larger"),
            "weight_decay": (0 <= self.weight_decay < math.inf, "a finite number, 0 or larger"),
            "betas": (len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas), "two numbers in [0, 1)"),
            "eps": (0 < self.eps < math.inf, "a finite number larger than 0: weights without a gradient get 0 / eps"),
            "warmup_steps": (self.warmup_steps >= 0, "0 (no warm-up) or larger"),
            "schedule": (self.schedule in ("constant", "linear", "cosine"), "constant, linear or cosine"),
            "final_fraction": (0 <= self.final_fraction <= 1, "in [0, 1]"),
            "max_grad_norm": (self.max_grad_norm is None or self.max_grad_norm > 0, "larger than 0, or None"),
            "state_bits": (self.state_bits in (8, 32), "8 or 32"),
        }
        check_options({f"OptimizerConfig.{name}": (getattr(self, name), *check) for name, check in checks.items()})
        if self.final_fraction and self.schedule == "constant":
            raise ValueError(
                f"OptimizerConfig.final_fraction is {self.final_fraction} with schedule 'constant', which never falls; "
                "choose schedule 'linear' or 'cosine', or leave final_fraction out."
            )
        if self.state_bits == 8:
            optional.require(optional.BITSANDBYTES_AVAILABLE, "OptimizerConfig(state_bits=8)", "bitsandbytes")

    def learning_rate_factor(self, step: int, total_steps: float) -> float:
        """Fraction of the peak learning rate at an optimizer step, counted from 0."""
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        if self.schedule == "constant":
            return 1.0
        progress = min((step - self.warmup_steps) / max(total_steps - self.warmup_steps, 1), 1.0)
        falling = 1 - progress if self.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
        return self.final_fraction + (1 - self.final_fraction) * falling


def build_optimizer(
    parts: Mapping[str, tuple[nn.Module, OptimizerConfig]],
    total_steps: Callable[[], float],
    fused: bool | None = None,
) -> dict[str, Any]:
    """Build the return value of `configure_optimizers`.

    Args:
        parts: Module and options of each part, by the prefix of its parameter groups' names.
        total_steps: Returns the optimizer steps of the whole run; called only if a schedule needs them.
        fused: As in `torch.optim.AdamW`.

    Raises:
        ValueError: If a schedule needs the length of the run and the Trainer sets none.
    """
    needs_total = any(config.schedule != "constant" for _, config in parts.values())
    steps = total_steps() if needs_total else math.inf
    if needs_total and math.isinf(steps):
        raise ValueError("schedule is 'linear' or 'cosine' and the run has no end; set max_steps or max_epochs.")
    groups: list[dict[str, Any]] = []
    factors: list[Callable[[int], float]] = []
    for name, (module, config) in parts.items():
        for suffix, parameters in _groups(module, config).items():
            groups.append(
                {
                    "name": name + suffix,
                    "params": parameters,
                    "lr": config.learning_rate,
                    "betas": config.betas,
                    "eps": config.eps,
                    "weight_decay": 0.0 if suffix == _NO_DECAY else config.weight_decay,
                    "state_bits": 32 if suffix == _EMBEDDINGS else config.state_bits,
                }
            )
            factors.append(lambda step, config=config: config.learning_rate_factor(step, steps))  # type: ignore[misc]
    optimizer = _adamw(groups, fused)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factors)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def parameters_by_part(parts: Mapping[str, tuple[nn.Module, OptimizerConfig]]) -> dict[str, list[nn.Parameter]]:
    """Return the trained parameters of each part. An optimizer that shards them may hold other tensors."""
    return {name: [p for p in module.parameters() if p.requires_grad] for name, (module, _) in parts.items()}


def _adamw(groups: list[dict[str, Any]], fused: bool | None) -> torch.optim.Optimizer:
    if all(group["state_bits"] == 32 for group in groups):
        return torch.optim.AdamW(
            [{name: value for name, value in group.items() if name != "state_bits"} for group in groups], fused=fused
        )
    from pl_grouprl.training.adamw_8bit import AdamW8bit

    return AdamW8bit(groups)


def _groups(module: nn.Module, config: OptimizerConfig) -> dict[str, list[nn.Parameter]]:
    """Trained parameters by the suffix of their group. Only a part without trained parameters has an empty group."""
    embeddings = {p for layer in module.modules() if isinstance(layer, nn.Embedding) for p in layer.parameters()}
    groups: dict[str, list[nn.Parameter]] = {}
    for parameter in module.parameters():
        if not parameter.requires_grad:
            continue
        suffix = _NO_DECAY if config.weight_decay and not _is_matrix(parameter) else ""
        if config.state_bits < 32 and parameter in embeddings:
            suffix = _EMBEDDINGS
        groups.setdefault(suffix, []).append(parameter)
    return {suffix: groups[suffix] for suffix in ("", _EMBEDDINGS, _NO_DECAY) if suffix in groups} or {"": []}


def _is_matrix(parameter: nn.Parameter) -> bool:
    return len(getattr(parameter, "whole_shape", parameter.shape)) >= 2  # FSDP1's shards are flat


def saved_options(parts: Mapping[str, tuple[nn.Module, OptimizerConfig]]) -> dict[str, Any]:
    """Options that are saved with the optimizer's state, by `part.option`."""
    return {
        f"{part}.{name}": list(value) if isinstance(value := getattr(config, name), tuple) else value
        for part, (_, config) in parts.items()
        for name in ("learning_rate", "weight_decay", "betas", "eps", "state_bits")
    }
