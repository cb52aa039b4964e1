"""Leaves out of small fits what does not depend on them and takes a third of their time."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import accelerate.utils.other as unwrapping
import torch
from lightning.pytorch.trainer.connectors import callback_connector
from lightning.pytorch.trainer.connectors.logger_connector import result

from pl_grouprl.attention.patch import SharedPrefix
from pl_grouprl.checks import sampling as decoding_check
from pl_grouprl.training import checks as prefix_sharing
from pl_grouprl.training.sampler import Sampler
from pl_grouprl.utilities.modes import is_whole

_LAYER_CHECKS: dict[Any, Any] = {}
_DECODED: dict[Any, set[Any]] = {}
_check_layers = SharedPrefix._run_layer_check


class RememberingPrefix(SharedPrefix):
    """Checks the layers of equal models once in a process: same classes, config, weights and backend."""

    def _run_layer_check(self) -> Any:
        if not is_whole(self.decoder):
            return _check_layers(self)
        key = (self.backend, _equal_for(self.model, self.decoder))
        if key not in _LAYER_CHECKS:
            _LAYER_CHECKS[key] = _check_layers(self)
        return _LAYER_CHECKS[key]


def _equal_for(model: Any, decoder: Any) -> Any:
    """The same value for models of the same classes, config and weights."""
    return (
        str(vars(decoder.config)),
        *((type(module), len(module._forward_hooks)) for module in model.modules()),
        *((weight.dtype, weight.shape, weight.double().sum().item()) for weight in decoder.parameters()),
    )


def _remembering_decoders(generate: Any) -> Any:
    """The decoding of models equal to one that has passed is not checked again."""

    def remembering(sampler: Sampler, *args: Any, **kwargs: Any) -> Any:
        model = sampler._run.policy
        if model in decoding_check._PASSED or not is_whole(model):
            return generate(sampler, *args, **kwargs)
        key = (type(sampler.engine), _equal_for(model, model))
        if key in _DECODED:
            decoding_check._PASSED[model] = set(_DECODED[key])
        groups = generate(sampler, *args, **kwargs)
        _DECODED[key] = _DECODED.get(key, set()) | decoding_check._PASSED.get(model, set())
        return groups

    return remembering


@contextmanager
def quick_fits() -> Iterator[None]:
    """Inside, models equal to one that was checked are not checked again; see the comments for the rest."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(prefix_sharing, "shared_prefix", RememberingPrefix))
        stack.enter_context(patch.object(Sampler, "generate", _remembering_decoders(Sampler.generate)))
        # To unwrap a model that is saved, accelerate imports deepspeed, and with it mlflow and pandas.
        stack.enter_context(patch.object(unwrapping, "is_deepspeed_available", lambda: "deepspeed" in sys.modules))
        if not torch.cuda.is_available():  # it records a traceback for each kind of device that it would seed later
            stack.enter_context(patch.object(torch, "manual_seed", torch.default_generator.manual_seed))
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
