"""How completions are sampled."""

from __future__ import annotations

from dataclasses import dataclass

from pl_grouprl.utilities.arguments import checked_arguments
from pl_grouprl.utilities.options import check_options


@checked_arguments
@dataclass(frozen=True)
class SamplingConfig:
    """How completions are sampled.

    Attributes:
        max_new_tokens: Longest completion in tokens; longer ones end with finish reason `length`.
        temperature: Divides the logits; 0 means greedy decoding.
        top_p: Keeps the smallest set of tokens whose probability reaches this; 1 keeps all.
        top_k: Keeps the k most likely tokens; 0 keeps all.
        min_p: Drops tokens less likely than this fraction of the most likely one; 0 keeps all.
        stop: Strings that end a completion. The tokens that complete the string are kept.
        stop_token_ids: Tokens that end a completion, besides the model's own end tokens and the one with which the chat
            template ends a turn. Kept in the completion.
    """

    max_new_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            raise ValueError(
                f"SamplingConfig.stop is the string {self.stop!r}; pass a list of strings, [{self.stop!r}]."
            )
        checks = {
            "max_new_tokens": (self.max_new_tokens >= 1, "a whole number, at least 1"),
            "temperature": (self.temperature >= 0, "0 (greedy) or larger"),
            "top_p": (0 < self.top_p <= 1, "in (0, 1]"),
            "top_k": (self.top_k >= 0, "0 (off) or larger"),
            "min_p": (0 <= self.min_p <= 1, "in [0, 1]"),
        }
        check_options({f"SamplingConfig.{name}": (getattr(self, name), *check) for name, check in checks.items()})

    @property
    def is_truncated(self) -> bool:
        """Whether top-k, top-p or min-p may leave out tokens."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)
