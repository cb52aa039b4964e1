"""Finds overridden methods, and checks what they return and raise.

Errors name the class and method, what was found and what was expected.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from pl_grouprl.training.loss_sums import LossSums


def is_custom(method: Callable[..., Any]) -> bool:
    """Whether a method, or what replaces it on an instance, is not this package's."""
    return not method.__module__.startswith("pl_grouprl.")


def refuse_stop_iteration(trainer: Any) -> None:
    """Make a StopIteration that a hook raises an error. A second call changes nothing.

    Lightning would take it for the end of the data. It profiles every hook of modules, callbacks, strategies and data
    modules, but not the end of the data.
    """
    profiler = trainer.profiler
    if "profile" in vars(profiler):
        return
    profile = profiler.profile

    def refusing_profile(action: str) -> ExitStack:
        def refuse(kind: Any, error: BaseException | None, traceback: Any) -> None:
            if isinstance(error, StopIteration):
                raise RuntimeError(
                    f"{action} raised StopIteration, as next() does without a default at the end of an iterator."
                ) from error

        # With contextlib's contextmanager, the original StopIteration would be raised again.
        with ExitStack() as stack:
            stack.push(refuse)
            stack.enter_context(profile(action))
            return stack.pop_all()

    profiler.profile = refusing_profile


def checked_tensor(value: Any, where: str, *shapes: tuple[Sequence[int], str], boolean: bool = False) -> Tensor:
    """Check a tensor that an override returned; returns it detached and on the CPU.

    Args:
        value: What the override returned.
        where: Class, method and field, for the error.
        *shapes: The shapes it may have, each with a description of its axes for the error.
        boolean: Whether it must be a bool tensor rather than real numbers.

    Raises:
        TypeError: If it is not a tensor, or has the wrong dtype.
        ValueError: If its shape differs, or a value is NaN or infinite.
    """
    expected = "expected a tensor of shape " + ", or ".join(f"{list(shape)}, {meaning}" for shape, meaning in shapes)
    if not isinstance(value, Tensor):
        raise TypeError(f"{where} returned a {type(value).__name__}; {expected}.")
    if list(value.shape) not in [list(shape) for shape, _ in shapes]:
        raise ValueError(f"{where} returned shape {list(value.shape)}; {expected}.")
    if boolean != (value.dtype == torch.bool) or value.is_complex():
        kind = "of bool" if boolean else "of floating-point numbers"
        raise TypeError(f"{where} returned {value.dtype}; {expected}, {kind}.")
    value = value.detach().cpu()
    return value if boolean else _finite(value if value.is_floating_point() else value.float(), where)


def _finite(value: Tensor, where: str) -> Tensor:
    broken = int((~value.isfinite()).sum())
    if broken:
        raise ValueError(f"{where} returned {broken} of {value.numel()} values that are NaN or infinite.")
    return value


def check_loss_sums(loss_sums: Any, owner: str) -> LossSums:
    """Check what `compute_loss` returned.

    Raises:
        TypeError: If it is not `LossSums` made of pairs of tensors.
        ValueError: If a loss or a count is not a scalar.
    """
    where = f"{owner}.compute_loss"
    if not isinstance(loss_sums, LossSums):
        raise TypeError(f"{where} returned a {type(loss_sums).__name__}; expected LossSums(losses, metrics).")
    for kind, pairs in (("losses", loss_sums.losses), ("metrics", loss_sums.metrics)):
        for name, pair in pairs.items():
            if not isinstance(pair, tuple) or len(pair) != 2:
                raise TypeError(f"{where}: {kind}[{name!r}] is a {type(pair).__name__}; expected a sum and its count.")
            for part, what in zip(pair, ("sum", "count"), strict=True):
                _check_scalar(part, f"{where}: the {what} of {kind}[{name!r}]")
    for name, value in loss_sums.extremes.items():
        _check_scalar(value, f"{where}: extremes[{name!r}]")
    return loss_sums


def check_denominators(denominators: Any, owner: str) -> dict[str, Tensor]:
    """Check what `loss_denominators` returned.

    Raises:
        TypeError: If it is not a mapping of tensors.
        ValueError: If one is not a scalar.
    """
    where = f"{owner}.loss_denominators"
    if not isinstance(denominators, Mapping):
        raise TypeError(f"{where} returned a {type(denominators).__name__}; expected a scalar tensor by part.")
    for name, count in denominators.items():
        _check_scalar(count, f"{where}: {name!r}")
    return dict(denominators)


def _check_scalar(value: Any, where: str) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{where} is a {type(value).__name__}; expected a scalar tensor.")
    if value.dim():
        raise ValueError(f"{where} has shape {list(value.shape)}; expected a scalar tensor, shape [].")


_RENAMED = {
    "prepare": "compute_targets",
    "estimate_advantages": "compute_targets",
    "prepare_scores": "score_rollouts_before_update",
    "policy_terms": "compute_loss",
    "recorded_routers": "compute_loss",
    "collect_groups": "collect_rollouts",
    "reward_groups": "collect_rollouts",
    "map_rollouts": "score_rollouts",
    "start_rewards": "collect_rollouts",
    "sample_with": "generate",
    "divide": "compute_loss",
    "total_denominators": "loss_denominators",
}


def refuse_renamed(cls: type) -> None:
    """Refuse a subclass that overrides a method which is no longer called, or misspells the name of one that is.

    A name is taken as misspelt if it is new, public and close to a method that the class does not override.

    Raises:
        TypeError: Names the method to override instead.
    """
    for old, new in _RENAMED.items():
        if old in vars(cls):
            raise TypeError(f"{cls.__name__}.{old} would never be called; override {new}, see RLModule.")
    hooks = _hooks(cls.__mro__[1:])
    for name, value in vars(cls).items():
        if (
            not inspect.isfunction(value)
            or name.startswith("_")
            or any(hasattr(base, name) for base in cls.__mro__[1:])
        ):
            continue
        for hook in difflib.get_close_matches(name, hooks - vars(cls).keys(), n=1, cutoff=0.85):
            raise TypeError(
                f"{cls.__name__}.{name} would never be called; did you mean to override {hook}? If it is a method of "
                "your own, name it differently."
            )


def _hooks(bases: Sequence[type]) -> set[str]:
    """Public methods of this package's classes with more than one word in their names."""
    return {
        name
        for base in bases
        if base.__module__.startswith("pl_grouprl.")
        for name, value in vars(base).items()
        if "_" in name.strip("_") and not name.startswith("_") and inspect.isfunction(value)
    }
