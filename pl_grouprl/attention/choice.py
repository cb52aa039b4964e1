"""The backends by name, and which of them `auto` runs."""

from __future__ import annotations

from torch import Tensor

from pl_grouprl.attention.backend import Backend
from pl_grouprl.attention.cascade import CASCADE, has_fast_kernel
from pl_grouprl.attention.flex import FLEX
from pl_grouprl.attention.prefix_grouper import PREFIX_GROUPER
from pl_grouprl.attention.reference import REFERENCE
from pl_grouprl.attention.rule import AttentionRule
from pl_grouprl.packing import SharedPrefixLayout


def get_backend(name: str) -> Backend:
    """Find a backend by name.

    Raises:
        ValueError: If there is none of that name.
    """
    if name not in BACKENDS:
        raise ValueError(f"backend is {name!r}; choose one of {', '.join(sorted(BACKENDS))}.")
    return BACKENDS[name]


def choose(query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Backend:
    """What `auto` runs for one layer: the fastest backend that is exact there.

    `cascade` on fast kernels first; on CUDA `flex` for what those kernels lack (float32, soft caps, images seen both
    ways under a window); then `cascade` on its plain kernel; at last the dense mask.
    """
    order = [CASCADE, FLEX, REFERENCE]
    if query.is_cuda and not has_fast_kernel(query, key, value, rule):
        order = [FLEX, CASCADE, REFERENCE]
    return next(backend for backend in order if backend.refusal(query, key, value, rule) is None)


def _attend(query: Tensor, key: Tensor, value: Tensor, layout: SharedPrefixLayout, rule: AttentionRule) -> Tensor:
    return choose(query, key, value, rule)(query, key, value, layout, rule)


AUTO = Backend("auto", _attend)
BACKENDS = {backend.name: backend for backend in (AUTO, CASCADE, FLEX, PREFIX_GROUPER, REFERENCE)}
