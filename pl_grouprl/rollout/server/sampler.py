"""The sampling server's engine: rollouts with one version of the weights, and updates between versions."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from pl_grouprl.rollout.engine import check_request
from pl_grouprl.rollout.server.protocol import HEARTBEAT
from pl_grouprl.rollout.stopping import StopStrings, tokenizer_fingerprint
from pl_grouprl.types import SamplingConfig


class RefusalError(Exception):
    """A refused request.

    Attributes:
        status: HTTP status.
        answer: Sent to the client.
    """

    def __init__(self, status: int, error: str, **more: Any) -> None:
        super().__init__(error)
        self.status = status
        self.answer = {"error": error, **more}


@dataclass(frozen=True)
class PromptRequest:
    """A request for rollouts of one prompt, one per seed."""

    prompt: list[int]
    seeds: list[int]


class Sampler:
    """A vLLM engine whose weights have a version, or which has no weights yet.

    All tokens of a rollout come from one version: an update ends running rollouts.

    Args:
        engine: vLLM's `AsyncLLM`, with the worker extension `WeightReceiver`.
        transfer: How weights arrive: `http` or `nccl`.
    """

    def __init__(self, engine: Any, *, transfer: str) -> None:
        self.engine = engine
        self.transfer = transfer
        self.instance = secrets.token_hex(8)
        self.version: int | None = None
        self.update: str | None = None
        self.updating = False
        self._tokenizer: Any = None
        self._fingerprint: str | None = None
        self._buckets = 0
        self._changing = asyncio.Lock()
        self._running: set[asyncio.Task[Any]] = set()

    def info(self) -> dict[str, Any]:
        """Information about this server for clients."""
        import vllm

        model, parallel = self.engine.model_config, self.engine.vllm_config.parallel_config
        return {
            **self._state(),
            "transfer": self.transfer,
            "workers": parallel.world_size,
            "vllm": vllm.__version__,
            "model": {
                "model_type": model.hf_config.model_type,
                "vocab_size": model.get_vocab_size(),
                "max_model_len": model.max_model_len,
                "dtype": str(model.dtype).removeprefix("torch."),
                "tensor_parallel_size": parallel.tensor_parallel_size,
            },
        }

    def check_alive(self) -> None:
        """Refuse with 503 if the engine is dead."""
        if self.engine.errored:
            raise RefusalError(503, "the engine is dead and the server is stopping; see its log.")

    # Rollouts

    def check(
        self,
        version: int,
        update: str,
        requests: Sequence[PromptRequest],
        sampling: SamplingConfig,
        tokenizer: str | None,
    ) -> None:
        """Refuse a request that cannot be served.

        Args:
            version: Version of the weights to sample from.
            update: Id of the update that sent them.
            requests: The prompts.
            sampling: How to sample.
            tokenizer: Fingerprint of the policy's tokenizer; needed with stop strings.

        Raises:
            RefusalError: With 409 if the weights differ, 422 if the model cannot take a prompt, or the tokenizer does
                not match that of the policy.
        """
        self._check_version(version, update)
        model = self.engine.model_config
        limits = {"max_model_len": model.max_model_len}
        try:
            prompts = [request.prompt for request in requests]
            check_request(prompts, sampling, 1, limits=limits, vocab_size=model.get_vocab_size())
            if sampling.stop:
                self._check_tokenizer(sampling, tokenizer)
        except (OSError, ValueError) as error:
            raise RefusalError(422, str(error)[:1000]) from None

    async def rollouts(
        self, version: int, update: str, requests: Sequence[PromptRequest], sampling: SamplingConfig, **options: Any
    ) -> AsyncIterator[dict[str, Any] | None]:
        """Sample; running rollouts are stopped if the caller disconnects.

        Args:
            version: See `check`.
            update: See `check`.
            requests: The prompts.
            sampling: How to sample.
            options: `end_ids` and `never`, see `requests.sampling_params`.

        Yields:
            The version, each rollout when it ends, and a final message. None is a heartbeat.
        """
        tasks: dict[asyncio.Task[Any], tuple[int, int]] = {}
        try:
            self._check_version(version, update)
            for i, request in enumerate(requests):
                for j, seed in enumerate(request.seeds):
                    tasks[asyncio.create_task(self._sample(request.prompt, seed, sampling, options))] = (i, j)
            self._running |= tasks.keys()
            yield {"version": version, "instance": self.instance}
            pending = set(tasks)
            while pending:
                done, pending = await asyncio.wait(pending, timeout=HEARTBEAT, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    if task.cancelled():
                        raise self._other_weights("a weight update has begun")
                    yield {"index": tasks[task], **task.result()}
                if not done:
                    yield None
            yield {"done": True}
        except RefusalError as error:
            yield {"status": error.status, **error.answer}
        except Exception as error:
            yield _failure(error)
        finally:
            self._running -= tasks.keys()
            for task in tasks:
                task.cancel()

    async def _sample(
        self, prompt: list[int], seed: int, sampling: SamplingConfig, options: dict[str, Any]
    ) -> dict[str, Any]:
        from vllm.inputs import tokens_input

        from pl_grouprl.rollout.vllm.requests import Completion, sampling_params

        never = [token for token in options["never"] if token < self.engine.model_config.get_vocab_size()]
        params = sampling_params(sampling, seed=seed, end_ids=options["end_ids"], never=never)
        completion = Completion(self._stop(sampling))
        stream = self.engine.generate(tokens_input(prompt), params, secrets.token_hex(8))
        async with aclosing(stream):  # closing it aborts the request if a stop string was found
            async for output in stream:
                if completion.add(output.outputs[0]):
                    break
        rollout = completion.rollout()
        return {
            "token_ids": rollout.token_ids,
            "logprobs": rollout.logprobs,
            "finish_reason": rollout.finish_reason,
        }

    def _stop(self, sampling: SamplingConfig) -> StopStrings:
        if sampling.stop and self._tokenizer is None:
            from transformers import AutoTokenizer

            self._tokenizer = AutoTokenizer.from_pretrained(self.engine.model_config.tokenizer)
        return StopStrings(self._tokenizer, sampling.stop)

    def _check_tokenizer(self, sampling: SamplingConfig, expected: str | None) -> None:
        stop, model = self._stop(sampling), self.engine.model_config
        if self._fingerprint is None:
            self._fingerprint = tokenizer_fingerprint(stop.tokenizer, model.get_vocab_size())
        if self._fingerprint != expected:
            raise ValueError(
                f"stop strings need the policy's tokenizer, but that of the server's model ({model.tokenizer}) decodes "
                "differently; start the server with a --model that has the policy's."
            )

    # Weights

    async def begin(self) -> str:
        """Begin an update, replacing an unfinished one and ending running rollouts. Returns the update's id."""
        async with self._changing:
            await self._drop(updating=True)
            await self._await_engine(self.engine.start_weight_update())
            self.update, self._buckets = secrets.token_hex(8), 0
            return self.update

    async def load(self, update: str, index: int, bucket: dict[str, Any]) -> None:
        """Load a bucket of weights.

        Args:
            update: The update's id.
            index: Number of the bucket. A bucket that was already loaded is skipped.
            bucket: Passed to the transfer: the path of a safetensors file, or a broadcast's description.
        """
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        async with self._changing:
            self._check_update(update)
            if index > self._buckets:
                raise RefusalError(422, f"index is {index}, but bucket {self._buckets} comes next.")
            if index == self._buckets:
                await self._await_engine(self.engine.update_weights(WeightTransferUpdateRequest(update_info=bucket)))
                self._buckets += 1

    async def end(self, update: str, version: int, names: list[str]) -> list[Any]:
        """Activate an update. Idempotent.

        Args:
            update: The update's id.
            version: Version of the weights.
            names: Names of all weights that were sent.

        Returns:
            Each worker's checksums; see `check_weights`.
        """
        async with self._changing:
            if self.updating or self.version != version:
                self._check_update(update)
                await self._await_engine(self.engine.finish_weight_update(str(version)))
                await self._await_engine(self.engine.collective_rpc("refresh_stale_weights"))
                if not await self._await_engine(self.engine.reset_prefix_cache(reset_running_requests=True)):
                    await self._drop()
                    raise RefusalError(500, "vLLM did not drop its prefix cache.")
            elif update != self.update:
                raise self._other_weights(f"update {update} is not the one that ended")
            workers = await self._await_engine(self.engine.collective_rpc("weight_checksums", args=(names,)))
            self.updating, self.version = False, version
            return workers

    async def abort(self, update: str) -> None:
        """Drop an update, or the weights that it brought. Ignored for another update."""
        async with self._changing:
            if update == self.update:
                await self._drop()

    async def connect(self, init_info: dict[str, Any]) -> None:
        """Join the trainer's process group (NCCL)."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        async with self._changing:
            await self._drop()
            await self._await_engine(self.engine.shutdown_weight_transfer_engine())
            await self._await_engine(
                self.engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info=init_info))
            )

    async def _drop(self, *, updating: bool = False) -> None:
        """Invalidate the weights."""
        self.version, self.update, self.updating = None, None, updating
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self._await_engine(self.engine.collective_rpc("abandon_weights"))

    async def _await_engine(self, call: Any) -> Any:
        """Wait for the engine; if it fails, invalidate the weights."""
        try:
            return await call
        except Exception as error:
            self.version, self.update, self.updating = None, None, False
            failure = _failure(error)
            status = 503 if failure["status"] == 503 else 422
            raise RefusalError(status, f"the engine refuses: {failure['error']}") from error

    def _check_version(self, version: int, update: str) -> None:
        self.check_alive()
        if self.updating or self.version != version or self.update != update:
            raise self._other_weights(f"version {version} of update {update} is requested")

    def _check_update(self, update: str) -> None:
        if not self.updating or self.update != update:
            raise self._other_weights(f"update {update} is not in progress")

    def _other_weights(self, reason: str) -> RefusalError:
        state = "an update is in progress" if self.updating else f"the weights are version {self.version}"
        return RefusalError(409, f"{reason}, but {state}.", **self._state())

    def _state(self) -> dict[str, Any]:
        return {
            "instance": self.instance,
            "version": self.version,
            "update": self.update,
            "updating": self.updating,
        }


def _failure(error: Exception) -> dict[str, Any]:
    """The answer to an engine error: 422 if it refuses the request, 503 if it is dead."""
    from vllm.exceptions import VLLMClientError
    from vllm.v1.engine.exceptions import EngineDeadError

    status = 503 if isinstance(error, EngineDeadError) else 500
    if isinstance(error, ValueError | FloatingPointError | VLLMClientError):
        status = 422
    return {"status": status, "error": f"{type(error).__name__}: {error.__cause__ or error}"[:2000]}
