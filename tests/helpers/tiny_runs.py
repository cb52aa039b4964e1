"""Runs small enough for a test: a random Qwen3 of 2 layers, prompts of digits, completions of a few letters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint

from pl_grouprl.algorithms import GRPO, OptimizerConfig
from pl_grouprl.attention.backends.saved import save_attention
from pl_grouprl.data import PromptDataModule
from pl_grouprl.demo import MostFrequentDigit
from pl_grouprl.demo.tasks import digit_tokenizer
from pl_grouprl.types import Rollout, SamplingConfig

QUIET: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
PLAIN = OptimizerConfig(learning_rate=1.0, eps=1.0)
"""With so large an eps a step of AdamW is nearly the gradient itself."""
PARTS = (
    *("sharing", "episodes", "evaluation", "reward_calls", "kl", "importance_sampling", "guards", "policy_loss"),
    *("data", "trainer"),
)
AHEAD: dict[str, Any] = {"max_staleness": 1, "importance_sampling": {"mode": "token_truncate"}}


class TinyPolicy:
    """The same random weights each time; a larger `initializer_range` gives less uniform distributions."""

    def __init__(
        self,
        gradient_checkpointing: Any = False,
        seed: int = 0,
        hidden_size: int = 32,
        initializer_range: float = 0.02,
        num_experts: int = 0,
    ) -> None:
        self.gradient_checkpointing = gradient_checkpointing
        self.num_experts = num_experts
        self.seed = seed
        self.hidden_size = hidden_size
        self.initializer_range = initializer_range

    def load(self) -> Any:
        from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

        experts = {"num_experts": self.num_experts, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        config = (Qwen3MoeConfig if self.num_experts else Qwen3Config)(
            **(experts if self.num_experts else {}),
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
            model = (Qwen3MoeForCausalLM if self.num_experts else Qwen3ForCausalLM)(config)
        if self.gradient_checkpointing:
            saving = {"context_fn": save_attention} if self.gradient_checkpointing == "attention" else {}
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False} | saving)
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


class RoutedEngine(ScriptedEngine):
    """The same completions, with experts of two layers that depend on tokens and places alone.

    Args:
        num_experts: Of each layer; a token gets two.
    """

    router_replay = True

    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts

    def generate(self, prompts, sampling, *, num_generations, seed):
        groups = super().generate(prompts, sampling, num_generations=num_generations, seed=seed)
        for prompt, group in zip(prompts, groups, strict=True):
            for rollout in group:
                rollout.routed_experts = self.experts([*prompt, *rollout.token_ids])
        return groups

    def experts(self, token_ids: list[int]) -> torch.Tensor:
        first = torch.tensor([[token + place, 2 * token + place] for place, token in enumerate(token_ids)])
        return torch.stack([first, first + 1], dim=-1).remainder(self.num_experts).to(torch.int16)


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
    """What every step had: metrics and rollouts, and copies of gradients, weights, moments and learning rates."""

    module: Any
    trainer: Any

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.groups: list[Any] = []
        self.gradients: list[dict[str, Any]] = []
        self.weights: list[dict[str, Any]] = []
        self.moments: list[list[Any]] = []
        self.rates: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        optimizer = trainer.optimizers[0]
        self.steps.append(metrics_of(trainer))
        self.groups.append(module.last_rollouts.groups)
        self.gradients.append(gradients_of(module))
        self.weights.append(weights_of(module))
        moments = [value for own in optimizer.state.values() for value in own.values()]
        self.moments.append([torch.as_tensor(value).clone() for value in moments])
        self.rates.append({group["name"]: group["lr"] for group in optimizer.param_groups if "name" in group})

    @property
    def buffer(self) -> Any:
        """The rollouts of the last step, with all quantities."""
        return self.module.last_rollouts

    @property
    def rollouts(self) -> list[Rollout]:
        return [rollout for group in self.buffer.groups for rollout in group.rollouts]

    @property
    def tokens(self) -> list[Any]:
        """The tokens of the rollouts of every step."""
        return [[[rollout.token_ids for rollout in group.rollouts] for group in groups] for groups in self.groups]


def metrics_of(trainer: Any) -> dict[str, float]:
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def weights_of(module: Any) -> dict[str, Any]:
    """Copies of all parameters by name."""
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def gradients_of(module: Any) -> dict[str, Any]:
    """Gradients of the last optimizer step by parameter; None where the optimizer left one alone."""
    trained = ((name, p) for name, p in module.named_parameters() if p.requires_grad)
    return {name: None if p.grad is None else p.grad.detach().clone() for name, p in trained}


def part(tensors: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Those whose names begin with a prefix."""
    return {name: value for name, value in tensors.items() if name.startswith(prefix)}


