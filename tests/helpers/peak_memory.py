"""Bytes that tensors hold, counted as operations make them and as they are freed."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Peak(TorchDispatchMode):
    """Most bytes that tensors made in this context hold at one time.

    Args:
        known: Tensors whose storage does not count, nor that of views of them.
    """

    def __init__(self, known: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: dict[int, Any] = {}
        self._before = {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self._look(leaf.untyped_storage())
        return out

    def _look(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known and key not in self._before:
            self._known[key] = weakref.ref(storage, lambda _: self._gone(key, size))
            self.live += size
            self.peak = max(self.peak, self.live)

    def _gone(self, key: int, size: int) -> None:
        del self._known[key]
        self.live -= size
