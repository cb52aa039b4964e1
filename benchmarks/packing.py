"""How full rows of a token budget are, and how balanced ranks are, on random batches with log-normal lengths.

Only counts; no model runs. README.md says how to read the table.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.options import positive, write_json
from pl_grouprl.models import ModelCost
from pl_grouprl.packing import balance, imbalance, plan_rows

QWEN3_0_6B = ModelCost(2 * 440.5e6, {None: 28 * 16 * 4 * 128}, 2 * 1024 * 151_936)


@dataclass(frozen=True)
class Setting:
    """Random batches and the budget of their rows.

    Attributes:
        groups: Groups in a batch.
        rollouts: Rollouts of a group.
        prompt: Median tokens of a prompt.
        rollout: Median tokens of a rollout.
        sigma: Standard deviation of the logarithm of both lengths.
        budget: Tokens of a row.
    """

    groups: int = 64
    rollouts: int = 8
    prompt: int = 512
    rollout: int = 400
    sigma: float = 0.6
    budget: int = 16_384

    def draw(self, rng: random.Random) -> list[tuple[int, list[int]]]:
        """Prompt length and rollout lengths of each group of one batch."""
        return [
            (self._length(rng, self.prompt), [self._length(rng, self.rollout) for _ in range(self.rollouts)])
            for _ in range(self.groups)
        ]

    def _length(self, rng: random.Random, median: int) -> int:
        return max(1, round(rng.lognormvariate(math.log(median), self.sigma)))


SETTINGS = [
    Setting(),
    Setting(groups=128, rollouts=16, budget=32_768),
    Setting(groups=512),
    Setting(budget=32_768),
    Setting(groups=32),
    Setting(groups=16),
    Setting(groups=8),
    Setting(budget=12_288),
    Setting(budget=8192),
    Setting(sigma=1.0, budget=32_768),
]
"""The first is typical; then larger batches, fewer rows, and rows with few groups."""

COLUMNS = {
    "used": "of the rows' budget",
    "at best": "with the fewest rows that can hold the tokens",
    "rows": "per batch",
    "splits": "groups larger than the budget, per batch",
    "balanced": "largest cost of a rank over the mean",
    "worst": "the same in the least even batch",
    "in order": "groups assigned in order, the same number to each rank",
}


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Parse the command line, count, print, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=positive, default=200, help="random batches of each setting (default: 200)")
    parser.add_argument("--ranks", type=positive, default=8, help="simulated ranks (default: 8)")
    parser.add_argument("--output", type=Path, help="write OUTPUT.json")
    options = parser.parse_args(arguments)
    print(f"{options.batches} batches each, {options.ranks} ranks, costs of the shape of Qwen3-0.6B")
    print("\n".join(f"{name}: {meaning}" for name, meaning in COLUMNS.items()))
    print(f"\n{'setting':58} " + " ".join(f"{name:>9}" for name in COLUMNS))
    results = []
    for setting in SETTINGS:
        figures = count(setting, options.batches, options.ranks)
        print(f"{_words(setting):58} " + " ".join(f"{figures[name]:9.4f}" for name in COLUMNS), flush=True)
        results.append({"setting": asdict(setting), **figures})
    write_json(options.output, None, {"batches": options.batches, "ranks": options.ranks, "results": results})
    return results


def count(setting: Setting, batches: int, ranks: int) -> dict[str, float]:
    """Averages over the batches, by the names of `COLUMNS`."""
    rng = random.Random(0)
    batch_figures = [_of_batch(setting.draw(rng), setting.budget, ranks) for _ in range(batches)]
    averages = {name: mean(figures[name] for figures in batch_figures) for name in COLUMNS if name != "worst"}
    return averages | {"worst": max(figures["balanced"] for figures in batch_figures)}


def _of_batch(groups: list[tuple[int, list[int]]], budget: int, ranks: int) -> dict[str, float]:
    plan = plan_rows(groups, budget)
    tokens = sum(groups[group][0] + sum(groups[group][1]) for row in plan.rows for group in row)
    costs = QWEN3_0_6B.of_groups(groups)
    in_order = [group * ranks // len(groups) for group in range(len(groups))]
    return {
        "used": tokens / (len(plan.rows) * budget),
        "at best": tokens / (math.ceil(tokens / budget) * budget),
        "rows": len(plan.rows),
        "splits": len(plan.splits),
        "balanced": imbalance(costs, balance(costs, ranks), ranks),
        "in order": imbalance(costs, in_order, ranks),
    }


def _words(setting: Setting) -> str:
    changed = {name: value for name, value in asdict(setting).items() if value != getattr(Setting(), name)}
    lengths = f"{setting.groups} groups of {setting.rollouts}, budget {setting.budget}"
    return lengths + "".join(f", {name} {changed[name]}" for name in ("prompt", "rollout", "sigma") if name in changed)