def same(left: Any, right: Any, prefix: str = "") -> bool:
    """Whether tensors, in a sequence or by name (of a prefix), are the same to the bit."""
    if isinstance(left, dict):
        left, right = part(left, prefix), part(right, prefix)
        assert left
        assert left.keys() == right.keys()
        left, right = left.values(), right.values()
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def largest_difference(left: Any, right: Any) -> float:
    """Between tensors in a sequence or by name."""
    if isinstance(left, dict):
        assert left.keys() == right.keys()
        left, right = left.values(), right.values()
    return max((a - b).abs().max().item() for a, b in zip(left, right, strict=True))


def compare_gradients(found: dict[str, Any], expected: dict[str, Any], tolerance: float = 1e-6) -> None:
    """The largest difference is small beside the largest gradient of the part: policy or critic."""
    assert found.keys() == expected.keys()
    for name in {name.split(".")[0] for name in expected}:
        own, other = part(found, name), part(expected, name)
        scale = max(gradient.abs().max().item() for gradient in other.values())
        assert scale > 1e-4, name
        worst = largest_difference(own, other)
        assert worst <= tolerance * scale, (name, worst / scale)


def share_of_letters(completions, **columns):
    """Reward: how much of a completion is letters; random policies differ in it, and all can learn it."""
    return [sum(c.isalpha() for c in text) / max(len(text), 1) for text in completions]


def constant(value: Any) -> Any:
    """A reward function that gives all completions the same."""
    return lambda completions, **columns: [value] * len(completions)


def merged(*options: dict[str, Any]) -> dict[str, Any]:
    """Options together; those of one part, such as `sharing`, are merged too, and later ones win."""
    whole: dict[str, Any] = {}
    for some in options:
        for name, value in some.items():
            before = whole.get(name)
            both = name in PARTS and isinstance(before, dict) and isinstance(value, dict)
            whole[name] = before | value if both else value
    return whole


def make_module(cls: Any = GRPO, policy: Any = None, rewards: Any = share_of_letters, **kwargs: Any) -> Any:
    longest = 14 if getattr(kwargs.get("engine"), "varies_num_generations", False) else 5
    defaults = {
        "num_generations": 4,
        "sampling": SamplingConfig(max_new_tokens=longest),
        "optimizer": OptimizerConfig(learning_rate=1e-2),
        "sharing": {"verify": False},
    }
    return cls(policy or TinyPolicy(), rewards, **merged(defaults, kwargs))


def make_data(
    train_size: int = 12, batch_size: int = 4, val: bool = False, val_size: int = 4, **kwargs: Any
) -> PromptDataModule:
    task = MostFrequentDigit(prompt_length=20, majority_share=0.4, train_size=train_size, val_size=val_size)
    return PromptDataModule(task, task if val else None, batch_size=batch_size, **kwargs)


def make_trainer(folder: Path, **kwargs: Any) -> Trainer:
    """A Trainer of one CPU; checkpoints only if a callback saves them."""
    saves = any(isinstance(callback, Checkpoint) for callback in kwargs.get("callbacks", ()))
    defaults = {"accelerator": "cpu", "devices": 1, "max_epochs": -1, "default_root_dir": folder}
    return Trainer(**{**defaults, **QUIET, "enable_checkpointing": saves, **kwargs})


def saving(folder: Path, **options: Any) -> ModelCheckpoint:
    """A checkpoint after each step, `step=1.ckpt` and so on."""
    options = {"filename": "{step}", "every_n_train_steps": 1, "save_top_k": -1} | options
    return ModelCheckpoint(dirpath=folder, **options)


def fit(
    folder: Path,
    cls: Any = GRPO,
    *,
    steps: int = 1,
    module: Any = None,
    data: Any = None,
    trainer: dict[str, Any] | None = None,
    callbacks: Any = (),
    save: bool = False,
    resume: int | str | Path | None = None,
    **options: Any,
) -> History:
    """Train some steps, or continue from the checkpoint of a step.

    Args:
        folder: Where checkpoints are, if any.
        cls: The algorithm.
        steps: Optimizer steps.
        module: In place of a new one.
        data: Options of `make_data`, or a data module.
        trainer: Options of the Trainer.
        callbacks: Further ones.
        save: A checkpoint after each step.
        resume: The number of a step that was saved, or a path.
        **options: Options of the algorithm.

    Returns:
        What each step had, with the module and the trainer.
    """
    history = History()
    history.module = make_module(cls, **options) if module is None else module
    callbacks = [history, *callbacks, *([saving(folder)] if save else [])]
    history.trainer = make_trainer(folder, **{"max_steps": steps, "callbacks": callbacks, **(trainer or {})})
    data = make_data(**data) if isinstance(data, dict) else make_data() if data is None else data
    checkpoint = folder / f"step={resume}.ckpt" if isinstance(resume, int) else resume
    history.trainer.fit(history.module, data, ckpt_path=checkpoint, weights_only=True)
    return history
