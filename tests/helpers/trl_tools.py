"""Runs a scripted conversation with tools through TRL's `GRPOTrainer`."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from helpers.qwen_tokenizer import qwen_tokenizer
from helpers.tool_cases import ToolCase, seen_by_reward


def run_trl(case: ToolCase) -> dict[str, Any]:
    """What `helpers.tool_cases` says of conversations: the rollouts, and how many calls there were, and failed."""
    from trl import GRPOConfig, GRPOTrainer

    seen: dict[str, Any] = {}

    def observe(**arguments: Any) -> list[float]:
        seen.update(arguments)
        return [0.0] * len(arguments["prompts"])

    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=_tiny_model(),
            reward_funcs=observe,
            args=GRPOConfig(
                output_dir=folder,
                report_to="none",
                use_cpu=True,
                bf16=False,
                per_device_train_batch_size=len(case.rows) * max(2, case.num_generations),
                num_generations=max(2, case.num_generations),
                max_steps=1,
                max_completion_length=case.max_completion_length,
                max_tool_calling_iterations=case.max_tool_calling_iterations,
                chat_template_kwargs=dict(case.template_kwargs),
            ),
            train_dataset=_dataset(case),
            processing_class=_tokenizer(),
            tools=list(case.tools) or None,
            environment_factory=case.environment_factory,
        )
        result = _generate(trainer, case)
    prompt_ids, completion_ids, mask, *_ = result["generated"]
    tokenizer = trainer.processing_class
    rewards = [
        {name: _number(value) for name, value in zip(trainer.reward_func_names, row, strict=True) if name != "observe"}
        for row in result["rewards"]
    ]
    return {
        "rollouts": [
            {
                "prompt": tokenizer.decode(prompt_ids[i]),
                "completion_ids": completion_ids[i],
                "mask": [1] * len(completion_ids[i]) if mask is None else mask[i],
                **seen_by_reward(seen, i),
                "reward": {name: reward for name, reward in rewards[i].items() if reward is not None},
            }
            for i in range(len(case.answers))
        ],
        "calls": round(result["metrics"]["tools/call_frequency"][-1] * len(case.answers)) if trainer.tools else 0,
        "failures": _failures(result["metrics"], len(case.answers)) if trainer.tools else 0,
    }


def _generate(trainer: Any, case: ToolCase) -> dict[str, Any]:
    """One batch of rollouts, with what TRL's methods returned on the way."""
    result: dict[str, Any] = {}

    def record(name: str, method: Any) -> Any:
        def recorded(*args: Any, **kwargs: Any) -> Any:
            result[name] = method(*args, **kwargs)
            return result[name]

        return recorded

    script = _Script(case, trainer.processing_class)
    rows = [dict(row) for row in case.rows for _ in range(case.num_generations)]
    with (
        patch.object(trainer.model, "generate", side_effect=script),
        patch.object(trainer, "_generate", record("generated", trainer._generate)),
        patch.object(trainer, "_calculate_rewards", record("rewards", trainer._calculate_rewards)),
    ):
        trainer.num_generations = case.num_generations
        trainer._generate_and_score_completions(rows)
    result["metrics"] = trainer._metrics["train"]
    result["rewards"] = result["rewards"].tolist()
    return result


class _Script:
    """Stands for the model's `generate`: continues each conversation by its next answer."""

    def __init__(self, case: ToolCase, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.limit = case.max_completion_length
        self.answers = [
            [tokenizer.encode(answer, add_special_tokens=False) for answer in turns] for turns in case.answers
        ]
        self.turns = [0] * len(self.answers)
        self.histories: list[list[int]] = [[] for _ in self.answers]

    def __call__(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **options: Any) -> torch.Tensor:
        prompts = [row[mask.bool()].tolist() for row, mask in zip(input_ids, attention_mask, strict=True)]
        completions = [self._continue(rollout, prompt) for rollout, prompt in self._match(prompts)]
        length = max(map(len, completions))
        pad = self.tokenizer.pad_token_id
        padded = [ids + [pad] * (length - len(ids)) for ids in completions]
        return torch.cat([input_ids, torch.tensor(padded, device=input_ids.device)], dim=1)

    def _match(self, prompts: list[list[int]]) -> list[tuple[int, list[int]]]:
        """The rollout of each prompt, which are some of all, in order."""
        pairs, start = [], 0
        for prompt in prompts:
            rollout = next(
                i for i in range(start, len(self.answers)) if prompt[: len(self.histories[i])] == self.histories[i]
            )
            pairs.append((rollout, prompt))
            start = rollout + 1
        return pairs

    def _continue(self, rollout: int, prompt: list[int]) -> list[int]:
        answer = self.answers[rollout][self.turns[rollout]][: self.limit]
        self.turns[rollout] += 1
        self.histories[rollout] = prompt + answer
        return answer


def _tokenizer() -> Any:
    import trl

    tokenizer = qwen_tokenizer()
    templates = Path(trl.__file__).parent / "chat_templates"
    tokenizer.chat_template = (templates / "qwen3.jinja").read_text(encoding="utf-8")
    return tokenizer


def _tiny_model() -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(
        Qwen3Config(
            **{"vocab_size": 320, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "head_dim": 4},
            **{"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 1 << 16},
        )
    )


def _dataset(case: ToolCase) -> Any:
    from datasets import Dataset

    if case.environment_factory is not None and not any(case.rows):
        return None
    return Dataset.from_list([dict(row) for row in case.rows])


def _failures(metrics: dict[str, list[float]], rollouts: int) -> int:
    calls = metrics["tools/call_frequency"][-1] * rollouts
    return round(metrics["tools/failure_frequency"][-1] * calls)


def _number(value: float) -> float | None:
    return None if value != value else value
