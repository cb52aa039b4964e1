"""Activation checkpointing that saves what attention computes, and recomputes the rest of a layer.

The backward pass of attention reads its output and the log-sum-exp of its scores, which take b + 4 / D bytes per number
of a query (b bytes of the dtype, heads of size D) and the time of a forward pass to recompute. `save_attention` keeps
them, by PyTorch's selective checkpointing: operators named in `SAVED` run once. Whatever else computes attention runs
again, which changes nothing but time: FlexAttention, whose operators PyTorch compiles into one function; plain matrix
products outside the cascade (`eager`, PyTorch's math kernel, backend `reference`); layers with a state.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar, Token
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from pl_grouprl.utilities import internals
from pl_grouprl.utilities.device_defaults import Checkpointing

SAVED = frozenset(
    {
        "pl_grouprl::saved_attention",  # the cascade
        "pl_grouprl::packed_attention",  # any backend in compiled layers
        "aten::_scaled_dot_product_flash_attention",  # also FlashAttention-3 and 4, which PyTorch puts in its place
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_fused_attention_overrideable",
        "aten::_flash_attention_forward",  # the same for sequences of different lengths
        "aten::_efficient_attention_forward",
        "aten::_cudnn_attention_forward",
        "torch_attn::_varlen_attn",
        "flash_attn::_flash_attn_forward",  # the package
        "flash_attn::_flash_attn_varlen_forward",
        "flash_attn_3::_flash_attn_forward",
    }
)
"""Operators that return attention's output and log-sum-exp, and what their backward pass needs besides its inputs."""


def checkpointing_of(model: Any) -> Checkpointing:
    """How a model was set to recompute activations, in the words of the policy's `gradient_checkpointing`."""
    functions = [internals.checkpointing_options(module).get("context_fn") for module in model.modules()]
    return "attention" if save_attention in functions else getattr(model, "is_gradient_checkpointing", False)


def save_attention() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """`context_fn` of `torch.utils.checkpoint.checkpoint`: contexts of a layer's forward pass and its recomputation.

    Example:
        >>> options = {"use_reentrant": False, "context_fn": save_attention}
        >>> model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)  # doctest: +SKIP
    """
    forward, recomputation = create_selective_checkpoint_contexts(_policy)
    if torch.compiler.is_compiling():  # which takes PyTorch's own contexts only; compiled attention is one operator
        return forward, recomputation
    return _Saving(forward), _Saving(recomputation)


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if _is_saved(operator) else CheckpointPolicy.PREFER_RECOMPUTE


@cache
def _is_saved(operator: Any) -> bool:
    return operator.name() in SAVED


_SAVES = ContextVar("saves", default=False)  # per thread: the backward pass has one for each GPU


class _Saving:
    """A context of selective checkpointing, within which `as_one_operator` does what it says."""

    def __init__(self, selective: AbstractContextManager[Any]) -> None:
        self._selective = selective
        self._token: Token[bool] | None = None

    def __enter__(self) -> None:
        self._selective.__enter__()
        self._token = _SAVES.set(True)

    def __exit__(self, *error: Any) -> bool | None:
        assert self._token is not None
        _SAVES.reset(self._token)
        return self._selective.__exit__(*error)


_COMPUTE: ContextVar[Callable[[], tuple[Tensor, Tensor]]] = ContextVar("compute")


def as_one_operator(compute: Callable[[], tuple[Tensor, Tensor]], query: Tensor) -> tuple[Tensor, Tensor]:
    """Compute an output and its log-sum-exp; under `save_attention` once, inside an operator that is saved as a whole.

    Otherwise the parts that are merged into an output would be saved, and those without a fused kernel recomputed.

    Args:
        compute: The computation; returns new tensors and records no gradient.
        query: Any tensor that it reads, by which PyTorch finds the operator.
    """
    if not _SAVES.get():
        return compute()
    token = _COMPUTE.set(compute)
    try:
        return torch.ops.pl_grouprl.saved_attention(query)
    finally:
        _COMPUTE.reset(token)


def _saved_attention(query: Tensor) -> tuple[Tensor, Tensor]:
    return _COMPUTE.get()()


_LIBRARY = torch.library.Library("pl_grouprl", "FRAGMENT")
_LIBRARY.define("saved_attention(Tensor query) -> (Tensor, Tensor)")
_LIBRARY.impl("saved_attention", _saved_attention, "CompositeExplicitAutograd")
