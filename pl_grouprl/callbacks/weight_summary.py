"""The table of a module's weights at the start of a fit."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.callbacks import ModelSummary
from lightning.pytorch.utilities.model_summary.model_summary import get_human_readable_count


class WeightSummary(ModelSummary):
    """Lightning's `ModelSummary` without its FLOPs, which are 0 before anything has run.

    Args:
        max_depth: Levels of submodules to show: 1 for the parts of the module, such as policy and reference; 0 for
            none.
    """

    @staticmethod
    def summarize(
        summary_data: list[tuple[str, list[str]]],
        total_parameters: int,
        trainable_parameters: int,
        model_size: float,
        total_training_modes: dict[str, int],
        total_flops: int,
        **summarize_kwargs: Any,
    ) -> None:
        """Print name, class and number of weights of each part."""
        from rich import get_console
        from rich.table import Table

        columns = {name: values for name, values in summary_data if name in ("Name", "Type", "Params")}
        table = Table(*("weights" if name == "Params" else name.lower() for name in columns))
        for row in zip(*columns.values(), strict=True):
            table.add_row(*row)
        trained, total = (
            get_human_readable_count(int(count)).strip() for count in (trainable_parameters, total_parameters)
        )
        table.caption = f"{trained} of {total} weights are trained"
        get_console().print(table)
