"""Figures of one response: its text in lines like a paragraph, and above each token what is known about it.

Legend: B rollouts, L length of the longest row, T tokens of the response.
"""

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

Values = Sequence[float] | Tensor
"""A number for each token, shape [T]."""

LIKELIER, LESS_LIKELY, UNTRAINED = "#4c8bf5", "#f08c4a", "#e9ecef"
GREY, FAINT = "#868e96", "#dee2e6"
MARKERS = ("o", "D", "^", "s")

DARK = ("#4c8bf5", "#f08c4a", "#3fa65a", "#d6568a", "#8a6fe8", "#22a6b3")
LIGHT = ("#d6e4fd", "#fce0cc", "#d0ecd7", "#f8d6e3", "#e3dcfb", "#cdeef1")
"""Colors of neighboring groups: of their bars, and behind their text."""

CAUSES = {
    ENDED_BY_VARIANCE: ("the variance rule", "#212529"),
    ENDED_BY_SIZE: ("its size", "#e03131"),
    ENDED_BY_LAST: ("the end of the response or turn", "#adb5bd"),
}
"""By what a group was ended, in words, and the color of the line after its last token."""


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
            they were divided by it. NaN marks a token that is not trained, such as tool output; its text is gray. Or
            up to five of them by name, to be compared.
        title: Heading.
        label: What the scale shows.
        max_tokens: Tokens shown, from the first on.

    Returns:
        A `matplotlib.figure.Figure` on the Agg canvas, not known to pyplot; `figure.savefig("advantages.png")` writes
        it, and a notebook shows it.

    Raises:
        ValueError: If there are more kinds of advantages than five, or if shapes differ.
    """
    from matplotlib.patches import Patch

    response = Response(tokens, advantages, label, max_tokens)
    first = response.first
    response.bars([LIKELIER if value > 0 else LESS_LIKELY for value in first])
    response.tint([UNTRAINED if math.isnan(value) else "none" for value in first])
    explained = (
        (LIKELIER, "more likely", any(value > 0 for value in first)),
        (LESS_LIKELY, "less likely", any(value < 0 for value in first)),
        (UNTRAINED, "not trained", any(map(math.isnan, first))),
    )
    handles = [(Patch(color=color), words) for color, words, is_shown in explained if is_shown]
    return response.finish(title, label, handles + response.compare())


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
        ValueError: If there are more values than five, if shapes differ, or if the row has trained tokens beyond T.
    """
    from matplotlib.lines import Line2D

    index: list[int] = groups.group_index[row].tolist()
    if len(index) < len(tokens) or any(number >= 0 for number in index[len(tokens) :]):
        raise ValueError(
            f"tokens has {len(tokens)} entries, which are not those of row {row} of groups ({len(index)} long)."
        )
    response = Response(tokens, values, label, max_tokens)
    dark, light = (
        [colors[number % len(colors)] if number >= 0 else UNTRAINED for number in index] for colors in (DARK, LIGHT)
    )
    response.bars(dark)
    response.tint(light)
    handles: list[tuple[Any, str]] = []
    if groups.causes is not None:  # a line after the last token of each group
        causes = groups.causes[row].tolist()
        shown = set()
        for axes, cell in response.cells():
            if cause := causes[cell.number]:
                shown.add(cause)
                end, transform = cell.start + cell.width, axes.get_xaxis_transform()
                style = {"color": CAUSES[cause][1], "linewidth": 2, "clip_on": False, "solid_capstyle": "butt"}
                axes.plot([end, end], [-TEXT_HEIGHT, 0], transform=transform, **style)
        for cause, (words, color) in CAUSES.items():
            if cause in shown:
                handles.append((Line2D([], [], color=color, linewidth=2), f"ended by {words}"))
    return response.finish(title, label, handles + response.compare())


# The figure.

_LEFT, _RIGHT, _TOP, _BOTTOM = 0.85, 0.2, 0.75, 0.25
_COLUMN, _BARS, _TEXT, _GAP = 0.088, 0.85, 0.26, 0.16
"""Inches: margins of the figure, a character, the bars of a line, its text, and what is between lines."""

TEXT_HEIGHT = _TEXT / _BARS
"""Height of the text below the bars, in heights of the bars."""


