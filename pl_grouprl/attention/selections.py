"""Lets a check on a few tokens exercise layers that select tokens by score, such as an indexer."""

from __future__ import annotations

import inspect
import sys
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

MAX_SELECTED = 3
"""Tokens that a layer selects in the check, fewer than any of its sequences has."""


class SmallSelections(TorchFunctionMode):
    """Limits `topk` to a few in functions that take the attention mask; few tokens would all be selected.

    Args:
        most: Tokens that a layer selects; None leaves the number as it is, and only notes which functions select.
    """

    def __init__(self, most: int | None = MAX_SELECTED) -> None:
        super().__init__()
        self._most, self._tried = most, set[CodeType]()

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs, caller = kwargs or {}, sys._getframe(1).f_code
        if func in (torch.topk, Tensor.topk) and _selects(caller):
            self._tried.add(caller)
            if self._most is not None and len(args) > 1:
                args = (args[0], min(args[1], self._most), *args[2:])
            elif self._most is not None:
                kwargs = kwargs | {"k": min(kwargs["k"], self._most)}
        return func(*args, **kwargs)

    def untried(self, decoder: nn.Module) -> list[str]:
        """Names of the decoder's methods that select tokens and have not run yet."""
        return sorted(name for code, name in _selecting_methods(decoder).items() if code not in self._tried)


def selects_tokens(decoder: nn.Module) -> bool:
    """Whether a module of the decoder selects tokens by the attention mask, as an indexer does."""
    return any(code.co_name == "forward" for code in _selecting_methods(decoder))


def _selecting_methods(decoder: nn.Module) -> dict[CodeType, str]:
    kinds = {kind for module in decoder.modules() if module is not decoder for kind in type(module).__mro__}
    methods = [(kind, inspect.unwrap(method)) for kind in kinds for method in vars(kind).values() if callable(method)]
    codes = [(getattr(method, "__code__", None), kind) for kind, method in methods]
    return {code: f"{kind.__name__}.{code.co_name}" for code, kind in codes if code is not None and _selects(code)}


def _selects(code: CodeType) -> bool:
    """Whether a function takes the attention mask and calls `topk`."""
    return "topk" in code.co_names and "attention_mask" in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
