"""Decodes a batch of sequences until each has ended.

Shapes: B rows of the batch, N sequences that it began with, V vocabulary, T steps.

All state of a row is on the device, and a step asks the host for nothing: it runs the model on each row's newest token,
draws the next, and marks rows that have ended. Between steps the host looks at the marks: on a CPU in every step, so
that a step's cost is proportional to the sequences that are left; on asynchronous devices every few steps, where each
look synchronizes. Until the host removes it, a row that has ended stays where it is and draws tokens that do not count.
Under a CUDA graph (`step_graph`) it stays until so many have ended that a smaller graph pays off.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pl_grouprl.rollout.engine import StopStrings
from pl_grouprl.rollout.hf.kept import KeptSequence
from pl_grouprl.rollout.hf.prefill import NextTokenLogits, Prefix
from pl_grouprl.rollout.hf.sampling import sample_tokens, uniforms
from pl_grouprl.rollout.hf.step_graph import StepGraph
from pl_grouprl.types import Rollout, SamplingConfig
from pl_grouprl.utilities.progress import tick

STEPS_PER_CHECK = {"cpu": 1}
"""Steps between looks for ended sequences, by device."""

_ASYNC_STEPS_PER_CHECK = 8
"""The same for other devices."""


class DecodeRow(NamedTuple):
    """A sequence to decode.

    Attributes:
        prefix: Where its prompt was encoded.
        place: The prompt's row there.
        stream: (prompt index, generation index), which identify its random numbers.
        max_new_tokens: Maximum number of tokens to sample.
        token_ids: Tokens of the prompt, which a repetition penalty counts.
    """

    prefix: Prefix
    place: int
    stream: tuple[int, int]
    max_new_tokens: int
    token_ids: Sequence[int] = ()

    @property
    def length(self) -> int:
        """Tokens of the prompt."""
        return self.prefix.lengths[self.place]


class DecodeBatch:
    """Sequences that are decoded together; a subclass has the cache.

    Args:
        rows: The sequences.
        sampling: How to sample; its `max_new_tokens` is not read.
        end_ids: Tokens that end a sequence.
        stop: Strings that end a sequence.
        seed: Seed of the random streams.
        keep: Whether to keep the cache of each sequence when it leaves, in `kept`.
        groups: Numbers of the rows that must stay together, as lists; None if rows may change places freely.

    Attributes:
        kept: By the number of a sequence, the cache of its prompt and its tokens except the last.
    """

    def __init__(
        self,
        rows: Sequence[DecodeRow],
        sampling: SamplingConfig,
        *,
        end_ids: Sequence[int],
        stop: StopStrings,
        seed: int,
        keep: bool = False,
        groups: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self.sampling, self.stop, self.keeps, self.device = sampling, stop, keep, rows[0].prefix.logits_PV.device
        groups = [range(len(rows))] if groups is None else groups
        self.numbers = [number for group in groups for number in group]
        self.group_sizes = [len(group) for group in groups]
        self.limits = {row.max_new_tokens for row in rows}
        self.num_steps = max(self.limits)
        self._can_end = bool(end_ids)
        self._graph: StepGraph | None = None
        ordered = [rows[number] for number in self.numbers]
        self.logits_BV: Tensor | None = torch.stack([row.prefix.logits_PV[row.place] for row in ordered])
        # One entry per row; rows move when others leave.
        self.number_B = self.int64(self.numbers)
        self.length_B = self.int64([row.length for row in ordered])  # in the cache
        self.position_B = self.int64([row.prefix.positions[row.place] for row in ordered])
        self.limit_B = self.int64([row.max_new_tokens for row in ordered])
        self.token_B, self.count_B = torch.zeros_like(self.number_B), torch.zeros_like(self.number_B)
        self.done_B, self.stopped_B = (
            torch.zeros_like(self.number_B, dtype=torch.bool),
            torch.zeros_like(self.number_B, dtype=torch.bool),
        )
        self.seen_BV: Tensor | None = None  # tokens of the prompt and the completion
        if sampling.repetition_penalty != 1:
            self.seen_BV = torch.zeros_like(self.logits_BV, dtype=torch.bool)
            for seen_V, row in zip(self.seen_BV, ordered, strict=True):  # some models have no logit of a placeholder
                seen_V[self.int64([token for token in row.token_ids if token < len(seen_V)])] = True
        self.step_1 = torch.zeros(1, dtype=torch.int64, device=self.device)  # the step that is drawn next
        # One entry per step and sequence, in the order of `rows`.
        self.uniforms_TN: Tensor | None = None
        if sampling.temperature != 0:
            numbers_NT = uniforms(seed, [row.stream for row in rows], 0, self.num_steps)
            self.uniforms_TN = numbers_NT.t().contiguous().to(self.device)
        self.tokens_TN = torch.zeros(self.num_steps, len(rows), dtype=torch.int64, device=self.device)
        self.logprobs_TN = torch.zeros(self.num_steps, len(rows), device=self.device)
        self._experts: list[tuple[Tensor, Tensor]] = []  # of each step after the first: numbers and experts of the rows
        self._prompt_experts: list[Tensor] | None = None  # those of the prompts
        if rows[0].prefix.routed_experts is not None:
            self._prompt_experts = [row.prefix.routed_experts[row.place] for row in rows]  # type: ignore[index]
        self._end_ids = self.int64(end_ids)
        # On the host, one entry per sequence, in the order of `rows`.
        self._lengths = [row.length for row in rows]
        self._counts, self._stopped = [0] * len(rows), [False] * len(rows)
        # On the host, one entry per row of the batch, like `numbers`.
        self._ended = [False] * len(rows)
        self.kept: dict[int, KeptSequence] = {}

    def int64(self, values: Sequence[int]) -> Tensor:
        """A tensor on the batch's device."""
        return torch.tensor(list(values), dtype=torch.int64, device=self.device)

    def run(self, logits: NextTokenLogits) -> list[Rollout]:
        """Decode until all sequences have ended.

        Returns:
            A rollout per sequence, in order, without text.

        Raises:
            FloatingPointError: If the model's logits were not finite.
        """
        assert self.logits_BV is not None
        # A cache that further steps would change has to be taken in the step in which its row ends.
        often = bool(self.stop) or (self.keeps and self.ended_rows_change)
        self._steps_per_check = 1 if often else STEPS_PER_CHECK.get(self.device.type, _ASYNC_STEPS_PER_CHECK)
        self._draw(self.logits_BV)
        self.logits_BV = None
        step, drawn = partial(self._step, logits), 1
        if logits.routers is None:  # recording is done in Python
            self._graph = self.make_graph(logits.model)
        while self._look(drawn):
            self.count_step()
            if self._graph is None:
                step()
            else:
                self._graph.run(step)
            drawn += 1
        self._retire(range(len(self.numbers)))
        counts_N = torch.tensor(self._counts)
        tokens_NT, logprobs_NT = self.tokens_TN.t().cpu(), self.logprobs_TN.t().cpu()
        counted = torch.arange(self.num_steps) < counts_N[:, None]
        if not bool(logprobs_NT[counted].isfinite().all()):
            raise FloatingPointError(
                "the model's logits are not finite (NaN or infinite); check its weights, and whether its dtype can "
                "hold its activations (try bfloat16 or float32 in place of float16)."
            )
        experts = self._routed_experts()
        return [
            Rollout(
                token_ids=ids[:count].tolist(),
                logprobs=values[:count].tolist(),
                finish_reason="stop" if stopped else "length",
                routed_experts=own,
            )
            for ids, values, count, stopped, own in zip(
                tokens_NT, logprobs_NT, self._counts, self._stopped, experts, strict=True
            )
        ]

    def _routed_experts(self) -> list[Tensor | None]:
        """The experts of each sequence, prompt included; the last token has none, because it was not run."""
        if self._prompt_experts is None:
            return [None] * len(self._counts)
        shape = (len(self._counts), self.num_steps, *self._prompt_experts[0].shape[1:])
        found = self._prompt_experts[0].new_full(shape, -1)
        for step, (number_B, experts_B) in enumerate(self._experts):
            found[number_B.cpu(), step] = experts_B.cpu()
        for own, count in zip(found, self._counts, strict=True):
            own[count - 1 :] = -1
        parts = zip(self._prompt_experts, found, self._counts, strict=True)
        return [torch.cat([prompt, own[:count]]) for prompt, own, count in parts]

    # A step, which asks the host for nothing.

    def _step(self, logits: NextTokenLogits) -> None:
        live_B = ~self.done_B  # a row that has ended overwrites the entry after its last cached token
        logits_BV = self.forward(logits)
        if logits.routed_experts is not None:
            self._experts.append((self.number_B, logits.routed_experts[:, -1]))
        self._draw(logits_BV)
        self.length_B.add_(live_B)
        self.position_B.add_(live_B)

    def _draw(self, logits_BV: Tensor) -> None:
        """Draw a token for each row, and mark rows that it ends."""
        uniforms_B = None
        if self.uniforms_TN is not None:
            uniforms_B = self.uniforms_TN.index_select(0, self.step_1).squeeze(0).index_select(0, self.number_B)
        tokens_B, logprobs_B = sample_tokens(logits_BV, self.sampling, uniforms_B, self.seen_BV)
        if self.seen_BV is not None:
            self.seen_BV.scatter_(-1, tokens_B[:, None], True)
        entry_B = self.step_1 * self.tokens_TN.shape[1] + self.number_B
        self.tokens_TN.view(-1).index_copy_(0, entry_B, tokens_B)
        self.logprobs_TN.view(-1).index_copy_(0, entry_B, logprobs_B)
        self.token_B.copy_(tokens_B)
        live_B = ~self.done_B
        self.count_B.add_(live_B)
        if self._can_end:  # compared, because `isin` may sort and synchronize
            self.stopped_B.logical_or_((tokens_B[:, None] == self._end_ids).any(dim=-1).logical_and_(live_B))
        self.done_B.logical_or_(self.stopped_B).logical_or_(self.count_B >= self.limit_B)
        self.step_1.add_(1)

    # What the host does between steps.

    def _look(self, drawn: int) -> bool:
        """Remove rows that have ended, now and then; returns whether to go on after `drawn` tokens."""
        tick(self._ended.count(False))
        if self.stop:
            first = max(drawn - self.stop.window, 0)
            found = self.stop.found(self.tokens_TN[first:drawn, self.number_B].t().tolist())
            found_B = torch.tensor(
                [hit and not ended for hit, ended in zip(found, self._ended, strict=True)], device=self.device
            )
            self.stopped_B.logical_or_(found_B)
            self.done_B.logical_or_(found_B)
        if drawn == self.num_steps:
            return False
        looks = drawn % self._steps_per_check == 0 and (self._can_end or bool(self.stop))
        if drawn not in self.limits and not looks:
            return True
        done = self._ended = self.done_B.tolist()
        live = done.count(False)
        if not live:
            return False
        rows = live if self._graph is None else self._graph.rows_to_keep(len(done), live, self.num_steps - drawn)
        leaving = [place for place, ended in enumerate(done) if ended][: len(done) - rows]
        if leaving:
            self._retire(leaving)
            gone = set(leaving)
            self._remove([place in gone for place in range(len(done))])
        return True

    def _retire(self, places: Sequence[int]) -> None:
        """Note how rows ended, and keep their caches."""
        counts, stopped = self.count_B.tolist(), self.stopped_B.tolist()
        for place in places:
            number = self.numbers[place]
            self._counts[number], self._stopped[number] = counts[place], stopped[place]
            if self.keeps:  # the last token is not in the cache
                self.kept[number] = self.take(place, self._lengths[number] + counts[place] - 1)

    def _remove(self, leaving: Sequence[bool]) -> None:
        """Remove rows: in each group, rows from its end take the places that its beginning leaves free."""
        order: list[int] = []
        sizes = []
        for first, last in pairwise(accumulate(self.group_sizes, initial=0)):
            left = [place for place in range(first, last) if not leaving[place]]
            start, end = len(order), len(order) + len(left)
            staying = {place for place in left if start <= place < end}
            moving = iter([place for place in left if place not in staying])
            order += [place if place in staying else next(moving) for place in range(start, end)]
            sizes.append(len(left))
        self.group_sizes, self.numbers = sizes, [self.numbers[place] for place in order]
        self._ended = [self._ended[place] for place in order]
        order_B = self.int64(order)
        for name in ("number_B", "length_B", "position_B", "limit_B", "token_B", "count_B", "done_B", "stopped_B"):
            setattr(self, name, getattr(self, name)[order_B])
        if self.seen_BV is not None:
            self.seen_BV = self.seen_BV[order_B]
        targets = [target for target, source in enumerate(order) if target != source]
        self.keep_rows(order_B, self.int64(targets), self.int64([order[target] for target in targets]))
        if self._graph is not None:
            self._graph.restart()

    # What a subclass does.

    ended_rows_change = True
    """Whether further steps change the cache of a row that has ended."""

    def make_graph(self, model: Any) -> StepGraph | None:
        """What runs the steps; None if they cannot be captured."""
        return None

    def count_step(self) -> None:
        """Count a step that is about to begin, on the host."""

    def forward(self, logits: NextTokenLogits) -> Tensor:
        """Run the model on each row's newest token, which extends the cache; returns logits [B, V]."""
        raise NotImplementedError

    def keep_rows(self, order_B: Tensor, targets: Tensor, sources: Tensor) -> None:
        """Keep the rows of the cache at `order_B`, in that order: rows `sources` move to `targets`, others stay."""
        raise NotImplementedError

    def take(self, place: int, num_tokens: int) -> KeptSequence:
        """Copy a row of the cache, of `num_tokens` tokens."""
        raise NotImplementedError


def place_rows(rows: Sequence[DecodeRow]) -> list[tuple[Prefix, list[int], list[int]]]:
    """The batches of prompts that rows come from: each with the rows' places in it, and in the decode batch."""
    found: dict[int, Any] = {}
    for place, row in enumerate(rows):
        _, sources, targets = found.setdefault(id(row.prefix), (row.prefix, [], []))
        sources.append(row.place)
        targets.append(place)
    return list(found.values())