class Response:
    """A figure of a response with its text, to be filled by `bars`, `tint`, `compare` and `finish`.

    Args:
        tokens: Text of each token, length T.
        values: Numbers per token, of shape [T], or several by name; all share the scale of the figure.
        label: Name of the numbers if they have none.
        max_tokens: Tokens shown; a note says how many there are.

    Raises:
        ValueError: If there are too many series, or one has another length than the tokens.
    """

    def __init__(
        self, tokens: Sequence[str], values: Values | Mapping[str, Values], label: str, max_tokens: int
    ) -> None:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator

        named = dict(values) if isinstance(values, Mapping) else {label: values}
        if len(named) > len(MARKERS) + 1:
            raise ValueError(f"{len(named)} series were given; at most {len(MARKERS) + 1} can be told apart.")
        self.series: dict[str, list[float]] = {}
        for name, own in named.items():
            flat = torch.as_tensor(own).detach().cpu().double()
            if flat.shape != (len(tokens),):
                raise ValueError(f"{name} has shape {tuple(flat.shape)}; there are {len(tokens)} tokens.")
            self.series[name] = flat.tolist()
        self.first = next(iter(self.series.values()))
        self.lines = lines_of(tokens[:max_tokens])
        self.note = f"the first {max_tokens} of {len(tokens)} tokens" if len(tokens) > max_tokens else ""
        # A figure with one axes for each line, as wide as its characters are, and the text below the bars.
        shown = [own[cell.number] for own in self.series.values() for line in self.lines for cell in line]
        finite = [value for value in shown if math.isfinite(value)]
        low, high = min([0.0, *finite]), max([0.0, *finite])
        room = 0.08 * (high - low)
        limits = (low - room if low < 0 else 0.0, high + room if high > 0 else 0.0) if low < high else (-1.0, 1.0)
        width = _LEFT + COLUMNS * _COLUMN + _RIGHT
        pitch = _BARS + _TEXT + _GAP
        height = _TOP + len(self.lines) * pitch + _BOTTOM - _GAP

        class ResponseFigure(Figure):  # shown by notebooks, whether pyplot was imported or not
            def _repr_png_(self) -> bytes:
                picture = io.BytesIO()
                self.savefig(picture, format="png", dpi=110)
                return picture.getvalue()

        self.axes: list[Any] = []
        self.figure: Any = ResponseFigure(figsize=(width, height), facecolor="white")
        FigureCanvasAgg(self.figure)
        for number, line in enumerate(self.lines):
            bottom = height - _TOP - number * pitch - _BARS
            axes = self.figure.add_axes((_LEFT / width, bottom / height, COLUMNS * _COLUMN / width, _BARS / height))
            axes.set(xlim=(0, COLUMNS), ylim=limits, xticks=[])
            axes.yaxis.set_major_locator(MaxNLocator(4, min_n_ticks=3))
            axes.tick_params(labelsize=7, length=0)
            axes.spines[:].set_visible(False)
            axes.grid(axis="y", color=FAINT, linewidth=0.6)
            axes.set_axisbelow(True)
            axes.axhline(0, color=GREY, linewidth=0.7)
            below: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "va": "center", "parse_math": False}
            for cell in line:
                place = (cell.start + cell.width / 2, -0.5 * TEXT_HEIGHT)
                axes.text(*place, cell.text, ha="center", family="monospace", fontsize=9.5, **below)
            first = f"{line[0].number + 1}"  # in the margin
            axes.text(-0.6, -0.5 * TEXT_HEIGHT, first, ha="right", fontsize=7, color=GREY, **below)
            self.axes.append(axes)

    def cells(self) -> list[tuple[Any, Cell]]:
        """Every token shown, with the axes of its line."""
        return [(axes, cell) for axes, line in zip(self.axes, self.lines, strict=True) for cell in line]

    def bars(self, colors: Sequence[str]) -> None:
        """Draw a bar over each token for the first series; none where the value is NaN."""
        for axes, line in zip(self.axes, self.lines, strict=True):
            drawn = [cell for cell in line if math.isfinite(self.first[cell.number])]
            axes.bar(
                [cell.start + 0.06 for cell in drawn],
                [self.first[cell.number] for cell in drawn],
                [cell.width - 0.12 for cell in drawn],
                align="edge",
                color=[colors[cell.number] for cell in drawn],
                linewidth=0,
            )

    def tint(self, colors: Sequence[str]) -> None:
        """Put a color behind the text of each token."""
        from matplotlib.patches import Rectangle

        for axes, cell in self.cells():
            place = {"transform": axes.get_xaxis_transform(), "clip_on": False, "zorder": 0, "linewidth": 0}
            corner = (cell.start, -TEXT_HEIGHT)
            axes.add_patch(Rectangle(corner, cell.width, TEXT_HEIGHT, color=colors[cell.number], **place))

    def compare(self) -> list[tuple[Any, str]]:
        """Draw all series but the first as points; return what the legend says of them, the first included."""
        from matplotlib.patches import Patch

        bars, *others = self.series
        handles: list[tuple[Any, str]] = [(Patch(color=GREY), bars)] if others else []
        for name, marker in zip(others, MARKERS, strict=False):
            drawn: Any = None
            for axes, line in zip(self.axes, self.lines, strict=True):
                middles = [cell.start + cell.width / 2 for cell in line]
                heights = [self.series[name][cell.number] for cell in line]
                (drawn,) = axes.plot(middles, heights, marker, color="black", markersize=3.5, markerfacecolor="white")
            handles.append((drawn, name))
        return handles

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


# The text.

COLUMNS = 96
"""Characters of a line."""

_WIDEST = 4
"""By how much the tokens of a response that fills less than a line are spread."""

_MOST = 24
"""Characters of a token that are shown."""

_CONTEXT = 8
"""Tokens that are decoded before a token, so that it gets its space and its part of a character."""


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
        T strings, special tokens by name. A character made of several tokens belongs to the last one; the others
        are empty.
    """

    def decoded(start: int, end: int) -> str:
        text: str = tokenizer.decode(
            list(token_ids[start:end]), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text.rstrip("�")  # without the beginning of an unfinished character

    texts = []
    for index in range(len(token_ids)):
        first = max(0, index - _CONTEXT)
        texts.append(decoded(first, index + 1)[len(decoded(first, index)) :])
    return texts


def lines_of(texts: Sequence[str], columns: int = COLUMNS) -> list[list[Cell]]:
    """Set tokens in lines, without splitting one; a new line follows each line break in the text."""
    shown, widths = [], []
    for text in texts:
        visible = "".join(
            {"\n": "↵", "\r": "␍", "\t": "→"}.get(character, character if character.isprintable() else "·")
            for character in text
        )
        shown.append(visible if len(visible) <= _MOST else visible[: _MOST - 1] + "…")
        upright = [character for character in shown[-1] if not unicodedata.combining(character)]
        widths.append(max(1, sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in upright)))
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
