"""Checks that a teacher fits its student: tokenizer, vocabulary, and other weights."""

from __future__ import annotations

from typing import Any

from torch import nn

from pl_grouprl.models.adapter_layers import has_adapters
from pl_grouprl.models.reference import fingerprint
from pl_grouprl.utilities.text import first_names


def check_tokenizers(student: Any, teacher: Any) -> None:
    """Refuse a teacher whose tokenizer has other tokens, or other ids for the same tokens.

    Raises:
        ValueError: If one token differs.
    """
    ours, theirs = student.get_vocab(), teacher.get_vocab()
    differing = sorted(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
    if differing:
        token = differing[0]
        raise ValueError(
            f"teacher has another tokenizer than policy: {len(differing)} tokens differ ({first_names(differing, 6)}); "
            f"{token!r} has the id {theirs.get(token)} there and {ours.get(token)} in the policy's. The teacher would "
            "score different text; use one with the policy's tokenizer."
        )


def check_pair(student: nn.Module, teacher: nn.Module) -> float:
    """Refuse a teacher that cannot score the student's tokens, or is the student itself.

    Args:
        student: As loaded, before any training.
        teacher: As loaded.

    Returns:
        The teacher's fingerprint, so that a resumed run can recognize it.

    Raises:
        ValueError: If the teacher's vocabulary is smaller, or the teacher is the student's initial or base model.
    """
    sizes = [model.get_output_embeddings().weight.shape[0] for model in (student, teacher)]  # type: ignore[operator]
    if sizes[1] < sizes[0]:
        raise ValueError(
            f"teacher has logits for {sizes[1]} tokens and policy for {sizes[0]}, so it cannot score all that the "
            "policy may sample; use a teacher with at least as many."
        )
    teacher_fingerprint = fingerprint(teacher)
    if teacher_fingerprint == fingerprint(student, frozen_only=has_adapters(student)):
        raise ValueError(
            "teacher is the model that policy starts from, so there is nothing to learn from it; pass another model. "
            "To keep the policy near its start, set beta of GRPO."
        )
    return teacher_fingerprint
