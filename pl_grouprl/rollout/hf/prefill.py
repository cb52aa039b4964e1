"""Encodes prompts, those that extend kept sequences included, in batches of similar length."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pl_grouprl.media.inputs import media_inputs, placeholder_ids
from pl_grouprl.rollout.hf.cache import (
    KeptSequence,
    gather_cache,
    has_states,
    keeps_more,
    needs_padding_mask,
    shares_prompts,
)
from pl_grouprl.rollout.hf.shared_prompt import EncodedPrompt, find_shared_prompts
from pl_grouprl.types import Prompt
from pl_grouprl.utilities import internals

if TYPE_CHECKING:
    from transformers.cache_utils import Cache

# Encodes prompts in batches of similar length.
#
# Shapes: P prompts of a batch, S positions, V vocabulary.
#
# Prompts come sorted by length. Prompts of similar length share a batch, padded on the left to end in the same column;
# equal lengths need neither padding nor a mask. Models with stateful layers get prompts of one length only, as padding
# would change the state. Prompts with images or videos are encoded one by one.

PAD = 0
"""Left padding. Masked, so any token works."""

MAX_PADDING = 1 / 8
"""Prompts of a batch may be longer than its shortest one by at most this fraction."""


class NextTokenLogits:
    """Calls a decoder with a cache for the next token's logits, leaving out arguments that it does not take.

    Placeholders of images and videos get the logit -inf, because in a completion they would refer to missing images.

    Args:
        model: A transformers decoder with a language-model head.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.device = next(model.parameters()).device
        parameters = inspect.signature(model.forward).parameters
        takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
        self._optional = {name for name in ("position_ids", "logits_to_keep") if takes_any or name in parameters}
        self._cache = cache_argument(model)
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
            input_ids_BS: Tokens that are not in the cache yet.
            cache: Extended by these tokens.
            position_ids_BS: Position of each token in its sequence; [3, B, S] for models with three per token.
            mask_BS: 1 for real tokens and 0 for padding, over the cache and the new tokens; None without padding.
            media: Images and videos of the tokens' placeholders, by the model's keywords.

        Returns:
            Logits after the last token, shape [B, V], in the model's dtype.
        """
        optional = {"position_ids": position_ids_BS, "logits_to_keep": 1}
        output = self.model(
            input_ids=input_ids_BS,
            attention_mask=mask_BS,
            use_cache=True,
            **{self._cache: cache},
            **{name: value for name, value in optional.items() if name in self._optional},
            **(media or {}),
        )
        logits_BV = output.logits[:, -1]
        if self._never is None:  # created once, because copying to a device is slow
            known = [token for token in placeholder_ids(self.model).values() if token < logits_BV.shape[-1]]
            self._never = torch.tensor(known, dtype=torch.int64, device=logits_BV.device)
        return logits_BV.index_fill(-1, self._never, -math.inf) if len(self._never) else logits_BV


def cache_argument(model: Any) -> str:
    """The keyword of a model's cache.

    Raises:
        ValueError: If it takes none.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model  # PEFT passes on any argument
    name = internals.cache_argument(type(base).forward)
    if name is None:
        raise ValueError(
            f"HFRolloutEngine decodes with a cache, but {type(model).__name__} takes none. Choose another rollout "
            "engine for this model."
        )
    return name


@dataclass
class Prefix:
    """Prompts that were encoded together.

    Attributes:
        cache: The model's cache, prompts right-aligned.
        logits_PV: Logits of the completions' first token.
        lengths: Tokens of each prompt.
        positions: First position of each prompt's completions: after the prompt's largest position, which is less than
            its length if patches of an image share positions.
        shared: The part of each prompt that sequences may share: all of it, unless it continues a kept sequence.
    """

    cache: Cache
    logits_PV: Tensor
    lengths: list[int]
    positions: list[int]
    shared: list[EncodedPrompt]

    @property
    def width(self) -> int:
        """Positions in the cache: the length of the longest prompt."""
        return max(self.lengths)


def left_padding_mask(lengths: Sequence[int], width: int, device: torch.device) -> Tensor | None:
    """Mask of real tokens, int64 [P, S] with S = width; None if every prompt fills the width."""
    if min(lengths) == width:
        return None
    columns = torch.arange(width, device=device)
    return (columns >= width - torch.tensor(lengths, device=device).unsqueeze(-1)).long()


