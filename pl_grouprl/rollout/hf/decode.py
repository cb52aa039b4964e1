"""Decodes a batch of sequences until each has ended.

Shapes: B sequences that are still being decoded, V vocabulary, T steps per draw of random numbers.

Each step draws a token per sequence, removes ended sequences from the batch and runs the model on the rest. Sequences
leave as soon as they end (`kv_cache.drop_rows` makes that cheap), so a step's cost is proportional to the remaining
ones; on asynchronous devices they leave every few steps, and tokens drawn after their end are dropped. Steps are
vectorized, except that stop strings, if given, are searched sequence by sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pl_grouprl.rollout.engine import StopStrings
from pl_grouprl.rollout.hf.cache import KeptSequence, drop_rows, gather_cache, needs_padding_mask, take_row
from pl_grouprl.rollout.hf.prefill import NextTokenLogits, Prefix, left_padding_mask
from pl_grouprl.rollout.hf.sampling import sample_tokens, uniforms
from pl_grouprl.rollout.hf.shared_prompt import MIN_SAVED_TOKENS, find_shared_prompts
from pl_grouprl.types import Rollout, SamplingConfig
from pl_grouprl.utilities.progress import tick

RANDOM_STEPS = 64
"""Steps per draw of random numbers; does not affect their values."""

STEPS_PER_CHECK = {"cpu": 1}
"""Steps between checks for ended sequences, by device; see `_ASYNC_STEPS_PER_CHECK`."""

_ASYNC_STEPS_PER_CHECK = 8
"""Steps between checks on asynchronous devices, where each check synchronizes."""


class DecodeBatch:
    """Sequences that are decoded together.

    Args:
        parts: Encoded prompts and their row for each sequence, as `PrefixStore.select` returns them.
        sequences: (prompt index, generation index) of each, which identify its random stream.
        sampling: How to sample; its `max_new_tokens` is not read.
        max_new_tokens: Most tokens of each sequence.
        end_ids: Tokens that end a sequence.
        stop: Strings that end a sequence.
        seed: Seed of the random streams.
        min_saved_tokens: Minimum of copied tokens that sharing must save, per prompt.
        keep: Whether to keep the cache of each sequence when it leaves, in `kept`.

    Attributes:
        kept: By the number of a sequence, the cache of its prompt and its tokens except the last.
    """

    def __init__(
        self,
        parts: Sequence[tuple[Prefix, list[int]]],
        sequences: Sequence[tuple[int, int]],
        sampling: SamplingConfig,
        *,
        max_new_tokens: Sequence[int],
        end_ids: Sequence[int],
        stop: StopStrings,
        seed: int,
        min_saved_tokens: float = MIN_SAVED_TOKENS,
        keep: bool = False,
    ) -> None:
        device = parts[0][0].logits_PV.device
        indexed = [(prefix, torch.tensor(rows, device=device)) for prefix, rows in parts]
        lengths = [prefix.lengths[row] for prefix, rows in parts for row in rows]
        positions = [prefix.positions[row] for prefix, rows in parts for row in rows]
        self.sequences, self.sampling, self.stop, self.seed = sequences, sampling, stop, seed
        self.end_ids = torch.tensor(list(end_ids), dtype=torch.int64, device=device)
        self.width = max(prefix.width for prefix, _ in parts)
        self._limits = set(max_new_tokens)
        self._steps = max(self._limits)
        limit = self.width + self._steps
        prompts = find_shared_prompts(
            [(prefix.shared, prefix.lengths, rows) for prefix, rows in parts], device, min_saved_tokens
        )
        self.cache = gather_cache([(prefix.cache, rows) for prefix, rows in indexed], self.width, limit, prompts)
        self.logits_BV = torch.cat([prefix.logits_PV[rows] for prefix, rows in indexed])
        # Everything below has one row per live sequence and is reordered when sequences leave.
        self.row_B = torch.arange(len(sequences), device=device)
        self.position_B = torch.tensor(positions, device=device)
        self.limit_B = torch.tensor(list(max_new_tokens), device=device)
        masked = needs_padding_mask(self.cache)
        self.prompt_mask_BS = left_padding_mask(lengths, self.width, device) if masked else None
        self.uniforms_BT: Tensor | None = None
        self.tail_BW = torch.full((len(sequences), stop.window), -1, device=device) if stop else None
        self.finished_B = torch.zeros(len(sequences), dtype=torch.bool, device=device)
        # A kept sequence must leave at once: later tokens could push positions out of some layers.
        self._steps_per_check = 1 if stop or keep else STEPS_PER_CHECK.get(device.type, _ASYNC_STEPS_PER_CHECK)
        # Results so far, one entry per step; the last column marks tokens after an end.
        self._drawn: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        self._stopped: list[Tensor] = []
        self._lengths, self._keeps = lengths, keep
        self._shared = [prefix.shared[row] for prefix, rows in parts for row in rows]
        self.kept: dict[int, KeptSequence] = {}

    def run(self, logits: NextTokenLogits) -> list[Rollout]:
        """Decode until all sequences have ended.

        Returns:
            A rollout per sequence, in order, without text.

        Raises:
            FloatingPointError: If the model's logits were not finite.
        """
        for step in range(self._steps):
            tokens_B = self._draw(step)
            tick(len(tokens_B))
            if step + 1 == self._steps:
                break
            leaving_B = self._leaving(step)
            leaving = 0 if leaving_B is None else int(leaving_B.sum())
            if leaving == len(tokens_B):
                break
            if leaving_B is not None and leaving:
                self._keep(leaving_B, step)
                tokens_B = tokens_B[self._drop(leaving_B)]
            self.logits_BV = logits(
                tokens_B.unsqueeze(-1), self.cache, (self.position_B + step).unsqueeze(-1), self._mask(step + 1)
            )
        self._keep(torch.ones_like(self.finished_B), step)
        return self._collect()

    def _draw(self, step: int) -> Tensor:
        """Draw this step's token for every sequence, and record which sequences it ends."""
        tokens_B, logprobs_B = sample_tokens(self.logits_BV, self.sampling, self._uniforms(step))
        self._drawn.append((self.row_B, tokens_B, logprobs_B, self.finished_B))
        ends_B = torch.isin(tokens_B, self.end_ids)
        if self.tail_BW is not None:
            self.tail_BW = torch.cat([self.tail_BW[:, 1:], tokens_B.unsqueeze(-1)], dim=-1)
            tails = [[token for token in tail if token >= 0] for tail in self.tail_BW.tolist()]
            ends_B = ends_B | torch.tensor(self.stop.found(tails), device=ends_B.device)
        self.finished_B = self.finished_B | ends_B
        return tokens_B

    def _leaving(self, step: int) -> Tensor | None:
        """Sequences that leave after this step; None if this step does not check, because checking synchronizes."""
        if step + 1 in self._limits:  # at once: the model may have no further positions for them
            return self.finished_B | (self.limit_B <= step + 1)
        can_end = len(self.end_ids) > 0 or self.tail_BW is not None
        return self.finished_B if can_end and (step + 1) % self._steps_per_check == 0 else None

    def _uniforms(self, step: int) -> Tensor | None:
        if self.sampling.temperature == 0:
            return None
        if self.uniforms_BT is None or step % RANDOM_STEPS == 0:
            live = [self.sequences[row] for row in self.row_B.tolist()]
            count = min(RANDOM_STEPS, self._steps - step)
            self.uniforms_BT = uniforms(self.seed, live, step, count).to(self.row_B.device)
        return self.uniforms_BT[:, step % RANDOM_STEPS]

    def _mask(self, new_tokens: int) -> Tensor | None:
        if self.prompt_mask_BS is None:
            return None
        return torch.nn.functional.pad(self.prompt_mask_BS, (0, new_tokens), value=1)

    def _keep(self, leaving_B: Tensor, step: int) -> None:
        """Keep the caches of sequences that leave with the token of this step, which is not in the cache yet."""
        if self._keeps:
            for row in leaving_B.nonzero().flatten().tolist():
                number = int(self.row_B[row])
                num_tokens = self._lengths[number] + step
                self.kept[number] = take_row(self.cache, row, num_tokens, self._shared[number])

    def _drop(self, leaving_B: Tensor) -> Tensor:
        """Remove sequences, including all that ended; returns the old index of each remaining row."""
        order = drop_rows(self.cache, leaving_B)
        self._stopped.append(self.row_B[self.finished_B])
        self.finished_B = torch.zeros_like(order, dtype=torch.bool)
        self.row_B = self.row_B[order]
        self.position_B = self.position_B[order]
        self.limit_B = self.limit_B[order]
        if self.prompt_mask_BS is not None:
            self.prompt_mask_BS = self.prompt_mask_BS[order]
        if self.uniforms_BT is not None:
            self.uniforms_BT = self.uniforms_BT[order]
        if self.tail_BW is not None:
            self.tail_BW = self.tail_BW[order]
        return order

    def _collect(self) -> list[Rollout]:
        """Assemble one rollout per sequence from the steps."""
        rows, tokens, logprobs, past_end = (torch.cat(columns).cpu() for columns in zip(*self._drawn, strict=True))
        rows, tokens, logprobs = (column[~past_end] for column in (rows, tokens, logprobs))
        if not bool(logprobs.isfinite().all()):
            raise FloatingPointError(
                "the model's logits are not finite (NaN or infinite); check its weights, and whether its dtype can "
                "hold its activations (try bfloat16 or float32 in place of float16)."
            )
        counts = torch.bincount(rows, minlength=len(self.sequences)).tolist()
        order = rows.argsort(stable=True)
        stopped = set(torch.cat([*self._stopped, self.row_B[self.finished_B]]).tolist())
        pieces = zip(tokens[order].split(counts), logprobs[order].split(counts), strict=True)
        return [
            Rollout(
                token_ids=ids.tolist(), logprobs=values.tolist(), finish_reason="stop" if row in stopped else "length"
            )
            for row, (ids, values) in enumerate(pieces)
        ]
