"""Grades by a language model behind an OpenAI-compatible endpoint."""

from pl_grouprl.rewards.judge.judge import Judge

__all__ = ["Judge"]
