"""The arguments of an environment's `reset`, and how its observation joins the prompt."""

from __future__ import annotations

from typing import Any

from pl_grouprl.data.encoding import EMPTY_PROMPT
from pl_grouprl.types import Messages, Prompt


def row_of(prompt: Prompt) -> dict[str, Any]:
    """The keyword arguments of `reset`: the dataset's columns, and the prompt unless the environment writes it."""
    written = {} if prompt.prompt == EMPTY_PROMPT else {"prompt": prompt.prompt}
    return written | prompt.columns


def add_observation(prompt: Prompt, observation: str) -> Messages:
    """The messages of a prompt, with the environment's observation at the end of the last one."""
    if isinstance(prompt.prompt, str):
        raise ValueError(f"{prompt.where or 'a row'}: the prompt is a string; tools and environments need messages.")
    *before, last = prompt.prompt
    content = last["content"]
    if isinstance(content, str):
        content += observation
    else:
        content = [*content, {"type": "text", "text": observation}]
    return [*before, {**last, "content": content}]
