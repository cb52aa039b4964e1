"""Tolerances for comparing two computations of the same quantity, by dtype, and the measures they apply to.

Every self-check (`attention/layer_check.py` and `checks/`) uses `compare` or `gradient_difference`, and takes its
tolerance from here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pl_grouprl.utilities.modes import widest_dtype


@dataclass(frozen=True)
class Tolerance:
    """The largest differences that rounding explains in one dtype.

    Attributes:
        logprob: Shared against repeated prefix: difference of a log-probability, in nats; the largest in float32 and
            float64, the mean in narrower types. Also used for a critic's values, which are of order 1 too.
        gradient: Shared against repeated prefix: norm of the difference of all gradients over their norm.
        hidden: Shared against repeated prefix: mean difference of hidden states over their mean size.
        moved: The same between a row and itself at shifted positions, where rotary angles are rounded too.
        decoded_logprob: Decoding with a cache against one forward: largest difference of a log-probability, in nats.
        causal: States before a changed token: largest difference over the largest state. Only mixtures of experts have
            rounding errors here; untrained BERT, which is not causal, differs by 5e-3.
        score: A classifier's scores against its head's: difference over the largest possible product. The head runs
            with other shapes and, on a GPU, perhaps in TF32; untrained encoders differ by more than 1e-2.
        sampler_logprob: A separate sampler against the policy: mean difference of log-probabilities, in nats. The same
            for all dtypes, since the sampler has its own; bfloat16 explains a few hundredths.
    """

    logprob: float
    gradient: float
    hidden: float = 1e-4
    moved: float = 1e-3
    decoded_logprob: float = 1e-3
    causal: float = 1e-5
    score: float = 1e-3
    sampler_logprob: float = 0.2


_WIDE = Tolerance(1e-4, 1e-3)

TOLERANCES = {
    torch.float64: _WIDE,  # transformers still computes norms and rotary angles in float32
    torch.float32: _WIDE,
    torch.bfloat16: Tolerance(
        1e-1, 1e-1, hidden=5e-2, moved=5e-2, decoded_logprob=0.5, causal=4 * 2**-7, score=4 * 2**-7
    ),
    torch.float16: Tolerance(
        1e-2, 5e-2, hidden=2e-2, moved=2e-2, decoded_logprob=0.1, causal=4 * 2**-10, score=4 * 2**-10
    ),
}
"""Limits by the dtype that a model computes in; see `computing_dtype`."""


def computing_dtype(model: Any) -> torch.dtype:
    """The dtype that a transformers model computes in: autocast's if it is on, otherwise the weights'.

    If quantized layers compute in other dtypes, the narrowest.
    """
    device_type = model.device.type
    if torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    quantized = (module.compute_dtype or model.dtype for module in model.modules() if hasattr(module, "quant_state"))
    return min((model.dtype, *quantized), key=lambda dtype: dtype.itemsize)


def tolerance_of(dtype: torch.dtype) -> Tolerance:
    """The tolerances of a dtype; the strictest for dtypes outside the table."""
    return TOLERANCES.get(dtype, _WIDE)


@dataclass(frozen=True)
class Difference:
    """Elementwise difference of two tensors. NaN if either has a NaN.

    Attributes:
        largest: Largest absolute difference.
        mean: Mean absolute difference.
        largest_size: Largest absolute value of the expected tensor.
        mean_size: Mean absolute value of the expected tensor.
    """

    largest: float
    mean: float
    largest_size: float
    mean_size: float

    @property
    def relative_mean(self) -> float:
        """Mean difference over mean size."""
        return self.mean / max(self.mean_size, _TINY)

    @property
    def relative_largest(self) -> float:
        """Largest difference over largest size."""
        return self.largest / max(self.largest_size, _TINY)


_TINY = 1e-30


def compare(found: Tensor, expected: Tensor) -> Difference:
    """Measure the difference of two tensors of the same shape, in float32 or wider; 0 if they are empty."""
    if not expected.numel():
        return Difference(0.0, 0.0, 0.0, 0.0)
    wide = torch.promote_types(torch.promote_types(found.dtype, expected.dtype), torch.float32)
    sizes = expected.detach().to(wide).abs()
    apart = (found.detach().to(wide) - expected.detach().to(wide)).abs()
    return Difference(*(value.item() for value in (apart.max(), apart.mean(), sizes.max(), sizes.mean())))


def gradient_difference(found: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> float:
    """Norm of the difference of two lists of gradients over the norm of the expected ones; None counts as zero."""
    squared_error, squared_norm = 0.0, 0.0
    for one, other in zip(expected, found, strict=True):
        if one is None and other is None:
            continue
        a, b = (torch.zeros(()) if grad is None else grad.to(widest_dtype(grad.device)) for grad in (one, other))
        squared_error += (a - b).square().sum().item()
        squared_norm += a.square().sum().item()
    return (squared_error / squared_norm) ** 0.5 if squared_norm else squared_error**0.5
