"""Sampling the slow way, and tiny decoders of many families to sample from."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from pl_grouprl.rollout.hf.sampling import sample_tokens, uniforms
from pl_grouprl.types import Rollout, SamplingConfig

VOCAB = 24

_COMMON = {
    **{"vocab_size": VOCAB, "eos_token_id": None, "bos_token_id": None, "pad_token_id": None},
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "initializer_range": 0.3},
}
_WINDOW = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_DELTA_NET = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    **{"linear_conv_kernel_dim": 4, "layer_types": ["linear_attention", "full_attention"]},
}
_LATENT = {
    **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12},
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 16},
    **{"n_shared_experts": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4},
}
_LLAMA4 = {
    **{"attention_chunk_size": 8, "layer_types": ["chunked_attention", "full_attention"], "intermediate_size_mlp": 48},
    **{"num_local_experts": 2, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2, "no_rope_layers": [1, 0]},
}
_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_d_conv": 4, "mamba_n_groups": 1}
_FALCON_H1 = {**_MAMBA, "mamba_d_ssm": 64, "mamba_chunk_size": 8}

_QWEN4 = {
    **{**_DELTA_NET, **_EXPERTS, "shared_expert_intermediate_size": 16, "hc_lowrank": 8, "ple_embed_dim": 32},
    **{"layer_types": ["linear_attention", "indexed_attention"], "indexer_n_heads": 16, "indexer_head_dim": 8},
    **{"indexer_kv_heads": 1, "indexer_budget": 6, "indexer_compress_ratio": 2},
}
_MINIMAX_M3 = {
    **{"num_local_experts": 4, "num_experts_per_tok": 2, "dense_intermediate_size": 48, "shared_intermediate_size": 48},
    **{"layer_types": ["full_attention", "minimax_m3_sparse"], "mlp_layer_types": ["dense", "sparse"], "rotary_dim": 4},
    **{"index_n_heads": 2, "index_head_dim": 8, "index_block_size": 4, "index_topk_blocks": 2, "index_local_blocks": 1},
}

FAMILIES: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 8},
    "gemma2": {**_WINDOW, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0, "query_pre_attn_scalar": 8},
    "gemma3_text": {**_WINDOW, "query_pre_attn_scalar": 8},
    "gpt_oss": {**_WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
    "llama4_text": _LLAMA4,
    "deepseek_v3": _LATENT,
    "deepseek_v32": {**_LATENT, "index_n_heads": 16, "index_head_dim": 16, "index_topk": 6},
    "qwen4_exp_text": _QWEN4,
    "minimax_m3_vl_text": _MINIMAX_M3,
    "mamba": {"state_size": 4},
    "olmo3": _WINDOW,
    "cohere2": _WINDOW,
    "qwen3_5_text": _DELTA_NET,
    "qwen3_next": {**_DELTA_NET, **_EXPERTS, "shared_expert_intermediate_size": 16},
    "lfm2": {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3, "conv_bias": True},
    "falcon_h1": _FALCON_H1,
    "gpt2": _GPT2,
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32, "do_layer_norm_before": True},
}
"""Options of each family's config beyond the common ones."""


def tiny_decoder(family: str, **overrides: Any) -> Any:
    """A random causal language model in eval mode, weights large enough that every token it sees moves its logits."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **{**_COMMON, **FAMILIES.get(family, {}), **overrides})
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():
            for vector in (weight for weight in model.parameters() if weight.dim() == 1):
                vector += 0.2 * torch.randn_like(vector)  # biases begin at zero, where padding leaves no trace
    return model


def penalized(logits_TV: torch.Tensor, prompt: list[int], rollout: Rollout, sampling: SamplingConfig) -> torch.Tensor:
    """The logits of a rollout's tokens after transformers' own repetition penalty, one token at a time."""
    from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

    penalize = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)
    read = [*prompt, *rollout.token_ids]
    rows = [penalize(torch.tensor([read[: len(prompt) + t]]), one[None]) for t, one in enumerate(logits_TV)]
    return torch.cat(rows)


@torch.no_grad()
def assert_sampled(
    model: Any,
    prompt: list[int],
    rollout: Rollout,
    sampling: SamplingConfig,
    *,
    name: tuple[int, int],
    seed: int,
    media: dict[str, torch.Tensor] | None = None,
    never: tuple[int, ...] = (),
) -> None:
    """Check a rollout against one forward over the whole sequence, alone and without a cache.

    Each token is the one that is drawn from the logits before it; as that holds for the first and, given those before
    it, for any other, sampling step by step gives the same.

    Args:
        model: A transformers model.
        prompt: Its tokens.
        rollout: What the engine sampled.
        sampling: How to sample; a completion ends at `stop_token_ids`.
        name: Of the random stream: index of the prompt, index of the rollout.
        seed: Of the random streams.
        media: Images of the prompt, by keyword.
        never: Tokens that are not sampled.
    """
    count = len(rollout.token_ids)
    inputs = {
        key: torch.nn.functional.pad(value, (0, count))[None] if key.endswith("token_type_ids") else value
        for key, value in (media or {}).items()
    }
    logits = model(torch.tensor([prompt + rollout.token_ids]), use_cache=False, **inputs).logits[
        0, len(prompt) - 1 : -1
    ]
    logits = logits.index_fill(-1, torch.tensor(never, dtype=torch.int64), -torch.inf)
    if sampling.repetition_penalty != 1:
        logits = penalized(logits, prompt, rollout, sampling)
    plain = replace(sampling, repetition_penalty=1.0)
    tokens, logprobs = sample_tokens(logits, plain, uniforms(seed, [name], 0, count)[0])
    assert rollout.token_ids == tokens.tolist()
    torch.testing.assert_close(torch.tensor(rollout.logprobs), logprobs, atol=1e-4, rtol=0)
    stops = [token in sampling.stop_token_ids for token in rollout.token_ids]
    assert not any(stops[:-1])
    assert stops[-1] or count == sampling.max_new_tokens
