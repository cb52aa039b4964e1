"""Encode prompts, each once, and keep their caches until the last rollout of theirs has begun.

Shapes: P prompts of a batch, S positions, V vocabulary.

Prompts come sorted by length. Prompts of about the same length share a batch and are padded on the left, so that all
end in the same column; where the lengths are equal there is neither padding nor a mask.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers.cache_utils import Cache

PAD = 0
"""Fills the left of short prompts. Masked, so any token will do."""

MAX_PADDING = 1 / 8
"""A batch takes no prompt that is longer than its shortest one by more than this share."""


class NextTokenLogits:
    """Calls a decoder with a cache for the logits of the next token, leaving out arguments that it does not take.

    Args:
        model: A transformers decoder with a language-model head.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.device = next(model.parameters()).device
        parameters = inspect.signature(model.forward).parameters
        takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
        self._optional = {name for name in ("position_ids", "logits_to_keep") if takes_any or name in parameters}

    def __call__(self, input_ids_BS: Tensor, cache: Cache, position_ids_BS: Tensor, mask_BS: Tensor | None) -> Tensor:
        """Append tokens to the cache.

        Args:
            input_ids_BS: Tokens that the cache does not hold yet.
            cache: Grows by these tokens.
            position_ids_BS: Position of each token in its own sequence.
            mask_BS: 1 for real tokens and 0 for padding, over the cache and the new tokens; None without padding.

        Returns:
            Logits after the last token, shape [B, V], in the model's dtype.
        """
        optional = {"position_ids": position_ids_BS, "logits_to_keep": 1}
        output = self.model(
            input_ids=input_ids_BS,
            attention_mask=mask_BS,
            past_key_values=cache,
            use_cache=True,
            **{name: value for name, value in optional.items() if name in self._optional},
        )
        return output.logits[:, -1]


@dataclass
class Prefix:
    """Prompts that have been encoded together.

    Attributes:
        cache: Keys and values, prompts right-aligned.
        logits_PV: Logits of the first token of the completions.
        lengths: Tokens of each prompt.
    """

    cache: Cache
    logits_PV: Tensor
    lengths: list[int]

    @property
    def width(self) -> int:
        """Positions in the cache: the length of the longest prompt."""
        return max(self.lengths)


def left_padding_mask(lengths: Sequence[int], width: int, device: torch.device) -> Tensor | None:
    """Mark the real tokens, int64 [P, S] with S = width; None if every prompt fills the width."""
    if min(lengths) == width:
        return None
    columns = torch.arange(width, device=device)
    return (columns >= width - torch.tensor(lengths, device=device).unsqueeze(-1)).long()


def prefill(logits: NextTokenLogits, prompts: Sequence[Sequence[int]]) -> Prefix:
    """Encode prompts in one forward pass; only the last position reaches the language-model head."""
    from transformers.cache_utils import DynamicCache

    lengths = [len(prompt) for prompt in prompts]
    width, device = max(lengths), logits.device
    input_ids = torch.tensor([[PAD] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    mask = left_padding_mask(lengths, width, device)
    if mask is None:
        position_ids = torch.arange(width, device=device).expand(len(prompts), -1)
    else:
        position_ids = (mask.cumsum(dim=-1) - 1).clamp(min=0)
    cache = DynamicCache(config=logits.model.config)
    return Prefix(cache, logits(input_ids, cache, position_ids, mask), lengths)


def plan_prefill(lengths: Sequence[int], max_tokens: int) -> list[range]:
    """Cut prompts, sorted by length, into batches.

    Args:
        lengths: Tokens of each prompt, ascending.
        max_tokens: Most tokens of a batch, padding included. A longer prompt gets a batch of its own.

    Returns:
        The indices of each batch, consecutive.
    """
    batches = []
    start = 0
    for index, length in enumerate(lengths):
        too_many = (index + 1 - start) * length > max_tokens
        too_uneven = length > lengths[start] * (1 + MAX_PADDING)
        if index > start and (too_many or too_uneven):
            batches.append(range(start, index))
            start = index
    if lengths:
        batches.append(range(start, len(lengths)))
    return batches


class PrefixStore:
    """Prefills prompts when they are first asked for and forgets them when no later call will ask again.

    Args:
        logits: The model.
        prompts: Distinct prompts, sorted by length.
        max_tokens: Most tokens of a forward pass.
    """

    def __init__(self, logits: NextTokenLogits, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
        self._logits = logits
        self._prompts = prompts
        self._batches = plan_prefill([len(prompt) for prompt in prompts], max_tokens)
        self._ready: dict[int, Prefix] = {}

    def select(self, wanted: Sequence[int], needed_later: int) -> list[tuple[Prefix, list[int]]]:
        """Fetch prompts for a decode batch.

        Args:
            wanted: Index of the prompt of each sequence, ascending, with repetition.
            needed_later: The first prompt that a later call will ask for.

        Returns:
            Batches of encoded prompts and, for each, its row for every sequence; together in the order of `wanted`.
        """
        parts = []
        for number, batch in enumerate(self._batches):
            rows = [index - batch.start for index in wanted if index in batch]
            if rows:
                if number not in self._ready:
                    self._ready[number] = prefill(self._logits, [self._prompts[index] for index in batch])
                parts.append((self._ready[number], rows))
            if batch.stop <= needed_later:
                self._ready.pop(number, None)
        return parts
