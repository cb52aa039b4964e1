"""Advantages over the tokens of a response."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pl_grouprl.plots.response import GREY, MARKERS, Response, Values

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LIKELIER, LESS_LIKELY = "#4c8bf5", "#f08c4a"
UNTRAINED = "#e9ecef"


def plot_advantages(
    tokens: Sequence[str],
    advantages: Values | Mapping[str, Values],
    *,
    title: str = "",
    label: str = "advantage",
    max_tokens: int = 200,
) -> Figure:
    """Draw the advantage of each token of a response, above its text.

    The text is set in lines like a paragraph. A bar upwards (blue) makes its token more likely, one downwards (orange)
    less likely. Of several kinds of advantages, the first has the bars and the others have points on the same scale.

    Args:
        tokens: Text of each token of one response, length T; see `token_texts`.
        advantages: Advantage of each token, shape [T], in units of the reward, or of its standard deviation where
            they were divided by it. NaN marks a token that is not trained, such as tool output; its text is grey. Or
            up to five of them by name, to be compared.
        title: Heading.
        label: What the scale shows.
        max_tokens: Tokens shown, from the first on.

    Returns:
        A `matplotlib.figure.Figure` on the Agg canvas, not known to pyplot; `figure.savefig("advantages.png")` writes
        it, and a notebook shows it.

    Raises:
        ValueError: If there are no tokens, more kinds of advantages than five, or if shapes differ.
    """
    named = dict(advantages) if isinstance(advantages, Mapping) else {label: advantages}
    response = Response(tokens, named, max_tokens)
    first = next(iter(response.series.values()))
    response.bars(first, [LIKELIER if value > 0 else LESS_LIKELY for value in first])
    response.tint([UNTRAINED if math.isnan(value) else "none" for value in first])
    return response.finish(title, label, _sides(first) + compared(response))


def _sides(values: Sequence[float]) -> list[tuple[Any, str]]:
    from matplotlib.patches import Patch

    present = {
        "more likely": (LIKELIER, any(value > 0 for value in values)),
        "less likely": (LESS_LIKELY, any(value < 0 for value in values)),
        "not trained": (UNTRAINED, any(map(math.isnan, values))),
    }
    return [(Patch(color=color), words) for words, (color, shown) in present.items() if shown]


def compared(response: Response) -> list[tuple[Any, str]]:
    """Draw all series but the first as points; return what the legend says of them, the first included.

    Raises:
        ValueError: If there are more series than markers.
    """
    from matplotlib.patches import Patch

    bars, *others = response.series
    if len(others) > len(MARKERS):
        raise ValueError(f"{len(others) + 1} series were given; at most {len(MARKERS) + 1} can be told apart.")
    if not others:
        return []
    points = [(response.points(response.series[name], m), name) for name, m in zip(others, MARKERS, strict=False)]
    return [(Patch(color=GREY), bars), *points]
