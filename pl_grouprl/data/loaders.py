"""Loaders of prompt batches for training and evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from pl_grouprl.types import Prompt
from pl_grouprl.utilities.describe import private_copy


class PromptBatch:
    """This rank's prompts of one rollout.

    Deliberately a plain object: Lightning would walk through a collection or dataclass, token by token, to move tensors
    and guess the batch size. Pass `batch_size` when logging.

    Attributes:
        prompts: Prompts of this rank; copies, because callbacks receive the batch.
        rollout_number: Index of the rollout since the start of training, over all epochs; equal on all ranks. In
            evaluation, the index of the batch.
        update_index: How many times this batch was yielded before: 0 when a rollout begins.
        num_updates: How many times this batch is yielded in total.
    """

    __slots__ = ("num_updates", "prompts", "rollout_number", "update_index")

    def __init__(
        self, prompts: Sequence[Prompt], rollout_number: int = 0, update_index: int = 0, num_updates: int = 1
    ) -> None:
        self.prompts = private_copy(list(prompts))
        self.rollout_number = rollout_number
        self.update_index = update_index
        self.num_updates = num_updates

    def __len__(self) -> int:
        return len(self.prompts)

    def __repr__(self) -> str:
        return (
            f"PromptBatch({len(self)} prompts, rollout_number={self.rollout_number}, "
            f"update {self.update_index + 1} of {self.num_updates})"
        )


class TrainPromptLoader:
    """Yields each batch of prompts once per update, epoch after epoch, with a resumable position.

    Lightning sees `len(loader)` batches per epoch. The order is drawn for all rows from (seed, epoch) alone. Dropped
    rows are omitted afterwards, so the others keep their order under another length limit; if the limit changes
    mid-epoch, rows of batches already begun stay in front. Each rank takes every `num_replicas`-th prompt of a batch,
    so ranks may differ by one prompt.

    Not a torch DataLoader: Lightning injects samplers into those, and prefetches one batch if they have no length,
    which would start a rollout one optimizer step too early. Lightning sets the epoch by calling `set_epoch` on the
    attribute `sampler`. Checkpoints save the position (`state_dict`), which is valid for any number of ranks, also if
    other rows are dropped: the epoch then continues with prompts that it has not used.

    Args:
        prompts: All prompts in use, the same on every rank.
        batch_size: Prompts of one rollout, over all ranks.
        updates_per_rollout: How often each batch is repeated.
        shuffle: Draw a new order in each epoch.
        seed: Determines the orders.
        drop_last: Skip the prompts of an epoch that do not fill a batch.
        num_replicas: Number of ranks that share the data.
        rank: This rank.
        rows: The data row of each prompt, ascending; None if no row was dropped.
        num_rows: Number of rows in the data; required with `rows`.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        *,
        batch_size: int,
        updates_per_rollout: int = 1,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = True,
        num_replicas: int = 1,
        rank: int = 0,
        rows: Sequence[int] | None = None,
        num_rows: int | None = None,
    ) -> None:
        self.prompts = prompts
        self.num_replicas = num_replicas
        self.rank = rank
        self._settings: dict[str, Any] = {
            "batch_size": batch_size,
            "updates_per_rollout": updates_per_rollout,
            "shuffle": shuffle,
            "seed": seed,
            "drop_last": drop_last,
            "num_prompts": len(prompts) if num_rows is None else num_rows,
            "level_column": None,
        }
        rest = len(prompts) % batch_size
        if batch_size < num_replicas:
            raise ValueError(f"batch_size={batch_size} leaves some of {num_replicas} ranks without a prompt; raise it.")
        if drop_last and len(prompts) < batch_size:
            have = f"The training data has {len(prompts)} prompts, fewer than batch_size={batch_size}"
            raise ValueError(f"{have}; lower batch_size, add data, or set drop_last=False.")
        if not drop_last and 0 < rest < num_replicas:
            have = f"With drop_last=False the last batch of an epoch has {rest} prompts for {num_replicas} ranks"
            raise ValueError(f"{have}; set drop_last=True, or another batch_size than {batch_size}.")
        self._prompt_of = np.full(self._settings["num_prompts"], -1)  # of each row; -1 for rows not in use
        rows = range(len(prompts)) if rows is None else rows
        self._prompt_of[np.asarray(rows, dtype=np.int64)] = np.arange(len(prompts))
        self._begun: tuple[int, np.ndarray] | None = None  # an epoch, and its rows before the length limit changed
        self._drawn: tuple[int, np.ndarray] | None = None  # the last epoch, and its order
        self._epoch = 0
        self._first_rollout = 0
        self._position = 0
        self._announced_epoch: int | None = None
        self._resumed = False

    @property
    def rollouts_per_epoch(self) -> int:
        """Number of different batches in an epoch."""
        return self._num_batches(len(self.prompts))

    def __len__(self) -> int:
        return self.rollouts_per_epoch * self._settings["updates_per_rollout"]

    @property
    def sampler(self) -> TrainPromptLoader:
        """The object whose `set_epoch` Lightning calls."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch; does nothing if it has already begun.

        The first call sets the number. After a resume only a *change* of the number counts: Lightning 2.6 skips a
        number if, under `max_steps`, it resumes from a checkpoint at the end of an epoch.
        """
        if self._announced_epoch is None:
            self._epoch, self._position, self._first_rollout = epoch, 0, epoch * self.rollouts_per_epoch
        elif epoch != self._announced_epoch:
            self._begin_next_epoch()
        self._announced_epoch = epoch

    def __iter__(self) -> Iterator[PromptBatch]:
        """Iterate over one epoch; without `set_epoch`, each iteration is the next one.

        The first iteration after `load_state_dict` continues from that state. (Nothing is read before the first batch
        is requested, because Lightning creates iterators before it sets the epoch.)
        """
        if not self._resumed or self._position >= len(self):
            self._begin_next_epoch()
        self._resumed = False
        updates = self._settings["updates_per_rollout"]
        while self._position < len(self):
            batch_index, update_index = divmod(self._position, updates)
            self._position += 1
            rollout_number = self._first_rollout + batch_index
            yield PromptBatch(
                self._prompts_of_rank(self._rows_of(rollout_number)),
                rollout_number=rollout_number,
                update_index=update_index,
                num_updates=updates,
            )

    def peek(self, rollout_number: int) -> list[Prompt]:
        """Return this rank's prompts of a past or future rollout, without changing the position."""
        return self._prompts_of_rank(self._rows_of(rollout_number))

    def draw_extra(self, count: int, *, rollout_number: int, attempt: int = 0) -> list[Prompt]:
        """Draw additional prompts for a rollout, to replace groups without signal (dynamic sampling).

        The draw depends only on seed, rollout, attempt and count, so a resumed run draws the same prompts, as does any
        number of ranks. No prompt is drawn twice. If there is enough data, draws are disjoint from the rollout's
        regular batch, and across attempts (if none exceeds a batch). Otherwise the regular batch is used last.

        Draws from all prompts, including those outside an epoch's full batches and Lightning's `overfit_batches`.

        Args:
            count: Prompts for all ranks.
            rollout_number: The `PromptBatch.rollout_number` of the regular prompts.
            attempt: Number of the draw for this rollout, from 0.

        Returns:
            This rank's share: every `num_replicas`-th of `count` prompts in random order, or of all if there are fewer.
        """
        # The last number keeps this stream apart from those of the epochs' orders: seeds are padded with zeros.
        rng = np.random.default_rng((self._settings["seed"], rollout_number, 1))
        order = self._eligible(rng.permutation(len(self._prompt_of)), rollout_number)
        regular = np.isin(order, self._rows_of(rollout_number))
        step = attempt * self._settings["batch_size"]
        drawn = np.concatenate([np.roll(order[~regular], -step), np.roll(order[regular], -step)])
        return self._prompts_of_rank(drawn[:count])

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's position, the rows that this epoch has begun, and the settings they depend on."""
        begun = -(-self._position // self._settings["updates_per_rollout"]) * self._settings["batch_size"]
        position = {
            "epoch": self._epoch,
            "position": self._position,
            "announced_epoch": self._announced_epoch,
            "first_rollout": self._first_rollout,
            "begun": self._epoch_rows(self._epoch)[:begun].tolist(),
        }
        return position | self._settings

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state, on any number of ranks.

        The rows in use may have changed. Batches that the epoch has begun stay the same and are not repeated. The epoch
        has its new length, and is over if it already had that many batches.

        Raises:
            ValueError: If the settings differ, so the position would refer to other prompts; or if the epoch is over
                while its current batch still has updates left.
        """
        differences = [
            f"{name} was {state_dict.get(name)!r} and is {value!r}"
            for name, value in self._settings.items()
            if state_dict.get(name) != value
        ]
        if differences:
            raise ValueError(
                f"The checkpoint's position in the data is meaningless here, because {'; '.join(differences)}; restore "
                "these settings, or start a new run from the checkpoint's weights."
            )
        epoch, position = state_dict["epoch"], state_dict["position"]
        batches = -(-position // self._settings["updates_per_rollout"])
        first = state_dict["first_rollout"]
        self._announced_epoch, self._resumed = state_dict["announced_epoch"], True
        if batches <= self.rollouts_per_epoch:
            self._epoch, self._position, self._first_rollout = epoch, position, first
            self._begun = epoch, np.asarray(state_dict["begun"], dtype=np.int64)
            return
        if position % self._settings["updates_per_rollout"]:
            raise ValueError(
                f"The checkpoint is in the middle of the updates of batch {batches} of an epoch that has "
                f"{self.rollouts_per_epoch} batches with these prompts ({len(self.prompts)} of {len(self._prompt_of)} "
                "rows); keep max_prompt_length and overlong_prompts, or resume where a batch of rollouts ends."
            )
        self._epoch, self._position, self._first_rollout = epoch + 1, 0, first + batches

    def _begin_next_epoch(self) -> None:
        """Move to the next epoch, unless nothing of the current one was read."""
        if self._position > 0:
            self._first_rollout += self.rollouts_per_epoch
            self._epoch, self._position, self._resumed = self._epoch + 1, 0, False

    def _num_batches(self, prompts: int) -> int:
        full, rest = divmod(prompts, self._settings["batch_size"])
        return full + (rest > 0 and not self._settings["drop_last"])

    def _rows_of(self, rollout_number: int) -> np.ndarray:
        """The rows in the batch of a rollout."""
        epochs, batch_index = divmod(rollout_number - self._first_rollout, self.rollouts_per_epoch)
        return self._batch(self._epoch_rows(self._epoch + epochs), batch_index)

    def _all_rows(self, epoch: int) -> np.ndarray:
        """The order of an epoch including dropped rows."""
        if not self._settings["shuffle"]:
            return np.arange(len(self._prompt_of))
        if self._drawn is None or self._drawn[0] != epoch:
            order = np.random.default_rng((self._settings["seed"], epoch)).permutation(len(self._prompt_of))
            self._drawn = epoch, order
        return self._drawn[1]

    def _epoch_rows(self, epoch: int) -> np.ndarray:
        """The order of an epoch: rows in use, and rows of batches begun before the length limit changed."""
        order = self._all_rows(epoch)
        order = order[self._prompt_of[order] >= 0]
        if self._begun is None or self._begun[0] != epoch:
            return order
        return np.concatenate([self._begun[1], order[~np.isin(order, self._begun[1])]])

    def _eligible(self, rows: np.ndarray, rollout_number: int) -> np.ndarray:
        """Keep only rows that a rollout may use."""
        return rows[self._prompt_of[rows] >= 0]

    def _batch(self, order: np.ndarray, batch_index: int) -> np.ndarray:
        size = self._settings["batch_size"]
        return order[batch_index * size : (batch_index + 1) * size]

    def _prompts_of_rank(self, rows: np.ndarray) -> list[Prompt]:
        """This rank's prompts of a batch."""
        indices = self._prompt_of[rows[self.rank :: self.num_replicas]]
        return [self.prompts[index] for index in indices[indices >= 0].tolist()]  # -1 is not in use


class EvalPromptLoader:
    """Yields every prompt once, in order, in batches of about equal size.

    Without repetition or padding: each rank takes every `num_replicas`-th prompt of a batch. All ranks have the same
    number of batches, as sharded models need; with fewer prompts than ranks, some ranks' batches are empty.

    Args:
        prompts: All prompts, the same on every rank.
        batch_size: Maximum number of prompts in a batch, over all ranks.
        num_replicas: Number of ranks that share the data.
        rank: This rank.
    """

    def __init__(self, prompts: Sequence[Prompt], *, batch_size: int, num_replicas: int = 1, rank: int = 0) -> None:
        self.prompts = prompts
        self.batch_size = batch_size
        self.num_replicas = num_replicas
        self.rank = rank

    def __len__(self) -> int:
        return -(-len(self.prompts) // self.batch_size)

    def __iter__(self) -> Iterator[PromptBatch]:
        for number, indices in enumerate(np.array_split(np.arange(len(self.prompts)), len(self))):
            share = indices[self.rank :: self.num_replicas]
            yield PromptBatch([self.prompts[index] for index in share], rollout_number=number)


class LevelSchedule:
    """The level of each rollout: 0 at first, then as set by `change_to`.

    A change takes effect at the first rollout whose level has not been queried yet, so rollouts sampled ahead keep
    theirs. The state contains all changes, so a resumed run has the same levels.
    """

    def __init__(self) -> None:
        self._changes = [(0, 0)]  # first rollout, level
        self._last_queried = -1

    @property
    def level(self) -> int:
        """The level after the last change."""
        return self._changes[-1][1]

    def at(self, rollout_number: int) -> tuple[int, int]:
        """The level of a rollout, and how many rollouts before it had the same level."""
        self._last_queried = max(self._last_queried, rollout_number)
        stretches = [(first, level) for first, level in self._changes if first <= rollout_number]
        ends = [first for first, _ in stretches[1:]] + [rollout_number]
        current = stretches[-1][1]
        before = sum(end - first for (first, level), end in zip(stretches, ends, strict=True) if level == current)
        return current, before

    def change_to(self, level: int) -> int:
        """Change the level; return the number of the first rollout that has the new one."""
        first = self._last_queried + 1
        self._changes.append((first, level))
        return first

    def state_dict(self) -> dict[str, Any]:
        """Return plain containers."""
        return {"changes": [list(change) for change in self._changes], "known": self._last_queried}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._changes = [(int(first), int(level)) for first, level in state["changes"]]
        self._last_queried = state["known"]


class LevelPromptLoader(TrainPromptLoader):
    """Yields batches of prompts of a single level, set by a schedule.

    Each pass over the prompts of a level has a new order; prompts that do not fill a batch are not in that pass.
    An epoch is as long as without levels. A resumed run must have the same rows in use.

    Args:
        prompts: All prompts in use, of every level, the same on every rank.
        schedule: The level of each rollout.
        column: Column of the level: integers from 0.
        **options: Options of `TrainPromptLoader`.

    Raises:
        ValueError: If a prompt has no level, a level is missing or has too few prompts for a batch, or `drop_last` is
            False.
    """

    def __init__(self, prompts: Sequence[Prompt], *, schedule: LevelSchedule, column: str, **options: Any) -> None:
        super().__init__(prompts, **options)
        self._schedule = schedule
        self._settings |= {"level_column": column, "num_prompts_in_use": len(prompts)}
        levels: list[Any] = [prompt.columns.get(column) for prompt in prompts]
        for prompt, level in zip(prompts, levels, strict=True):
            if isinstance(level, bool) or not isinstance(level, int) or level < 0:
                raise ValueError(f"{prompt.where}: column {column!r} is {level!r}; write the level, an integer from 0.")
        self._counts = np.bincount(levels)  # prompts of each level
        self._levels = np.full(len(self._prompt_of), -1)  # of each row; -1 for rows not in use
        self._levels[self._prompt_of >= 0] = levels
        size = self._settings["batch_size"]
        if not self._settings["drop_last"]:
            raise ValueError("drop_last is False; a curriculum trains on full batches of one level, so set it to True.")
        if small := {level: int(count) for level, count in enumerate(self._counts) if count < size}:
            have = f"The training data has {small} prompts of these levels, fewer than batch_size={size}"
            raise ValueError(f"{have}; add rows, or lower batch_size.")

    @property
    def num_levels(self) -> int:
        """Number of levels in the data."""
        return len(self._counts)

    def _rows_of(self, rollout_number: int) -> np.ndarray:
        level, number = self._schedule.at(rollout_number)
        pass_number, batch_index = divmod(number, self._num_batches(int(self._counts[level])))
        return self._batch(self._eligible(self._all_rows(pass_number), rollout_number), batch_index)

    def _eligible(self, rows: np.ndarray, rollout_number: int) -> np.ndarray:
        return rows[self._levels[rows] == self._schedule.at(rollout_number)[0]]
