"""Shared prefixes in a plain PyTorch training loop, without Lightning: wrap it in `with shared_prefix(model):`.

Inside the context, the model takes the same padded batches as before. Rows that repeat a prompt are found by their
tokens, the prompt is encoded once, and logits, losses and gradients stay the same. The script trains both ways and
prints time and losses. Takes less than a minute on two CPU cores:

    python examples/shared_prefix_in_a_training_loop.py
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from pl_grouprl.attention import shared_prefix

PADDING = 0


def make_batch(prompts: int, rollouts: int, prompt_tokens: int, new_tokens: int, seed: int) -> tuple[Tensor, Tensor]:
    """Left-padded prompts, each repeated for its rollouts, and advantages.

    Returns:
        Tokens, shape [prompts * rollouts, prompt_tokens + new_tokens], and advantages, one per row.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for number in range(prompts):
        length = prompt_tokens - 16 * number
        prompt = torch.randint(1, 256, (length,), generator=generator)
        padding = torch.full((prompt_tokens - length,), PADDING)
        rows += [
            torch.cat([padding, prompt, torch.randint(1, 256, (new_tokens,), generator=generator)])
            for _ in range(rollouts)
        ]
    return torch.stack(rows), torch.randn(prompts * rollouts, generator=generator)


def policy_gradient_loss(model: Any, input_ids: Tensor, advantages: Tensor, new_tokens: int) -> Tensor:
    """Mean of -advantage * log-probability of the new tokens."""
    mask = (input_ids != PADDING).long()
    logits = model(input_ids, attention_mask=mask, logits_to_keep=new_tokens + 1).logits[:, :-1]
    logprobs = logits.log_softmax(dim=-1).gather(-1, input_ids[:, -new_tokens:, None]).squeeze(-1)
    return -(advantages[:, None] * logprobs).mean()


def train(
    model: Any, batches: list[tuple[Tensor, Tensor]], new_tokens: int, context: AbstractContextManager[Any]
) -> tuple[list[float], float]:
    """The usual loop inside a context; return the loss of each step and the seconds per step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    losses = []
    with context:  # backward passes must be inside, too
        start = time.perf_counter()
        for input_ids, advantages in batches:
            loss = policy_gradient_loss(model, input_ids, advantages, new_tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses, (time.perf_counter() - start) / len(batches)


def main(
    prompts: int = 2,
    rollouts: int = 6,
    prompt_tokens: int = 512,
    new_tokens: int = 24,
    steps: int = 4,
    hidden: int = 256,
) -> tuple[list[float], list[float]]:
    """Train both ways from the same weights and print; return the losses without and with shared prefixes."""
    config = Qwen3Config(
        vocab_size=256, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=hidden // 4,
    )  # fmt: skip
    batches = [make_batch(prompts, rollouts, prompt_tokens, new_tokens, seed) for seed in range(steps)]
    results = {}
    for name in ("repeated", "shared"):
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(config)
        context = shared_prefix(model) if name == "shared" else nullcontext()
        losses, seconds = train(model, batches, new_tokens, context)
        results[name] = losses
        print(f"{name:9} {seconds:.3f} s per step, losses {', '.join(f'{loss:+.6f}' for loss in losses)}")
    return results["repeated"], results["shared"]


if __name__ == "__main__":
    main()
