"""The token groups of GROUP PPO over the tokens of a response."""

from __future__ import annotations

import io
import math
import unicodedata
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from pl_grouprl.functional.token_groups import ENDED_BY_LAST, ENDED_BY_SIZE, ENDED_BY_VARIANCE, TokenGroups

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The tokens of a response as readable text, set in lines like a paragraph.

COLUMNS = 96
"""Characters of a line."""

_WIDEST = 4
"""By how much the tokens of a response that fills less than a line are spread."""

_MOST = 24
"""Characters of a token that are shown."""

_CONTEXT = 8
"""Tokens that are decoded before a token, so that it gets its space and its part of a character."""

_VISIBLE = {"\n": "↵", "\r": "␍", "\t": "→"}


class Cell(NamedTuple):
    """A token on its line.

    Attributes:
        number: Place in the response, from 0.
        start: Column at which it begins.
        width: Columns.
        text: What is shown.
    """

    number: int
    start: int
    width: int
    text: str


def token_texts(token_ids: Sequence[int], tokenizer: Any) -> list[str]:
    """Return the text that each token adds to a response.

    Args:
        token_ids: Tokens of one response, length T.
        tokenizer: A tokenizer of transformers.

    Returns:
        T strings, special tokens by name. A character made of several tokens is that of the last one; the others
        are empty.
    """
    texts = []
    for index in range(len(token_ids)):
        first = max(0, index - _CONTEXT)
        before = _decoded(tokenizer, token_ids[first:index])
        texts.append(_decoded(tokenizer, token_ids[first : index + 1])[len(before) :])
    return texts


def _decoded(tokenizer: Any, token_ids: Sequence[int]) -> str:
    """The text without the beginning of an unfinished character."""
    text: str = tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text.rstrip("�")


