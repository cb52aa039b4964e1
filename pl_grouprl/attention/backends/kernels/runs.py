"""A variable-length call as a few dense batches, for kernels without variable lengths.

Short runs of similar sizes are padded into one batch. Long runs that need a mask are cut into pieces of queries with
the keys they see, so work grows with queries times window.

Legend: R runs of a batch, N queries of each, M keys of each, H heads of a packed tensor, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from pl_grouprl.attention.backends.kernels.call import Index, VarlenCall

SHORT = {"cpu": 64, "cuda": 128}
"""Runs of up to this many queries are padded into one batch per size.

On CPU a batch saves calls, not work: measured on one thread, a run of 24 tokens takes 66 microseconds in a batch of 64,
and 47 alone. On CUDA a block takes about ten launches.
"""
MANY_KEYS = 2048
"""Runs with more keys than this are large enough to run unpadded, one per batch."""
BATCH = 2**18
"""Maximum number of query-key pairs in one padded batch."""
PIECE = 256
"""Queries per piece of a long run that needs a mask."""


@dataclass(frozen=True)
class Runs:
    """Runs of tokens of a packed row, as a dense batch.

    Attributes:
        index: One run as a slice, or the tokens of each run, shape [R, length]; a short run repeats its last token.
        tokens: The tokens of all runs without repetitions, concatenated.
        kept_at: Flattened batch indices of tokens that are not repetitions, shape [tokens]; None if all are kept.
        repeated_at: Flattened batch indices of the repetitions; None if there are none.
    """

    index: slice | Tensor
    tokens: Index
    kept_at: Tensor | None = None
    repeated_at: Tensor | None = None

    @classmethod
    def one(cls, tokens: Index) -> Runs:
        """A single run."""
        return cls(tokens if isinstance(tokens, slice) else tokens[None], tokens)

    @property
    def count(self) -> int:
        """R."""
        return 1 if isinstance(self.index, slice) else self.index.shape[0]

    @property
    def length(self) -> int:
        """Tokens of each run, including repetitions."""
        return self.index.stop - self.index.start if isinstance(self.index, slice) else self.index.shape[1]

    def take(self, packed: Tensor, blank: bool = False) -> Tensor:
        """[row, H, D] -> [R, H, length, D]; with `blank`, zeros in place of the repetitions."""
        if isinstance(self.index, slice):
            return packed[self.index].transpose(0, 1)[None]
        flat = packed.index_select(0, self.index.flatten())
        if blank and self.repeated_at is not None:
            flat.index_fill_(0, self.repeated_at, 0)
        return flat.unflatten(0, self.index.shape).transpose(1, 2)

    def flat(self, batch: Tensor) -> Tensor:
        """[R, H, length, D] -> [tokens, H, D], without the repetitions."""
        flat = batch.transpose(1, 2).flatten(0, 1)
        return flat if self.kept_at is None else flat.index_select(0, self.kept_at)

    def take_lse(self, lse: Tensor) -> Tensor:
        """[H, row] -> [R, H, length]."""
        return self.take(lse.t()[..., None])[..., 0].contiguous()

    def flat_lse(self, batch: Tensor) -> Tensor:
        """[R, H, length] -> [H, tokens], without the repetitions."""
        return self.flat(batch[..., None])[..., 0].t()


@dataclass(frozen=True)
class Block:
    """One dense batch of a call.

    Attributes:
        queries: The runs of queries.
        keys: The runs of keys, one for each run of queries.
        plain_causal: Whether query i sees exactly the keys up to i, without a mask.
        last_keys: Index of the last key that each query sees, shape [R, N], or [1, N] if it is the same in all runs;
            None if no mask is needed.
        window: Maximum number of keys that a query sees, including its own, if a mask is needed; None for no limit.
    """

    queries: Runs
    keys: Runs
    plain_causal: bool = False
    last_keys: Tensor | None = None
    window: int | None = None

    def hidden(self) -> Tensor | None:
        """Which keys a query must not see, shape [R, 1, N, M]; None if it sees all.

        No row hides all keys: a repeated query sees what its run's last query sees.
        """
        if self.last_keys is None:
            return None
        distance = self.last_keys[:, None, :, None] - torch.arange(self.keys.length, device=self.last_keys.device)
        hidden = distance < 0
        return hidden if self.window is None else hidden | (distance >= self.window)

    def cut(self, rows: int) -> Iterator[Block]:
        """Cut this block into pieces of at most `rows` queries; a padded batch stays whole."""
        assert not self.plain_causal
        if self.queries.count > 1:
            yield self
            return
        for start in range(0, self.queries.length, rows):
            stop = min(start + rows, self.queries.length)
            queries = Runs.one(_part(self.queries.tokens, start, stop))
            last_keys = None if self.last_keys is None else self.last_keys[:, start : start + rows]
            yield Block(queries, self.keys, last_keys=last_keys, window=self.window)


def dense_blocks(call: VarlenCall, device: torch.device, plain_causal: bool) -> list[Block]:
    """Plan a call as dense batches, once per call and device.

    Args:
        call: The call.
        device: Device of the indices.
        plain_causal: Whether the kernel runs causal runs of equal lengths without a mask.
    """
    return call.memo(("blocks", device, plain_causal), lambda: _plan(call, device, plain_causal))


class _Piece(NamedTuple):
    """A run of queries, or part of one, with the keys it sees; the last query is aligned with the last key."""

    query_start: int
    num_queries: int
    key_start: int
    num_keys: int
    plain_causal: bool


def _plan(call: VarlenCall, device: torch.device, plain_causal: bool) -> list[Block]:
    blocks: list[Block] = []
    batches: dict[tuple[int, int, bool], list[_Piece]] = {}
    for piece in _pieces(call, plain_causal):
        if piece.num_queries <= SHORT.get(device.type, SHORT["cuda"]) and piece.num_keys <= MANY_KEYS:
            size = 1 << (piece.num_queries - 1).bit_length()
            size = min(size, -(-piece.num_queries // 16) * 16)  # 33 to 48 tokens are padded to 48, not 64
            num_keys = size if piece.plain_causal else _rounded_up(piece.num_keys)
            batches.setdefault((size, num_keys, piece.plain_causal), []).append(piece)
        else:
            blocks.append(_single(piece, call, device))
    for (num_queries, num_keys, _), pieces in batches.items():
        most = max(1, BATCH // (num_queries * num_keys))
        for start in range(0, len(pieces), most):
            batch = pieces[start : start + most]
            alone = len(batch) == 1
            blocks.append(
                _single(batch[0], call, device) if alone else _padded(batch, num_queries, num_keys, call, device)
            )
    return blocks


def _pieces(call: VarlenCall, plain_causal: bool) -> Iterator[_Piece]:
    query_starts, key_starts = accumulate(call.query_lens, initial=0), accumulate(call.key_lens, initial=0)
    for query_start, key_start, n, m in zip(query_starts, key_starts, call.query_lens, call.key_lens, strict=False):
        window = m if call.window is None else min(call.window, m)
        if not call.causal or (plain_causal and n == m == window):
            yield _Piece(query_start, n, key_start, m, call.causal)
            continue
        for start in range(0, n, PIECE):
            stop = min(start + PIECE, n)
            first = max(0, start + m - n - window + 1)
            yield _Piece(query_start + start, stop - start, key_start + first, stop + m - n - first, False)


def _single(piece: _Piece, call: VarlenCall, device: torch.device) -> Block:
    queries = Runs.one(_joined(_part(call.queries, piece.query_start, piece.query_start + piece.num_queries)))
    keys = Runs.one(_joined(_part(call.keys, piece.key_start, piece.key_start + piece.num_keys)))
    if not call.causal or piece.plain_causal:
        return Block(queries, keys, plain_causal=piece.plain_causal)
    last_keys = torch.arange(piece.num_keys - piece.num_queries, piece.num_keys, device=device)[None]
    return Block(queries, keys, last_keys=last_keys, window=call.effective_window)


def largest_piece(call: VarlenCall, device: torch.device) -> Block:
    """A piece as large as any of a causal call; the lower right corner of its mask contains all others' masks."""
    num_queries = min(PIECE, max(call.query_lens))
    num_keys = max(call.key_lens)
    if call.window is not None:
        num_keys = min(num_keys, num_queries + call.window - 1)
    return _single(_Piece(0, num_queries, 0, num_keys, False), call, device)


