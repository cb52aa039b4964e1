"""Random decoders of two layers, with weights large enough that every token they see moves their logits."""

from __future__ import annotations

import random
from typing import Any

import torch

from pl_grouprl.types import Rollout, RolloutGroup

VOCAB = 61
FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "gpt2")

_COMMON = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None, "initializer_range": 0.2}
_ROTARY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
}
_GPT2 = {
    **{"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512},
    **{"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
}
_EAGER = {"gemma2"}
"""Families whose soft-capping transformers before 5.21 leaves out in its default attention."""

_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}


def tiny_model(family: str = "llama", *, dtype: torch.dtype = torch.float32, seed: int = 0, **overrides: Any) -> Any:
    """A causal language model in eval mode; `overrides` go to its config."""
    from transformers import AutoConfig, AutoModelForCausalLM

    options = {**_COMMON, **(_GPT2 if family == "gpt2" else _ROTARY), **(_MOE if family.endswith("moe") else {})}
    config = AutoConfig.for_model(family, **{**options, **overrides})
    if family in _EAGER:
        config._attn_implementation = "eager"
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def random_groups(seed: int, shapes: list[tuple[int, list[int]]], vocabulary: int = VOCAB) -> list[RolloutGroup]:
    """Groups of random tokens: (prompt length, rollout lengths) each."""
    rng = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(1, vocabulary) for _ in range(count)]

    return [RolloutGroup(tokens(prompt), [Rollout(tokens(n)) for n in rollouts]) for prompt, rollouts in shapes]


def repeated_rows(seed: int, prompts: list[int], rollouts: int, length: int) -> torch.Tensor:
    """Rows of equal length: each prompt repeated, and behind it `length` random tokens more; all prompts equally long.

    Args:
        seed: Of the tokens.
        prompts: Length of each prompt.
        rollouts: Rows of each prompt.
        length: Tokens behind the prompt.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for prompt in prompts:
        head = torch.randint(1, VOCAB, (1, prompt), generator=generator).repeat(rollouts, 1)
        rows.append(torch.cat([head, torch.randint(1, VOCAB, (rollouts, length), generator=generator)], dim=1))
    return torch.cat(rows)


def gradients(model: Any) -> dict[str, torch.Tensor]:
    """Copies of all gradients by name."""
    return {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}


def worst_gradient_error(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Largest relative error over the parameters, each measured against its own gradient's norm.

    A gradient that is zero but for rounding (the bias of keys: softmax does not see it) is measured against the
    largest norm of all.
    """
    assert actual.keys() == expected.keys()
    largest = max(g.norm().item() for g in expected.values())
    return max(
        ((actual[name].double() - g.double()).norm() / max(g.norm().item(), 1e-3 * largest)).item()
        for name, g in expected.items()
    )
