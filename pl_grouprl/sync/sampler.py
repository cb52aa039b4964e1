"""What a sampler with its own copy of the weights implements, and how it fails."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from torch import Tensor


@dataclass(frozen=True)
class AdapterWeights:
    """A LoRA adapter on its way to a sampler, as PEFT would save it.

    Attributes:
        config: What its `adapter_config.json` would hold.
        weights: Name, as in its `adapter_model.safetensors`, and whole value of each; read like the other weights, and
            after them.
    """

    config: Mapping[str, Any]
    weights: Iterable[tuple[str, Tensor]]


@runtime_checkable
class SyncedSampler(Protocol):
    """Holds a copy of the policy's weights, which it receives after updates.

    All ranks call `bind` and `update_weights` together. They exchange errors afterwards, so an engine whose ranks wait
    for each other inside a method must release them all before it raises there. `bind` reads the policy's config; its
    weights may be shards.

    Attributes:
        adapter: How it receives a policy with an adapter: `merged` into the weights, or `separate`, the adapter alone
            once the base is there.
        version: Version of the sampler's weights, as far as this process knows; None if it has none of ours.
    """

    adapter: Literal["merged", "separate"]
    version: int | None

    def bind(self, model: Any, tokenizer: Any = None) -> None:
        """Name the policy; see `RolloutEngine.bind`."""
        ...

    def update_weights(
        self, weights: Iterable[tuple[str, Tensor]], *, version: int, adapter: AdapterWeights | None = None
    ) -> dict[str, float]:
        """Load new weights into the sampler, and verify that it has them.

        Args:
            weights: Name, as in a checkpoint in Hugging Face format, and whole value of each. Read once, in order; the
                caller gathers what is left unread. A tensor may change once the next one is requested.
            version: Larger than any before.
            adapter: The adapter on those weights if `self.adapter` is `separate`. The first time `weights` are the
                base; later they are empty, and the sampler keeps its base.

        Returns:
            Figures for the log, `bytes` among them. (The caller measures `seconds`, which include gathering.)

        Raises:
            SamplerLostError: If the sampler was restarted in the meantime.
            WeightsMismatchError: If the weights that the sampler computes with are not those that were sent.
        """
        ...

    def close(self) -> None:
        """Release the sampler; the next call of `update_weights` starts it again.

        Calling it again is harmless. A rank may call it alone, after an exception.
        """
        ...


class SamplerLostError(RuntimeError):
    """The sampler was restarted and has lost the policy's weights: send them and sample again."""


class WeightsMismatchError(RuntimeError):
    """The sampler has other weights than the policy; its rollouts must not be trained on."""
