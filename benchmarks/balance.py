"""Compares the time of two ranks with the estimated cost of their groups: two processes, one thread each.

README.md says how to read the table.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import distributed

from benchmarks.cases import Case
from benchmarks.measure import CLOCKS, Conditions
from benchmarks.options import positive, write_json
from benchmarks.packing import Setting
from pl_grouprl.attention import find_decoder, shared_prefix
from pl_grouprl.models import ModelCost
from pl_grouprl.models.score import score
from pl_grouprl.packing import balance, imbalance, pack, plan_rows
from pl_grouprl.types import Rollout, RolloutGroup

RANKS = 2
MODEL = Case("two ranks", hidden=256, layers=4, heads=8, kv_heads=4, head_dim=32, intermediate=768, vocabulary=4096)
Lengths = list[tuple[int, list[int]]]


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line, run both ranks, print, and write JSON."""
    options = parse(arguments)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run_rank, (options, f"file://{folder}/meet"), nprocs=RANKS)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Options, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=positive, default=12, help="in the batch of both ranks (default: 12)")
    parser.add_argument("--rollouts", type=positive, default=8, help="of each group (default: 8)")
    parser.add_argument("--prompt", type=positive, default=256, help="median tokens of a prompt (default: 256)")
    parser.add_argument("--rollout", type=positive, default=64, help="median tokens of a rollout (default: 64)")
    parser.add_argument("--sigma", type=float, default=0.6, help="of the logarithm of the lengths (default: 0.6)")
    parser.add_argument("--budget", type=positive, default=4096, help="tokens of a row (default: 4096)")
    parser.add_argument("--rounds", type=positive, default=5, help="how often each assignment runs (default: 5)")
    parser.add_argument("--seed", type=int, default=0, help="of the batch (default: 0)")
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall", help="cpu: each process's own processor time")
    parser.add_argument("--output", type=Path, help="write OUTPUT.json")
    return parser.parse_args(arguments)


def assignments(costs: Sequence[float]) -> dict[str, list[int]]:
    """The rank of each group, by assignment: balanced, in order, and the costliest half on one rank."""
    count = len(costs)
    by_cost = sorted(range(count), key=lambda group: -costs[group])
    costliest_half = set(by_cost[: count // RANKS])
    return {
        "balanced": balance(costs, RANKS),
        "in order": [group * RANKS // count for group in range(count)],
        "costliest half together": [0 if group in costliest_half else 1 for group in range(count)],
    }


def run_rank(rank: int, options: argparse.Namespace, meeting_place: str) -> None:
    """Time this rank's passes under each assignment; rank 0 gathers and reports."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=meeting_place, rank=rank, world_size=RANKS)
    conditions = Conditions.here("cpu", options.clock)
    lengths = Setting(options.groups, options.rollouts, options.prompt, options.rollout, options.sigma).draw(
        random.Random(options.seed)
    )
    model = MODEL.make_model()
    costs = ModelCost.of(find_decoder(model), model.get_output_embeddings()).of_groups(lengths)
    plans = assignments(costs)
    seconds: dict[str, list[float]] = {name: [] for name in plans}
    groups = random_tokens(lengths)
    with shared_prefix(model):
        for number in range(options.rounds + 1):  # the first round warms up
            for name, ranks in plans.items():
                own = [group for group, owner in zip(groups, ranks, strict=True) if owner == rank]
                took = update(model, own, options.budget, options.clock)
                seconds[name] += [took] if number else []
    of_ranks: list[Any] = [None] * RANKS
    distributed.all_gather_object(of_ranks, seconds)
    if rank == 0:
        rows = [_figures(name, costs, ranks, [took[name] for took in of_ranks]) for name, ranks in plans.items()]
        report(options, conditions, lengths, rows)
    distributed.destroy_process_group()


def random_tokens(lengths: Lengths) -> list[RolloutGroup]:
    """Groups of these lengths, the same on every rank."""
    rng = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(MODEL.vocabulary) for _ in range(count)]

    return [RolloutGroup(tokens(prompt), [Rollout(tokens(n)) for n in rollouts]) for prompt, rollouts in lengths]


def update(model: Any, groups: list[RolloutGroup], budget: int, clock: str) -> float:
    """Seconds of this rank's passes. Afterwards gradients are summed, where the ranks wait for each other."""
    lengths = [(len(group.prompt_ids), [len(r.token_ids) for r in group.rollouts]) for group in groups]
    model.zero_grad()
    distributed.barrier()
    start = CLOCKS[clock]()
    for row in plan_rows(lengths, budget).rows:
        batch = pack([groups[group] for group in row])
        score(model, batch).logprobs_N.sum().backward()
    took = CLOCKS[clock]() - start
    for parameter in model.parameters():
        distributed.all_reduce(parameter.grad)
    return took


def _figures(name: str, costs: Sequence[float], ranks: Sequence[int], seconds: list[list[float]]) -> dict[str, Any]:
    per_rank = [median(rounds) for rounds in seconds]
    estimated = imbalance(costs, ranks, RANKS)
    measured = max(per_rank) / (sum(per_rank) / RANKS)
    return {
        "assignment": name,
        "estimated": estimated,
        "measured": measured,
        "difference": measured / estimated - 1,
        "seconds": per_rank,
        "rounds": seconds,
        "groups": [list(ranks).count(rank) for rank in range(RANKS)],
    }


def report(options: argparse.Namespace, conditions: Conditions, lengths: Lengths, rows: list[dict[str, Any]]) -> None:
    """Print the table and write it, with its conditions."""
    tokens = sum(prompt + sum(rollouts) for prompt, rollouts in lengths)
    shape = f"hidden {MODEL.hidden}, {MODEL.layers} layers, {MODEL.dtype}, {options.groups} groups, {tokens} tokens"
    print(f"conditions: {conditions}\n{shape}, rows of {options.budget}, medians of {options.rounds} rounds\n")
    print("largest over mean of two ranks    estimated  measured  difference  seconds of each rank")
    for row in rows:
        each = "  ".join(f"{seconds:.2f}" for seconds in row["seconds"])
        print(
            f"{row['assignment']:33} {row['estimated']:9.3f} {row['measured']:9.3f} {row['difference']:10.1%}   {each}"
        )
    told = {key: value for key, value in vars(options).items() if key != "output"}
    write_json(options.output, conditions, {"model": asdict(MODEL), "options": told, "results": rows})
