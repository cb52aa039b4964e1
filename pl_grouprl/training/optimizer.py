"""One optimizer for all parts of a module, each with its learning rate and schedule."""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from pl_grouprl.utilities import optional
from pl_grouprl.utilities.options import check_options

Schedule = Literal["constant", "linear", "cosine"]

_ADAMW = "torch.optim.AdamW"

_NO_DECAY = "_no_decay"
"""Suffix of the parameter group of vectors, if matrices have weight decay, or Muon."""

_EMBEDDINGS = "_embeddings"
"""Suffix of the parameter group of embeddings, if other moments are quantized, or matrices of layers have Muon."""

_OTHERS = "_others"
"""Suffix of the parameter group of stacked matrices and of those with one row or column, if the rest have Muon."""


@dataclass(frozen=True)
class OptimizerConfig:
    """Options of an optimizer and its learning rate schedule; steps are optimizer steps.

    Attributes:
        learning_rate: Peak learning rate.
        weight_decay: Weight decay of weight matrices; vectors (norms, biases) are never decayed.
        betas: Decay rates of AdamW's two moments.
        eps: Added to AdamW's denominator.
        warmup_steps: Steps over which the learning rate rises from 0.
        schedule: After the warm-up: `constant`, or `linear` or `cosine` decay to `final_fraction`.
        final_fraction: Fraction of the peak learning rate at the last step.
        max_grad_norm: Clips this part's gradient norm separately; defaults to `trainer.gradient_clip_val`, which
            clips all such parts together.
        state_bits: Bits per value of the two moments. With 8, they are quantized in blocks of 256 (bitsandbytes,
            arXiv:2110.02861) and need 2 bytes per weight instead of 8; those of embeddings and of tensors with fewer
            than 4096 numbers keep 32. Needs whole weights: a single device or DDP.
        optim: Path of the optimizer's class, such as `torch.optim.SGD` or `torchao.optim.AdamW8bit`. With
            `torch.optim.Muon`, AdamW trains what Muon is not for: embeddings, the output head, and all that is not
            a matrix. Another class than AdamW needs weights in their own shapes: a single device, DDP or FSDP2.
        optim_args: Arguments of its constructor besides `learning_rate` and `weight_decay`, which every class gets.

    Raises:
        ModuleNotFoundError: If `state_bits` is 8 and bitsandbytes is not installed.
        ValueError: If an option is out of range, or `optim` does not take it.
        ImportError: If there is no module of `optim`.
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
    optim: str = _ADAMW
    optim_args: dict[str, Any] | None = None

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
                "choose schedule 'linear' or 'cosine', or omit final_fraction."
            )
        if self.state_bits == 8:
            optional.require(optional.BITSANDBYTES_AVAILABLE, "OptimizerConfig(state_bits=8)", "bitsandbytes")
        known = inspect.signature(self.optimizer_class).parameters
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
        own = {"params", "lr", "weight_decay"} | ({"betas", "eps"} if self.optim == _ADAMW else set())
        for name in self.optim_args or ():  # torch would keep an unknown one in the groups, unused
            if name in own or (name not in known and not takes_all):
                taken = ", ".join(sorted(known.keys() - own))
                raise ValueError(f"OptimizerConfig.optim_args has {name!r}; {self.optim} takes {taken}.")
        if self.weight_decay and "weight_decay" not in known and not takes_all:
            raise ValueError(f"OptimizerConfig.weight_decay is {self.weight_decay}, which {self.optim} does not have.")
        if self.state_bits == 8 and (self.optim != _ADAMW or self.optim_args):
            raise ValueError("OptimizerConfig.state_bits is 8, of bitsandbytes' AdamW; omit optim and optim_args.")
        for name, default in {"betas": (0.9, 0.999), "eps": 1e-8}.items():
            if self.optim != _ADAMW and not self.has_muon and getattr(self, name) != default:
                raise ValueError(
                    f"OptimizerConfig.{name} is {getattr(self, name)}, of {_ADAMW}; leave it at {default}, and put what"
                    f" {self.optim} takes into optim_args."
                )

    @property
    def optimizer_class(self) -> type[torch.optim.Optimizer]:
        """The class at `optim`."""
        module, _, name = self.optim.rpartition(".")
        found: type[torch.optim.Optimizer] = getattr(importlib.import_module(module), name)
        return found

    @property
    def has_muon(self) -> bool:
        """Whether the matrices of layers are trained by Muon, and the rest by AdamW."""
        return issubclass(self.optimizer_class, torch.optim.Muon)

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
        fused: As in `torch.optim.AdamW`; for groups of AdamW whose `optim_args` do not choose.

    Raises:
        ValueError: If a schedule needs the length of the run and the Trainer sets none.
    """
    needs_total = any(config.schedule != "constant" for _, config in parts.values())
    steps = total_steps() if needs_total else math.inf
    if needs_total and math.isinf(steps):
        raise ValueError("schedule is 'linear' or 'cosine' and the run has no end; set max_steps or max_epochs.")
    adamw: list[dict[str, Any]] = []
    others: list[tuple[OptimizerConfig, list[dict[str, Any]]]] = []
    factors: dict[str, Callable[[int], float]] = {}
    for name, (module, config) in parts.items():
        own: list[dict[str, Any]] = []
        for suffix, parameters in _groups(module, config).items():
            group = {
                "name": name + suffix,
                "params": parameters,
                "lr": config.learning_rate,
                "weight_decay": 0.0 if suffix == _NO_DECAY else config.weight_decay,
            }
            if config.optim == _ADAMW or (config.has_muon and suffix):
                bits = 32 if suffix == _EMBEDDINGS else config.state_bits
                options = {} if config.has_muon else config.optim_args or {}
                adamw.append({**group, "betas": config.betas, "eps": config.eps, "state_bits": bits, **options})
            else:
                own.append(group)
            factors[name + suffix] = partial(config.learning_rate_factor, total_steps=steps)
        if own:
            others.append((config, own))
    optimizers = [_adamw(adamw, fused)] if adamw else []
    optimizers += [config.optimizer_class(own, **config.optim_args or {}) for config, own in others]
    if len(optimizers) > 1 and any(group["state_bits"] == 8 for group in adamw):
        raise ValueError("state_bits is 8 in one part and optim another class in another; omit one of them.")
    optimizer = optimizers[0] if len(optimizers) == 1 else SeveralOptimizers(optimizers)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, [factors[g["name"]] for g in optimizer.param_groups])
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def parameters_by_part(parts: Mapping[str, tuple[nn.Module, OptimizerConfig]]) -> dict[str, list[nn.Parameter]]:
    """Return the trained parameters of each part. An optimizer that shards them may hold other tensors."""
    return {name: [p for p in module.parameters() if p.requires_grad] for name, (module, _) in parts.items()}


