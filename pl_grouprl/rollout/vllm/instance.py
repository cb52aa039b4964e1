"""A vLLM engine in this process: start, load weights, sample, sleep, shut down."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor

from pl_grouprl.rollout.stopping import StopStrings
from pl_grouprl.rollout.vllm.arguments import DECIDED_IN_PROCESS, common_arguments
from pl_grouprl.rollout.vllm.cpu import CACHE_GIB, runs_on_cpu
from pl_grouprl.rollout.vllm.lora import adapter_folder
from pl_grouprl.rollout.vllm.media import engine_prompt, media_engine_args
from pl_grouprl.rollout.vllm.model_folder import check_native, write_model_folder
from pl_grouprl.rollout.vllm.process import EngineProcess
from pl_grouprl.rollout.vllm.ranks import (
    engine_arguments,
    engine_environment,
    engine_group,
    gather_from,
    share_requests,
)
from pl_grouprl.rollout.vllm.requests import Completion, new_tokens, sampling_params
from pl_grouprl.types import Media, Rollout, SamplingConfig
from pl_grouprl.utilities.distributed import raise_on_all_ranks
from pl_grouprl.utilities.progress import tick

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

T = TypeVar("T")

Request = tuple[Sequence[int], Media, Sequence[int], int]
"""Tokens and media of a prompt, a seed for each of its sequences, and their length limit."""

_RUNNING: WeakSet[VLLMInstance] = WeakSet()
"""At most one per process, because it uses the process's process groups."""


class VLLMInstance:
    """A vLLM engine that runs its model in the caller's process and thread.

    Args:
        options: Arguments of vLLM's `EngineArgs`.
        further: Further arguments, from the user.
        kv_cache_gib: Size of its cache in GiB; None leaves it to vLLM on GPUs and is 1 on CPUs.
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
            if name in DECIDED_IN_PROCESS or name in options:
                decides = DECIDED_IN_PROCESS.get(name, f"the engine's argument {name}")
                raise ValueError(f"engine_kwargs has {name!r}, which is decided by {decides}; leave it out.")
        self._options = {**options, **further}
        self._kv_cache_gib = kv_cache_gib
        self._tensor_parallel_size = tensor_parallel_size
        self._sleep_level = sleep_level
        self._asleep = False
        self._loading = False
        self._adapter: Any = None
        self._adapters = 0
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
            raise RuntimeError(
                "another vLLM runs in this process, which can hold only one; close() its engine first, or use "
                "VLLMServerRolloutEngine."
            )
        ranks = engine_arguments(self._tensor_parallel_size)
        device = next(model.parameters()).device
        if device.type != "cuda" and torch.cuda.is_available():  # offloaded weights
            device = torch.device("cuda", torch.cuda.current_device())
        self._model = model
        process = EngineProcess(device, engine_environment(device))
        further = {**ranks, **lora, **media_engine_args(model)}
        with tempfile.TemporaryDirectory() as folder:
            write_model_folder(model, Path(folder))
            self._engine = process.start(lambda: self._build(folder, dtype, further))
        self._process = process
        _RUNNING.add(self)
        self._group = engine_group(self._tensor_parallel_size)

    def _build(self, folder: str, dtype: torch.dtype, further: dict[str, Any]) -> LLMEngine:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        check_native(self._model)
        on_cpu, options = runs_on_cpu(), dict(self._options)
        if "enable_lora" in further and dtype == torch.float32 and not on_cpu:
            raise ValueError(
                "dtype is float32, in which vLLM applies no separate adapter on GPUs; set it to 'bfloat16' or "
                "'float16', or adapter to 'merged'."
            )
        if self._kv_cache_gib is not None or on_cpu:
            options["kv_cache_memory_bytes"] = int((self._kv_cache_gib or CACHE_GIB) * 2**30)
        arguments = EngineArgs(
            model=folder,
            dtype=str(dtype).removeprefix("torch."),  # type: ignore[arg-type]
            load_format="dummy",
            enable_sleep_mode=self._sleep_level > 0,
            skip_tokenizer_init=True,  # prompts are tokens, and stop strings are found here
            **common_arguments(),
            **further,
            **options,
        )
        return LLMEngine.from_engine_args(arguments, enable_multiprocessing=False)

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

    def load_adapter(self, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
        """Replace the adapter. Its name and number are new each time, since vLLM caches by them.

        Args:
            config: Contents of its `adapter_config.json`.
            weights: Contents of its `adapter_model.safetensors`.
        """
        self._adapters += 1
        with self._process.inside(), adapter_folder(config, weights) as folder:
            from vllm.lora.request import LoRARequest

            before, self._adapter = self._adapter, None
            if before is not None:
                self._engine.remove_lora(before.lora_int_id)
            adapter = LoRARequest(f"policy-{self._adapters}", self._adapters, folder)
            if not self._engine.add_lora(adapter):
                raise RuntimeError(f"vLLM did not load the adapter {adapter.lora_name}.")
            self._adapter = adapter

    def checksums(self, names: list[str], adapter_names: list[str]) -> list[Any]:
        """Checksums of the weights loaded by each rank of this engine; see `compare.check_weights`.

        Args:
            names: Names of all weights that were sent.
            adapter_names: Names of the separate adapter's weights that were sent.
        """
        (checksums,) = self._call("weight_checksums", names=names)
        if self._adapter is not None:
            checksums += self._call("adapter_checksums", number=self._adapter.lora_int_id, names=adapter_names)[0]
        return gather_from(self._group, [list(weight) for weight in checksums])

    def raise_on_engine_ranks(self, run: Callable[[], T]) -> T:
        """Run a function, and raise its error on all ranks of this engine; see `raise_on_all_ranks`."""
        return run() if self._group is None else raise_on_all_ranks(run, group=self._group)

    def sample(
        self,
        requests: Sequence[Request],
        sampling: SamplingConfig,
        *,
        end_ids: Sequence[int],
        never: Sequence[int],
        stop: StopStrings,
    ) -> list[list[Rollout]]:
        """Sample a sequence per seed of each request; ranks that share an engine pool their requests.

        Args:
            requests: This rank's requests; may be empty. If those of all its ranks are empty, vLLM is not called.
            sampling: How to sample; its `max_new_tokens` is not read.
            end_ids: Tokens that end a sequence.
            never: Tokens that are not sampled.
            stop: Strings that end a sequence.
        """
        pooled, mine = share_requests([list(request) for request in requests], self._group)
        if not pooled:
            return []
        with self._process.inside():
            if self._asleep:
                self._engine.wake_up()
                self._asleep = False
            return self._run(pooled, sampling, end_ids, never, stop)[mine]

    def _run(
        self,
        requests: Sequence[Any],
        sampling: SamplingConfig,
        end_ids: Sequence[int],
        never: Sequence[int],
        stop: StopStrings,
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
                    if completions[output.request_id].add(*new_tokens(output.outputs[0])):
                        self._engine.abort_request([output.request_id])
        except BaseException:
            self._engine.abort_request(list(completions))
            raise
        return [
            [completions[f"{place}.{number}"].rollout() for number in range(len(seeds))]
            for place, (_, _, seeds, _) in enumerate(requests)
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
