"""Rollouts by vLLM servers in separate processes, on this machine or others."""

from __future__ import annotations

import copy
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

import httpx2
from torch import Tensor

from pl_grouprl.distributed.checksum import cast
from pl_grouprl.media.inputs import placeholder_ids
from pl_grouprl.models.adapters import has_adapters
from pl_grouprl.models.router_replay import mixture_layers
from pl_grouprl.rollout.engine import AdapterWeights, PolicyEngine, SampleRequest, SamplerLostError
from pl_grouprl.rollout.vllm.access import TOKEN_VARIABLE
from pl_grouprl.rollout.vllm.adapter import INSTEAD, AdapterForm, adapter_name, choose_form, lora_arguments
from pl_grouprl.rollout.vllm.client import Labels, PromptRequest, Server
from pl_grouprl.rollout.vllm.fleet import Fleet
from pl_grouprl.rollout.vllm.requests import sampling_options
from pl_grouprl.rollout.vllm.scheduler import Scheduler
from pl_grouprl.rollout.vllm.settings import SamplerDtype, trainer_device
from pl_grouprl.types import Rollout, SamplingConfig
from pl_grouprl.utilities.distributed import gather_plain, own_rank, raise_on_all_ranks
from pl_grouprl.utilities.options import check_options


class VLLMServerRolloutEngine(PolicyEngine):
    """Samples with vLLM servers, started by `python -m pl_grouprl.rollout.vllm` with the policy's model.

    Rank 0 sends the weights to all servers in parallel, and then verifies checksums of the weights that their layers
    loaded. The servers' `--transfer` decides how: as files in each server's folder, in shared memory by default, or by
    NCCL from GPU to GPU. Every rank sends its prompts; each prompt goes to the next free server. The trainer does not
    need vLLM unless weights go by NCCL.

    Reproducible: each sequence has its own seed, derived from (seed, index of the prompt, number of the rollout), so
    the numbers of servers and ranks do not matter. Other sequences in the batch may change the last bits of a
    probability, and so, rarely, a token.

    Waits for a server that does not answer. Raises `SamplerLostError` for a server that was restarted without weights,
    and `WeightsMismatchError` for a server whose weights another trainer has changed.

    Args:
        urls: URLs of the servers, `http://host:port`; at least one.
        token: The servers' token; None reads the environment variable PL_GROUPRL_TOKEN. It is sent unencrypted, so
            beyond this machine use TLS (`https://`) or a tunnel.
        timeout: Seconds that a server may be unreachable before the run ends, and the time limit of calls other than
            rollouts. Rollouts have no limit; a health check every few seconds detects dead servers.
        dtype: Required dtype of the servers; `auto` accepts any dtype that all servers share.
        bucket_mib: Size of the buckets of weights, in MiB.
        adapter: `separate`: servers, started with `--enable-lora --max-lora-rank RANK`, get the base once, then only
            the adapter, which requests call `policy-VERSION`: LoRA without DoRA on linear layers of the decoder.
            `merged`: they get all weights with the adapter merged in. `auto` is `separate` where policy and servers
            allow it, else `merged`, and logs why.
        max_concurrent_requests: Number of prompts per rank that a server works on at a time.
        router_replay: Record the experts of each token, as `HFRolloutEngine` does; the servers need
            `--enable-return-routed-experts`. This has not run on a GPU yet.
        in_flight: What `update_weights` does with sequences that are being sampled: `keep` continues them with the new
            weights, `restart` starts them again. With a separate adapter, they always start again.

    Attributes:
        urls: The URLs, as a list.
        token: The servers' token; None if they have none.
        max_model_len: Maximum length of prompt plus completion on every server; None before the first
            `update_weights`.

    Raises:
        ValueError: If an option is out of range, or a url is malformed.
    """

    truncates_logprobs = True
    updates_in_flight = True

    def __init__(
        self,
        urls: str | list[str] = "http://127.0.0.1:8000",
        *,
        token: str | None = None,
        timeout: float = 300.0,
        dtype: SamplerDtype = "auto",
        bucket_mib: int = 256,
        adapter: Literal["auto", "merged", "separate"] = "auto",
        max_concurrent_requests: int = 64,
        in_flight: Literal["keep", "restart"] = "keep",
        router_replay: bool = False,
    ) -> None:
        urls = [urls] if isinstance(urls, str) else list(urls)
        check_options(
            {
                "urls": (urls, len(urls) > 0 and len(set(urls)) == len(urls), "at least one url, each once"),
                "timeout": (timeout, timeout > 0, "larger than 0"),
                "dtype": (dtype, dtype in get_args(SamplerDtype), f"one of {', '.join(get_args(SamplerDtype))}"),
                "bucket_mib": (bucket_mib, bucket_mib >= 1, "at least 1"),
                "adapter": (adapter, adapter in ("auto", "merged", "separate"), "'auto', 'merged' or 'separate'"),
                "max_concurrent_requests": (max_concurrent_requests, max_concurrent_requests >= 1, "at least 1"),
                "in_flight": (in_flight, in_flight in ("keep", "restart"), "'keep' or 'restart'"),
            }
        )
        token = os.environ.get(TOKEN_VARIABLE) or None if token is None else token
        self.urls, self.token = urls, token
        self._is_automatic = adapter == "auto"
        self.adapter: AdapterForm = "merged" if adapter == "auto" else adapter
        self.version: int | None = None
        self.dtype: SamplerDtype = dtype
        self.max_concurrent_requests = max_concurrent_requests
        self.in_flight, self.router_replay = in_flight, router_replay
        self._bucket_bytes = bucket_mib << 20
        self._servers = [Server(url, token=token, timeout=timeout) for url in urls]
        self._labels = Labels(secrets.token_hex(8))
        self._fleet: Fleet | None = None
        self._is_lost = False
        self._given_tokenizer: Any = None
        self._decoding = threading.Lock()
        self._scheduler = Scheduler(self._servers, max_concurrent_requests)

    @property
    def weight_version(self) -> str | None:
        """The servers' label for the latest weights; None before the first update."""
        return None if self.version is None else self._labels.of(self.version)

    @property
    def served_model(self) -> str | None:
        """Name of the latest weights for `/inference/v1/generate`; None for the server's own model."""
        return adapter_name(self.version) if self.adapter == "separate" and self.version is not None else None

    def bind(self, model: Any, tokenizer: Any = None) -> None:
        """Set the policy. Reads its config; `update_weights` sends its weights. See `RolloutEngine.bind`.

        With `adapter='auto'` and a policy with an adapter, asks the servers whether they take it.
        """
        if self._is_automatic and self.model is not model:
            self.adapter = "merged"
            if has_adapters(model):
                device = trainer_device(model)

                def choose() -> AdapterForm:
                    """On rank 0, which alone talks to servers."""
                    if own_rank() > 0:
                        return "merged"
                    return choose_form(model, lambda lora: self._check_lora(lora, self._describe()))

                self.adapter = gather_plain(raise_on_all_ranks(choose, device, shared=SamplerLostError), device)[0]
        if self.model is not model or self._given_tokenizer is not tokenizer:
            self._given_tokenizer = tokenizer
            super().bind(model, copy.deepcopy(tokenizer))  # a copy, because other threads decode

    def update_weights(
        self, weights: Iterable[tuple[str, Tensor]], *, version: int, adapter: AdapterWeights | None = None
    ) -> dict[str, float]:
        """Send new weights to the servers, and verify them; see `SyncedRolloutEngine.update_weights`.

        Returns on all ranks once all servers have the weights. Other threads may be in `generate`.

        Raises:
            ValueError: If a server has another model or dtype, or this machine cannot send it weights.
            RuntimeError: If a server rejects a call, or was away for longer than `timeout`.
        """
        started = time.perf_counter()
        device = trainer_device(self.model)

        def update() -> int:
            """On rank 0, send weights; all ranks read the stream to its end, because they gather it together."""
            try:
                return self._send(weights, version, adapter) if own_rank() == 0 else 0
            finally:
                deque(weights, maxlen=0)
                deque(() if adapter is None else adapter.weights, maxlen=0)

        try:
            size = raise_on_all_ranks(update, device, shared=SamplerLostError)
        except BaseException:
            self.version, self._is_lost = None, True
            raise
        run_id, self.max_model_len = gather_plain([self._labels.run, self.max_model_len], device)[0]
        self._labels = Labels(run_id)
        self.version, self._is_lost = version, False
        return {"bytes": float(size), "seconds": time.perf_counter() - started}

    def _send(self, weights: Iterable[tuple[str, Tensor]], version: int, adapter: AdapterWeights | None) -> int:
        checksums: dict[str, int] = {}
        fleet = self._ready({} if adapter is None else lora_arguments(self.model, adapter.config))
        try:
            return fleet.update(
                cast(weights, fleet.dtype, checksums),
                version,
                checksums,
                bucket_bytes=self._bucket_bytes,
                pause="keep" if self.in_flight == "keep" and adapter is None else "abort",
                adapter=adapter,
            )
        except BaseException:
            if fleet.by_nccl:  # workers may still be waiting in its NCCL group
                self._release_fleet()
            raise

    def _describe(self) -> list[dict[str, Any]]:
        """The description of each server, once it can be reached."""
        infos = []
        for server in self._servers:
            server.wait()
            try:
                infos.append(server.describe())
            except httpx2.TransportError as error:
                raise SamplerLostError(f"the sampling server at {server.url} went away again ({error}).") from error
        return infos

    def _check_lora(self, lora: Mapping[str, Any], infos: Sequence[Mapping[str, Any]]) -> None:
        rank = lora["max_lora_rank"]
        for server, info in zip(self._servers, infos, strict=True):
            if info["dtype"] == "float32" and info["device"] != "cpu":
                raise ValueError(
                    f"the sampling server at {server.url} has dtype 'float32', in which vLLM applies no separate "
                    f"adapter on GPUs{INSTEAD}, or start it with --dtype bfloat16."
                )
            if (info["max_lora_rank"] or 0) < rank:
                raise ValueError(
                    f"the sampling server at {server.url} has max_lora_rank {info['max_lora_rank']}, not {rank}"
                    f"{INSTEAD}, or start it with --enable-lora --max-lora-rank {rank}."
                )

    def _ready(self, lora: Mapping[str, Any]) -> Fleet:
        """Check that the servers serve this policy; return their fleet, a new one if a server was restarted.

        Args:
            lora: The `lora_arguments` of a separate adapter; empty if there is none.
        """
        infos = self._describe()
        if lora:
            self._check_lora(lora, infos)
        dtype = infos[0]["dtype"] if self.dtype == "auto" else self.dtype
        model = "start it with --model of the policy"
        checks = {
            "model_type": (self.model.config.model_type, model),
            "vocab_size": (self._vocab_size, model),
            "dtype": (dtype, f"start it with --dtype {dtype}, or set dtype"),
            "backend": (infos[0]["backend"], "start all servers with the same --transfer"),
            "logprobs_mode": ("processed_logprobs", "start it with python -m pl_grouprl.rollout.vllm"),
        }
        for server, info in zip(self._servers, infos, strict=True):
            for name, (wanted, remedy) in checks.items():
                if info[name] != wanted:
                    raise ValueError(
                        f"the sampling server at {server.url} has {name} {info[name]!r}, not {wanted!r}; {remedy}."
                    )
        if len({info["instance"] for info in infos}) < len(infos):
            raise ValueError(f"urls is {self.urls}, of which two are the same server; omit one.")
        self.max_model_len = min(info["max_model_len"] for info in infos)
        if self._fleet is None or not self._fleet.is_same(infos):
            self._release_fleet()
            self._fleet = Fleet(self._servers, infos, self._labels)
        return self._fleet

    @property
    def _vocab_size(self) -> int:
        return self.model.config.get_text_config(decoder=True).vocab_size

    def sample(self, requests: Sequence[SampleRequest], sampling: SamplingConfig, seed: int) -> list[list[Rollout]]:
        """Sample the rollouts of each request, without text; several threads may call it. See `PolicyEngine.sample`.

        Raises:
            ValueError: If a request is invalid, or has images or videos.
            RuntimeError: If there are no weights yet, or a server was away for longer than `timeout`.
            SamplerLostError: If a server came back without the weights.
            WeightsMismatchError: If a server has other weights.
            FloatingPointError: If the model's logits are not finite.
        """
        version, vocab_size = self.version, self._vocab_size
        if any(request.media for request in requests):
            raise ValueError(f"{type(self).__name__} only serves text, and a prompt has images or videos.")
        stop = self.check(requests, sampling)
        for request in requests:
            if max(request.token_ids) >= vocab_size:  # a placeholder beyond the vocabulary, which crashes the server
                raise ValueError(f"a prompt has token id {max(request.token_ids)}, beyond vocab_size={vocab_size}.")
        if version is None:
            if self._is_lost:
                raise SamplerLostError("the last update of the sampling servers has failed.")
            raise RuntimeError(f"{type(self).__name__} has no weights; call update_weights before generate.")
        end_ids, mixtures = self.end_ids(sampling), mixture_layers(self.model) if self.router_replay else None
        never = [token for token in sorted(placeholder_ids(self.model).values()) if token < vocab_size]
        asked = []
        for request in requests:
            limited = replace(sampling, max_new_tokens=request.max_new_tokens)
            options = [sampling_options(limited, end_ids=end_ids, never=never, seed=one) for one in request.seeds(seed)]
            bodies = [{"token_ids": request.token_ids, "sampling_params": option} for option in options]
            named = self.adapter == "separate"
            asked.append(PromptRequest(bodies, stop, self._labels, version, vocab_size, named, mixtures))
        return self._scheduler.sample(asked)

    def close(self) -> None:
        """Release the servers, which keep running, and cancel what other threads are sampling.

        The next `update_weights` connects again.
        """
        self.version, self._is_lost = None, False
        self._scheduler.cancel()
        self._release_fleet()

    def _release_fleet(self) -> None:
        if self._fleet is not None:
            self._fleet.close()
            self._fleet = None
