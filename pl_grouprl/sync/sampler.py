"""The interface of samplers with their own copy of the weights, and their errors."""

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
        weights: Name, as in its `adapter_model.safetensors`, and whole value of each; read like the other weights,
            after them.
    """

    config: Mapping[str, Any]
    weights: Iterable[tuple[str, Tensor]]


@runtime_checkable
class SyncedSampler(Protocol):
    """Has a copy of the policy's weights, synced after updates.

    `bind` and `update_weights` are collective. Ranks exchange errors afterwards, so an engine whose ranks wait for each
    other inside a method must release all of them before raising. `bind` reads the policy's config; its weights may be
    shards.

    Attributes:
        adapter: How it takes a policy's adapter: `merged` into the weights, or `separate`: the base once, then only the
            adapter.
        version: Version of the sampler's weights, as far as this process knows; None if it has none of ours.
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
            weights: Name, as in a Hugging Face checkpoint, and whole value of each. Read once, in order; the caller
                exhausts what is left unread. A tensor may change once the next one is requested.
            version: Larger than any before.
            adapter: The adapter for those weights if `self.adapter` is `separate`. The first time, `weights` are the
                base; later they are empty, and the sampler keeps its base.

        Returns:
            Metrics, including `bytes`. (The caller measures `seconds`, including gathering.)

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
    """The sampler has other weights than the policy; its rollouts must not be trained on."""
