"""In which order an epoch takes its rows, and what becomes of that order when other rows are left out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class EpochOrder:
    """The order of the training rows in each epoch.

    An epoch's order is drawn for all rows, dropped ones included, from (seed, epoch) alone; then the dropped ones are
    left out. So an order keeps its meaning when another length limit drops others. If that happens within an epoch, the
    rows whose batches had begun stay in front, as they came, and those that were not reached follow.

    Args:
        rows: The row of each prompt that is used, counted from 0 and rising.
        num_rows: How many rows there are, dropped ones included.
        seed: Determines the orders, together with the epoch.
        shuffle: False takes the rows as they are, in each epoch.
    """

    def __init__(self, rows: Sequence[int], num_rows: int, *, seed: int, shuffle: bool) -> None:
        self.num_rows = num_rows
        self.seed = seed
        self.shuffle = shuffle
        self._prompt_of = np.full(num_rows, -1)
        self._prompt_of[np.asarray(rows, dtype=np.int64)] = np.arange(len(rows))
        self._begun: tuple[int, np.ndarray] | None = None

    def all_rows(self, epoch: int) -> np.ndarray:
        """The order of an epoch with the dropped rows, shape [num_rows]."""
        if not self.shuffle:
            return np.arange(self.num_rows)
        return np.random.default_rng((self.seed, epoch)).permutation(self.num_rows)

    def rows(self, epoch: int) -> np.ndarray:
        """The order of an epoch: rows that are used, and those that had begun when others were used."""
        order = self.kept(self.all_rows(epoch))
        if self._begun is None or self._begun[0] != epoch:
            return order
        begun = self._begun[1]
        return np.concatenate([begun, order[~np.isin(order, begun)]])

    def kept(self, rows: np.ndarray) -> np.ndarray:
        """Those of some rows that are used."""
        return rows[self._prompt_of[rows] >= 0]

    def prompts(self, rows: np.ndarray) -> list[int]:
        """The index of the prompt of each row; rows that are not used have none."""
        return self._prompt_of[self.kept(rows)].tolist()

    def begin_with(self, epoch: int, rows: Sequence[int]) -> None:
        """Put rows in front of an epoch's order."""
        self._begun = (epoch, np.asarray(rows, dtype=np.int64))
