"""The cascade's two primitives, variable-length attention forward and backward, for each device.

Every kernel has both, as `EagerKernel` documents them. They take the tensors of a packed row, query [S, H, D], key
[T, K, D] and value [T, K, E], and yield the results of a call in parts, each with the N queries and M keys of the row
that it is about.

Legend: Q query tokens of a call, M key tokens of a call, H query heads, K key/value heads (H is a multiple of K),
D head size of queries and keys, E head size of values; in dense batches, R runs of N queries and M keys each.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

_Made = TypeVar("_Made")

Index = slice | Tensor
"""Tokens of a packed row: a range, or their indices."""


def take(packed: Tensor, index: Index) -> Tensor:
    """Index a packed tensor: a view for a slice, else a copy."""
    return packed[index] if isinstance(index, slice) else packed.index_select(0, index)


def put(packed: Tensor, index: Index, part: Tensor) -> None:
    """Overwrite tokens of a packed tensor."""
    if isinstance(index, slice):
        packed[index] = part
    else:
        packed.index_copy_(0, index, part)


@dataclass(frozen=True)
class VarlenCall:
    """Independent attention problems in one call: the i-th run of queries attends to the i-th run of keys.

    Attributes:
        query_lens: Number of queries of each problem, all positive.
        key_lens: Number of keys of each problem, likewise.
        causal: Whether a query sees only keys up to its position. The last query of a run is aligned with the last
            key: query i of n is at key i + m - n of m, and m >= n. Otherwise each query sees all keys.
        window: Maximum number of keys that a query of a causal call sees, including its own; no limit if None.
        queries: The tokens of the packed row that query, problem by problem. No token queries twice.
        keys: The tokens whose keys and values they attend to, likewise; a token may be in several problems.
    """

    query_lens: tuple[int, ...]
    key_lens: tuple[int, ...]
    causal: bool
    window: int | None = None
    queries: Index = field(default_factory=lambda: slice(None), compare=False)
    keys: Index = field(default_factory=lambda: slice(None), compare=False)
    _memo: dict[Hashable, object] = field(default_factory=dict, compare=False, repr=False)

    def to(self, device: torch.device) -> VarlenCall:
        """Move the indices to a device."""
        queries, keys = (i if isinstance(i, slice) else i.to(device) for i in (self.queries, self.keys))
        return replace(self, queries=queries, keys=keys, _memo={})

    @property
    def effective_window(self) -> int | None:
        """The window, or None if it hides no key."""
        return None if self.window is None or self.window >= max(self.key_lens, default=0) else self.window

    @property
    def flash_options(self) -> tuple[bool, dict[str, int]]:
        """Whether the call is causal without a window, and its window, as FlashAttention takes them.

        It counts the keys to the left of a query's own, and aligns the last query with the last key.
        """
        window = self.effective_window
        if window is None:
            return self.causal, {}
        return False, {"window_size_left": window - 1, "window_size_right": 0}

    def cumulative(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Offsets of the runs of queries and of keys on the device, shape [problems + 1] each, int32."""

        def offsets(lens: tuple[int, ...]) -> Tensor:
            return torch.tensor([0, *accumulate(lens)], dtype=torch.int32, device=device)

        return self.memo(("cumulative", device), lambda: (offsets(self.query_lens), offsets(self.key_lens)))

    def memo(self, key: Hashable, make: Callable[[], _Made]) -> _Made:
        """Cache something that a kernel derives from this call."""
        if key not in self._memo:
            self._memo[key] = make()
        return self._memo[key]  # type: ignore[return-value]


MAX_CUDA_HEAD_SIZE = 256
"""Of FlashAttention."""

CUDA_HEAD_MULTIPLE = 8
"""FlashAttention takes head sizes that are multiples of this."""


