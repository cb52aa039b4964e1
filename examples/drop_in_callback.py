"""Speeds up an existing LightningModule with one callback on its Trainer.

`PolicyGradient` below is written the usual way: a padded batch, an attention mask, logits, a loss. It imports nothing
from pl_grouprl. It is trained twice on the same batches, without and with `SharedPrefixCallback`; the script prints the
time per step and the difference of the losses. Takes less than a minute on two CPU cores:

    python examples/drop_in_callback.py
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import Qwen3Config, Qwen3ForCausalLM


class PolicyGradient(pl.LightningModule):
    """REINFORCE on rollouts with given advantages."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = Qwen3ForCausalLM(config)
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Mean of -advantage * log-probability over the response tokens."""
        logits = self.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
        targets, trained = batch["input_ids"][:, 1:], batch["is_response"][:, 1:]
        logprobs = logits.log_softmax(dim=-1).gather(-1, targets[..., None]).squeeze(-1)
        loss = -(batch["advantages"][:, None] * logprobs * trained).sum() / trained.sum()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW on all parameters."""
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class StepTimer(pl.Callback):
    """Seconds of each training step: forward, backward and optimizer."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_batch_start(self, *args: Any) -> None:
        """Start the clock."""
        self._start = time.perf_counter()

    def on_train_batch_end(self, *args: Any) -> None:
        """Stop it."""
        self.seconds.append(time.perf_counter() - self._start)


def make_batch(prompt_tokens: int, rollouts: int, new_tokens: int, vocabulary: int, seed: int) -> dict[str, Tensor]:
    """One prompt with rollouts of different lengths, as a right-padded batch; tokens and advantages are random."""
    generator = torch.Generator().manual_seed(seed)
    prompt = torch.randint(1, vocabulary, (prompt_tokens,), generator=generator)
    input_ids = torch.zeros(rollouts, prompt_tokens + new_tokens, dtype=torch.long)
    is_response = torch.zeros_like(input_ids)
    for row in range(rollouts):
        length = new_tokens - row % max(new_tokens // 2, 1)
        end = prompt_tokens + length
        input_ids[row, :prompt_tokens] = prompt
        input_ids[row, prompt_tokens:end] = torch.randint(1, vocabulary, (length,), generator=generator)
        is_response[row, prompt_tokens:end] = 1
    return {
        "input_ids": input_ids,
        "attention_mask": (input_ids != 0).long(),  # 0 is the padding token
        "is_response": is_response,
        "advantages": torch.randn(rollouts, generator=generator),
    }


def train(
    config: Qwen3Config, batches: list[dict[str, Tensor]], callbacks: list[pl.Callback]
) -> tuple[list[float], list[float]]:
    """Train a new module on the batches; return the loss and the seconds of each step."""
    module, timer = PolicyGradient(config), StepTimer()
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[timer, *callbacks],
    )  # fmt: skip
    trainer.fit(module, DataLoader(batches, batch_size=None))  # the batches are already complete
    return module.losses, timer.seconds


def main(
    prompt_tokens: int = 768,
    rollouts: int = 8,
    new_tokens: int = 24,
    steps: int = 5,
    hidden: int = 256,
    layers: int = 3,
) -> dict[str, list[float]]:
    """Train without and with the callback and print both; return losses and seconds per step by name."""
    from pl_grouprl import SharedPrefixCallback

    config = Qwen3Config(
        vocab_size=256, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, head_dim=hidden // 4,
    )  # fmt: skip
    batches = [make_batch(prompt_tokens, rollouts, new_tokens, config.vocab_size, seed) for seed in range(steps)]
    plain_losses, plain_seconds = train(config, batches, [])
    shared_losses, shared_seconds = train(config, batches, [SharedPrefixCallback()])
    before, after = statistics.median(plain_seconds), statistics.median(shared_seconds)
    apart = max(abs(a - b) for a, b in zip(plain_losses, shared_losses, strict=True))
    print(
        f"\n{rollouts} rollouts of one prompt, {prompt_tokens} + {new_tokens} tokens, {torch.get_num_threads()} threads"
    )
    print(f"seconds per step    without the callback {before:.3f}, with it {after:.3f}: x{before / after:.1f}")
    print(f"losses              {', '.join(f'{loss:+.6f}' for loss in plain_losses)}")
    print(f"largest difference  {apart:.1e}")
    return {
        "plain_losses": plain_losses,
        "shared_losses": shared_losses,
        "plain_seconds": plain_seconds,
        "shared_seconds": shared_seconds,
    }


if __name__ == "__main__":
    main()
