"""A figure of one response: lines of tokens, and above each token what is known about it.

Legend: T tokens of the response.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pl_grouprl.plots.tokens import COLUMNS, Cell, lines_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
