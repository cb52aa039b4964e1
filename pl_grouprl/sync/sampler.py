"""The interface and errors of samplers that have a copy of the weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from torch import Tensor


@dataclass(frozen=True)
class AdapterWeights:
    """A LoRA adapter to send to a sampler, in the form in which PEFT saves it.

    Attributes:
        config: Contents of its `adapter_config.json`.
        weights: Names, as in its `adapter_model.safetensors`, and whole values; read after the other weights.
    """

    config: Mapping[str, Any]
    weights: Iterable[tuple[str, Tensor]]


@runtime_checkable
class SyncedSampler(Protocol):
    """A sampler with a copy of the policy's weights, synced after updates.

    `bind` and `update_weights` are collective. Ranks exchange errors afterwards, so an engine whose ranks wait for each
    other inside a method must release all of them before raising. `bind` reads the policy's config; its weights may be
    shards.

    Attributes:
        adapter: `merged`: takes weights with adapters merged; `separate`: takes the base once, then only the adapter.
        version: Version of the weights that it has, as far as this process knows; None if none were sent.
    """

    adapter: Literal["merged", "separate"]
    version: int | None

    def bind(self, model: Any, tokenizer: Any = None) -> None:
        """Set the policy; see `RolloutEngine.bind`."""
        ...

    def update_weights(
        self, weights: Iterable[tuple[str, Tensor]], *, version: int, adapter: AdapterWeights | None = None
    ) -> dict[str, float]:
        """Load new weights into the sampler, and verify that it has them.

        Args:
            weights: Names, as in a Hugging Face checkpoint, and whole values. Read once, in order; the caller exhausts
                what is left unread. A tensor may change once the next one is requested.
            version: Larger than any before.
            adapter: The adapter for those weights if `self.adapter` is `separate`. The first time, `weights` are the
                base; later they are empty, and the sampler keeps its base.

        Returns:
            Metrics, including `bytes`; the caller measures `seconds`.

        Raises:
            SamplerLostError: If the sampler was restarted in the meantime.
            WeightsMismatchError: If the sampler did not load exactly the weights sent.
        """
        ...

    def close(self) -> None:
        """Release the sampler; the next call of `update_weights` starts it again.

        Idempotent. A rank may call it alone, after an exception.
        """
        ...


class SamplerLostError(RuntimeError):
    """The sampler was restarted and lost the policy's weights: send them and sample again."""


class WeightsMismatchError(RuntimeError):
    """The sampler's weights differ from the policy's; its rollouts must not be trained on."""