def lines_of(texts: Sequence[str], columns: int = COLUMNS) -> list[list[Cell]]:
    """Set tokens in lines, without splitting one; a new line follows each line break in the text."""
    shown = list(map(_shown, texts))
    widths = [max(1, sum(map(_width, text))) for text in shown]
    spread = max(1, min(_WIDEST, columns // sum(widths)))
    lines: list[list[Cell]] = [[]]
    for index, width in enumerate(spread * width for width in widths):
        last = lines[-1][-1] if lines[-1] else None
        start = last.start + last.width if last else 0
        if last and (start + width > columns or "\n" in texts[last.number]):
            lines.append([])
            start = 0
        lines[-1].append(Cell(index, start, width, shown[index]))
    return lines


def _shown(text: str) -> str:
    visible = "".join(_VISIBLE.get(character, character if character.isprintable() else "·") for character in text)
    return visible if len(visible) <= _MOST else visible[: _MOST - 1] + "…"


def _width(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


# A figure of one response: lines of tokens, and above each token what is known about it.
#
# Legend: T tokens of the response.

MARKERS = ("o", "D", "^", "s")
GREY, FAINT = "#868e96", "#dee2e6"

_LEFT, _RIGHT, _TOP, _BOTTOM = 0.85, 0.2, 0.75, 0.25
_COLUMN, _BARS, _TEXT, _GAP = 0.088, 0.85, 0.26, 0.16
"""Inches: margins of the figure, a character, the bars of a line, its text, and what is between lines."""

TEXT_HEIGHT = _TEXT / _BARS
"""Height of the text below the bars, in heights of the bars."""

Values = Sequence[float] | Tensor
"""A number for each token, shape [T]."""


class Response:
    """An empty figure of a response, to be filled by `bars`, `points`, `tint` and `finish`.

    Args:
        tokens: Text of each token, length T.
        series: Numbers per token by name, each of shape [T]; all share the scale of the figure.
        max_tokens: Tokens shown; a note says how many there are.

    Raises:
        ValueError: If there is nothing to draw, or a series has another length than the tokens.
    """

    def __init__(self, tokens: Sequence[str], series: Mapping[str, Values], max_tokens: int) -> None:
        if not tokens or not series:
            raise ValueError(f"tokens={list(tokens)!r} with {len(series)} series: there is nothing to draw.")
        if max_tokens < 1:
            raise ValueError(f"max_tokens is {max_tokens}; it must be 1 or larger.")
        self.series = {name: _numbers(name, values, len(tokens)) for name, values in series.items()}
        self.lines = lines_of(tokens[:max_tokens])
        self.note = f"the first {max_tokens} of {len(tokens)} tokens" if len(tokens) > max_tokens else ""
        shown = [own[cell.number] for own in self.series.values() for line in self.lines for cell in line]
        self.figure, self.axes = _empty_figure(len(self.lines), _limits(shown))
        for axes, line in zip(self.axes, self.lines, strict=True):
            _write(axes, line)

    def cells(self) -> list[tuple[Any, Cell]]:
        """Every token shown, with the axes of its line."""
        return [(axes, cell) for axes, line in zip(self.axes, self.lines, strict=True) for cell in line]

    def bars(self, values: Sequence[float], colors: Sequence[str]) -> None:
        """Draw a bar over each token; none where the value is NaN."""
        for axes, line in zip(self.axes, self.lines, strict=True):
            drawn = [cell for cell in line if math.isfinite(values[cell.number])]
            axes.bar(
                [cell.start + 0.06 for cell in drawn],
                [values[cell.number] for cell in drawn],
                [cell.width - 0.12 for cell in drawn],
                align="edge",
                color=[colors[cell.number] for cell in drawn],
                linewidth=0,
            )

    def points(self, values: Sequence[float], marker: str) -> Any:
        """Draw a point over the middle of each token."""
        drawn: Any = None
        for axes, line in zip(self.axes, self.lines, strict=True):
            middles, heights = [cell.start + cell.width / 2 for cell in line], [values[cell.number] for cell in line]
            (drawn,) = axes.plot(middles, heights, marker, color="black", markersize=3.5, markerfacecolor="white")
        return drawn

    def tint(self, colors: Sequence[str]) -> None:
        """Put a color behind the text of each token."""
        from matplotlib.patches import Rectangle

        for axes, cell in self.cells():
            place = {"transform": axes.get_xaxis_transform(), "clip_on": False, "zorder": 0, "linewidth": 0}
            corner = (cell.start, -TEXT_HEIGHT)
            axes.add_patch(Rectangle(corner, cell.width, TEXT_HEIGHT, color=colors[cell.number], **place))

    def finish(self, title: str, label: str, handles: Sequence[tuple[Any, str]]) -> Figure:
        """Add what explains the figure and return it."""
        height = self.figure.get_figheight()
        heading = ", ".join(part for part in (title, self.note) if part)
        left = _LEFT / self.figure.get_figwidth()
        self.figure.text(left, 1 - 0.1 / height, heading, va="top", fontsize=11, fontweight="bold", parse_math=False)
        self.figure.text(0.12 / self.figure.get_figwidth(), 0.5, label, rotation=90, va="center", fontsize=9)
        if handles:
            drawn, names = zip(*handles, strict=True)
            style: dict[str, Any] = {"fontsize": 8, "frameon": False, "borderaxespad": 0, "ncols": len(names)}
            legend = self.figure.legend(
                drawn, names, loc="upper left", bbox_to_anchor=(left, 1 - 0.33 / height), **style
            )
            for text in legend.get_texts():
                text.set_parse_math(False)
        return self.figure


def _numbers(name: str, values: Values, length: int) -> list[float]:
    flat = torch.as_tensor(values).detach().cpu().double()
    if flat.shape != (length,):
        raise ValueError(f"{name} has shape {tuple(flat.shape)}; there are {length} tokens, so pass ({length},).")
    return [float(value) for value in flat]


def _limits(values: Sequence[float]) -> tuple[float, float]:
    finite = [value for value in values if math.isfinite(value)]
    low, high = min([0.0, *finite]), max([0.0, *finite])
    if low == high:
        return -1.0, 1.0
    room = 0.08 * (high - low)
    return low - room if low < 0 else 0.0, high + room if high > 0 else 0.0


def _empty_figure(num_lines: int, limits: tuple[float, float]) -> tuple[Figure, list[Any]]:
    """A figure with one axes for each line, as wide as its characters are."""
    from matplotlib.ticker import MaxNLocator

    width = _LEFT + COLUMNS * _COLUMN + _RIGHT
    pitch = _BARS + _TEXT + _GAP
    height = _TOP + num_lines * pitch + _BOTTOM - _GAP
    figure = _figure(width, height)
    axes = []
    for number in range(num_lines):
        bottom = height - _TOP - number * pitch - _BARS
        own = figure.add_axes((_LEFT / width, bottom / height, COLUMNS * _COLUMN / width, _BARS / height))
        own.set(xlim=(0, COLUMNS), ylim=limits, xticks=[])
        own.yaxis.set_major_locator(MaxNLocator(4, min_n_ticks=3))
        own.tick_params(labelsize=7, length=0)
        own.spines[:].set_visible(False)
        own.grid(axis="y", color=FAINT, linewidth=0.6)
        own.set_axisbelow(True)
        own.axhline(0, color=GREY, linewidth=0.7)
        axes.append(own)
    return figure, axes


def _figure(width: float, height: float) -> Figure:
    """A figure that notebooks show, whether pyplot was imported or not."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    class ResponseFigure(Figure):
        def _repr_png_(self) -> bytes:
            picture = io.BytesIO()
            self.savefig(picture, format="png", dpi=110)
            return picture.getvalue()

    figure = ResponseFigure(figsize=(width, height), facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def _write(axes: Any, line: Sequence[Cell]) -> None:
    """The text of a line, below its bars, with the number of its first token in the margin."""
    below = {"transform": axes.get_xaxis_transform(), "va": "center", "parse_math": False}
    height = -0.5 * TEXT_HEIGHT
    for cell in line:
        middle = cell.start + cell.width / 2
        axes.text(middle, height, cell.text, ha="center", family="monospace", fontsize=9.5, **below)
    axes.text(-0.6, height, f"{line[0].number + 1}", ha="right", fontsize=7, color=GREY, **below)


# Advantages over the tokens of a response.

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


# The token groups of GROUP PPO over the tokens of a response.
#
# Legend: B rollouts, L length of the longest row, T tokens of the response.

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
