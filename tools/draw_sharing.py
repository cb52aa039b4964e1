"""Draws what sharing a prompt saves: `python tools/draw_sharing.py docs/images/sharing.png`.

The length of a bar is its number of tokens; both halves have the same scale.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

PROMPT, ROLLOUT = "#5b7fa6", "#e0a458"
GREY = "#8a8a8a"


def token_counts(prompt: int, rollout: int, group: int) -> tuple[int, int]:
    """Tokens that a decoder reads for one group: with repeated prompts, and with a shared prompt."""
    return group * (prompt + rollout), prompt + group * rollout


def draw(path: Path, prompt: int = 2048, rollout: int = 256, group: int = 8) -> None:
    """Draw one group both ways.

    Args:
        path: PNG file.
        prompt: Tokens of the prompt.
        rollout: Tokens of each rollout.
        group: Rollouts.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    repeated, shared = token_counts(prompt, rollout, group)
    figure = Figure(figsize=(10, 2.9), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharex=True, sharey=True)
    for row in range(group):
        _bar(left, row, 0, prompt, PROMPT)
        _bar(left, row, prompt, rollout, ROLLOUT)
        _bar(right, row, prompt + 0.06 * prompt, rollout, ROLLOUT)
        right.plot([prompt, prompt * 1.06], [(group - 1) / 2, row], color=GREY, linewidth=0.8)
    _bar(right, (group - 1) / 2, 0, prompt, PROMPT)
    left.set_title(f"prompt repeated: {repeated:,} tokens", fontsize=11)
    right.set_title(f"prompt once: {shared:,} tokens, {repeated / shared:.1f} times fewer", fontsize=11)
    right.text(prompt / 2, (group - 1) / 2 - 0.75, f"prompt, {prompt:,} tokens", ha="center", fontsize=9, color=PROMPT)
    right.text(prompt * 0.98, 0.1, f"{group} rollouts of {rollout} tokens", ha="right", fontsize=9, color="#a8701f")
    for axes in (left, right):
        axes.set_axis_off()
        axes.set_ylim(group - 0.4, -0.6)
    figure.savefig(path, dpi=130)


def _bar(axes: Any, row: float, start: float, length: float, color: str) -> None:
    axes.barh(row, length, left=start, height=0.62, color=color)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path)
    draw(parser.parse_args().path)
