"""Keeps the metrics of a run by step, independently of loggers; saved in checkpoints."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

Point = tuple[int, float]


class MetricHistory:
    """Values of each metric with their optimizer steps, in order."""

    def __init__(self) -> None:
        self.points: dict[str, list[Point]] = {}

    def record(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Add a value of each metric. Non-finite values are skipped; a second value for a step replaces the first."""
        for name, value in metrics.items():
            number = float(value)
            if not math.isfinite(number):
                continue
            points = self.points.setdefault(name, [])
            if points and points[-1][0] == step:
                points.pop()
            points.append((step, number))

    def statistics(self, name: str) -> dict[str, float]:
        """Return first, last, lowest, highest and mean value, and the lowest over the last quarter of the steps.

        The quarter is that of the steps from this metric's first value to its last.
        """
        points = self.points[name]
        values = [value for _, value in points]
        start, end = points[0][0], points[-1][0]
        late = [value for step, value in points if step >= end - (end - start) / 4]
        return {
            "first": values[0],
            "last": values[-1],
            "min": min(values),
            "max": max(values),
            "mean": math.fsum(values) / len(values),
            "min_last_quarter": min(late),
            "count": len(values),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return plain lists of numbers."""
        return {name: [list(point) for point in points] for name, points in self.points.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.points = {name: [(int(step), float(value)) for step, value in points] for name, points in state.items()}
