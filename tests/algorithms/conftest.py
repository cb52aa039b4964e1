"""A run small enough for a test: a random Qwen3 of 2 layers, prompts of digits, completions of a few letters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer, seed_everything

from pl_grouprl.algorithms import GRPO, OptimizerConfig
from pl_grouprl.data import PromptDataModule
from pl_grouprl.demo import MostFrequentDigit
from pl_grouprl.demo.tasks import digit_tokenizer
from pl_grouprl.types import Rollout, SamplingConfig


class TinyPolicy:
    """The same random weights each time; a larger `initializer_range` gives less uniform distributions."""

    def __init__(
        self,
        gradient_checkpointing: bool = False,
        seed: int = 0,
        hidden_size: int = 32,
        initializer_range: float = 0.02,
    ) -> None:
        self.gradient_checkpointing = gradient_checkpointing
        self.seed = seed
        self.hidden_size = hidden_size
        self.initializer_range = initializer_range

    def load(self) -> Any:
        from transformers import Qwen3Config, Qwen3ForCausalLM

        config = Qwen3Config(
            vocab_size=len(digit_tokenizer()),
            hidden_size=self.hidden_size,
            initializer_range=self.initializer_range,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=64,
            eos_token_id=1,
            pad_token_id=0,
        )
        with torch.random.fork_rng(), torch.device("cpu"):  # a GPU would draw other weights
            torch.manual_seed(self.seed)
            model = Qwen3ForCausalLM(config)
        if self.gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return model

    def load_tokenizer(self) -> Any:
        return digit_tokenizer()


class ScriptedEngine:
    """Completions that depend on the prompt and the number of the rollout alone; lengths from 1 to 5, one empty."""

    def bind(self, model: Any, tokenizer: Any = None) -> None:
        pass

    def generate(self, prompts, sampling, *, num_generations, seed):
        return [[self._rollout(sum(prompt) + 7 * g) for g in range(num_generations)] for prompt in prompts]

    @staticmethod
    def _rollout(number: int) -> Rollout:
        length = number % 6
        ids = [2 + (number + 3 * i) % 20 for i in range(length)]
        return Rollout(ids, logprobs=[0.0] * length, finish_reason="length" if length == 5 else "stop")


class RaggedEngine:
    """Groups of 1 to 4 rollouts, of 0 to 11 tokens, some with tool output amid, all decided by the prompt alone.

    Args:
        logprobs: Whether a sampler's log-probabilities are reported: made-up ones, as of an older policy.
        max_size: Rollouts of the largest group.
    """

    varies_num_generations = True

    def __init__(self, logprobs: bool = False, max_size: int = 4) -> None:
        self.logprobs = logprobs
        self.max_size = max_size

    def bind(self, model: Any, tokenizer: Any = None) -> None:
        pass

    def generate(self, prompts, sampling, *, num_generations, seed):
        longest = sampling.max_new_tokens
        return [self._group(sum(i * token for i, token in enumerate(prompt)), longest) for prompt in prompts]

    def _group(self, number: int, longest: int) -> list[Rollout]:
        return [self._rollout(number // 4 + 5 * g, longest) for g in range(1 + number % self.max_size)]

    def _rollout(self, number: int, longest: int) -> Rollout:
        length = min(number % 12, longest)
        ids = [2 + (number + 7 * i * i) % 20 for i in range(length)]
        return Rollout(
            ids,
            logprobs=[-3.3 + 0.1 * ((number + i) % 5) for i in range(length)] if self.logprobs else None,
            loss_mask=[int(i not in (2, 3)) for i in range(length)] if number % 2 else None,
            finish_reason="length" if length > 8 else "stop",
        )


class History(Callback):
    """The metrics of every step, and what the optimizer was given: copies of the gradients and the weights after it."""

    def __init__(self, keep_tensors: bool = False) -> None:
        self.keep_tensors = keep_tensors
        self.steps: list[dict[str, float]] = []
        self.gradients: list[dict[str, Any]] = []
        self.weights: list[dict[str, Any]] = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.steps.append({name: float(value) for name, value in trainer.callback_metrics.items()})
        if self.keep_tensors:
            self.gradients.append(gradients_of(module))
            self.weights.append({name: p.detach().clone() for name, p in module.named_parameters()})


def gradients_of(module: Any) -> dict[str, Any]:
    """Gradients of the last optimizer step by parameter; None where the optimizer left one alone."""
    trained = ((name, p) for name, p in module.named_parameters() if p.requires_grad)
    return {name: None if p.grad is None else p.grad.detach().clone() for name, p in trained}


def share_of_letters(completions, **columns):
    """Reward: how much of a completion is letters; random policies differ in it, and all can learn it."""
    return [sum(c.isalpha() for c in text) / max(len(text), 1) for text in completions]


@pytest.fixture(autouse=True)
def _seeded():
    seed_everything(1, verbose=False)


@pytest.fixture
def make_module():
    def make(cls=GRPO, policy=None, rewards=share_of_letters, **kwargs):
        longest = 14 if getattr(kwargs.get("engine"), "varies_num_generations", False) else 5
        defaults = {
            "num_generations": 4,
            "sampling": SamplingConfig(max_new_tokens=longest),
            "optimizer": OptimizerConfig(learning_rate=1e-2),
        }
        sharing = {"verify": False} | kwargs.pop("sharing", {})
        return cls(policy or TinyPolicy(), rewards, **{**defaults, **kwargs, "sharing": sharing})

    return make


@pytest.fixture
def make_data():
    def make(train_size=12, prompt_length=20, batch_size=4, val=False, **kwargs):
        task = MostFrequentDigit(prompt_length=prompt_length, majority_share=0.4, train_size=train_size, val_size=4)
        return PromptDataModule(task, task if val else None, batch_size=batch_size, **kwargs)

    return make


@pytest.fixture
def make_trainer(tmp_path):
    def make(**kwargs):
        quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
        defaults = {"accelerator": "cpu", "devices": 1, "max_epochs": -1, "default_root_dir": tmp_path}
        kwargs.setdefault("enable_checkpointing", bool(kwargs.get("callbacks")))
        return Trainer(**{**defaults, **quiet, **kwargs})

    return make


@pytest.fixture
def tiny_policy():
    return TinyPolicy


@pytest.fixture
def scripted_engine():
    return ScriptedEngine()


@pytest.fixture
def parameters():
    """Copy of a module's trained weights."""
    return lambda module: [p.detach().clone() for p in module.policy.parameters()]


@pytest.fixture
def ragged_engine():
    return RaggedEngine


@pytest.fixture
def history():
    return History


@pytest.fixture
def gradients():
    return gradients_of
