"""End tokens and stop strings, which end a completion before its length limit."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from pl_grouprl.types import SamplingConfig


def end_token_ids(model: Any, tokenizer: Any, sampling: SamplingConfig) -> list[int]:
    """Collect every token that ends a completion.

    Args:
        model: Its `generation_config` names the end tokens, or else its `config`.
        tokenizer: Its `eos_token_id` is added; may be None.
        sampling: Its `stop_token_ids` are added.

    Returns:
        The token ids, ascending and unique. If empty, all completions run to the limit.
    """
    sources = [
        getattr(model, "generation_config", None) or getattr(model, "config", None),
        tokenizer,
    ]
    found = set(sampling.stop_token_ids)
    for source in sources:
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            found.update([ids] if isinstance(ids, int) else ids)
    return sorted(found)


class StopStrings:
    """Detects whether the newest token completes a stop string.

    Only the last `window` tokens are decoded, with special tokens, so an end-of-turn marker can be a stop string. A
    token is at least one byte, so a window of one token per byte of the longest string contains all of it; the margin
    allows for decoders that treat the first token of a text differently, and for characters cut in the middle.

    Args:
        tokenizer: Decodes tokens.
        stop: The strings.
        lock: Held while the tokenizer decodes, if several threads share it.

    Raises:
        ValueError: If there are strings and no tokenizer, or if a string is empty.
    """

    MARGIN = 4

    def __init__(self, tokenizer: Any, stop: Sequence[str], lock: AbstractContextManager[Any] | None = None) -> None:
        if stop and tokenizer is None:
            raise ValueError(
                f"SamplingConfig.stop is {tuple(stop)!r} but the engine has no tokenizer to decode completions with; "
                "bind one, or use stop_token_ids."
            )
        if "" in stop:
            raise ValueError("SamplingConfig.stop has an empty string, which every completion contains; remove it.")
        self.tokenizer = tokenizer
        self.stop = tuple(stop)
        self._lock = nullcontext() if lock is None else lock
        self.window = max((len(string.encode()) for string in stop), default=-self.MARGIN) + self.MARGIN

    def __bool__(self) -> bool:
        return bool(self.stop)

    def found(self, tail_ids: Sequence[Sequence[int]]) -> list[bool]:
        """Whether each completion's last `window` tokens contain a stop string.

        Args:
            tail_ids: The last tokens of each completion, up to `window`, the newest last.
        """
        with self._lock:
            tails = [self.tokenizer.decode(list(ids), skip_special_tokens=False) for ids in tail_ids]
        return [any(string in tail for string in self.stop) for tail in tails]