def has_fused_kernel(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether a fused kernel serves these tensors, [..., D] each, heads padded to one size where they differ."""
    if query.is_cuda:
        half = query.dtype in (torch.bfloat16, torch.float16)
        return half and max(key.shape[-1], value.shape[-1]) <= MAX_CUDA_HEAD_SIZE
    return query.device.type == "cpu"


def head_multiple(query: Tensor) -> int:
    """The number that the fused kernel needs head sizes to be a multiple of."""
    return CUDA_HEAD_MULTIPLE if query.is_cuda else 1


# A variable-length call as a few dense batches, for kernels without variable lengths: short runs of similar sizes are
# padded into one batch; long runs that need a mask are cut into pieces of queries with the keys they see, so work grows
# with queries times window.

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
        window: Maximum number of keys that a query sees, including its own, if a mask is needed; no limit if None.
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


def dense_blocks(call: VarlenCall, device: torch.device, plain_causal: bool) -> list[Block]:
    """Plan a call as dense batches, once per call and device.

    Args:
        call: The call.
        device: Device of the indices.
        plain_causal: Whether the kernel runs causal runs of equal lengths without a mask.
    """

    def plan() -> list[Block]:
        blocks: list[Block] = []
        batches: dict[tuple[int, int, bool], list[_Piece]] = {}
        for piece in _pieces(call, plain_causal):
            if piece.num_queries > SHORT.get(device.type, SHORT["cuda"]) or piece.num_keys > MANY_KEYS:
                blocks.append(_unpadded(piece, call, device))
                continue
            size = 1 << (piece.num_queries - 1).bit_length()
            size = min(size, -(-piece.num_queries // 16) * 16)  # 33 to 48 tokens are padded to 48, not 64
            step = max(16, (1 << (piece.num_keys - 1).bit_length()) // 4)  # rounds up by at most a quarter
            num_keys = size if piece.plain_causal else -(-piece.num_keys // step) * step
            batches.setdefault((size, num_keys, piece.plain_causal), []).append(piece)
        for (num_queries, num_keys, _), pieces in batches.items():
            most = max(1, BATCH // (num_queries * num_keys))
            for start in range(0, len(pieces), most):
                batch = pieces[start : start + most]
                if len(batch) == 1:
                    blocks.append(_unpadded(batch[0], call, device))
                else:
                    blocks.append(_padded(batch, num_queries, num_keys, call, device))
        return blocks

    return call.memo(("blocks", device, plain_causal), plan)


class _Piece(NamedTuple):
    """A run of queries, or part of one, with the keys it sees; the last query is aligned with the last key."""

    query_start: int
    num_queries: int
    key_start: int
    num_keys: int
    plain_causal: bool


def _pieces(call: VarlenCall, plain_causal: bool) -> Iterator[_Piece]:
    query_start = key_start = 0
    for n, m in zip(call.query_lens, call.key_lens, strict=True):
        window = m if call.window is None else min(call.window, m)
        if not call.causal or (plain_causal and n == m == window):
            yield _Piece(query_start, n, key_start, m, call.causal)
        else:
            for start in range(0, n, PIECE):
                stop = min(start + PIECE, n)
                first = max(0, start + m - n - window + 1)
                yield _Piece(query_start + start, stop - start, key_start + first, stop + m - n - first, False)
        query_start, key_start = query_start + n, key_start + m


def _unpadded(piece: _Piece, call: VarlenCall, device: torch.device) -> Block:
    def run(tokens: Index, start: int, length: int) -> Runs:
        part = _part(tokens, start, start + length)
        if isinstance(part, Tensor) and bool((part.diff() == 1).all()):
            part = slice(int(part[0]), int(part[-1]) + 1)
        return Runs.one(part)

    queries = run(call.queries, piece.query_start, piece.num_queries)
    keys = run(call.keys, piece.key_start, piece.num_keys)
    if not call.causal or piece.plain_causal:
        return Block(queries, keys, plain_causal=piece.plain_causal)
    last_keys = torch.arange(piece.num_keys - piece.num_queries, piece.num_keys, device=device)[None]
    return Block(queries, keys, last_keys=last_keys, window=call.effective_window)


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
    if isinstance(tokens, slice):
        first = tokens.start or 0
        return slice(first + start, first + stop)
    return tokens[start:stop]


MAX_SCORES = 2**24
"""Approximate limit on the number of the eager kernel's scores in memory at a time."""


@dataclass(frozen=True)
class EagerKernel:
    """Matrix products and exponentials in float32 or wider: any device and dtype, and another head size for values.

    Attributes:
        scale: Multiplies the scores.
        softcap: If set, a score s becomes softcap * tanh(s / softcap) (Gemma 2, arXiv:2408.00118, sec. 2).
    """

    scale: float
    softcap: float | None = None

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, call: VarlenCall
    ) -> Iterator[tuple[Index, Tensor, Tensor]]:
        """Yield queries, their output [N, H, E] and the log-sum-exp of their scores [H, N] (float32 or wider).

        Each query of the call is in one part.
        """
        wide = torch.promote_types(query.dtype, torch.float32)
        for block in self.blocks(query, call):
            # Autocast would round the factors of matrix products.
            with torch.autocast(query.device.type, enabled=False):
                keys, values = (block.keys.take(tensor).to(wide) for tensor in (key, value))
                queries = _fold(block.queries.take(query).to(wide), keys.shape[1])
                scores, _ = self._scores(queries, keys, block, query.shape[1])
                part_lse = scores.logsumexp(-1, keepdim=True)
                part = scores.sub_(part_lse).exp_() @ values
                out, lse = _unfold(part, query.shape[1]), _unfold(part_lse, query.shape[1])[..., 0]
            yield block.queries.tokens, block.queries.flat(out).to(query.dtype), block.queries.flat_lse(lse)

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, call: VarlenCall
    ) -> Iterator[tuple[Index, Index, Tensor, Tensor, Tensor]]:
        """Yield queries, keys and gradients of query [N, H, D], key [M, K, D] and value [M, K, E], to be added up.

        If `out` and `lse` come from a softmax over more keys than this call has, the result is this call's share of
        the gradients.
        """
        wide = torch.promote_types(query.dtype, torch.float32)
        heads, kv_heads = query.shape[1], key.shape[1]
        for block in self.blocks(query, call):
            with torch.autocast(query.device.type, enabled=False):
                keys, values = (block.keys.take(tensor).to(wide) for tensor in (key, value))
                queries = _fold(block.queries.take(query).to(wide), kv_heads)
                grads = block.queries.take(grad, blank=True).to(wide)
                delta = _fold((grads * block.queries.take(out)).sum(-1, keepdim=True), kv_heads)
                grads = _fold(grads, kv_heads)
                scores, slope = self._scores(queries, keys, block, heads)
                weights = scores.sub_(_fold(block.queries.take_lse(lse)[..., None], kv_heads)).exp_()
                grad_scores = (grads @ values.mT).sub_(delta).mul_(weights)
                if slope is not None:
                    grad_scores.mul_(slope)
                for_query = _unfold((grad_scores @ keys).mul_(self.scale), heads)
                for_key = (grad_scores.mT @ queries).mul_(self.scale)
                for_value = weights.mT @ grads
            flat_key, flat_value = block.keys.flat(for_key), block.keys.flat(for_value)
            yield block.queries.tokens, block.keys.tokens, block.queries.flat(for_query), flat_key, flat_value

    def blocks(self, query: Tensor, call: VarlenCall) -> Iterator[Block]:
        """The blocks of a call, cut by queries to about `MAX_SCORES` scores at most; padded batches stay whole."""
        for block in dense_blocks(call, query.device, plain_causal=False):
            if block.queries.count > 1:
                yield block
                continue
            rows = max(1, MAX_SCORES // (query.shape[1] * block.keys.length))
            for start in range(0, block.queries.length, rows):
                stop = min(start + rows, block.queries.length)
                queries = Runs.one(_part(block.queries.tokens, start, stop))
                last_keys = None if block.last_keys is None else block.last_keys[:, start : start + rows]
                yield Block(queries, block.keys, last_keys=last_keys, window=block.window)

    def _scores(self, queries: Tensor, keys: Tensor, block: Block, heads: int) -> tuple[Tensor, Tensor | None]:
        """Scores of a block, minus infinity where hidden, and the cap's slope, if any: [R, K, G * N, M] each."""
        scores = queries @ keys.mT * self.scale  # a copy: selective checkpointing may have saved the product
        slope = None
        if self.softcap is not None:
            scores.div_(self.softcap).tanh_()
            slope = 1 - scores.square()
            scores.mul_(self.softcap)
        hidden = block.hidden()
        if hidden is not None:
            # Folding keeps the N queries of a head together, and all heads have the same mask.
            scores.unflatten(2, (heads // keys.shape[1], -1)).masked_fill_(hidden[:, None], float("-inf"))
        return scores, slope


def _fold(batch: Tensor, kv_heads: int) -> Tensor:
    """[R, H, N, D] -> [R, K, G * N, D]: the queries of the G heads that share a key/value head as one run."""
    return batch.unflatten(1, (kv_heads, -1)).flatten(2, 3)


def _unfold(batch: Tensor, heads: int) -> Tensor:
    """The inverse of `_fold`: [R, K, G * N, D] -> [R, H, N, D]."""
    return batch.unflatten(2, (heads // batch.shape[1], -1)).flatten(1, 2)


@dataclass(frozen=True)
class CPUKernel:
    """PyTorch's flash attention for CPU, one dense batch at a time: float32, float64, bfloat16, and one head size.

    Attributes:
        scale: Multiplies the scores.
    """

    scale: float

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, call: VarlenCall
    ) -> Iterator[tuple[Index, Tensor, Tensor]]:
        """See `EagerKernel.forward`."""
        for block in dense_blocks(call, query.device, plain_causal=True):
            out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                block.queries.take(query), block.keys.take(key), block.keys.take(value),
                0.0, block.plain_causal, attn_mask=_mask(block, call, query.dtype), scale=self.scale,
            )  # fmt: skip
            yield block.queries.tokens, block.queries.flat(out), block.queries.flat_lse(lse)

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, call: VarlenCall
    ) -> Iterator[tuple[Index, Index, Tensor, Tensor, Tensor]]:
        """See `EagerKernel.backward`."""
        for block in dense_blocks(call, query.device, plain_causal=True):
            queries, keys = block.queries, block.keys
            for_query, for_key, for_value = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                queries.take(grad, blank=True), queries.take(query), keys.take(key), keys.take(value),
                queries.take(out), queries.take_lse(lse),
                0.0, block.plain_causal, attn_mask=_mask(block, call, query.dtype), scale=self.scale,
            )  # fmt: skip
            yield queries.tokens, keys.tokens, queries.flat(for_query), keys.flat(for_key), keys.flat(for_value)


def _mask(block: Block, call: VarlenCall, dtype: torch.dtype) -> Tensor | None:
    """Additive mask of a block's scores, shape [R or 1, 1, N, M]: minus infinity where a key is hidden."""
    if block.last_keys is None:
        return None
    device = block.last_keys.device

    def additive(block: Block) -> Tensor:
        hidden = block.hidden()
        assert hidden is not None
        return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))

    if block.queries.count > 1:
        return call.memo(("mask", id(block), dtype), lambda: additive(block))

    def largest_piece() -> Tensor:
        num_queries, num_keys = min(PIECE, max(call.query_lens)), max(call.key_lens)
        if call.window is not None:
            num_keys = min(num_keys, num_queries + call.window - 1)
        return additive(_unpadded(_Piece(0, num_queries, 0, num_keys, False), call, device))

    # All unpadded runs share one mask, because the last query of each is aligned with its last key.
    corner = call.memo(("mask", dtype), largest_piece)
    return corner[..., -block.queries.length :, -block.keys.length :]


