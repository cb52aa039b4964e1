"""Activation checkpointing that saves what attention computes, and recomputes the rest of a layer.

The backward pass of attention reads its output and the log-sum-exp of its scores. Keeping both takes b + 4 / D bytes
per number of a query (b bytes of the dtype, heads of size D); recomputing them takes another forward pass of attention.
`save_attention` keeps them. On a packed row the cascade does so itself, at no cost. Elsewhere, and in compiled layers,
it is PyTorch's selective checkpointing, in which each operator passes through Python: those named in `SAVED` run once.

Whatever else computes attention runs again, which changes nothing but time: backends `flex`, `prefix_grouper` and
`reference` outside compiled layers, PyTorch's math kernel, `eager`, and layers with a state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar, Token
from typing import Any

from torch import Tensor
from torch.compiler import is_compiling
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from pl_grouprl.attention.call import PACKED_ROW
from pl_grouprl.utilities import internals
from pl_grouprl.utilities.device_defaults import Checkpointing

SAVED = frozenset(
    {
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
    if save_attention in functions:
        return "attention"
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def save_attention() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """`context_fn` of `torch.utils.checkpoint.checkpoint`: contexts of a layer's forward pass and its recomputation.

    Example:
        >>> options = {"use_reentrant": False, "context_fn": save_attention}
        >>> model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)  # doctest: +SKIP
    """
    row = PACKED_ROW.get()
    if row is None or row.dense or is_compiling():
        return create_selective_checkpoint_contexts(_policy)
    results: list[_Result] = []
    return _Saving(results, replays=False), _Saving(results, replays=True)


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator.name() in SAVED else CheckpointPolicy.PREFER_RECOMPUTE


_Result = tuple[tuple[Tensor, int], ...]
"""Tensors, and the number of changes in place that each had seen when it was saved."""


class _Saving:
    """A context in which `once` saves its results, or returns saved ones in the same order."""

    def __init__(self, results: list[_Result], *, replays: bool) -> None:
        self.results, self._replays = results, replays
        self.saved: Iterator[_Result] | None = None
        self._token: Token[_Saving | None] | None = None

    def __enter__(self) -> None:
        self.saved = iter(self.results) if self._replays else None
        self._token = _SAVING.set(self)

    def __exit__(self, *error: Any) -> None:
        assert self._token is not None
        _SAVING.reset(self._token)


_SAVING: ContextVar[_Saving | None] = ContextVar("saving", default=None)
"""Of the layer that runs in this thread; the backward pass has a thread for each GPU."""


def once(compute: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Compute new tensors without a gradient, or return them if the layer that is recomputed has them.

    Raises:
        RuntimeError: If the model changed them in place.
    """
    saving = _SAVING.get()
    if saving is None:
        return compute()
    if saving.saved is None:
        tensors = compute()
        saving.results.append(tuple((tensor.detach(), tensor._version) for tensor in tensors))
        return tensors
    result = next(saving.saved)
    if any(tensor._version != version for tensor, version in result):
        raise RuntimeError("the model changes the output of attention in place; use gradient_checkpointing: true.")
    return tuple(tensor.detach() for tensor, _ in result)
