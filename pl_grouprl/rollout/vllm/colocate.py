"""Rollouts by vLLM in the trainer's process, on the same devices."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from pl_grouprl.distributed.checksum import buckets, cast, check_weights
from pl_grouprl.media.inputs import placeholder_ids
from pl_grouprl.models.adapters import base_of
from pl_grouprl.models.router_replay import mixture_layers
from pl_grouprl.rollout.engine import AdapterWeights, PolicyEngine, SampleRequest, StopStrings
from pl_grouprl.rollout.vllm.adapter import INSTEAD, AdapterForm, adapter_tensors, choose_form, lora_arguments
from pl_grouprl.rollout.vllm.instance import VLLMInstance
from pl_grouprl.rollout.vllm.requests import check_temperature
from pl_grouprl.rollout.vllm.settings import SamplerDtype
from pl_grouprl.types import Rollout, SamplingConfig
from pl_grouprl.utilities import optional
from pl_grouprl.utilities.options import check_options


class VLLMRolloutEngine(PolicyEngine):
    """Samples with vLLM (0.32), which has its own copy of the weights.

    The first `update_weights` starts vLLM from the policy's config only; all weights go from the policy directly into
    vLLM's layers. After each update, checksums verify that the layers loaded exactly the weights sent. Rollouts of one
    prompt share its blocks in vLLM's prefix cache, and the turns of an episode those of its history; an update empties
    it.

    Reproducible: each sequence has its own seed, derived from (seed, index of the prompt, number of the rollout); its
    random numbers differ from `HFRolloutEngine`'s. Other sequences in the batch may change the last bits of a
    probability, and so, rarely, a token.

    Log-probabilities are those of the sampled distribution, after top-p, top-k and min-p. vLLM applies min-p before the
    other two.

    Args:
        tensor_parallel_size: Adjacent ranks that share one vLLM. 1: each rank has its own.
        gpu_memory_utilization: Fraction of each GPU's memory that vLLM may use, including weights.
        kv_cache_gib: Memory of vLLM's key and value cache in GiB instead; on CPUs 1 by default.
        max_model_len: Maximum length of prompt plus completion; defaults to the model's maximum.
        max_num_seqs: Maximum number of sequences decoded at once.
        dtype: Dtype of vLLM's weights and activations; `auto` is bfloat16 on a GPU under `bf16-mixed`,
            else the dtype of the policy's weights.
        enforce_eager: Run layers without CUDA graphs and compilation: starts sooner, samples slower.
        sleep_level: What vLLM releases between rollouts: 0 nothing; 1 its cache and its weights, which move to main
            memory; 2 both, and the weights are sent again before the next rollout. GPUs only.
        bucket_mib: Size of the buckets of weights, in MiB.
        adapter: `separate` sends vLLM the base once, then only the adapter, named `policy-VERSION`: LoRA without DoRA
            on linear layers of the decoder, on GPUs in 16 bits. `merged` sends all weights with the adapter merged in.
            `auto` is `separate` where vLLM can apply the adapter, else `merged`, and logs why.
        seed: Seed of vLLM's random numbers outside sequences; does not affect rollouts.
        router_replay: Record the experts of each token, as `HFRolloutEngine` does (`enable_return_routed_experts` of
            vLLM); not with stop strings. This has not run on a GPU yet.
        engine_kwargs: Further arguments of vLLM's `EngineArgs`.

    Raises:
        ModuleNotFoundError: If vLLM is not installed.
        ValueError: If an option is out of range, `engine_kwargs` has an argument that the engine sets, or vLLM has no
            build for this system.
    """

    truncates_logprobs = True
    keeps_caches = True

    def __init__(
        self,
        *,
        tensor_parallel_size: int = 1,
        gpu_memory_utilization: float = 0.3,
        kv_cache_gib: float | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int = 256,
        dtype: SamplerDtype = "auto",
        enforce_eager: bool = False,
        sleep_level: Literal[0, 1, 2] = 0,
        bucket_mib: int = 256,
        adapter: Literal["auto", "merged", "separate"] = "auto",
        seed: int = 0,
        router_replay: bool = False,
        engine_kwargs: dict[str, Any] | None = None,
    ) -> None:
        optional.check_vllm_system(type(self).__name__)
        optional.require(optional.VLLM_AVAILABLE, type(self).__name__, "vllm")
        check_options(
            {
                "tensor_parallel_size": (tensor_parallel_size, tensor_parallel_size >= 1, "at least 1"),
                "gpu_memory_utilization": (gpu_memory_utilization, 0 < gpu_memory_utilization <= 1, "in (0, 1]"),
                "kv_cache_gib": (kv_cache_gib, kv_cache_gib is None or kv_cache_gib > 0, "larger than 0, or None"),
                "max_model_len": (max_model_len, max_model_len is None or max_model_len >= 2, "at least 2, or None"),
                "dtype": (dtype, dtype in get_args(SamplerDtype), f"one of {', '.join(get_args(SamplerDtype))}"),
                "seed": (seed, 0 <= seed < 2**32, "in [0, 2^32)"),
                "max_num_seqs": (max_num_seqs, max_num_seqs >= 1, "at least 1"),
                "sleep_level": (sleep_level, sleep_level in (0, 1, 2), "0, 1 or 2"),
                "bucket_mib": (bucket_mib, bucket_mib >= 1, "at least 1"),
                "adapter": (adapter, adapter in ("auto", "merged", "separate"), "'auto', 'merged' or 'separate'"),
            }
        )
        self._sleep_level, self.router_replay = sleep_level, router_replay
        self.kept_share = 0.0 if sleep_level else gpu_memory_utilization  # of each GPU, during updates
        if adapter == "separate":
            self._check_sleep()
        self._is_automatic = adapter == "auto"
        self.adapter: AdapterForm = "merged" if adapter == "auto" else adapter
        self.version: int | None = None
        self.max_model_len = max_model_len
        self.dtype: SamplerDtype = dtype
        self.autocast_dtype: torch.dtype | None = None  # set by the run
        self._bucket_bytes = bucket_mib << 20
        self._sent: dict[str, int] = {}
        self._awake = False
        self._vllm = VLLMInstance(
            {
                "gpu_memory_utilization": gpu_memory_utilization,
                "max_model_len": max_model_len,
                "max_num_seqs": max_num_seqs,
                "enforce_eager": enforce_eager,
                "seed": seed,
                **({"enable_return_routed_experts": True} if router_replay else {}),
            },
            engine_kwargs or {},
            kv_cache_gib=kv_cache_gib,
            tensor_parallel_size=tensor_parallel_size,
            sleep_level=sleep_level,
        )

    def bind(self, model: Any, tokenizer: Any = None) -> None:
        """Set the policy. Reads its config; `update_weights` sends its weights. See `RolloutEngine.bind`."""
        if self.model is not model:
            self.close()
            if self._is_automatic:
                self.adapter = choose_form(model, lambda arguments: self._check_lora(model))
        super().bind(model, tokenizer)

    def _check_lora(self, model: Any) -> None:
        self._check_sleep()
        if torch.cuda.is_available() and self._sampler_dtype(model) == torch.float32:
            raise ValueError(f"dtype is float32, in which vLLM applies no separate adapter on GPUs{INSTEAD}.")
        self._vllm.check_lora(model)

    def _check_sleep(self) -> None:
        if self._sleep_level == 2:
            raise ValueError(
                f"sleep_level is 2, which releases the base weights that adapter='separate' sends only once{INSTEAD}, "
                "or set sleep_level to 1."
            )

    def _sampler_dtype(self, model: Any) -> torch.dtype:
        if self.dtype != "auto":
            return getattr(torch, self.dtype)
        if self.autocast_dtype == torch.bfloat16:
            return torch.bfloat16
        kinds = [weight.dtype for weight in base_of(model).parameters() if weight.is_floating_point()]
        return max(set(kinds), key=kinds.count)

    def update_weights(
        self, weights: Iterable[tuple[str, Tensor]], *, version: int, adapter: AdapterWeights | None = None
    ) -> dict[str, float]:
        """Load new weights into vLLM, and verify them; see `SyncedRolloutEngine.update_weights`.

        Raises:
            ValueError: If vLLM cannot serve the adapter, or has no base for it.
            WeightsMismatchError: If vLLM loaded other weights.
        """
        started, model = time.perf_counter(), self.model
        self.version = None
        lora = {} if adapter is None else lora_arguments(model, adapter.config)
        dtype = self._sampler_dtype(model)
        self._vllm.start(model, dtype, lora)
        sent: dict[str, int] = {}
        added: dict[str, int] = {}
        size = 0
        with self._vllm.updating():
            for bucket in buckets(cast(weights, dtype, sent), self._bucket_bytes):
                size += sum(weight.nbytes for _, weight in bucket)
                self._vllm.load(bucket)
        self._sent = sent or self._sent
        if adapter is not None:
            if not self._sent:
                raise ValueError(f"weights are empty, but {type(self).__name__} has no base yet; send it first.")
            tensors = adapter_tensors(adapter, dtype, added)
            size += sum(weight.nbytes for weight in tensors.values())
            self._vllm.load_adapter(version, adapter.config, tensors)
        check_weights({**self._sent, **added}, self._vllm.checksums(list(self._sent), list(added)))
        self.version = version
        return {"bytes": float(size), "seconds": time.perf_counter() - started}

    def sample(self, requests: Sequence[SampleRequest], sampling: SamplingConfig, seed: int) -> list[list[Rollout]]:
        """Sample the rollouts of each request, without text; see `PolicyEngine.sample`.

        Raises:
            ValueError: If a request is invalid.
            RuntimeError: If vLLM has no weights yet.
            FloatingPointError: If the model's logits are not finite.
        """
        if self.version is None:
            raise RuntimeError(f"{type(self).__name__} has no weights; call update_weights before generate.")

        def check() -> StopStrings:
            check_temperature(sampling)
            if self.router_replay and sampling.stop:
                raise ValueError(
                    f"router_replay is on with SamplingConfig.stop={sampling.stop}, at which vLLM returns no experts; "
                    "use stop_token_ids."
                )
            return self.check(requests, sampling)

        stop = self._vllm.raise_on_engine_ranks(check)
        never = sorted(placeholder_ids(self.model).values())
        mixtures = mixture_layers(self.model) if self.router_replay else None
        how: dict[str, Any] = {"end_ids": self.end_ids(sampling), "never": never, "stop": stop, "mixtures": mixtures}
        groups = self._vllm.sample(requests, sampling, seed, **how)
        self._sleep()
        return groups

    @contextmanager
    def keep_caches(self) -> Iterator[None]:
        """Context in which vLLM does not sleep between calls; see `RolloutEngine`.

        vLLM's prefix cache finds what earlier calls have encoded or sampled, in whole blocks; tokens after a prompt's
        last cached block are encoded again. A full cache drops the blocks that were used least recently.
        """
        self._awake = True
        try:
            yield
        finally:
            self._awake = False
        if self.version is not None:
            self._sleep()

    def _sleep(self) -> None:
        if not self._awake and self._vllm.sleep():
            self.version = None

    def close(self) -> None:
        """Stop vLLM; the next `update_weights` restarts it."""
        self.version, self._sent = None, {}
        self._vllm.close()