class SeveralOptimizers(torch.optim.Optimizer):
    """Optimizers that step together, with one list of groups and one state: Lightning runs and saves a single one.

    Args:
        optimizers: Optimizers of different parameters.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers
        super().__init__([group for own in optimizers for group in own.param_groups], {})
        self._share()

    def __getstate__(self) -> dict[str, Any]:
        """For copies; torch names only its own attributes."""
        return {**super().__getstate__(), "optimizers": self.optimizers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._share()

    def _share(self) -> None:
        """Give each its groups and the common state, which loading a checkpoint replaces."""
        groups = iter(self.param_groups)
        for own in self.optimizers:
            own.__setstate__({"state": self.state, "param_groups": [next(groups) for _ in own.param_groups]})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Compute gradients if there is a closure, and make one step of each."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for own in self.optimizers:
            own.step()
        return loss


def _adamw(groups: list[dict[str, Any]], fused: bool | None) -> torch.optim.Optimizer:
    if any({"fused", "foreach"} & group.keys() for group in groups):
        fused = None  # chosen by optim_args
    if all(group["state_bits"] == 32 for group in groups):
        return torch.optim.AdamW(
            [{name: value for name, value in group.items() if name != "state_bits"} for group in groups], fused=fused
        )
    from pl_grouprl.training.adamw_8bit import AdamW8bit

    return AdamW8bit(groups)


def _groups(module: nn.Module, config: OptimizerConfig) -> dict[str, list[nn.Parameter]]:
    """Trained parameters by the suffix of their group. Only a part without trained parameters has an empty group."""
    embeddings = {p for layer in module.modules() if isinstance(layer, nn.Embedding) for p in layer.parameters()}
    if config.has_muon:  # nor are output heads for it
        models: list[Any] = [layer for layer in module.modules() if hasattr(layer, "get_output_embeddings")]
        heads = [head for model in models if (head := model.get_output_embeddings()) is not None]
        embeddings |= {parameter for head in heads for parameter in head.parameters()}
    groups: dict[str, list[nn.Parameter]] = {}
    for parameter in module.parameters():
        if not parameter.requires_grad:
            continue
        shape: Sequence[int] = getattr(parameter, "whole_shape", parameter.shape)  # FSDP1's shards are flat
        suffix = _NO_DECAY if config.weight_decay and len(shape) < 2 else ""
        if (config.state_bits < 32 or config.has_muon) and parameter in embeddings:
            suffix = _EMBEDDINGS
        elif config.has_muon and (len(shape) != 2 or 1 in shape):
            suffix = _NO_DECAY if len(shape) < 2 else _OTHERS
        groups.setdefault(suffix, []).append(parameter)
    return {suffix: groups[suffix] for suffix in ("", _EMBEDDINGS, _OTHERS, _NO_DECAY) if suffix in groups} or {"": []}
