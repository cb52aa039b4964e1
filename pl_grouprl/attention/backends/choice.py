"""The backends by name, and which of them `auto` runs."""

from __future__ import annotations

from torch import Tensor

from pl_grouprl.attention.backends.backend import Backend
from pl_grouprl.attention.backends.cascade import CASCADE, has_fast_kernel
from pl_grouprl.attention.backends.flex import FLEX
from pl_grouprl.attention.backends.prefix_grouper import PREFIX_GROUPER
from pl_grouprl.attention.backends.reference import REFERENCE
from pl_grouprl.attention.backends.rule import AttentionRule
from pl_grouprl.packing import SharedPrefixLayout


def get_backend(name: str, argument: str = "backend") -> Backend:
    """Find a backend by name.

    Raises:
        ValueError: If there is none of that name, with the name of the caller's argument.
    """
    if name not in BACKENDS:
        raise ValueError(f"{argument} is {name!r}; choose one of {', '.join(sorted(BACKENDS))}.")
    return BACKENDS[name]


def choose(query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Backend:
    """What `auto` runs for one layer: the fastest backend that is exact there.

    On CUDA `cascade` where it has a fast kernel, and `flex` for what such kernels lack (float32, soft caps, images seen
    both ways under a window). Elsewhere `cascade`, on plain matrix products where need be, and at last the dense mask.
    """
    order = [CASCADE, REFERENCE]
    if query.is_cuda:
        order = [CASCADE, FLEX] if has_fast_kernel(query, key, value, rule) else [FLEX, CASCADE]
    return next(backend for backend in order if backend.refusal(query, key, value, rule) is None)


def _attend(query: Tensor, key: Tensor, value: Tensor, layout: SharedPrefixLayout, rule: AttentionRule) -> Tensor:
    return choose(query, key, value, rule)(query, key, value, layout, rule)


AUTO = Backend("auto", _attend)
BACKENDS = {backend.name: backend for backend in (AUTO, CASCADE, FLEX, PREFIX_GROUPER, REFERENCE)}
