"""Encode prompts, each once, and keep their caches until the last rollout of theirs has begun.

Shapes: P prompts of a batch, S positions, V vocabulary.

Prompts come sorted by length. Prompts of about the same length share a batch and are padded on the left, so that all
end in the same column; where the lengths are equal there is neither padding nor a mask. Models with layers that sum up
what they have seen get prompts of one length only, as padding would go into the sum. Prompts with images or videos are
encoded one by one.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pl_grouprl.media.inputs import media_inputs, placeholder_ids
from pl_grouprl.types import Prompt

if TYPE_CHECKING:
    from transformers.cache_utils import Cache

PAD = 0
"""Fills the left of short prompts. Masked, so any token will do."""

MAX_PADDING = 1 / 8
"""A batch takes no prompt that is longer than its shortest one by more than this share."""


class NextTokenLogits:
    """Calls a decoder with a cache for the logits of the next token, leaving out arguments that it does not take.

    Tokens that stand for images or videos get the logit -inf: in a completion they would be read as images that are
    not there.

    Args:
        model: A transformers decoder with a language-model head.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.device = next(model.parameters()).device
        parameters = inspect.signature(model.forward).parameters
        takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
        self._optional = {name for name in ("position_ids", "logits_to_keep") if takes_any or name in parameters}
        self._never: Tensor | None = None

    def __call__(
        self,
        input_ids_BS: Tensor,
        cache: Cache,
        position_ids_BS: Tensor,
        mask_BS: Tensor | None,
        media: dict[str, Tensor] | None = None,
    ) -> Tensor:
        """Append tokens to the cache.

        Args:
            input_ids_BS: Tokens that the cache does not hold yet.
            cache: Grows by these tokens.
            position_ids_BS: Position of each token in its own sequence; [3, B, S] where it has three of them.
            mask_BS: 1 for real tokens and 0 for padding, over the cache and the new tokens; None without padding.
            media: What the tokens' placeholders stand for, by the model's keywords.

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
            **(media or {}),
        )
        logits_BV = output.logits[:, -1]
        if self._never is None:  # made once, for what it costs to copy to a device
            known = [token for token in placeholder_ids(self.model).values() if token < logits_BV.shape[-1]]
            self._never = torch.tensor(known, dtype=torch.int64, device=logits_BV.device)
        return logits_BV.index_fill(-1, self._never, -math.inf) if len(self._never) else logits_BV


@dataclass
class Prefix:
    """Prompts that have been encoded together.

    Attributes:
        cache: What the layers remember, prompts right-aligned.
        logits_PV: Logits of the first token of the completions.
        lengths: Tokens of each prompt.
        positions: Where each prompt's completions begin: behind the largest position of the prompt, which is less than
            its length where the patches of an image share positions.
    """

    cache: Cache
    logits_PV: Tensor
    lengths: list[int]
    positions: list[int]

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


def prefill(logits: NextTokenLogits, prompts: Sequence[Prompt]) -> Prefix:
    """Encode prompts in one forward pass; only the last position reaches the language-model head.

    Args:
        logits: The model.
        prompts: Of any length; one alone if it has media.
    """
    lengths = [len(prompt.token_ids) for prompt in prompts]
    width, device = max(lengths), logits.device
    rows = [[PAD] * (width - len(prompt.token_ids)) + list(prompt.token_ids) for prompt in prompts]
    input_ids = torch.tensor(rows, device=device)
    mask = left_padding_mask(lengths, width, device)
    if mask is None:
        position_ids = torch.arange(width, device=device).expand(len(prompts), -1)
    else:
        position_ids = (mask.cumsum(dim=-1) - 1).clamp(min=0)
    cache, media, following = new_cache(logits.model), None, lengths
    if prompts[0].media:
        media, positions = media_inputs(logits.model, prompts[0].token_ids, prompts[0].media)
        if positions is not None:
            position_ids, following = positions.position_ids.to(device), positions.next_position_S.tolist()
    return Prefix(cache, logits(input_ids, cache, position_ids, mask, media), lengths, following)


def new_cache(model: Any) -> Cache:
    """An empty cache with the layers that the model needs."""
    from transformers.cache_utils import DynamicCache, DynamicLayer

    from pl_grouprl.rollout.shared_prompt import PromptLayer

    cache = DynamicCache(config=model.config)
    cache.layers = [PromptLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def plan_prefill(prompts: Sequence[Prompt], max_tokens: int, *, max_padding: float = MAX_PADDING) -> list[range]:
    """Cut prompts, sorted by length, into batches.

    Args:
        prompts: Their lengths ascend. One with media gets a batch of its own.
        max_tokens: Most tokens of a batch, padding included. A longer prompt gets a batch of its own.
        max_padding: How much longer than its shortest prompt the longest of a batch may be, as a share.

    Returns:
        The indices of each batch, consecutive.
    """
    batches = []
    start = 0
    for index, prompt in enumerate(prompts):
        length, first = len(prompt.token_ids), prompts[start]
        too_many = (index + 1 - start) * length > max_tokens
        too_uneven = length > len(first.token_ids) * (1 + max_padding)
        alone = bool(prompt.media or first.media)
        if index > start and (too_many or too_uneven or alone):
            batches.append(range(start, index))
            start = index
    if prompts:
        batches.append(range(start, len(prompts)))
    return batches


class PrefixStore:
    """Prefills prompts when they are first asked for and forgets them when no later call will ask again.

    Args:
        logits: The model.
        prompts: Distinct prompts, sorted by length.
        max_tokens: Most tokens of a forward pass.
        padding: Whether prompts of different lengths may share one.
    """

    def __init__(
        self, logits: NextTokenLogits, prompts: Sequence[Prompt], max_tokens: int, *, padding: bool = True
    ) -> None:
        from pl_grouprl.rollout.kv_cache import has_states  # imports transformers

        self._logits = logits
        self._prompts = prompts
        self.padding = padding
        max_padding = MAX_PADDING if padding and not has_states(new_cache(logits.model)) else 0.0
        self._batches = plan_prefill(prompts, max_tokens, max_padding=max_padding)
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
