"""Which rows of a batch continue which prompt, and whether sharing their prompts pays off.

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
"""Minimum of copied tokens that sharing must save per prompt and layer, about the cost of a prompt's extra call."""


@dataclass(frozen=True, eq=False)
class EncodedPrompt:
    """A prompt that sequences may share, from one encoding of it; compared by identity.

    Attributes:
        length: Its tokens.
    """

    length: int


class PromptRows:
    """Which prompt each row of a batch continues; shared by all layers of its cache.

    Args:
        prompts: Index of each row's prompt.
        device: Device of the cache.
        own_lengths: Tokens that each row has cached after its prompt; None if there are none.

    Attributes:
        counts: Number of rows of each prompt.
        starts: Start of each prompt's rows in `order`, and their total number, int32 [P + 1].
        order: Rows sorted by prompt, int64 [B]; None if already sorted.
        inverse: Index of each row in `order`; None likewise.
        offsets: Column at which each row's own tokens start, as rows end in the same column.
    """

    def __init__(self, prompts: Sequence[int], device: torch.device, own_lengths: Sequence[int] | None = None) -> None:
        self._prompts, self._device = list(prompts), device
        self._mask: Tensor | None = None
        self.counts = [0] * (max(prompts) + 1)
        own_lengths = [0] * len(self._prompts) if own_lengths is None else own_lengths
        self.own_width = max(own_lengths)
        self.offsets = [self.own_width - length for length in own_lengths]
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
        """What the last `new` of `width` own tokens see of these: 0, or -inf; shape [B or 1, 1, new, width].

        None if a single new token of each row sees all.
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
        places: For each prompt, the part and row that it is taken from, and its length.
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
        """The same as a tensor, int32."""
        return _starts(self.lengths, self.rows.starts.device)


def find_shared_prompts(
    parts: Sequence[tuple[Sequence[EncodedPrompt], Sequence[int], Sequence[int]]],
    device: torch.device,
    min_saved_tokens: float = MIN_SAVED_TOKENS,
) -> SharedPrompts | None:
    """List the prompts of a batch, or return None if sharing would not pay off.

    Args:
        parts: For sequences encoded together, their prompts, their lengths with what follows the prompts, and the
            sequence of each row.
        device: Device of the cache.
        min_saved_tokens: Minimum of copied tokens that sharing must save, per prompt.
    """
    sequences = [
        (prompts[row], lengths[row], part, row) for part, (prompts, lengths, rows) in enumerate(parts) for row in rows
    ]
    distinct: dict[EncodedPrompt, tuple[int, int, int]] = {}
    for prompt, _, part, row in sequences:
        distinct.setdefault(prompt, (part, row, prompt.length))
    stored = {prompt for prompt, length, *_ in sequences if length > prompt.length}  # apart from what follows
    copied = sum(prompt.length for prompt in distinct if prompt not in stored)
    saved = sum(prompt.length for prompt, *_ in sequences) - copied
    if saved < min_saved_tokens * len(distinct):
        return None
    number = {prompt: index for index, prompt in enumerate(distinct)}
    own_lengths = [length - prompt.length for prompt, length, *_ in sequences]
    rows = PromptRows([number[prompt] for prompt, *_ in sequences], device, own_lengths)
    return SharedPrompts(list(distinct.values()), rows)


def _starts(lengths: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
