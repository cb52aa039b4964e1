"""A stand-in for liger-kernel: what it replaces in a Qwen3 model and where, and how many kernels it launches.

The mathematics is eager. As with liger, classes and functions in the family's file are replaced, too, and rotary
positions only there.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from types import ModuleType

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

LAUNCHED = Counter()
"""Kernels that the stand-ins of one kernel each launched, by name."""

MOVED = Counter()
"""Bytes that these read and wrote."""


def install(monkeypatch, *, wrong: float = 0.0) -> None:
    """Let `liger_kernel` be installed, and its kernels run on a CPU.

    Args:
        monkeypatch: Of the test.
        wrong: Is added to the weights of norms.
    """
    from pl_grouprl.utilities import optional

    LAUNCHED.clear()
    patches = ModuleType("liger_kernel.transformers.monkey_patch")
    patches.__dict__.update(Launch=Launch, rms_norm=rms_norm, rotate=rotate, gate=gate, WRONG=wrong)
    exec(PATCHES, patches.__dict__)
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, patches.__name__, patches)
    monkeypatch.setattr(optional, "LIGER_AVAILABLE", True)
    monkeypatch.setenv("TRITON_INTERPRET", "1")


PATCHES = """
class Norm:
    def forward(self, hidden_states):
        return Launch.apply("rms_norm", rms_norm, hidden_states, self.weight, self.variance_epsilon, WRONG)


class MLP:
    def forward(self, x):
        return self.down_proj(Launch.apply("swiglu", gate, self.gate_proj(x), self.up_proj(x)))


def rotary(q, k, cos, sin, unsqueeze_dim=1):
    q, k = (states.transpose(1, 2).contiguous() for states in (q, k))
    q, k = Launch.apply("rope", rotate, q, k, cos, sin)
    return q.transpose(1, 2), k.transpose(1, 2)


def apply_to_qwen3(rope=True, cross_entropy=False, fused_linear_cross_entropy=True, rms_norm=True, model=None):
    from transformers.models.qwen3 import modeling_qwen3

    assert not cross_entropy and not fused_linear_cross_entropy
    modeling_qwen3.apply_rotary_pos_emb = rotary
    modeling_qwen3.Qwen3RMSNorm, modeling_qwen3.Qwen3MLP = Norm, MLP
    for module in model.modules():
        name = type(module).__name__
        if name.endswith(("RMSNorm", "MLP")):
            replacement = Norm if name.endswith("Norm") else MLP
            vars(module)["forward"] = replacement.forward.__get__(module, type(module))
            vars(module)["_get_name"] = (lambda self: "Fused").__get__(module, type(module))


MODEL_TYPE_TO_APPLY_LIGER_FN = {"qwen3": apply_to_qwen3, "gpt2": lambda model=None: None}
"""


class Launch(torch.autograd.Function):
    """A function of tensors as one kernel, and its backward as another; operators inside are not seen from outside.

    The backward reads the arguments and the output's gradients, and writes gradients.
    """

    @staticmethod
    def forward(ctx, name, function, *args):
        LAUNCHED[name] += 1
        ctx.name, ctx.function, ctx.args = name, function, args
        with _disable_current_modes():
            out = function(*args)
        MOVED[name] += num_bytes(args, out)
        return out

    @staticmethod
    def backward(ctx, *grads):
        LAUNCHED[f"{ctx.name}, backward"] += 1
        with _disable_current_modes(), torch.enable_grad():
            args = [arg.detach().requires_grad_() if isinstance(arg, torch.Tensor) else arg for arg in ctx.args]
            tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
            found = iter(torch.autograd.grad(ctx.function(*args), tensors, grads))
            gradients = [next(found) if isinstance(arg, torch.Tensor) else None for arg in args]
            if ctx.name == "rms_norm":
                parts = gradients[1].float()[None]
        MOVED[f"{ctx.name}, backward"] += num_bytes(ctx.args, grads, gradients)
        if ctx.name == "rms_norm":  # PyTorch adds up partial sums of the weight's gradient, and rounds
            gradients[1] = parts.sum(dim=0).to(args[1].dtype)
        return None, None, *gradients


def num_bytes(*values):
    """Bytes of all tensors among values, however nested; what is expanded counts once."""
    tensors = [one for one in tree_leaves(values) if isinstance(one, torch.Tensor)]
    return sum(
        one.element_size() * math.prod(size for size, stride in zip(one.shape, one.stride(), strict=True) if stride)
        for one in tensors
    )


def rms_norm(states, weight, eps, wrong):
    wide = states.float()
    return (weight + wrong) * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(states.dtype)


def rotate(q, k, cos, sin):
    """Of [B, T, heads, D], by [B or 1, T, D]."""
    half = cos.shape[-1] // 2

    def rotated(states):
        first, second = states[..., :half], states[..., half:]
        return states * cos[:, :, None] + torch.cat([-second, first], dim=-1) * sin[:, :, None]

    return rotated(q), rotated(k)


def gate(gated, up):
    return nn.functional.silu(gated) * up
