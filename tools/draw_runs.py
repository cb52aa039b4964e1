"""Draws a few panels of several runs over each other: `python tools/draw_runs.py PICTURE NAME=RUN...`.

    python tools/draw_runs.py runs.png "as it is=runs/grpo_pg/version_0" "twice the rate=runs/grpo_pg/version_1"

A RUN is a run folder; its NAME stands in the legend. `python -m pl_grouprl.report` makes a page of everything instead.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from pl_grouprl.callbacks.curves import draw_panel
from pl_grouprl.report import read_run

PANELS = ("reward", "completion length (tokens)", "entropy (nats per token)", "KL to the reference", "gradient norm")
EQUAL = "frac_reward_zero_std"


def draw(path: Path, runs: dict[str, Path]) -> None:
    """Draw the panels of all runs.

    Args:
        path: PNG file.
        runs: Run folders by name.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    points = {name: dict(read_run(folder).history.points) for name, folder in runs.items()}
    figure = Figure(figsize=(15, 7), layout="constrained")
    FigureCanvasAgg(figure)
    *axes, last = figure.subplots(2, 3).flat
    for own, title in zip(axes, PANELS, strict=True):
        draw_panel([own], title, points)
    shares = {name: {EQUAL: own[EQUAL]} if EQUAL in own else {} for name, own in points.items()}
    draw_panel([last], "shares: truncated, equal rewards, clipped", shares)
    last.set_title("share of groups with equal rewards", fontsize=10, loc="left", fontweight="bold")
    figure.savefig(path, dpi=100)


def main(args: Sequence[str] | None = None) -> None:
    """Draw what the command line names."""
    parser = argparse.ArgumentParser(description="Draws a few panels of several runs over each other.")
    parser.add_argument("picture", type=Path, help="PNG file to write")
    parser.add_argument("runs", nargs="+", metavar="NAME=RUN", help="run folder, after its name in the legend")
    given = parser.parse_args(args)
    pairs = [run.rpartition("=") for run in given.runs]
    for name, _, folder in pairs:
        if not name:
            parser.error(f"{folder!r} has no name; pass NAME=RUN, such as healthy={folder}")
    draw(given.picture, {name: Path(folder) for name, _, folder in pairs})


if __name__ == "__main__":
    main()
