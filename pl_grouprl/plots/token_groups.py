"""The token groups of GROUP PPO over the tokens of a response.

Legend: B rollouts, L length of the longest row, T tokens of the response.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pl_grouprl.functional.token_groups import ENDED_BY_LAST, ENDED_BY_SIZE, ENDED_BY_VARIANCE, TokenGroups
from pl_grouprl.plots.advantages import UNTRAINED, compared
from pl_grouprl.plots.response import TEXT_HEIGHT, Response, Values

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DARK = ("#4c8bf5", "#f08c4a", "#3fa65a", "#d6568a", "#8a6fe8", "#22a6b3")
LIGHT = ("#d6e4fd", "#fce0cc", "#d0ecd7", "#f8d6e3", "#e3dcfb", "#cdeef1")
"""Colors of neighbouring groups: of their bars, and behind their text."""

CAUSES = {
    ENDED_BY_VARIANCE: ("the variance rule", "#212529"),
    ENDED_BY_SIZE: ("its size", "#e03131"),
    ENDED_BY_LAST: ("the end of the response or turn", "#adb5bd"),
}
"""By what a group was ended, in words, and the color of the line after its last token."""


def plot_token_groups(
    tokens: Sequence[str],
    groups: TokenGroups,
    values: Values | Mapping[str, Values],
    *,
    row: int = 0,
    title: str = "",
    label: str = "advantage",
    max_tokens: int = 200,
) -> Figure:
    """Draw how GROUP PPO cut a response into token groups, with the advantage of each above its text.

    The text is set in lines like a paragraph, in the colors of the groups. A line follows the last token of each group
    and says what ended it. Of several values per token, the first has the bars and the others have points on the same
    scale.

    Args:
        tokens: Text of each token of one response, length T; see `token_texts`.
        groups: Result of `find_token_groups`, rows of shape [B, L]; or `GroupPPO.token_groups`.
        values: What the bars show for each token, shape [T], in any unit: the advantages of the token groups, which are
            in units of the reward unless whitened; NaN draws nothing. Or up to five of them by name, to be compared.
        row: Row of the response in `groups`.
        title: Heading.
        label: What the scale shows.
        max_tokens: Tokens shown, from the first on.

    Returns:
        A `matplotlib.figure.Figure` on the Agg canvas, not known to pyplot; `figure.savefig("token_groups.png")` writes
        it, and a notebook shows it.

    Raises:
        ValueError: If there are no tokens, more values than five, if shapes differ, or if the row has trained tokens
            beyond T.
    """
    index = _groups_of(groups, row, len(tokens))
    response = Response(tokens, dict(values) if isinstance(values, Mapping) else {label: values}, max_tokens)
    first = next(iter(response.series.values()))
    response.bars(first, [_of_group(DARK, number) for number in index])
    response.tint([_of_group(LIGHT, number) for number in index])
    handles = _mark_ends(response, groups, row) + compared(response)
    return response.finish(title, label, handles)


def _groups_of(groups: TokenGroups, row: int, length: int) -> list[int]:
    """The group of each token."""
    num_rows, longest = groups.group_index.shape
    if not 0 <= row < num_rows:
        raise ValueError(f"row is {row}; groups has {num_rows} rows.")
    index: list[int] = groups.group_index[row].tolist()
    if longest < length or any(number >= 0 for number in index[length:]):
        raise ValueError(f"tokens has {length} entries, which are not those of row {row} of groups ({longest} long).")
    return index[:length]


def _of_group(colors: Sequence[str], number: int) -> str:
    return colors[number % len(colors)] if number >= 0 else UNTRAINED


def _mark_ends(response: Response, groups: TokenGroups, row: int) -> list[tuple[Any, str]]:
    """Draw a line after the last token of each group; return what the legend says of them."""
    from matplotlib.lines import Line2D

    if groups.causes is None:
        return []
    causes = groups.causes[row].tolist()
    style = {"linewidth": 2, "clip_on": False, "solid_capstyle": "butt"}
    for axes, cell in response.cells():
        if causes[cell.number]:
            end = cell.start + cell.width
            color = CAUSES[causes[cell.number]][1]
            axes.plot([end, end], [-TEXT_HEIGHT, 0], color=color, transform=axes.get_xaxis_transform(), **style)
    shown = {causes[cell.number] for _, cell in response.cells()}
    return [
        (Line2D([], [], color=color, linewidth=2), f"ended by {words}")
        for cause, (words, color) in CAUSES.items()
        if cause in shown
    ]
