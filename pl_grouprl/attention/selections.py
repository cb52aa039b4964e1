"""Makes layers that select tokens by score, such as an indexer, do so within the few tokens of a check."""

from __future__ import annotations

import inspect
import sys
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

MAX_SELECTED = 3
"""Tokens that a layer selects, fewer than a sequence of the check has."""


class SmallSelections(TorchFunctionMode):
    """Limits how many tokens a function that takes the attention mask selects, so that few tokens show a difference."""

    def __init__(self) -> None:
        super().__init__()
        self._tried: set[CodeType] = set()

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs, caller = kwargs or {}, sys._getframe(1).f_code
        if func in (torch.topk, Tensor.topk) and _selects(caller):
            self._tried.add(caller)
            if len(args) > 1:
                args = (args[0], min(args[1], MAX_SELECTED), *args[2:])
            else:
                kwargs = kwargs | {"k": min(kwargs["k"], MAX_SELECTED)}
        return func(*args, **kwargs)

    def untried(self, decoder: nn.Module) -> list[str]:
        """Names of the methods of the decoder's modules that select tokens and have not done so."""
        return sorted(name for code, name in _selecting_methods(decoder).items() if code not in self._tried)


def selects_tokens(decoder: nn.Module) -> bool:
    """Whether a module of the decoder selects tokens by a mask that it is given, as an indexer does."""
    return any(code.co_name == "forward" for code in _selecting_methods(decoder))


def _selecting_methods(decoder: nn.Module) -> dict[CodeType, str]:
    kinds = {kind for module in decoder.modules() if module is not decoder for kind in type(module).__mro__}
    methods = [(kind, inspect.unwrap(method)) for kind in kinds for method in vars(kind).values() if callable(method)]
    codes = [(getattr(method, "__code__", None), kind) for kind, method in methods]
    return {code: f"{kind.__name__}.{code.co_name}" for code, kind in codes if code is not None and _selects(code)}


def _selects(code: CodeType) -> bool:
    """Whether a function takes the attention mask and the highest scores."""
    return "topk" in code.co_names and "attention_mask" in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
