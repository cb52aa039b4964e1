"""Decides when to send the policy's weights to a sampler, and resends them if the sampler lost them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import islice
from typing import Any, Protocol, TypeVar

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from pl_grouprl.distributed.checksum import add, checksum
from pl_grouprl.distributed.strategies import StrategySupport, local_weights
from pl_grouprl.distributed.weight_stream import adapter_config, adapter_weights, base_weights, checkpoint_weights
from pl_grouprl.models.adapters import has_adapters, is_quantized
from pl_grouprl.rollout.engine import AdapterWeights, SamplerLostError, SyncedRolloutEngine
from pl_grouprl.utilities.distributed import gather_plain, num_ranks, raise_on_all_ranks

T = TypeVar("T")
Named = tuple[str, Tensor]
Timed = Callable[[str], AbstractContextManager[None]]

MAX_RESTARTS = 3
"""Give up after the sampler was lost this many times in a row."""


class PolicyOwner(Protocol):
    """A module that has the policy, or a part of one."""

    @property
    def policy(self) -> Any:
        """A transformers model; its weights may be shards."""
        ...

    @property
    def tokenizer(self) -> Any:
        """Its tokenizer, or None."""
        ...

    @property
    def support(self) -> StrategySupport:
        """Gathers whole weights under the run's strategy."""
        ...

    @property
    def device(self) -> torch.device:
        """Device for communication."""
        ...


class WeightSync:
    """Sends the policy's weights to a sampler before it samples, if any bit on any rank changed since the last time.

    At the start of a run, the sampler is assumed to have no weights. All methods that send weights are collective, and
    an error on one rank ends the run on all.

    Args:
        timed: Given the name of a part of the step, returns a context that charges its time to that part.
    """

    def __init__(self, timed: Timed) -> None:
        self._timed = timed
        self._version = 0
        self._metrics: dict[str, float] = {"count": 0.0, "seconds": 0.0, "restarts": 0.0}
        self.forget()

    def forget(self) -> None:
        """Make the next sync send all weights."""
        self._sent: int | None = None
        self._sent_base: int | None = None

    def take_metrics(self) -> dict[str, float]:
        """Return this rank's metrics since the last call, summed.

        Returns:
            `sync/count` and `sync/seconds`, the engine's metrics (`sync/bytes`), and `sync/restarts`, how often the
            sampler was lost.
        """
        taken, self._metrics = self._metrics, dict.fromkeys(self._metrics, 0.0)
        return {f"sync/{name}": value for name, value in taken.items()}

    def sample(self, owner: PolicyOwner, engine: SyncedRolloutEngine, run: Callable[[], T]) -> T:
        """Sample on all ranks from the policy's current weights. Collective.

        Args:
            owner: Owner of the policy.
            engine: The engine, with a copy of the policy.
            run: Samples on this rank. Called again if the sampler was lost; must then return the same.

        Raises:
            RuntimeError: If the sampler is lost `MAX_RESTARTS` times in a row, or another rank fails for another
                reason.
        """
        for losses in range(1, MAX_RESTARTS + 1):
            try:
                self._update(owner, engine)
                with ExitStack() as waiting:

                    def sample(waiting: ExitStack = waiting) -> T:
                        result = run()
                        if num_ranks() > 1:
                            waiting.enter_context(self._timed("wait_for_ranks"))
                        return result

                    return raise_on_all_ranks(sample, owner.device, shared=SamplerLostError)
            except SamplerLostError as error:
                self.forget()
                self._add({"restarts": 1.0})
                lost = error
                rank_zero_warn(f"the sampler was lost ({losses} of at most {MAX_RESTARTS} times in a row): {error}")
            except BaseException:
                self.forget()
                raise
        raise RuntimeError(f"{type(engine).__name__} was lost {MAX_RESTARTS} times in a row, lastly: {lost}") from lost

    def _update(self, owner: PolicyOwner, engine: SyncedRolloutEngine) -> None:
        """Send weights, unless the sampler has the current ones of every rank."""
        policy, known = owner.policy, engine.version == self._version
        present, base = fingerprint(policy), fingerprint(policy, frozen_only=True)
        current, has_base = known and self._sent == present, known and self._sent_base == base
        states = gather_plain([current, has_base, max(self._version, engine.version or 0)], owner.device)
        if all(rank_is_current for rank_is_current, _, _ in states):
            return
        with_base = not all(rank_has_base for _, rank_has_base, _ in states)
        self._version = 1 + max(version for _, _, version in states)

        def send() -> dict[str, float]:
            # Lightning validates in inference mode, but inference tensors cannot be written to later.
            with torch.inference_mode(False), torch.no_grad(), ExitStack() as reading:
                engine.bind(policy, owner.tokenizer)
                separate = engine.adapter == "separate"
                passes = [owner.support.named_weights(policy) for _ in range(1 + (separate and with_base))]
                streams = reading.enter_context(read_to_the_end(*passes))
                if not separate:
                    return engine.update_weights(checkpoint_weights(policy, streams[0]), version=self._version)
                new_base = base_weights(policy, streams[0]) if with_base else iter(())
                adapter = AdapterWeights(adapter_config(policy), adapter_weights(policy, _skip_to_last(streams)))
                return engine.update_weights(new_base, version=self._version, adapter=adapter)

        with self._timed("weight_sync"):
            start = time.perf_counter()
            figures = raise_on_all_ranks(send, owner.device, shared=SamplerLostError)
            self._add({**figures, "count": 1.0, "seconds": time.perf_counter() - start})
        self._sent, self._sent_base = present, base

    def _add(self, figures: dict[str, float]) -> None:
        for name, figure in figures.items():
            self._metrics[name] = self._metrics.get(name, 0.0) + figure


