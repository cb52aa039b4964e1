"""Isolates vLLM inside the trainer's process: each of the two gets its own global state."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch

from pl_grouprl.rollout.vllm.cpu import REPLACED_FUNCTIONS, unique_shared_memory
from pl_grouprl.utilities.random_state import random_state, set_random_state

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

_LOGGERS = ("httpx", "httpx2")
"""Loggers that vLLM silences."""

_BACKENDS: tuple[Any, Any] = (torch.backends.cuda, torch.backends.mkldnn)


class EngineProcess:
    """The process that a trainer and a vLLM engine share.

    vLLM assumes that it owns the process: it seeds random numbers; sets environment variables, the precision of float32
    products, the number of threads and the GPU's current stream; replaces functions of torch; freezes the garbage
    collector; silences loggers; and destroys the default process group on exit. It does not touch signal handlers.

    Args:
        device: The trainer's device, which the engine uses too.
        environment: Environment variables for the engine.
    """

    def __init__(self, device: torch.device, environment: Mapping[str, str]) -> None:
        self._device = device
        self._environment = dict(environment)
        self._state: _State | None = None  # vLLM's, between its calls
        self._inside = False
        self._created_group = False

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Context for every call of vLLM, and only those; reentrant.

        Autocast, inference mode and gradients are off inside, and the default dtype is vLLM's, so the trainer's
        settings do not affect sampling.
        """
        if self._inside:
            yield
            return
        trainers = _State.now(self._device)
        if self._state is None:
            environment = {**trainers.environment, **self._environment}
            self._state = replace(trainers, environment=environment, dtype=torch.float32)
        self._inside = True
        self._state.restore(self._device)
        try:
            with torch.autocast(self._device.type, enabled=False), torch.inference_mode(False), torch.no_grad():
                yield
        finally:
            self._state = _State.now(self._device)
            trainers.restore(self._device)
            self._inside = False

    def start(self, build: Callable[[], LLMEngine]) -> LLMEngine:
        """Build an engine. Collective.

        If there is no process group, creates one with only this process, which vLLM needs; `stop` removes it.

        Args:
            build: Imports vLLM and returns the engine.
        """
        if not torch.distributed.is_initialized():
            backend = "gloo" if self._device.type == "cpu" else f"cpu:gloo,{self._device.type}:nccl"
            torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
            self._created_group = True
        frozen = gc.get_freeze_count()
        levels = [(logging.getLogger(name), logging.getLogger(name).level) for name in _LOGGERS]
        try:
            with self.inside(), unique_shared_memory(self._device):
                engine = build()
                # Otherwise garbage collection of the engine would destroy the trainer's process group.
                engine.engine_core._finalizer.detach()  # type: ignore[attr-defined]
        except BaseException:
            self.stop(None)
            raise
        finally:
            if not frozen:
                gc.unfreeze()
            for logger, level in levels:
                logger.setLevel(level)
        return engine

    def stop(self, engine: LLMEngine | None) -> None:
        """Stop an engine and vLLM's process groups; the trainer's stays.

        Args:
            engine: Result of `start`; None if it failed.
        """
        with self.inside(), _default_group_kept():
            if engine is not None:
                engine.engine_core.engine_core.shutdown()  # type: ignore[attr-defined]
            else:
                from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

                cleanup_dist_env_and_memory()
        if self._created_group:
            torch.distributed.destroy_process_group()
            self._created_group = False


@dataclass
class _State:
    """Per-process state that vLLM changes."""

    environment: dict[str, str]
    functions: dict[str, Any]
    num_threads: int
    dtype: torch.dtype
    precision: str | tuple[str, str]
    random: dict[str, Any]
    stream: Any
    gpu: int | None

    @classmethod
    def now(cls, device: torch.device) -> _State:
        """Capture the current state."""
        gpu = device.type == "cuda"
        return cls(
            environment=dict(os.environ),
            functions={name: attrgetter(name)(torch) for name in REPLACED_FUNCTIONS},
            num_threads=torch.get_num_threads(),
            dtype=torch.get_default_dtype(),
            precision=_precision(),
            random=random_state(device),
            stream=torch.cuda.current_stream(device) if gpu else None,
            gpu=torch.cuda.current_device() if gpu else None,
        )

    def restore(self, device: torch.device) -> None:
        """Restore the captured state."""
        for name in os.environ.keys() - self.environment.keys():
            del os.environ[name]
        for name, value in self.environment.items():
            if os.environ.get(name) != value:
                os.environ[name] = value
        for name, function in self.functions.items():
            owner, _, attribute = name.rpartition(".")
            setattr(attrgetter(owner)(torch) if owner else torch, attribute, function)
        if torch.get_num_threads() != self.num_threads:
            torch._C.set_num_threads(self.num_threads)  # bypasses replacements of torch.set_num_threads
        torch.set_default_dtype(self.dtype)
        _set_precision(self.precision)
        set_random_state(self.random, device)
        if self.gpu is not None:
            self.stream.wait_stream(torch.cuda.current_stream(device))  # vLLM uses a separate stream
            torch.cuda.set_stream(self.stream)
            torch.cuda.set_device(self.gpu)


def _precision() -> str | tuple[str, str]:
    """Precision of float32 products: one name, or that of GPUs and of CPUs if set separately."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return tuple(backend.matmul.fp32_precision for backend in _BACKENDS)  # type: ignore[return-value]


def _set_precision(precision: str | tuple[str, str]) -> None:
    if _precision() == precision:
        return
    if isinstance(precision, str):
        torch.set_float32_matmul_precision(precision)
        return
    for backend, value in zip(_BACKENDS, precision, strict=True):
        backend.matmul.fp32_precision = value


@contextmanager
def _default_group_kept() -> Iterator[None]:
    """Keep the default process group, which vLLM would destroy and the trainer needs."""
    destroy = torch.distributed.destroy_process_group

    def destroy_part(group: Any = None) -> None:
        if group is not None:
            destroy(group)

    with patch.object(torch.distributed, "destroy_process_group", destroy_part):
        yield
