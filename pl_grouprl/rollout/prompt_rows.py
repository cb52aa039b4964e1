"""Which prompt each row of a batch continues, and whether sharing prompts pays off.

Shapes: B rows of a batch, P prompts of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

MIN_SAVED_TOKENS = 256
"""Copied tokens that sharing must save, per prompt and layer: about the cost of the extra call for a prompt."""


@dataclass(frozen=True, eq=False)
class EncodedPrompt:
    """One encoding of a prompt, which sequences may share; compared by identity.

    Attributes:
        length: Number of its tokens.
    """

    length: int


class PromptRows:
    """Which prompt each row of a batch continues; shared by all layers of its cache.

    Args:
        prompts: Index of each row's prompt.
        device: Device of the cache.
        suffix_lengths: Cached tokens of each row after its prompt; None if no row has any.

    Attributes:
        counts: Number of rows of each prompt.
        starts: Start of each prompt's rows in `order`, and their total number, int32 [P + 1].
        order: Rows sorted by prompt, int64 [B]; None if already sorted.
        inverse: Index of each row in `order`; None if already sorted.
        offsets: Column at which the tokens after each row's prompt start; all rows end in the same column.
    """

    def __init__(
        self, prompts: Sequence[int], device: torch.device, suffix_lengths: Sequence[int] | None = None
    ) -> None:
        self._prompts, self._device = list(prompts), device
        self._mask: Tensor | None = None
        self.counts = [0] * (max(prompts) + 1)
        suffix_lengths = [0] * len(self._prompts) if suffix_lengths is None else suffix_lengths
        self.suffix_width = max(suffix_lengths)
        self.offsets = [self.suffix_width - length for length in suffix_lengths]
        self._arrange()

    def keep(self, order: Sequence[int]) -> None:
        """Keep the rows at `order`, in that order."""
        self._prompts = [self._prompts[row] for row in order]
        self.offsets = [self.offsets[row] for row in order]
        self._arrange()

    def prompt_of(self, row: int) -> int:
        """Index of a row's prompt."""
        return self._prompts[row]

    def mask(self, new: int, width: int, dtype: torch.dtype) -> Tensor | None:
        """Additive mask for the last `new` of `width` columns after the prompts; shape [B or 1, 1, new, width].

        None if each row has one new token, which attends to all columns.
        """
        if new == 1 and not any(self.offsets):
            return None
        if self._mask is None or self._mask.shape[-2:] != (new, width):
            columns = torch.arange(width, device=self._device)
            seen = columns <= columns[width - new :, None]
            if any(self.offsets):
                seen = seen & (columns >= torch.tensor(self.offsets, device=self._device)[:, None, None, None])
            blocked = torch.full((), -torch.inf, dtype=dtype, device=self._device)
            self._mask = torch.where(seen, blocked.new_zeros(()), blocked)
            self._mask = self._mask.view(-1, 1, new, width)
        return self._mask

    def _arrange(self) -> None:
        self.counts = [0] * len(self.counts)
        for prompt in self._prompts:
            self.counts[prompt] += 1
        self.starts = _starts(self.counts, self._device)
        order = sorted(range(len(self._prompts)), key=self._prompts.__getitem__)
        self.order: Tensor | None = None
        self.inverse: Tensor | None = None
        if order != list(range(len(order))):
            self.order = torch.tensor(order, device=self._device)
            self.inverse = self.order.argsort()
        self._mask = None


@dataclass(frozen=True)
class SharedPrompts:
    """The prompts of a batch.

    Attributes:
        places: For each prompt, the part and row where its cache is, and its length.
        rows: The prompt that each row continues.
    """

    places: list[tuple[int, int, int]]
    rows: PromptRows

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens of each prompt."""
        return [length for _, _, length in self.places]

    @cached_property
    def starts(self) -> list[int]:
        """Start of each prompt among the tokens of all, and their total number; P + 1 entries."""
        return [0, *accumulate(self.lengths)]

    @cached_property
    def starts_on_device(self) -> Tensor:
        """`starts` as an int32 tensor."""
        return _starts(self.lengths, self.rows.starts.device)


def find_shared_prompts(
    parts: Sequence[tuple[Sequence[EncodedPrompt], Sequence[int], Sequence[int]]],
    device: torch.device,
    min_saved_tokens: float = MIN_SAVED_TOKENS,
) -> SharedPrompts | None:
    """List the prompts of a batch, or return None if sharing would not pay off.

    Args:
        parts: For each group of sequences encoded together: their prompts, their lengths (prompt included), and the
            index of the sequence that each row continues.
        device: Device of the cache.
        min_saved_tokens: Copied tokens that sharing must save, per prompt.
    """
    sequences = [
        (prompts[row], lengths[row], part, row) for part, (prompts, lengths, rows) in enumerate(parts) for row in rows
    ]
    distinct: dict[EncodedPrompt, tuple[int, int, int]] = {}
    for prompt, _, part, row in sequences:
        distinct.setdefault(prompt, (part, row, prompt.length))
    # A continued sequence already stores its prompt apart from its other tokens.
    stored = {prompt for prompt, length, *_ in sequences if length > prompt.length}
    copied = sum(prompt.length for prompt in distinct if prompt not in stored)
    saved = sum(prompt.length for prompt, *_ in sequences) - copied
    if saved < min_saved_tokens * len(distinct):
        return None
    number = {prompt: index for index, prompt in enumerate(distinct)}
    suffix_lengths = [length - prompt.length for prompt, length, *_ in sequences]
    rows = PromptRows([number[prompt] for prompt, *_ in sequences], device, suffix_lengths)
    return SharedPrompts(list(distinct.values()), rows)


def _starts(lengths: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
