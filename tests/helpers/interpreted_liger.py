"""Compares liger-kernel's layers of a family with its own in Triton's interpreter: values and gradients, both paths.

TRITON_INTERPRET=1 python tests/helpers/interpreted_liger.py        # all families of the installed transformers
TRITON_INTERPRET=1 python tests/helpers/interpreted_liger.py qwen3  # one
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
import triton.language as tl
from triton.language.extra import libdevice
from triton.runtime import interpreter

sys.path.append(str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

from helpers.tiny_models import gradients, random_groups, worst_gradient_error
from models_table import select
from tiny_config import TOKENS
from tiny_families import CannotBuildError, build

from pl_grouprl.attention import shared_prefix
from pl_grouprl.models.kernels import fuse_if_exact
from pl_grouprl.models.score import score
from pl_grouprl.packing import pack

# Liger casts scalar arguments, which the interpreter leaves as Python's numbers, and calls functions of CUDA's library.
convert = interpreter._implicit_cvt


def with_floats(argument):
    if not isinstance(argument, float):
        return convert(argument)
    return tl.tensor(interpreter.TensorHandle(np.array([argument], np.float32), tl.float32), tl.float32)


interpreter._implicit_cvt = with_floats
libdevice.rsqrt = lambda x: 1 / tl.sqrt(x)
libdevice.tanh = lambda x: 2 * tl.sigmoid(2 * x) - 1

GROUPS = random_groups(0, [(6, [3, 2])], vocabulary=TOKENS)


def run(model, sharing):
    model.zero_grad()
    with shared_prefix(model, "cascade", min_saved_tokens=1):
        logprobs_N = score(model, pack(GROUPS, sharing, min_saved_tokens=1)).logprobs_N
        (logprobs_N * torch.linspace(0.5, 1.5, len(logprobs_N))).sum().backward()
    return logprobs_N.detach(), gradients(model)


def compare(family):
    """What the self-check says of a family, and the errors of log-probabilities and gradients if it accepts."""
    try:
        model, plain = prepare(family)
    except Exception:  # docs/models.md says why
        return "not measured", []
    reason = fuse_if_exact(model)
    if reason is not None:
        return ("not patched" if "has no layers" in reason else f"refused: {reason.partition(' from ')[0]}"), []
    shared, repeated = run(model, "shared"), run(model, "repeated")
    errors = []
    for other in (repeated, plain):
        errors += [(shared[0] - other[0]).abs().max().item(), worst_gradient_error(shared[1], other[1])]
    return "accepted", errors


def prepare(family):
    """A small model, and its results; options that are None by default are filled in only if they must be."""
    try:
        model = build(family).train()
        return model, run(model, "shared")
    except CannotBuildError:
        model = build(family, fill=True).train()
        return model, run(model, "shared")


def main(names):
    """Print a table; fails if an accepted family is not exact, or a named one is not accepted."""
    others, worst = {"not measured": [], "not patched": []}, [0.0] * 4
    print("| family | self-check | shared against repeated: log-probs, gradients | against its own layers |")
    print("|---|---|---|---|")
    for family in select(names or None):
        if family.variant:
            continue
        status, errors = compare(family)
        name = f"`{family.name}`{' *' * family.images}"
        if status in others:
            others[status].append(name)
            continue
        cells = [", ".join(f"{error:.1e}" for error in pair) for pair in (errors[:2], errors[2:])]
        print(f"| {name} | {status} | {cells[0]} | {cells[1]} |", flush=True)
        worst = [max(pair) for pair in zip(worst, errors or worst, strict=True)]
        assert errors or not names
    print("".join(f"\n{status.capitalize()}: {', '.join(found)}." for status, found in others.items()))
    assert not (names and any(others.values()))
    assert max(worst[::2]) < 5e-6
    assert max(worst[1::2]) < 5e-5


if __name__ == "__main__":
    main(sys.argv[1:])