def _padded(pieces: list[_Piece], num_queries: int, num_keys: int, call: VarlenCall, device: torch.device) -> Block:
    queries = _padded_runs(call.queries, [(p.query_start, p.num_queries) for p in pieces], num_queries, device)
    keys = _padded_runs(call.keys, [(p.key_start, p.num_keys) for p in pieces], num_keys, device)
    if pieces[0].plain_causal:
        return Block(queries, keys, plain_causal=True)
    query_lens = torch.tensor([p.num_queries for p in pieces])[:, None]
    key_lens = torch.tensor([p.num_keys for p in pieces])[:, None]
    last_keys = torch.minimum(torch.arange(num_queries)[None], query_lens - 1) + key_lens - query_lens
    if not call.causal:
        last_keys = (key_lens - 1).expand_as(last_keys)  # only the repeated keys are hidden
    if len({(p.num_queries, p.num_keys) for p in pieces}) == 1:
        last_keys = last_keys[:1]
    return Block(queries, keys, last_keys=last_keys.to(device), window=call.effective_window)


def _padded_runs(tokens: Index, runs: Sequence[tuple[int, int]], size: int, device: torch.device) -> Runs:
    starts = torch.tensor([start for start, _ in runs])[:, None]
    lengths = torch.tensor([length for _, length in runs])[:, None]
    offsets = torch.arange(size)[None, :]
    # Repetitions of the last key come last, where causal attention or the mask hides them.
    index = starts + torch.minimum(offsets, lengths - 1)
    kept = offsets < lengths
    index = index + (tokens.start or 0) if isinstance(tokens, slice) else tokens.cpu()[index]
    unique = index[kept].to(device)
    if bool(kept.all()):
        return Runs(index.to(device), unique)
    kept_at, repeated_at = (where.flatten().nonzero()[:, 0].to(device) for where in (kept, ~kept))
    return Runs(index.to(device), unique, kept_at, repeated_at)


def _part(tokens: Index, start: int, stop: int) -> Index:
    """Some of the tokens."""
    if isinstance(tokens, slice):
        first = tokens.start or 0
        return slice(first + start, first + stop)
    return tokens[start:stop]


def _joined(tokens: Index) -> Index:
    """As a slice if they follow each other."""
    if isinstance(tokens, slice) or not bool((tokens.diff() == 1).all()):
        return tokens
    return slice(int(tokens[0]), int(tokens[-1]) + 1)


def _rounded_up(num_keys: int) -> int:
    """Round up by at most a quarter, so runs of similar sizes share a batch."""
    step = max(16, (1 << (num_keys - 1).bit_length()) // 4)
    return -(-num_keys // step) * step
