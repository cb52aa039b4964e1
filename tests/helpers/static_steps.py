"""What a decoding step may do: an attention without host numbers, a watch on operators, a stand-in for CUDA graphs."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def dense_runs(q_NKD, keys_TKD, values_TKD, runs, scale):
    """`attend_runs` with shapes that do not depend on the lengths: what CUDA's kernel computes, in plain PyTorch."""
    per_row, columns = len(q_NKD) // runs.rows[-1], torch.arange(runs.max_k)
    cu_q, cu_k = runs.cu_q(per_row), runs.cu_k
    place = (cu_k[:-1, None] + columns).clamp(max=len(keys_TKD) - 1)
    run = torch.searchsorted(cu_q, torch.arange(len(q_NKD), dtype=cu_q.dtype), right=True) - 1
    keys, values = keys_TKD[place].index_select(0, run), values_TKD[place].index_select(0, run)  # [N, max_k, K, D]
    scores = torch.einsum("nkd,nmkd->nkm", q_NKD, keys) * scale
    hidden = columns >= runs.used_k.index_select(0, run)[:, None, None]
    scores = scores.masked_fill(hidden, -torch.inf)
    return torch.einsum("nkm,nmkd->nkd", scores.softmax(-1), values), scores.logsumexp(-1).t()


ASKING = {
    *("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "is_nonzero", "equal", "isin"),
    "repeat_interleave.Tensor",
}
"""Operators whose result, or its shape, the host has to know."""


def asks(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether an operator asks the host, which a capture refuses."""
    name = str(func).removeprefix("aten.")
    if name.startswith("index.Tensor") and any(getattr(index, "dtype", None) == torch.bool for index in args[1]):
        return True
    return any(name == asking or name.startswith(f"{asking}.") for asking in ASKING)


class Watch(TorchDispatchMode):
    """Records every operator with shapes, strides and numbers, and refuses those that ask the host."""

    def __init__(self):
        super().__init__()
        self.trace = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func).removeprefix("aten.")
        assert not asks(func, args), name
        out = func(*args, **(kwargs or {}))
        entry = [
            (tuple(value.shape), value.stride()) if isinstance(value, torch.Tensor) else repr(value)
            for value in tree_leaves((args, kwargs or {}, out))
        ]
        self.trace.append((name, entry))
        return out


class Tape(TorchDispatchMode):
    """Stands in for `CUDACapture`: records the operators of a step, and runs them again on the very same tensors.

    As in a CUDA graph, Python does not run again: numbers from the host, shapes and addresses stay what they were, and
    capturing changes nothing, since what it wrote is undone.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []
        self.undo: list[Any] = []
        self.rows: list[int] = []  # of each capture
        self.replays = 0

    def warm_up(self, step: Any) -> None:
        step()

    def capture(self, step: Any) -> None:
        self.calls, self.undo = [], []
        try:
            with self:
                step()
        finally:
            for tensor, before in reversed(self.undo):
                tensor.copy_(before)
        self.rows.append(next(len(out) for func, *_, out in self.calls if "embedding" in str(func)))

    def replay(self) -> None:
        self.replays += 1
        for func, args, kwargs, out in self.calls:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if asks(func, args):
            raise RuntimeError("operation not permitted when stream is capturing")
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                tensor = kwargs[argument.name] if argument.name in kwargs else args[place]
                self.undo.append((tensor, tensor.clone()))
        out = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, out))
        return out