@dataclass(frozen=True)
class CUDAKernel:
    """FlashAttention, which natively supports variable lengths, causal runs and windows.

    As shipped with PyTorch or replaced by `torch.nn.attention.activate_flash_attention_impl`. FlashAttention-3 ("FA3",
    on Hopper GPUs, from the package `flash_attn_interface`) registers itself for the same two operators; it raises on
    GPUs it does not support.

    Both versions take bfloat16 and float16, with one head size for queries, keys and values: a multiple of 8 up to 256.

    Attributes:
        scale: Multiplies the scores.
    """

    scale: float

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, call: VarlenCall
    ) -> Iterator[tuple[Index, Tensor, Tensor]]:
        """See `EagerKernel.forward`."""
        query, key, value = take(query, call.queries), take(key, call.keys), take(value, call.keys)
        cu_query, cu_key = call.cumulative(query.device)
        causal, window = call.flash_options
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            query, key, value, cu_query, cu_key, max(call.query_lens), max(call.key_lens),
            0.0, causal, False, scale=self.scale, **window,
        )  # fmt: skip
        yield call.queries, out, lse

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, call: VarlenCall
    ) -> Iterator[tuple[Index, Index, Tensor, Tensor, Tensor]]:
        """See `EagerKernel.backward`."""
        grad, query, out = (take(tensor, call.queries) for tensor in (grad, query, out))
        key, value = take(key, call.keys), take(value, call.keys)
        lse = lse[:, call.queries] if isinstance(call.queries, slice) else lse.index_select(1, call.queries)
        device = query.device
        cu_query, cu_key = call.cumulative(device)
        random_state, unused = call.memo(
            ("random_state", device),
            lambda: (torch.zeros(2, dtype=torch.uint64, device=device), torch.empty(0, device=device)),
        )
        causal, window = call.flash_options
        grads = torch.ops.aten._flash_attention_backward(
            grad, query, key, value, out, lse.contiguous(), cu_query, cu_key, max(call.query_lens), max(call.key_lens),
            0.0, causal, random_state, unused, scale=self.scale, **window,
        )  # fmt: skip
        yield call.queries, call.keys, *grads


VarlenKernel = EagerKernel | CPUKernel | CUDAKernel
