"""A vLLM engine in this process: start, load weights, sample, sleep, shut down."""

from __future__ import annotations

import gc
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from unittest.mock import patch
from weakref import WeakSet

import torch
from torch import Tensor

from pl_grouprl.rollout.engine import SampleRequest, StopStrings
from pl_grouprl.rollout.vllm import settings
from pl_grouprl.rollout.vllm.adapter import adapter_folder, adapter_name
from pl_grouprl.rollout.vllm.images import engine_prompt, media_engine_args
from pl_grouprl.rollout.vllm.requests import Completion, new_tokens, sampling_params
from pl_grouprl.types import Rollout, SamplingConfig
from pl_grouprl.utilities.distributed import raise_on_all_ranks
from pl_grouprl.utilities.modes import random_state, set_random_state
from pl_grouprl.utilities.progress import tick

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

T = TypeVar("T")

_RUNNING: WeakSet[VLLMInstance] = WeakSet()
"""At most one per process, because it uses the process's process groups."""


class VLLMInstance:
    """A vLLM engine that runs its model in the caller's process and thread.

    Args:
        options: Arguments of vLLM's `EngineArgs`.
        further: Further arguments, from the user.
        kv_cache_gib: Size of its cache in GiB; defaults to vLLM's choice on GPUs and 1 on CPUs.
        tensor_parallel_size: Number of ranks that share the engine.
        sleep_level: What the engine releases between rollouts; see `VLLMRolloutEngine`.

    Raises:
        ValueError: If `further` has an argument that users cannot set.
    """

    def __init__(
        self,
        options: dict[str, Any],
        further: dict[str, Any],
        *,
        kv_cache_gib: float | None,
        tensor_parallel_size: int,
        sleep_level: int,
    ) -> None:
        for name in further:
            if name in settings.DECIDED_IN_PROCESS or name in options:
                decides = settings.DECIDED_IN_PROCESS.get(name, f"the engine's argument {name}")
                raise ValueError(f"engine_kwargs has {name!r}, which is decided by {decides}; omit it.")
        self._options = {**options, **further}
        self._kv_cache_gib = kv_cache_gib
        self._tensor_parallel_size = tensor_parallel_size
        self._sleep_level = sleep_level
        self._asleep = False
        self._loading = False
        self._adapter: Any = None
        self._engine: Any = None
        self._process: Any = None
        self._model: Any = None
        self._group: Any = None

    def start(self, model: Any, dtype: torch.dtype, lora: dict[str, Any]) -> None:
        """Start vLLM with a policy's config and dummy weights, unless it runs already.

        Args:
            model: The policy.
            dtype: Dtype of vLLM's weights.
            lora: Further arguments for a separate adapter.
        """
        if self._engine is not None:
            return
        if _RUNNING:
            raise RuntimeError("another vLLM runs in this process, which can hold only one; close() its engine first.")
        ranks = settings.engine_arguments(self._tensor_parallel_size)
        self._model = model
        process = EngineProcess.of(model)
        further = {**ranks, **lora, **media_engine_args(model)}
        with tempfile.TemporaryDirectory() as folder:
            settings.write_model_folder(model, Path(folder))
            self._engine = process.start(lambda: self._build(folder, dtype, further))
        self._process = process
        _RUNNING.add(self)
        self._group = settings.engine_group(self._tensor_parallel_size)

    def _build(self, folder: str, dtype: torch.dtype, further: dict[str, Any]) -> LLMEngine:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        settings.check_native(self._model)
        on_cpu, options = settings.runs_on_cpu(), dict(self._options)
        if "enable_lora" in further and dtype == torch.float32 and not on_cpu:
            raise ValueError("dtype is float32, in which vLLM applies no separate adapter on GPUs; set 'bfloat16'.")
        if self._kv_cache_gib is not None or on_cpu:
            options["kv_cache_memory_bytes"] = int((self._kv_cache_gib or settings.CACHE_GIB) * 2**30)
        arguments = EngineArgs(
            model=folder,
            dtype=str(dtype).removeprefix("torch."),  # type: ignore[arg-type]
            load_format="dummy",
            enable_sleep_mode=self._sleep_level > 0,
            skip_tokenizer_init=True,  # prompts are tokens, and stop strings are found here
            **settings.common_arguments(),
            **further,
            **options,
        )
        return LLMEngine.from_engine_args(arguments, enable_multiprocessing=False)

    def check_lora(self, model: Any) -> None:
        """Check that vLLM's class for a policy takes adapters.

        Raises:
            ValueError: If it does not.
        """
        process = EngineProcess.of(model)
        with _keeping_log_levels(), process.inside():
            settings.check_lora(model)

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Context for loading an update; on exit, nothing of the old weights is cached."""
        with self._process.inside():
            if self._asleep:
                self._engine.wake_up(["weights"])
        self._loading = False
        yield
        if self._loading:
            self._call("finish_weight_update")
            self._call("refresh_stale_weights")
        with self._process.inside():
            if self._asleep:
                self._engine.wake_up(["kv_cache"])
                self._asleep = False
            self._engine.reset_mm_cache()
            self._engine.reset_encoder_cache()
            if not self._engine.reset_prefix_cache():
                raise RuntimeError("vLLM did not drop its prefix cache, so it would sample from old keys and values.")

    def load(self, bucket: list[tuple[str, Tensor]]) -> None:
        """Load some weights."""
        if not self._loading:
            self._call("abandon_weights")
            self._call("start_weight_update")
            self._loading = True
        self._call("update_weights", update_info={"weights": bucket})

    def load_adapter(self, version: int, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
        """Replace the adapter. Its name and number are new each time, since vLLM caches by them.

        Args:
            version: Version of the policy, larger than any before.
            config: Contents of its `adapter_config.json`.
            weights: Contents of its `adapter_model.safetensors`.
        """
        with self._process.inside(), adapter_folder(config, weights) as folder:
            from vllm.lora.request import LoRARequest

            before, self._adapter = self._adapter, None
            if before is not None:
                self._engine.remove_lora(before.lora_int_id)
            adapter = LoRARequest(adapter_name(version), version, folder)
            if not self._engine.add_lora(adapter):
                raise RuntimeError(f"vLLM did not load the adapter {adapter.lora_name}.")
            self._adapter = adapter

    def checksums(self, names: list[str], adapter_names: list[str]) -> list[Any]:
        """Checksums of the weights loaded by each rank of this engine; see `check_weights`.

        Args:
            names: Names of all weights that were sent.
            adapter_names: Names of the separate adapter's weights that were sent.
        """
        (checksums,) = self._call("weight_checksums", names=names)
        if self._adapter is not None:
            checksums += self._call("adapter_checksums", names=adapter_names, number=self._adapter.lora_int_id)[0]
        return settings.gather_from(self._group, [list(weight) for weight in checksums])

    def raise_on_engine_ranks(self, run: Callable[[], T]) -> T:
        """Run a function, and raise its error on all ranks of this engine; see `raise_on_all_ranks`."""
        return run() if self._group is None else raise_on_all_ranks(run, group=self._group)

    def sample(
        self,
        requests: Sequence[SampleRequest],
        sampling: SamplingConfig,
        seed: int,
        *,
        end_ids: Sequence[int],
        never: Sequence[int],
        stop: StopStrings,
        mixtures: Sequence[int] | None = None,
    ) -> list[list[Rollout]]:
        """Sample the rollouts of each request; ranks that share an engine pool their requests.

        Args:
            requests: This rank's requests; may be empty. If those of all its ranks are empty, vLLM is not called.
            sampling: How to sample; its `max_new_tokens` is not read.
            seed: Seed of this rank's call.
            end_ids: Tokens that end a sequence.
            never: Tokens that are not sampled.
            stop: Strings that end a sequence.
            mixtures: Layers whose experts are recorded; None if none are.
        """
        asked = [[one.token_ids, dict(one.media), one.seeds(seed), one.max_new_tokens] for one in requests]
        pooled, mine = settings.share_requests(asked, self._group)
        if not pooled:
            return []
        with self._process.inside():
            if self._asleep:
                self._engine.wake_up()
                self._asleep = False
            return self._run(pooled, sampling, end_ids, never, stop, mixtures)[mine]

    def _run(
        self,
        requests: Sequence[Any],
        sampling: SamplingConfig,
        end_ids: Sequence[int],
        never: Sequence[int],
        stop: StopStrings,
        mixtures: Sequence[int] | None,
    ) -> list[list[Rollout]]:
        completions: dict[str, Completion] = {}
        try:
            for place, (prompt, media, seeds, limit) in enumerate(requests):
                given = engine_prompt(self._model, prompt, media)
                limited = replace(sampling, max_new_tokens=limit)
                for number, seed in enumerate(seeds):
                    completions[f"{place}.{number}"] = Completion(stop)
                    parameters = sampling_params(limited, end_ids=end_ids, never=never, seed=seed)
                    self._engine.add_request(f"{place}.{number}", given, parameters, lora_request=self._adapter)
            while self._engine.has_unfinished_requests():
                outputs = self._engine.step()
                tick(sum(len(output.outputs[0].token_ids) for output in outputs))
                for output in outputs:
                    completion, found = completions[output.request_id], output.outputs[0]
                    completion.routed_experts = found.routed_experts
                    if completion.add(*new_tokens(found)):
                        self._engine.abort_request([output.request_id])
        except BaseException:
            self._engine.abort_request(list(completions))
            raise
        return [
            [completions[f"{place}.{number}"].rollout(len(prompt), mixtures) for number in range(len(seeds))]
            for place, (prompt, _, seeds, _) in enumerate(requests)
        ]

    def sleep(self) -> bool:
        """Release memory until the next rollout; returns whether the weights are lost."""
        if self._sleep_level and not self._asleep:
            with self._process.inside():
                self._engine.sleep(self._sleep_level)
            self._asleep = True
        return self._sleep_level == 2

    def close(self) -> None:
        """Shut vLLM down."""
        if self._engine is not None:
            engine, self._engine, self._model = self._engine, None, None
            _RUNNING.discard(self)
            self._process.stop(engine)
        self._asleep, self._adapter = False, None

    def _call(self, method: str, **kwargs: Any) -> Any:
        with self._process.inside():
            return self._engine.collective_rpc(method, kwargs=kwargs)


# Isolation of vLLM inside the trainer's process: each of the two gets its own global state.

_LOGGERS = ("httpx", "httpx2")
"""Loggers that vLLM silences."""


@contextmanager
def _keeping_log_levels() -> Iterator[None]:
    levels = [(logging.getLogger(name), logging.getLogger(name).level) for name in _LOGGERS]
    try:
        yield
    finally:
        for logger, level in levels:
            logger.setLevel(level)


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

    @classmethod
    def of(cls, model: Any) -> EngineProcess:
        """The process of a policy, with vLLM on the policy's device."""
        device = settings.trainer_device(model)
        return cls(device, settings.engine_environment(device))

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Context for every call of vLLM, and nothing else; reentrant.

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
        try:
            with _keeping_log_levels(), self.inside(), settings.unique_shared_memory(self._device):
                engine = build()
                # Otherwise garbage collection of the engine would destroy the trainer's process group.
                engine.engine_core._finalizer.detach()  # type: ignore[attr-defined]
        except BaseException:
            self.stop(None)
            raise
        finally:
            if not frozen:
                gc.unfreeze()
        return engine

    def stop(self, engine: LLMEngine | None) -> None:
        """Stop an engine and vLLM's process groups; the trainer's stays.

        Args:
            engine: Result of `start`; None if it failed.
        """
        destroy = torch.distributed.destroy_process_group

        def destroy_part(group: Any = None) -> None:  # not the default group, which the trainer needs
            if group is not None:
                destroy(group)

        with self.inside(), patch.object(torch.distributed, "destroy_process_group", destroy_part):
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
            functions={name: attrgetter(name)(torch) for name in settings.REPLACED_FUNCTIONS},
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
        if _precision() != self.precision:
            if isinstance(self.precision, str):
                torch.set_float32_matmul_precision(self.precision)
            else:
                for backend, value in zip(_BACKENDS, self.precision, strict=True):
                    backend.matmul.fp32_precision = value
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
