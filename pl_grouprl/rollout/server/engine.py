"""Rollouts by vLLM servers in separate processes, on this machine or others."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, Literal, get_args

from torch import Tensor

from pl_grouprl.rollout.bound_policy import BoundPolicy, HoldsPolicy, sequence_seeds
from pl_grouprl.rollout.engine import prompt_limits
from pl_grouprl.rollout.server.client import RefusedError, ServerClient
from pl_grouprl.rollout.server.fleet import Fleet, map_over_servers
from pl_grouprl.rollout.server.protocol import TOKEN_VARIABLE
from pl_grouprl.rollout.stopping import tokenizer_fingerprint
from pl_grouprl.rollout.vllm.model_folder import SamplerDtype
from pl_grouprl.rollout.vllm.requests import check_temperature
from pl_grouprl.sync.compare import check_weights
from pl_grouprl.sync.sampler import AdapterWeights, SamplerLostError, WeightsMismatchError
from pl_grouprl.sync.transfer import cast
from pl_grouprl.types import Media, Rollout, SamplingConfig
from pl_grouprl.utilities.arguments import checked_arguments
from pl_grouprl.utilities.distributed import own_rank
from pl_grouprl.utilities.options import check_options


@checked_arguments
class VLLMServerRolloutEngine(HoldsPolicy):
    """Samples with servers started by `python -m pl_grouprl.rollout.server`, with the policy's model.

    Rank 0 sends the weights to all servers in parallel, and then verifies checksums of the weights that their layers
    loaded. Every rank sends its prompts; each goes to the next free server. The trainer does not need vLLM unless
    weights go by NCCL.

    Reproducible: each sequence has its own seed, derived from (seed, index of the prompt, number of the rollout), so
    the numbers of servers and ranks do not matter. Other sequences in the batch may change the last bits of a
    probability, and so, rarely, a token.

    Waits for a server that does not answer. A restarted server without weights raises `SamplerLostError`, one whose
    weights another trainer changed `WeightsMismatchError`.

    Args:
        urls: URLs of the servers, `http://host:port`; an empty list is refused.
        token: The servers' token; None reads the environment variable PL_GROUPRL_TOKEN. It is sent unencrypted: beyond
            this machine, put TLS (`https://`) or a tunnel in front of the servers.
        timeout: Seconds that a server may be unreachable before the run ends, and time limit of calls other than
            rollouts. Rollouts have none, because servers send heartbeats.
        transfer: How weights are sent: `http`, or `nccl` from GPU to GPU, for servers with `--transfer nccl`.
        dtype: Required dtype of the servers; `auto` accepts any.
        bucket_mib: Size of the buckets of weights, in MiB.
        adapter: `merged`: servers get the weights with the adapter merged in; no other value is supported.
        max_concurrent_requests: Number of prompts per rank that a server works on at a time.

    Attributes:
        max_model_len: Maximum length of prompt plus completion on every server; None before the first
            `update_weights`.

    Raises:
        ValueError: If an option is out of range, or a url is malformed.
    """

    reserves_max_new_tokens = True
    takes_prompt_indices = True
    takes_limits = True

    def __init__(
        self,
        urls: str | list[str] = "http://127.0.0.1:8000",
        *,
        token: str | None = None,
        timeout: float = 300.0,
        transfer: Literal["http", "nccl"] = "http",
        dtype: SamplerDtype = "auto",
        bucket_mib: int = 256,
        adapter: Literal["merged"] = "merged",
        max_concurrent_requests: int = 64,
    ) -> None:
        urls = [urls] if isinstance(urls, str) else list(urls)
        check_options(
            {
                "urls": (urls, len(urls) > 0 and len(set(urls)) == len(urls), "at least one url, each once"),
                "timeout": (timeout, timeout > 0, "larger than 0"),
                "transfer": (transfer, transfer in ("http", "nccl"), "'http' or 'nccl'"),
                "dtype": (dtype, dtype in get_args(SamplerDtype), f"one of {', '.join(get_args(SamplerDtype))}"),
                "bucket_mib": (bucket_mib, bucket_mib >= 1, "at least 1"),
                "adapter": (adapter, adapter == "merged", "'merged', the only way that servers take an adapter"),
                "max_concurrent_requests": (max_concurrent_requests, max_concurrent_requests >= 1, "at least 1"),
            }
        )
        token = os.environ.get(TOKEN_VARIABLE) or None if token is None else token
        self.adapter: Literal["merged", "separate"] = adapter
        self.version: int | None = None
        self.max_model_len: int | None = None
        self.dtype: SamplerDtype = dtype
        self.transfer = transfer
        self.max_concurrent_requests = max_concurrent_requests
        self._bucket_bytes = bucket_mib << 20
        self._clients = [ServerClient(url, token=token, timeout=timeout) for url in urls]
        self._updates: list[str] = []
        self._tokenizer: str | None = None
        self._fleet: Fleet | None = None

    def bind(self, model: Any, tokenizer: Any = None) -> None:
        """Set the policy. Reads its config; `update_weights` sends its weights. See `RolloutEngine.bind`."""
        if self._policy is None or self._policy.tokenizer is not tokenizer:
            self._tokenizer = None
        self._policy = BoundPolicy(model, tokenizer)

    def update_weights(
        self, weights: Iterable[tuple[str, Tensor]], *, version: int, adapter: AdapterWeights | None = None
    ) -> dict[str, float]:
        """Send new weights to the servers, and verify them; see `SyncedRolloutEngine.update_weights`.

        Raises:
            ValueError: If a server has another model, dtype or transfer.
            RuntimeError: If a server refuses, or was away for longer than `timeout`.
        """
        if adapter is not None:
            raise ValueError(f"adapter is given, but {type(self).__name__} only takes merged weights.")
        started = time.perf_counter()
        self.version, self._updates = None, []
        size = self._send(weights, version) if own_rank() == 0 else 0
        self.max_model_len = min(client.info()["model"]["max_model_len"] for client in self._clients)
        self.version = version
        return {"bytes": float(size), "seconds": time.perf_counter() - started}

    def _send(self, weights: Iterable[tuple[str, Tensor]], version: int) -> int:
        sent: dict[str, int] = {}
        with self._translating_refusals():
            fleet = self._ready()
            fleet.begin()
            try:
                size = fleet.send(cast(weights, fleet.dtype, sent), self._bucket_bytes)
                for client, workers in zip(self._clients, fleet.end(version, list(sent)), strict=True):
                    with _naming_server(client):
                        check_weights(sent, workers)
            except BaseException:
                fleet.abort()
                if self.transfer == "nccl":  # workers may still be waiting in that group
                    self._release_fleet()
                raise
        self._updates = fleet.updates
        return size

    def _ready(self) -> Fleet:
        """The servers in their current state, after checking that they serve this policy."""
        infos = [client.info() for client in self._clients]
        for client, info in zip(self._clients, infos, strict=True):
            self._check_server(client.url, info, infos[0]["model"])
        if self._fleet is None or not self._fleet.is_same(infos):
            self._release_fleet()
            self._fleet = Fleet(self._clients, infos, self.transfer)
        return self._fleet

    def _check_server(self, url: str, info: dict[str, Any], first: dict[str, Any]) -> None:
        model, config = info["model"], self.policy.model.config
        text = config.get_text_config(decoder=True)
        dtype = first["dtype"] if self.dtype == "auto" else self.dtype
        checks = {
            "model_type": (model["model_type"], config.model_type, "start it with --model of the policy"),
            "vocab_size": (model["vocab_size"], text.vocab_size, "start it with --model of the policy"),
            "dtype": (model["dtype"], dtype, f"start it with --dtype {dtype}, or set dtype"),
            "transfer": (info["transfer"], self.transfer, f"start it with --transfer {self.transfer}, or set transfer"),
        }
        for name, (found, wanted, remedy) in checks.items():
            if found != wanted:
                raise ValueError(f"the sampling server at {url} has {name} {found!r}, not {wanted!r}; {remedy}.")

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingConfig,
        *,
        num_generations: int,
        seed: int,
        media: Sequence[Media] | None = None,
        prompt_indices: Sequence[int] | None = None,
        max_new_tokens: Sequence[int] | None = None,
    ) -> list[list[Rollout]]:
        """Sample completions; see `RolloutEngine.generate`.

        Raises:
            ValueError: If no policy is bound, the request is invalid (`engine.check_request`), or has images or videos.
            RuntimeError: If there are no weights yet, or a server was away for longer than `timeout`.
            SamplerLostError: If a server came back without the weights.
            WeightsMismatchError: If a server has other weights.
            FloatingPointError: If the model's logits are not finite.
        """
        policy = self.policy
        policy.check(prompts, sampling, num_generations, self.max_model_len, max_new_tokens=max_new_tokens)
        check_temperature(sampling)
        if media is not None and any(media):
            raise ValueError(f"{type(self).__name__} only serves text, and a prompt has images or videos.")
        if self.version is None:
            raise RuntimeError(f"{type(self).__name__} has no weights; call update_weights before generate.")
        policy.stop(sampling)  # refuses stop strings without a tokenizer
        common = {
            "tokenizer": self._fingerprint() if sampling.stop else None,
            "version": self.version,
            "end_ids": policy.end_ids(sampling),
            "never": policy.never,
        }
        seeds = sequence_seeds(seed, len(prompts), num_generations, prompt_indices)
        limits = prompt_limits(prompts, sampling, max_new_tokens)
        requests: list[dict[str, Any]] = [
            {
                "requests": [{"prompt": [int(token) for token in prompt], "seeds": prompt_seeds}],
                "sampling": {**asdict(sampling), "max_new_tokens": limit},
            }
            for prompt, prompt_seeds, limit in zip(prompts, seeds, limits, strict=True)
        ]

        def ask(server: int, place: int) -> list[Rollout]:
            request = {**common, "update": self._updates[server], **requests[place]}
            with _translating_request_errors():
                return [_rollout(found) for found in self._clients[server].generate(request)[0]]

        with self._translating_refusals():
            if requests and not self._updates:
                self._updates = [self._current_update(client) for client in self._clients]
            groups = map_over_servers(ask, len(requests), len(self._clients), self.max_concurrent_requests)
        policy.decode(rollout for group in groups for rollout in group)
        return groups

    def _fingerprint(self) -> str:
        """Fingerprint that the servers' tokenizer must have for stop strings to be found."""
        if self._tokenizer is None:
            size = self.policy.model.config.get_text_config(decoder=True).vocab_size
            self._tokenizer = tokenizer_fingerprint(self.policy.tokenizer, size)
        return self._tokenizer

    def _current_update(self, client: ServerClient) -> str:
        """The server's id of the update that rank 0 sent."""
        info = client.info()
        if info["version"] != self.version:
            raise RefusedError(client.url, 409, {**info, "error": f"version {self.version} is requested"})
        return info["update"]

    @contextmanager
    def _translating_refusals(self) -> Iterator[None]:
        """Translate a refusal: the weights are lost, or from another trainer."""
        try:
            yield
        except RefusedError as error:
            if error.status != 409:
                raise
            self.version = None
            if error.answer.get("version") is None and not error.answer.get("updating"):
                raise SamplerLostError(f"{error} It was restarted, or has lost an update.") from error
            raise WeightsMismatchError(
                f"{error} Does another trainer use this server? Give each trainer its own servers."
            ) from error

    def close(self) -> None:
        """Release the servers, which keep running; the next `update_weights` finds them again."""
        self.version, self._updates = None, []
        self._release_fleet()

    def _release_fleet(self) -> None:
        if self._fleet is not None:
            self._fleet.close()
            self._fleet = None


def _rollout(found: dict[str, Any]) -> Rollout:
    return Rollout(found["token_ids"], found["logprobs"], finish_reason=found["finish_reason"])


@contextmanager
def _translating_request_errors() -> Iterator[None]:
    """Convert server errors that are due to the request or the model."""
    try:
        yield
    except RefusedError as error:
        if error.status not in (413, 422):
            raise
        kind = FloatingPointError if "FloatingPointError" in str(error) else ValueError
        raise kind(str(error)) from error


@contextmanager
def _naming_server(client: ServerClient) -> Iterator[None]:
    try:
        yield
    except WeightsMismatchError as error:
        raise WeightsMismatchError(f"At {client.url}: {error}") from error
