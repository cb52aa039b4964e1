"""When a sampler with a copy of the policy's weights is given them, and what happens where it has lost them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from pl_grouprl.models.adapter_layers import has_adapters
from pl_grouprl.models.weight_stream import adapter_config, adapter_weights, base_weights, checkpoint_weights
from pl_grouprl.rollout.engine import AdapterWeights, RolloutEngine, SamplerLostError, SyncedRolloutEngine
from pl_grouprl.rollout.weights.checksum import add, checksum
from pl_grouprl.strategies.weights import local_weights
from pl_grouprl.utilities.distributed import gather_plain

if TYPE_CHECKING:
    from pl_grouprl.training.run import Run

T = TypeVar("T")
Named = tuple[str, Tensor]
Timed = Callable[[str], AbstractContextManager[None]]

MAX_LOSSES = 3
"""A sampler that is lost so often in a row is given up."""


class WeightSync:
    """Gives a sampler the policy's weights before it samples, where they have changed since it got them last.

    They have changed if a bit of them has, on any rank, whoever wrote it. Nothing is assumed of the sampler at the
    start of a run. All ranks take part in everything, and what one of them raises ends it on all.

    Args:
        timed: Charges what runs inside to the part `weight_sync` of the step's time.
    """

    def __init__(self, timed: Timed) -> None:
        self._timed = timed
        self._version = 0
        self._metrics: dict[str, float] = {"count": 0.0, "seconds": 0.0, "restarts": 0.0}
        self.forget()

    def forget(self) -> None:
        """Assume nothing of the sampler: it is given all weights before it samples again."""
        self._given: int | None = None
        self._given_base: int | None = None

    def take_metrics(self) -> dict[str, float]:
        """Figures of this rank since the last call, added up.

        Returns:
            `sync/count` and `sync/seconds` of syncs, what the engine says of them (`sync/bytes`), and how often its
            sampler was lost, `sync/restarts`.
        """
        taken, self._metrics = self._metrics, dict.fromkeys(self._metrics, 0.0)
        return {f"sync/{name}": value for name, value in taken.items()}

    def sample(self, module: Run, engine: SyncedRolloutEngine, run: Callable[[], T]) -> T:
        """Let all ranks sample from the weights that the policy has now.

        Args:
            module: Has the policy.
            engine: Has a copy of it.
            run: Samples on this rank. It is called again where the sampler was lost, and gives the same then.

        Raises:
            RuntimeError: If the sampler is lost again and again, or something else fails on another rank.
        """
        for losses in range(1, MAX_LOSSES + 1):
            try:
                self._update(module, engine)
                return together(run, module.device)
            except SamplerLostError as error:
                self.forget()
                self._add({"restarts": 1.0})
                lost = error
                rank_zero_warn(f"the sampler was lost ({losses} of at most {MAX_LOSSES} times in a row): {error}")
            except BaseException:
                self.forget()
                raise
        raise RuntimeError(
            f"the sampler of {type(engine).__name__} was lost {MAX_LOSSES} times in a row, the last time with: {lost}. "
            "See in its own log why it ends."
        ) from lost

    def _update(self, module: Run, engine: SyncedRolloutEngine) -> None:
        """Give the sampler weights, unless it has the present ones of every rank."""
        policy, known = module.policy, engine.version == self._version
        present, base = fingerprint(policy), fingerprint(policy, frozen_only=True)
        current, has_base = known and self._given == present, known and self._given_base == base
        told = gather_plain([current, has_base, max(self._version, engine.version or 0)], module.device)
        if all(rank_is_current for rank_is_current, _, _ in told):
            return
        with_base = not all(rank_has_base for _, rank_has_base, _ in told)
        self._version = 1 + max(version for _, _, version in told)
        with self._timed("weight_sync"):
            start = time.perf_counter()
            figures = together(lambda: self._send(module, engine, with_base), module.device)
            self._add({**figures, "count": 1.0, "seconds": time.perf_counter() - start})
        self._given, self._given_base = present, base

    def _send(self, module: Run, engine: SyncedRolloutEngine, with_base: bool) -> dict[str, float]:
        policy, separate = module.policy, engine.adapter == "separate"
        passes = [module.support.named_weights(policy) for _ in range(1 + (separate and with_base))]
        # Lightning validates in inference mode, whose tensors could not be written to later.
        with torch.inference_mode(False), torch.no_grad(), read_to_the_end(*passes) as streams:
            engine.bind(policy, module.tokenizer)
            if not separate:
                return engine.update_weights(checkpoint_weights(policy, streams[0]), version=self._version)
            base = base_weights(policy, streams[0]) if with_base else iter(())
            adapter = AdapterWeights(adapter_config(policy), adapter_weights(policy, _in_turn(streams)))
            return engine.update_weights(base, version=self._version, adapter=adapter)

    def _add(self, figures: dict[str, float]) -> None:
        for name, figure in figures.items():
            self._metrics[name] = self._metrics.get(name, 0.0) + figure


def together(run: Callable[[], T], device: torch.device | str) -> T:
    """Run something on every rank; what one raises ends it on all.

    Args:
        run: Anything that each rank comes back from, whatever happens on another.
        device: Where ranks tell each other how it went.

    Raises:
        Exception: Whatever it has raised on this rank.
        SamplerLostError: On every rank, if it was raised on one and nothing else on another.
        RuntimeError: If something else was raised on another rank, which it names.
    """
    error: Exception | None = None
    try:
        result = run()
    except Exception as raised:
        error = raised
    own = None if error is None else [isinstance(error, SamplerLostError), f"{type(error).__name__}: {error}"]
    told = [(rank, *said) for rank, said in enumerate(gather_plain(own, device)) if said is not None]
    failed = [(rank, text) for rank, lost, text in told if not lost]
    if error is not None and not (failed and isinstance(error, SamplerLostError)):
        raise error
    if failed:
        raise RuntimeError(f"rank {failed[0][0]} has failed, so this one cannot go on: {failed[0][1]}") from error
    if told:
        raise SamplerLostError(f"on rank {told[0][0]}, {told[0][2]}")
    return result


@contextmanager
def read_to_the_end(*streams: Iterable[Named]) -> Iterator[list[Iterator[Named]]]:
    """Hand streams to a reader, and read on where it stops: other ranks wait for what is gathered with them.

    Args:
        *streams: Weights that all ranks gather together, one stream after the other.
    """
    parts: list[Iterator[Named]] = [islice(stream, None) for stream in streams]  # which nobody can close
    try:
        yield parts
    finally:
        for part in parts:
            deque(part, maxlen=0)


def _in_turn(streams: list[Iterator[Named]]) -> Iterator[Named]:
    """The last of some streams; ranks gather the others before it, whether their reader has read them or not."""
    *before, last = streams
    for stream in before:
        deque(stream, maxlen=0)
    yield from last


def check_adapter(engine: RolloutEngine, policy: nn.Module) -> None:
    """Refuse an engine that takes an adapter by itself where there is none.

    Raises:
        ValueError: With the remedy.
    """
    if isinstance(engine, SyncedRolloutEngine) and engine.adapter == "separate" and not has_adapters(policy):
        raise ValueError(
            f"{type(engine).__name__}.adapter is 'separate', but the {type(policy).__name__} has no adapter; pass "
            "'merged', or train one (policy.init_args.adapter)."
        )


def fingerprint(model: nn.Module, *, frozen_only: bool = False) -> int:
    """Checksum of what this rank has of a model's weights: another one where a bit of them is another.

    Args:
        model: Its weights may be shards.
        frozen_only: Leave out what is trained.
    """
    weights = local_weights(model)
    return add(
        *(checksum(weight, place) for place, weight in enumerate(weights) if not (frozen_only and weight.requires_grad))
    )


class CloseEngine(pl.Callback):
    """Lets go of the module's sampler after an exception, where Lightning calls no `teardown`."""

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Close the engine; if that fails too, the exception stays the one that is raised."""
        engine = getattr(pl_module, "engine", None)
        try:
            if isinstance(engine, SyncedRolloutEngine):
                engine.close()
        except Exception as error:
            rank_zero_warn(f"{type(engine).__name__}.close failed after an exception: {error}")
