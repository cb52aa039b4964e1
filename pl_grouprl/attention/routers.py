"""Determines whether transformers' load-balancing loss applies to the router logits of a mixture of experts.

Families differ: some choose experts by sigmoid scores and a correction bias, which balances them without a loss; some
do not record the logits of all tokens. The model itself is inspected, not a list of names.
"""

from __future__ import annotations

import inspect
import sys

from torch import nn

from pl_grouprl.utilities import internals

_STANDARD = ["gate_logits", "num_experts", "top_k", "attention_mask"]


def masks_balancing_loss(decoder: nn.Module) -> bool:
    """Whether the family's load-balancing loss takes router logits [tokens, experts] and ignores padding.

    If so, router logits at padding may have any value.
    """
    return _records_router_logits(decoder) and _balancing_loss_arguments(decoder) == _STANDARD


def why_not_balanced(decoder: nn.Module) -> str | None:
    """Why the standard load-balancing loss does not apply to a decoder, or None if it does."""
    if not _records_router_logits(decoder):
        return "its decoder has no router logits to record"
    arguments = _balancing_loss_arguments(decoder)
    if arguments is None:
        return "transformers has no load-balancing loss for it"
    if arguments != _STANDARD:
        return "transformers computes another load-balancing loss for it"
    if any(name.endswith("correction_bias") for name, _ in (*decoder.named_parameters(), *decoder.named_buffers())):
        return "its routers choose by a correction bias, so the logits do not say which experts are used"
    return None


def _records_router_logits(decoder: nn.Module) -> bool:
    classes = tuple(getattr(recorder, "target_class", recorder) for recorder in internals.router_recorders(decoder))
    return any(isinstance(module, classes) for module in decoder.modules())


def _balancing_loss_arguments(decoder: nn.Module) -> list[str] | None:
    """Argument names of the load-balancing loss in the file defining the decoder."""
    # A wrapped decoder's class is created on the fly from the class in the family's file.
    for kind in type(decoder).__mro__:
        loss = getattr(sys.modules.get(kind.__module__), "load_balancing_loss_func", None)
        if loss is not None:
            return list(inspect.signature(loss).parameters)
    return None
