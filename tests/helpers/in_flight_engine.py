"""Engines that take weights in flight: one of made-up tokens, which waits where it is told to, and one of a model."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from helpers.copied_engine import CopiedPolicyEngine
from torch import Tensor

from pl_grouprl.types import Rollout, SamplingConfig
from pl_grouprl.utilities.distributed import derive_seed

Hook = Callable[["InFlightEngine", int, int], None]
"""(engine, number of the call from 0, number of the token) -> None; called before each token, may wait or raise."""


class InFlightEngine:
    """Tokens depend on the seed, the index of the prompt, and the rollout; log-probabilities are those of chance.

    Args:
        hook: Called before each token of the first rollout of each prompt, outside of any lock.
        length: Tokens of each rollout; None draws from 1 to the limit.
        reports: Whether rollouts say which version each token has.

    Attributes:
        version: See `SyncedRolloutEngine`.
        calls: Prompt, seed and version at the start of each call of `generate`.
        closed: Set by `close`, which calls in flight that wait by `wait` notice.
        changed: Notified when weights have arrived, and by tests.
    """

    takes_prompt_indices = True
    takes_limits = True
    updates_in_flight = True

    def __init__(self, hook: Hook | None = None, length: int | None = None, reports: bool = True) -> None:
        self.hook, self.length, self.reports = hook, length, reports
        self.adapter = "merged"
        self.version: int | None = None
        self.calls: list[tuple[tuple[int, ...], int, int | None]] = []
        self.names: set[str] = set()
        self.closed = False
        self.changed = threading.Condition()
        self._vocab = 0

    def bind(self, model: Any, tokenizer: Any = None) -> None:
        self._vocab = model.config.vocab_size

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], *, version: int, adapter: Any = None) -> dict:
        size = sum(weight.nbytes for _, weight in weights)
        with self.changed:
            assert self.version is None or version > self.version
            self.version, self.closed = version, False
            self.changed.notify_all()
        return {"bytes": float(size)}

    def close(self) -> None:
        with self.changed:
            self.version, self.closed = None, True
            self.changed.notify_all()

    def wait(self, condition: Callable[[], bool]) -> None:
        """Wait inside a call, until it is so or the engine is closed."""
        with self.changed:
            assert self.changed.wait_for(lambda: self.closed or condition(), 60), "waited for a minute"
            if self.closed:
                raise RuntimeError("the engine was closed")

    def notify(self) -> None:
        """Wake calls that wait."""
        with self.changed:
            self.changed.notify_all()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingConfig,
        *,
        num_generations: int,
        seed: int,
        prompt_indices: Sequence[int] | None = None,
        max_new_tokens: Sequence[int] | None = None,
    ) -> list[list[Rollout]]:
        with self.changed:
            first_call = len(self.calls)
            self.calls += [(tuple(prompt), seed, self.version) for prompt in prompts]
            self.names.add(threading.current_thread().name)
        indices = list(range(len(prompts)) if prompt_indices is None else prompt_indices)
        limits = [sampling.max_new_tokens] * len(prompts) if max_new_tokens is None else list(max_new_tokens)
        return [
            [
                self._rollout(first_call + place, derive_seed(seed, index, g), limit, is_first=g == 0)
                for g in range(num_generations)
            ]
            for place, (index, limit) in enumerate(zip(indices, limits, strict=True))
        ]

    def _rollout(self, call: int, seed: int, limit: int, *, is_first: bool) -> Rollout:
        length = min(limit, self.length or 1 + seed % limit)
        versions = []
        for token in range(length):
            if self.hook is not None and is_first:
                self.hook(self, call, token)
            versions.append(self.version or 0)
        token_ids = [2 + derive_seed(seed, token) % (self._vocab - 2) for token in range(length)]
        return Rollout(
            token_ids,
            [-math.log(self._vocab)] * length,
            finish_reason="length" if length == limit else "stop",
            weight_versions=versions if self.reports else None,
        )


class InFlightCopy(CopiedPolicyEngine):
    """Samples from a copy of the policy for several threads, one after another; weights come between two calls."""

    updates_in_flight = True

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.RLock()

    def update_weights(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        with self.lock:
            return super().update_weights(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> list[list[Rollout]]:
        with self.lock:
            if self.model is None:
                raise RuntimeError("the engine was closed")
            groups = super().generate(*args, **kwargs)
            for rollout in (rollout for group in groups for rollout in group):
                rollout.weight_versions = [self.version or 0] * len(rollout.token_ids)
            return groups

    def close(self) -> None:
        with self.lock:
            super().close()
