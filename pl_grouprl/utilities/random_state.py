"""The random state of a process, as plain values for a checkpoint."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def random_state(device: torch.device) -> dict[str, Any]:
    """State of the global generators of Python, NumPy and torch, and of the GPU if the process has one."""
    version, words, gauss = random.getstate()
    name, key, *rest = np.random.get_state(legacy=True)
    state = {
        "python": [version, list(words), gauss],
        "numpy": [name, np.asarray(key).tolist(), *rest],
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Restore a state; the GPU's only if both the process and the state have one."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, key, *rest = state["numpy"]
    np.random.set_state((name, np.asarray(key, dtype=np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def seed_torch(seed: int, device: torch.device) -> None:
    """Seed torch's global generators of the CPU and of the process's device.

    `torch.manual_seed` checks for every kind of device, which takes a millisecond or two.
    """
    if device.type not in ("cpu", "cuda"):
        torch.manual_seed(seed)
        return
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
