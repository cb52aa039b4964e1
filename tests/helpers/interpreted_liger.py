"""Compares liger-kernel's layers of a family with its own in Triton's interpreter: values and gradients, both paths.

TRITON_INTERPRET=1 python tests/helpers/interpreted_liger.py qwen3
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

from helpers.tiny_models import gradients, random_groups, tiny_model, worst_gradient_error

from pl_grouprl.attention import shared_prefix
from pl_grouprl.models.kernels import fuse_if_exact, is_fused
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

SMALL = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 16}
OPTIONS = {"gemma3_text": {"layer_types": ["full_attention"]}}
GROUPS = random_groups(0, [(6, [3, 2])])


def run(model, sharing):
    model.zero_grad()
    with shared_prefix(model, "cascade", min_saved_tokens=1):
        logprobs_N = score(model, pack(GROUPS, sharing, min_saved_tokens=1)).logprobs_N
        (logprobs_N * torch.linspace(0.5, 1.5, len(logprobs_N))).sum().backward()
    return logprobs_N.detach(), gradients(model)


def main(family):
    model = tiny_model(family, **SMALL, **OPTIONS.get(family, {})).train()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:  # so that weights and offsets matter
                weight.add_(0.2 * torch.randn(weight.shape, generator=generator))
    plain = run(model, "shared")
    assert fuse_if_exact(model) is None
    assert is_fused(model)
    shared, repeated = run(model, "shared"), run(model, "repeated")
    for name, other in (("repeated", repeated), ("its own layers", plain)):
        difference = (shared[0] - other[0]).abs().max().item()
        gradient = worst_gradient_error(shared[1], other[1])
        print(f"{family}: fused and shared against {name}: {difference:.1e}, gradients {gradient:.1e}")
        assert difference < 5e-6
        assert gradient < 5e-5


if __name__ == "__main__":
    main(sys.argv[1])
