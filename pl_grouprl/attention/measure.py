"""Times one decoder call with shared and with repeated prefixes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from pl_grouprl.attention.patch import sharing_paused
from pl_grouprl.packing import repeat_rows

if TYPE_CHECKING:
    from pl_grouprl.attention.patch import CallReport, SharedPrefix


def measure_speedup(patch: SharedPrefix, report: CallReport, *, repeats: int = 2) -> float:
    """Seconds of the repeated run over seconds of the shared one, decoder forward and backward.

    Leaves no gradients and does not change the random state. Runs alternate and the fastest of each kind counts, so the
    first serve as warm-up.

    Args:
        patch: The active context.
        report: A call of its decoder that shared a prefix.
        repeats: Runs of each kind.
    """
    layout = report.layout
    assert layout is not None
    assert report.position_ids is not None
    shared = {"input_ids": report.input_ids, "position_ids": report.position_ids, "prefix_layout": layout}
    repeated = repeat_rows(layout, report.input_ids)
    seconds: dict[str, list[float]] = {"shared": [], "repeated": []}
    devices = [report.input_ids.device] if report.input_ids.is_cuda else []
    with torch.random.fork_rng(devices=devices):
        for _ in range(repeats):
            for name, inputs in (("repeated", repeated), ("shared", shared)):
                seconds[name].append(_time_call(patch, inputs))
    return min(seconds["repeated"]) / min(seconds["shared"])


def _time_call(patch: SharedPrefix, inputs: dict[str, Any]) -> float:
    weights = [weight for weight in patch.decoder.parameters() if weight.requires_grad]
    listeners, patch.listeners = patch.listeners, []
    try:
        start = _now(patch)
        with sharing_paused(patch.model), torch.set_grad_enabled(bool(weights)):
            hidden = patch.decoder(**inputs, use_cache=False).last_hidden_state
            if weights:
                torch.autograd.grad(hidden.float().sum(), weights, allow_unused=True)
        return _now(patch) - start
    finally:
        patch.listeners = listeners


def _now(patch: SharedPrefix) -> float:
    if patch.decoder.device.type == "cuda":
        torch.cuda.synchronize(patch.decoder.device)
    return time.perf_counter()
