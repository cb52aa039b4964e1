"""Leaves out of small fits what does not depend on them and takes a third of their time."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from lightning.pytorch.trainer.connectors import callback_connector
from lightning.pytorch.trainer.connectors.logger_connector import result

from pl_grouprl.attention.patch import SharedPrefix
from pl_grouprl.training import prefix_sharing
from pl_grouprl.utilities import garbage
from pl_grouprl.utilities.modes import is_whole

_LAYER_CHECKS: dict[Any, Any] = {}
_check_layers = SharedPrefix._run_layer_check


class RememberingPrefix(SharedPrefix):
    """Checks the layers of equal models once in a process: same classes, config, weights and backend."""

    def _run_layer_check(self) -> Any:
        if not is_whole(self.decoder):
            return _check_layers(self)
        key = (
            self.backend,
            str(vars(self.decoder.config)),
            *((type(module), len(module._forward_hooks)) for module in self.model.modules()),
            *((weight.dtype, weight.shape, weight.double().sum().item()) for weight in self.decoder.parameters()),
        )
        if key not in _LAYER_CHECKS:
            _LAYER_CHECKS[key] = _check_layers(self)
        return _LAYER_CHECKS[key]


@contextmanager
def quick_fits() -> Iterator[None]:
    """Inside, models equal to one that was checked are not checked again; see the comments for the rest."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(prefix_sharing, "shared_prefix", RememberingPrefix))
        # To count what is frozen takes 50 ms with all that tests import.
        stack.enter_context(patch.object(garbage, "anything_frozen", return_value=True))
        # Private names of Lightning: tests take longer where they have changed.
        if hasattr(callback_connector, "_load_external_callbacks"):  # reads the metadata of all installed packages
            once = functools.cache(callback_connector._load_external_callbacks)
            stack.enter_context(patch.object(callback_connector, "_load_external_callbacks", once))
        if hasattr(result, "_ResultMetric"):  # copies all that it knows of a metric, to move it where it is
            stack.enter_context(patch.object(result._ResultMetric, "to", _move_unless_there(result._ResultMetric.to)))
        yield


def _move_unless_there(move: Any) -> Any:
    def to(metric: Any, *args: Any, **kwargs: Any) -> Any:
        there = metric.is_tensor and len(args) == 1 and not kwargs and metric.value.device == torch.device(args[0])
        return metric if there else move(metric, *args, **kwargs)

    return to
