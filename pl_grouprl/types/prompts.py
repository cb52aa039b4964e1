"""Prompts, and their images and videos."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Messages = list[dict[str, Any]]
"""A conversation in chat format: dictionaries with `role` and `content`."""

Media = dict[str, Any]
"""Images and videos of one prompt as the model reads them: CPU tensors, by the names of its keyword arguments.

Names that end in `token_type_ids` (`mm_token_type_ids`, `token_type_ids`) have one entry per token of the prompt, shape
[prompt tokens]; all others (`pixel_values`, `image_grid_thw`, ...) have their images, videos or patches along the first
axis.
"""


def is_per_token(name: str) -> bool:
    """Whether the media of this name have one entry per token of the prompt, not per image, video or patch."""
    return name.endswith("token_type_ids")


@dataclass
class Prompt:
    """One prompt, ready for the sampler.

    Attributes:
        token_ids: The prompt as the model reads it, chat template applied.
        prompt: What the data set held: a string, or a list of messages.
        columns: Every other column of the row; reward functions receive them.
        data_source: Name under which validation metrics are reported.
        media: What a processor made of the prompt's images and videos besides the tokens; see `Media`. Empty for text.
        where: The file and line, or the row, that it was read from, for error messages; empty if unknown.
    """

    token_ids: list[int]
    prompt: str | Messages = ""
    columns: dict[str, Any] = field(default_factory=dict)
    data_source: str = "default"
    media: Media = field(default_factory=dict)
    where: str = ""

    @property
    def num_tokens(self) -> int:
        """Number of tokens as the model reads them; a lower bound while images or videos are not processed yet."""
        return len(self.token_ids)

    def open(self) -> Prompt:
        """The prompt as the model reads it: itself, unless its images and videos have still to be processed."""
        return self