def prefill(logits: NextTokenLogits, prompts: Sequence[Prompt]) -> Prefix:
    """Encode prompts in one forward pass; only the last position reaches the language-model head.

    Args:
        logits: The model.
        prompts: Prompts of any length; a single one if it has media.
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
    logits_PV = logits(input_ids, cache, position_ids, mask, media)
    return Prefix(cache, logits_PV, lengths, following, [EncodedPrompt(length) for length in lengths])


def new_cache(model: Any) -> Cache:
    """Create an empty cache for the model."""
    from transformers.cache_utils import DynamicCache, DynamicLayer

    from pl_grouprl.rollout.hf.shared_prompt import PromptLayer

    cache = DynamicCache(config=model.config)
    cache.layers = [PromptLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def keeps_more_than_keys(model: Any) -> bool:
    """Whether a layer's cache keeps more for each token than keys and values, such as an indexer's keys."""
    return any(keeps_more(layer) for layer in new_cache(model).layers)


def plan_prefill(prompts: Sequence[Prompt], max_tokens: int, *, max_padding: float = MAX_PADDING) -> list[range]:
    """Split prompts, sorted by length, into batches.

    Args:
        prompts: Prompts by ascending length. One with media gets a separate batch.
        max_tokens: Most tokens of a batch, including padding. A longer prompt gets a separate batch.
        max_padding: How much longer the longest prompt of a batch may be than its shortest, as a fraction.

    Returns:
        The consecutive indices of each batch.
    """

    def fits(first: int, last: int) -> bool:
        shortest, length = len(prompts[first].token_ids), len(prompts[last].token_ids)
        few = (last + 1 - first) * length <= max_tokens
        return few and length <= shortest * (1 + max_padding) and not (prompts[first].media or prompts[last].media)

    return plan_batches(len(prompts), fits)


def plan_batches(count: int, fits: Callable[[int, int], bool]) -> list[range]:
    """Split `count` prompts into consecutive batches, each as long as its first and last prompt `fits` together."""
    batches, start = [], 0
    for index in range(1, count):
        if not fits(start, index):
            batches.append(range(start, index))
            start = index
    return [*batches, range(start, count)] if count else []


# Encodes prompts that extend kept sequences: only tokens that are not cached run through the model.
#
# A batch is right-aligned, with no padding between cached and new tokens, because sliding windows and linear attention
# could not skip it. So each sequence runs as many tokens as the one with the most new ones; the others rerun some
# cached
# tokens. If a layer cannot drop cached tokens, all sequences of a batch have the same number of new tokens.

MAX_REPEATED = 16
"""Cached tokens per sequence that may be rerun to share a forward pass: about the cost of a pass."""


def plan_continuing(
    lengths: Sequence[int], kept: Sequence[KeptSequence], max_tokens: int, *, padding: bool = True
) -> list[range]:
    """Split prompts that continue kept sequences into batches.

    Args:
        lengths: Tokens of each prompt, sorted by the number of new ones, then by length.
        kept: The sequence that each continues.
        max_tokens: Most tokens that a batch runs; a prompt with more gets a separate batch.
        padding: Whether prompts of different lengths may share a forward pass.

    Returns:
        The consecutive indices of each batch.
    """
    new = [length - sequence.num_tokens for length, sequence in zip(lengths, kept, strict=True)]

    def fits(first: int, last: int) -> bool:
        if (last + 1 - first) * new[last] > max_tokens or (not padding and lengths[first] != lengths[last]):
            return False
        max_repeated = max(MAX_REPEATED, MAX_PADDING * new[first]) if padding else 0
        return new[last] - new[first] <= max_repeated and all(
            new[last] - new[index] <= kept[index].num_removable for index in range(first, last)
        )

    return plan_batches(len(lengths), fits)


def continue_sequences(logits: NextTokenLogits, prompts: Sequence[Prompt], kept: Sequence[KeptSequence]) -> Prefix:
    """Encode prompts that extend kept sequences, in one forward pass.

    Args:
        logits: The model.
        prompts: Prompts without media; a batch of `plan_continuing`.
        kept: The sequence that each continues.
    """
    lengths, device = [len(prompt.token_ids) for prompt in prompts], logits.device
    new = max(length - sequence.num_tokens for length, sequence in zip(lengths, kept, strict=True))
    cached = [length - new for length in lengths]
    width, row = max(cached), torch.zeros(1, dtype=torch.int64, device=device)
    parts = [(sequence.first(count), row) for sequence, count in zip(kept, cached, strict=True)]
    shared = [sequence.prompt or EncodedPrompt(count) for sequence, count in zip(kept, cached, strict=True)]
    prompts_of_rows = [([prompt], [count], [0]) for prompt, count in zip(shared, cached, strict=True)]
    cache = gather_cache(parts, width, width + new, find_shared_prompts(prompts_of_rows, device, 0))
    input_ids = torch.tensor([list(prompt.token_ids[-new:]) for prompt in prompts], device=device)
    position_ids = torch.tensor(cached, device=device).unsqueeze(-1) + torch.arange(new, device=device)
    mask = left_padding_mask(lengths, width + new, device) if needs_padding_mask(cache) else None
    if not shares_prompts(cache):
        shared = [EncodedPrompt(length) for length in lengths]
    return Prefix(cache, logits(input_ids, cache, position_ids, mask), lengths, lengths, shared)


# Encodes the distinct prompts of a call, each once, and frees them after their last rollout has begun.


class PromptEncoder:
    """Encodes the prompts of a call: from the start, or from where a kept sequence ends.

    Args:
        logits: The model.
        prompts: Distinct prompts: first those that continue nothing, sorted by length, then the others, sorted by the
            number of tokens to run, then by length.
        max_tokens: Most tokens of a forward pass.
        kept: The sequence that each prompt continues, None for those that are encoded from the start.
        padding: Whether prompts of different lengths may share a forward pass.

    Attributes:
        batches: Consecutive indices of the prompts that are encoded together.
    """

    def __init__(
        self,
        logits: NextTokenLogits,
        prompts: Sequence[Prompt],
        max_tokens: int,
        *,
        kept: Sequence[KeptSequence | None] = (),
        padding: bool = True,
    ) -> None:
        self._logits, self._prompts = logits, prompts
        continued = [sequence for sequence in kept if sequence is not None]
        self._kept, self._fresh = dict(enumerate(continued)), len(prompts) - len(continued)
        max_padding = MAX_PADDING if padding and not has_states(new_cache(logits.model)) else 0.0
        lengths = [len(prompt.token_ids) for prompt in prompts[self._fresh :]]
        continuing = plan_continuing(lengths, continued, max_tokens, padding=padding)
        self.batches = [
            *plan_prefill(prompts[: self._fresh], max_tokens, max_padding=max_padding),
            *(range(batch.start + self._fresh, batch.stop + self._fresh) for batch in continuing),
        ]

    def encode(self, batch: range) -> Prefix:
        """Encode one of the batches; each only once, as it frees the sequences that it continues."""
        prompts = self._prompts[batch.start : batch.stop]
        if batch.start < self._fresh:
            return prefill(self._logits, prompts)
        kept = [self._kept.pop(index - self._fresh) for index in batch]
        return continue_sequences(self._logits, prompts, kept)


class PrefixStore:
    """Encodes prompts on first use and frees them after their last.

    Args:
        encoder: Encodes them.
    """

    def __init__(self, encoder: PromptEncoder) -> None:
        self._encoder = encoder
        self._ready: dict[int, Prefix] = {}

    def select(self, wanted: Sequence[int], needed_later: int) -> list[tuple[Prefix, list[int]]]:
        """Fetch prompts for a decode batch.

        Args:
            wanted: Prompt index of each sequence, ascending, with repetition.
            needed_later: The first prompt that later calls will need.

        Returns:
            Batches of encoded prompts, each with the row of every sequence in it; together in the order of `wanted`.
        """
        parts = []
        for number, batch in enumerate(self._encoder.batches):
            rows = [index - batch.start for index in wanted if index in batch]
            if rows:
                if number not in self._ready:
                    self._ready[number] = self._encoder.encode(batch)
                parts.append((self._ready[number], rows))
            if batch.stop <= needed_later:
                self._ready.pop(number, None)
        return parts