@contextmanager
def read_to_the_end(*streams: Iterable[Named]) -> Iterator[list[Iterator[Named]]]:
    """Pass streams to a reader, then exhaust them, because the other ranks gather the same weights.

    Args:
        *streams: Collective streams of weights, in order.
    """
    parts: list[Iterator[Named]] = [islice(stream, None) for stream in streams]  # which readers cannot close
    try:
        yield parts
    finally:
        for part in parts:
            deque(part, maxlen=0)


def _skip_to_last(streams: list[Iterator[Named]]) -> Iterator[Named]:
    """The last stream, after exhausting the others, because ranks gather them in order."""
    *before, last = streams
    for stream in before:
        deque(stream, maxlen=0)
    yield from last


def check_adapter(engine: object, policy: nn.Module) -> None:
    """Check that a synced engine can take the policy's weights and adapter.

    Raises:
        ValueError: If the policy is quantized, or lacks the adapter that the engine takes separately.
    """
    if not isinstance(engine, SyncedRolloutEngine):
        return
    if is_quantized(policy):
        raise ValueError(f"engine is {type(engine).__name__}, but weights are quantized; sample with HFRolloutEngine.")
    if engine.adapter == "separate" and not has_adapters(policy):
        name = type(policy).__name__
        raise ValueError(
            f"{type(engine).__name__}.adapter is 'separate', but the {name} has no adapter; pass 'merged'."
        )


def fingerprint(model: nn.Module, *, frozen_only: bool = False) -> int:
    """Checksum of this rank's part of a model's weights; any changed bit changes it.

    Args:
        model: Its weights may be shards.
        frozen_only: Omit trainable weights.
    """
    places = enumerate(local_weights(model))
    return add(*(checksum(weight, place) for place, weight in places if not (frozen_only and weight.requires_grad)))


class CloseEngine(pl.Callback):
    """Closes the module's sampler and harness after an exception, when Lightning does not call `teardown`."""

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Close both; if that fails too, the original exception is still raised."""
        engine = getattr(pl_module, "engine", None)
        harness = getattr(getattr(pl_module, "episodes", None), "harness", None)
        for part in (harness, engine if isinstance(engine, SyncedRolloutEngine) else None):
            try:
                if part is not None:
                    part.close()
            except Exception as error:
                rank_zero_warn(f"{type(part).__name__}.close failed after an exception: {error}")
