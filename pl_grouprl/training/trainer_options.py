"""Refuses Trainer options that a fit cannot honour, or that would end it before it begins."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch.callbacks import BatchSizeFinder, GradientAccumulationScheduler, LearningRateFinder
from torch._dynamo import OptimizedModule

from pl_grouprl.data.loaders import TrainPromptLoader
from pl_grouprl.utilities.distributed import num_ranks
from pl_grouprl.utilities.options import check_options

_REWARD = re.compile(r"((val|test)/)?(reward|rewards/.+/mean|.+/(mean|best|maj|pass)@\d+)")
"""Names of metrics of which more is better."""


def check_device(device: torch.device) -> None:
    """Refuse Apple's GPUs, which a Trainer chooses by itself on a Mac.

    Raises:
        ValueError: Says what to choose.
    """
    if device.type == "mps":
        raise ValueError(
            "trainer.accelerator is 'mps', which has no float64: sampling and the statistics of rewards need it. Set "
            "it to 'cpu'. (SharedPrefixCallback in a LightningModule of your own takes mps.)"
        )


def check_trainer(trainer: Any, stage: str) -> None:
    """Refuse finders of batch sizes and learning rates, and Trainer options that a fit cannot honor.

    Raises:
        ValueError: Names the option, its value and what it must be, or the finder.
    """
    for callback in getattr(trainer, "callbacks", ()):
        for finder, reason in _FINDERS.items():
            if isinstance(callback, finder):
                raise ValueError(f"callbacks has a {type(callback).__name__}, {reason}.")
    if stage != "fit":
        return
    if num_ranks() not in (1, trainer.world_size):
        raise ValueError(
            f"a process group of {num_ranks()} ranks exists, but the Trainer has {trainer.world_size}; gradients "
            "would not be averaged over it. Pass devices and strategy for all ranks, or destroy the group."
        )
    for callback in trainer.callbacks:
        name, monitor = type(callback).__name__, str(getattr(callback, "monitor", ""))
        if getattr(callback, "mode", None) == "min" and _REWARD.fullmatch(monitor):
            raise ValueError(f"{name}(monitor={monitor!r}) has mode='min', under which the lowest is best; pass 'max'.")
    every_epoch, interval = trainer.check_val_every_n_epoch, trainer.val_check_interval
    clip, limit = trainer.gradient_clip_val, trainer.limit_train_batches
    accumulated = trainer.accumulate_grad_batches
    check_options(
        {
            "trainer.accumulate_grad_batches": (accumulated, _is_count(accumulated), "a whole number, at least 1"),
            "trainer.val_check_interval": (
                interval,
                not isinstance(interval, int | float) or interval > 0,
                "larger than 0; for no validation leave the data module's val out, or set limit_val_batches to 0",
            ),
            "trainer.check_val_every_n_epoch": (
                every_epoch,
                every_epoch is None or _is_count(every_epoch),
                "a whole number, at least 1, or None",
            ),
            "trainer.gradient_clip_val": (clip, clip is None or clip >= 0, "0 (off) or larger, or None"),
            "trainer.limit_train_batches": (limit, limit > 0, "larger than 0: otherwise the run would end immediately"),
            "trainer.overfit_batches": (
                trainer.overfit_batches,
                not _is_no_batch(trainer),
                "0 (off), a number of batches, or a share that is at least one batch of validation",
            ),
            "trainer.max_steps": (trainer.max_steps, trainer.max_steps != 0, "at least 1, or -1 for no limit"),
            "trainer.max_epochs": (trainer.max_epochs, trainer.max_epochs != 0, "at least 1, or -1 for no limit"),
        }
    )


_FINDERS = {
    BatchSizeFinder: "but batch_size decides what is optimized, not how much memory it takes; leave it out, and set "
    "max_tokens_per_micro_batch (on a GPU its default is what fits)",
    LearningRateFinder: "which compares losses, but the loss of a policy gradient does not say how good the policy is; "
    "leave it out, and compare the rewards of short runs",
}


def accumulation_schedule(trainer: Any) -> dict[int, int]:
    """Batches per optimizer step, by the epoch in which that number begins."""
    schedulers = [callback for callback in trainer.callbacks if isinstance(callback, GradientAccumulationScheduler)]
    return schedulers[0].scheduling if schedulers else {0: trainer.accumulate_grad_batches}


def _is_no_batch(trainer: Any) -> bool:
    """Whether `overfit_batches` is a share that comes to less than one validation batch."""
    data = getattr(trainer, "datamodule", None)
    prompts = getattr(data, "prompts", {}).get("val", ())
    batches = math.ceil(len(prompts) / getattr(data, "val_batch_size", 1))
    share = trainer.overfit_batches
    return isinstance(share, float) and 0 < share < 1 and batches > 0 and share * batches < 1


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def refuse_manual_optimization(module: Any) -> None:
    """Refuse manual optimization, under which no optimizer would ever step and `max_steps` would never be reached.

    Raises:
        ValueError: Names the module's class.
    """
    if not module.automatic_optimization:
        raise ValueError(
            f"{type(module).__name__}.automatic_optimization is False, but RLModule steps the optimizer by Lightning's "
            "automatic optimization; leave it at True and override optimizer_step or configure_optimizers instead."
        )


def refuse_compiled(modules: Mapping[str, Any]) -> None:
    """Refuse compiled modules.

    Args:
        modules: Modules by name, for the error.

    Raises:
        ValueError: Says what to compile instead.
    """
    for name, part in modules.items():
        compiled = isinstance(part, OptimizedModule) or part._compiled_call_impl is not None
        if compiled or getattr(part, "_compiler_ctx", None) is not None:
            raise ValueError(
                f"{name} is compiled, which is not supported yet; leave out torch.compile({name}) and "
                f"{name}.compile(). The policy's decoder layers can be compiled: compile_layers of its source."
            )


def check_updates(trainer: Any, num_iterations: int, num_mini_batches: int) -> None:
    """Refuse more mini-batches than prompts, accumulation over several passes, and epochs that end between updates.

    Raises:
        ValueError: Names the options.
    """
    data = trainer.fit_loop._data_source.instance
    batch_size = getattr(data, "batch_size", None)
    if batch_size is not None and num_mini_batches > batch_size:
        raise ValueError(
            f"num_mini_batches is {num_mini_batches} with batch_size={batch_size} prompts; groups are not split, so it "
            f"can be at most {batch_size}."
        )
    accumulated = max(accumulation_schedule(trainer).values())
    if num_iterations > 1 and accumulated > num_mini_batches:
        raise ValueError(
            f"accumulate_grad_batches is {accumulated} with num_mini_batches={num_mini_batches} and "
            f"num_iterations={num_iterations}: one optimizer step would add up several passes over the same "
            "rollouts, which is the same as one pass. Set num_iterations to 1, or accumulate less."
        )
    updates, limit = num_iterations * num_mini_batches, trainer.limit_train_batches
    num_batches = len(data) if isinstance(data, TrainPromptLoader) else getattr(data, "num_train_batches", math.inf)
    used = min(num_batches, limit) if isinstance(limit, int) else num_batches * limit
    if used < math.inf and int(used) % updates and not trainer.fast_dev_run:
        name = "overfit_batches" if trainer.overfit_batches else "limit_train_batches"
        raise ValueError(
            f"trainer.{name} is {limit}, which ends each epoch after {int(used)} batches, amid the {updates} updates "
            f"(num_iterations={num_iterations} x num_mini_batches={num_mini_batches}) of a batch of rollouts; make it "
            f"a multiple of {updates}."
        )
