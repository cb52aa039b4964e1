"""Draws the forest of a packed row as text."""

from __future__ import annotations

from pl_grouprl.packing.layout import SharedPrefixLayout


def draw_forest(layout: SharedPrefixLayout) -> str:
    """Draw a layout as a tree of its segments' lengths, one line per segment, in row order."""
    last_child = {segment.parent: index for index, segment in enumerate(layout.segments)}
    lines: list[str] = []
    margins: list[str] = []  # of each segment's children
    for index, segment in enumerate(layout.segments):
        branch = margin = ""
        if segment.parent is not None:
            is_last = last_child[segment.parent] == index
            branch = margins[segment.parent] + ("└─ " if is_last else "├─ ")
            margin = margins[segment.parent] + ("   " if is_last else "│  ")
        lines.append(f"{branch}{segment.length}")
        margins.append(margin)
    return "\n".join(lines)
