"""Tiny models whose layers do more than plain causal softmax, and how to switch that off."""

from __future__ import annotations

from typing import Any

import torch
from helpers.tiny_models import tiny_model
from torch import nn

SPAN = 8
"""Tokens of windows and chunks: fewer than most sequences of the tests have."""

_LATENT = {
    **{"kv_lora_rank": 8, "q_lora_rank": 8, "num_key_value_heads": 4, "head_dim": 8},
    **{"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12, "n_routed_experts": 4, "n_group": 1},
    **{"topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1},
}
_DELTA_NET = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    "layer_types": ["linear_attention", "full_attention"],
}


def _set(**options: Any):
    """Change the config: masks are made by it in each call."""

    def off(model: nn.Module) -> None:
        for name, value in options.items():
            assert getattr(model.config, name) != value
            setattr(model.config, name, value)

    return off


def _without_soft_cap(model: nn.Module) -> None:
    for layer in model.model.layers:
        assert layer.self_attn.attn_logit_softcapping == 2.0
        layer.self_attn.attn_logit_softcapping = None


def _zero(*names: str):
    """Set parameters to zero."""

    def off(model: nn.Module) -> None:
        found = [parameter for name, parameter in model.named_parameters() if name.endswith(names)]
        assert found
        for parameter in found:
            parameter.data.zero_()

    return off


def _without_sinks(model: nn.Module) -> None:
    for layer in model.model.layers:
        layer.self_attn.sinks.data.fill_(-1e9)


VARIANTS = {
    "mistral": ("mistral", {"sliding_window": SPAN}, ["window 8"], _set(sliding_window=None)),
    "gemma2, windows": (
        "gemma2",
        {"sliding_window": SPAN, "attn_logit_softcapping": 2.0},
        ["window 8, soft cap 2", "soft cap 2"],
        _set(sliding_window=512),
    ),
    "gemma2, soft cap": ("gemma2", {"sliding_window": 512, "attn_logit_softcapping": 2.0}, [], _without_soft_cap),
    "gemma3": (
        "gemma3_text",
        {"sliding_window": SPAN, "layer_types": ["sliding_attention", "full_attention"]},
        ["full", "window 8"],
        _set(sliding_window=512),
    ),
    "gpt_oss, windows": (
        "gpt_oss",
        {"sliding_window": SPAN, "num_local_experts": 4},
        ["sinks", "window 8, sinks"],
        _set(sliding_window=512),
    ),
    "gpt_oss, sinks": ("gpt_oss", {"sliding_window": SPAN, "num_local_experts": 4}, [], _without_sinks),
    "deepseek_v3": ("deepseek_v3", _LATENT, ["full"], _zero("kv_b_proj.weight")),
    "llama4": (
        "llama4_text",
        {"attention_chunk_size": SPAN, "num_local_experts": 2, "no_rope_layers": [1, 0]},
        ["chunks of 8", "full"],
        _set(attention_chunk_size=512),
    ),
    "qwen3_5": ("qwen3_5_text", _DELTA_NET, ["full"], _zero("linear_attn.out_proj.weight")),
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention"]}, ["full"], _zero("conv.out_proj.weight")),
}
"""Family, options of its config, kinds of layers that it has (beside others), and what switches the feature off."""


def variant(name: str, **overrides: Any) -> nn.Module:
    """The model, all of its parameters moved by noise, so that sinks and weights of norms matter."""
    family, options, *_ = VARIANTS[name]
    model = tiny_model(family, **options, **overrides)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model
