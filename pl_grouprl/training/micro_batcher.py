"""Packs the rollouts of an update, or of a scoring pass, into micro-batches within a token budget."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from pl_grouprl.attention.sequence_parallel import (
    check_sequence_parallel,
    check_sequence_parallel_size,
    sequence_mesh,
)
from pl_grouprl.media.prompts import MediaPrompt
from pl_grouprl.packing import Sharing
from pl_grouprl.packing.trie import MIN_SAVED_TOKENS
from pl_grouprl.training.micro_batch import RowOptions
from pl_grouprl.training.micro_batch_schedule import MicroBatchSchedule, PackedRowCache
from pl_grouprl.training.rollout_buffer import RolloutBuffer
from pl_grouprl.training.run import Run
from pl_grouprl.types import Prompt
from pl_grouprl.utilities.memory import naming_memory
from pl_grouprl.utilities.options import check_options


class MicroBatcher:
    """Plans micro-batches, with the same number and kinds on every rank.

    Args:
        run: The run.
        sharing: `shared` encodes the prompt of a group once, `repeated` once per rollout.
        max_tokens: Most tokens of a micro-batch on one rank; None is no limit.
        sequence_parallel_size: Ranks that share the tokens of each row in updates.
        share_across_groups: Encode the common beginning of prompts once.
        min_saved_tokens: As in `packing.pack`; None if the attention backend runs prompts with rollouts alone.
        whole_episodes: Returns whether updates need all rows of an episode in one micro-batch.
        choose_max_tokens: Returns the limit where `max_tokens` sets none; called at the first pass of a run.

    Raises:
        ValueError: If a number is less than 1, options exclude each other, or padded rows would have to be divided.
    """

    def __init__(
        self,
        run: Run,
        sharing: Sharing = "shared",
        max_tokens: int | None = None,
        sequence_parallel_size: int = 1,
        *,
        share_across_groups: bool = False,
        min_saved_tokens: int | None = MIN_SAVED_TOKENS,
        whole_episodes: Callable[[], bool] = lambda: True,
        choose_max_tokens: Callable[[], int | None] = lambda: None,
    ) -> None:
        counts = {
            "sequence_parallel_size": sequence_parallel_size,
            "max_tokens_per_micro_batch": 1 if max_tokens is None else max_tokens,
        }
        check_options({name: (count, count >= 1, "at least 1") for name, count in counts.items()})
        self._run = run
        self.sharing: Sharing = sharing
        self.max_tokens = max_tokens
        self.sequence_parallel_size = sequence_parallel_size
        if share_across_groups and (sharing == "repeated" or min_saved_tokens is None):
            raise ValueError(
                "share_across_groups=True needs sharing='shared' and an attention backend that runs forests of any "
                "depth; use attention_backend='auto', 'cascade' or 'flex'."
            )
        self.share_across_groups = share_across_groups
        self._min_saved_tokens, self._whole_episodes = min_saved_tokens, whole_episodes
        self._choose_max_tokens = choose_max_tokens
        self._chosen: list[int | None] = []  # one entry once it was chosen
        self.cache = PackedRowCache()
        self._sequence_group: Any = None

    def check(self, world_size: int, prompts: Sequence[Prompt] | None, max_new_tokens: int) -> None:
        """Refuse options that cannot work, before anything is loaded.

        Args:
            world_size: Number of ranks.
            prompts: Prompts of the training data; None outside training.
            max_new_tokens: The longest completion, tool results included.

        Raises:
            ValueError: Names the options.
        """
        check_sequence_parallel_size(self.sequence_parallel_size, world_size)
        if self.sequence_parallel_size > 1 and self.sharing != "shared":
            raise ValueError(
                f"sequence_parallel_size is {self.sequence_parallel_size} with sharing={self.sharing!r}; padded rows "
                "are not divided among ranks. Use sharing='shared'."
            )
        has_media = any(isinstance(prompt, MediaPrompt) or prompt.media for prompt in prompts or ())
        if self.share_across_groups and has_media:
            raise ValueError(
                "share_across_groups is True, but prompts of the training data have images or videos, whose tokens do "
                "not tell them apart; set it to False."
            )
        if prompts is not None and self.max_tokens is not None:
            self._check_budget(self.max_tokens, prompts, max_new_tokens)

    def _check_budget(self, max_tokens: int, prompts: Sequence[Prompt], max_new_tokens: int) -> None:
        limit = max_tokens * self.sequence_parallel_size
        longest = {
            "a prompt of the training data has": max((len(prompt.token_ids) for prompt in prompts), default=0),
            "a rollout may have (sampling.max_new_tokens)": max_new_tokens,
        }
        if self.sharing == "repeated":
            longest = {"a prompt with its rollout may have": sum(longest.values())}
        for what, tokens in longest.items():
            if tokens > limit:
                raise ValueError(
                    f"max_tokens_per_micro_batch is {max_tokens} with sequence_parallel_size="
                    f"{self.sequence_parallel_size}, {limit} tokens together, but {what} {tokens}; raise one of them, "
                    "or lower sampling.max_new_tokens or max_prompt_length of PromptDataModule."
                )
        if sum(longest.values()) > limit:
            rank_zero_warn(
                f"max_tokens_per_micro_batch is {max_tokens} tokens (not rollouts), and a prompt with one rollout may "
                f"have {sum(longest.values())}: rollouts are trained in slices, which is slow. Raise it as far as "
                "memory allows; the result is the same."
            )

    def form_sequence_groups(self, models: Iterable[Any]) -> None:
        """Form the groups of ranks that split rows; refuse models whose attention cannot be divided."""
        self._chosen.clear()
        if self.sequence_parallel_size > 1:
            for model in models:
                check_sequence_parallel(model, self.sequence_parallel_size)
            mesh = sequence_mesh(self.sequence_parallel_size, self._run.device.type)
            self._sequence_group = mesh.get_group("sequence")

    def for_update(self, buffer: RolloutBuffer, members: Sequence[int]) -> MicroBatchSchedule:
        """Micro-batches of some groups of a buffer.

        Args:
            buffer: The rollouts.
            members: Indices of the groups.
        """
        budget = self._budget(buffer)
        options = self._options(budget, self._sequence_group, self.sequence_parallel_size)
        options = replace(options, whole_episodes=self._whole_episodes())
        return MicroBatchSchedule(buffer, members, options, self.cache)

    def for_scoring(self, buffer: RolloutBuffer) -> MicroBatchSchedule:
        """Micro-batches of all groups of a buffer.

        Scoring keeps no activations, so each rank scores alone, with the token budget of its whole sequence group.
        """
        budget = self._budget(buffer)
        budget = None if budget is None else budget * self.sequence_parallel_size
        return MicroBatchSchedule(buffer, range(len(buffer.groups)), self._options(budget, None, 1), self.cache)

    def _budget(self, buffer: RolloutBuffer) -> int | None:
        """`max_tokens`, or the chosen limit, raised to a whole prompt with its longest rollout."""
        if self.max_tokens is not None:
            return self.max_tokens
        if not self._chosen:
            self._chosen.append(self._choose_max_tokens())
        if self._chosen[0] is None or any(rows > 1 for group in buffer.groups for rows in group.rows_per_episode):
            return None
        longest = (
            len(group.prompt_ids) + max((len(rollout.token_ids) for rollout in group.rollouts), default=0)
            for group in buffer.groups
        )
        return max(self._chosen[0], *longest)

    def _options(self, budget: int | None, sequence_group: Any, sequence_ranks: int) -> RowOptions:
        return RowOptions(
            self.sharing,
            budget,
            self._run.device,
            sequence_group,
            sequence_ranks,
            self.share_across_groups,
            self._min_saved_tokens,
        )

    def naming_memory(self, what: str = "") -> contextlib.AbstractContextManager[None]:
        """Make an out-of-memory error name the option that bounds a micro-batch.

        Args:
            what: Text before "a pass" in the error.
        """
        return naming_memory(
            f"{what}a pass of max_tokens_per_micro_batch={self.max_tokens} tokens (None: "
            f"{self._chosen[0] if any(self._chosen) else 'all groups of a mini-batch at once'})",
            "lower it, which changes no result, or raise sequence_parallel_size",
        )
