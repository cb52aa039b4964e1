"""SmolLM2-135M-Instruct, its prompts of worked examples, and groups of answers to them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from pl_grouprl.models import PretrainedPolicy
from pl_grouprl.types import Rollout, RolloutGroup

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".cache" / "smollm2"
EXAMPLES = (("3 + 4", 7), ("12 + 5", 17), ("8 + 9", 17))
QUESTIONS = ("6 + 7", "11 + 2", "19 + 14")
ANSWERS = (
    ("Answer: 13<|im_end|>", "Answer: 12<|im_end|>", "6 + 7 = 13.\n\nAnswer: 13<|im_end|>"),
    ("Answer: 13<|im_end|>", "Answer: X", "13<|im_end|>"),
    ("Answer: 33<|im_end|>", "The sum of 19 and 14 is 33.\n\n1. Add 9", "Answer: 1914<|im_end|>"),
)


def prepare() -> Path:
    """The model's file, fetched into `.cache/smollm2` once."""
    path = ROOT / "examples" / "prepare_smollm2.py"
    spec = importlib.util.spec_from_file_location("prepare_smollm2", path)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script.prepare(FOLDER)


def smollm2(**options: Any) -> PretrainedPolicy:
    """The policy in the prepared file."""
    file = prepare()
    return PretrainedPolicy(str(file.parent), gguf_file=file.name, **options)


def messages(question: str) -> list[dict[str, str]]:
    """A sum to work out, after three examples."""
    turns = [("user", "Add two numbers. Answer with the sum only, as in the examples.")]
    turns += [("assistant", "I will.")]
    for example, answer in EXAMPLES:
        turns += [("user", f"What is {example}?"), ("assistant", f"Answer: {answer}")]
    return [{"role": role, "content": content} for role, content in [*turns, ("user", f"What is {question}?")]]


def prompt_ids(tokenizer: Any, question: str) -> list[int]:
    """Tokens of a prompt, about 140."""
    text = tokenizer.apply_chat_template(messages(question), add_generation_prompt=True, tokenize=False)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def answered(tokenizer: Any, questions: int = len(QUESTIONS)) -> list[RolloutGroup]:
    """Groups of three answers each, right and wrong, of 4 to 20 tokens."""
    pairs = zip(QUESTIONS[:questions], ANSWERS[:questions], strict=True)
    return [
        RolloutGroup(prompt_ids(tokenizer, question), [Rollout(tokenizer(answer)["input_ids"]) for answer in answers])
        for question, answers in pairs
    ]


def rewards_right(completions: Any, answer: Any, **columns: Any) -> list[float]:
    """One for the right sum, and a little for short answers, so that the rewards of a group differ."""
    texts = [one if isinstance(one, str) else one[-1]["content"] for one in completions]
    return [float(str(right) in text) - 0.01 * len(text) for text, right in zip(texts, answer, strict=True)]


def rows() -> list[dict[str, Any]]:
    """The questions as a data set, with their answers."""
    return [{"prompt": messages(question), "answer": sum(map(int, question.split(" + ")))} for question in QUESTIONS]
