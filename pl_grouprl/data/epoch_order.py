"""The order of rows in an epoch, which stays stable if other rows are dropped."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class EpochOrder:
    """The order of the training rows in each epoch.

    The order is drawn for all rows from (seed, epoch) alone, and dropped rows are left out afterwards, so the others
    keep their order under another length limit. If the limit changes mid-epoch, rows of batches already begun stay in
    front, in their order, and the others follow.

    Args:
        rows: The row of each prompt in use, counted from 0, ascending.
        num_rows: Number of rows, including dropped ones.
        seed: Determines the orders, together with the epoch.
        shuffle: If False, every epoch keeps the original order.
    """

    def __init__(self, rows: Sequence[int], num_rows: int, *, seed: int, shuffle: bool) -> None:
        self.num_rows = num_rows
        self.seed = seed
        self.shuffle = shuffle
        self._prompt_of = np.full(num_rows, -1)
        self._prompt_of[np.asarray(rows, dtype=np.int64)] = np.arange(len(rows))
        self._begun: tuple[int, np.ndarray] | None = None
        self._drawn: tuple[int, np.ndarray] | None = None

    def all_rows(self, epoch: int) -> np.ndarray:
        """The order of an epoch including dropped rows, shape [num_rows]."""
        if not self.shuffle:
            return np.arange(self.num_rows)
        if self._drawn is None or self._drawn[0] != epoch:
            self._drawn = epoch, np.random.default_rng((self.seed, epoch)).permutation(self.num_rows)
        return self._drawn[1]

    def rows(self, epoch: int) -> np.ndarray:
        """The order of an epoch: rows in use, and those of batches begun before the length limit changed."""
        order = self.kept(self.all_rows(epoch))
        if self._begun is None or self._begun[0] != epoch:
            return order
        begun = self._begun[1]
        return np.concatenate([begun, order[~np.isin(order, begun)]])

    def kept(self, rows: np.ndarray) -> np.ndarray:
        """Keep only rows that are in use."""
        return rows[self._prompt_of[rows] >= 0]

    def prompts(self, rows: np.ndarray) -> list[int]:
        """The prompt index of each row; skips rows that are not in use."""
        return self._prompt_of[self.kept(rows)].tolist()

    def begin_with(self, epoch: int, rows: Sequence[int]) -> None:
        """Move the rows that an epoch has already begun to the front of its order."""
        self._begun = (epoch, np.asarray(rows, dtype=np.int64))
