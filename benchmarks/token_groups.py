"""Time to find token groups and their advantages, compared with one forward of the tiny model on as many tokens.

`python -m benchmarks token-groups --help` lists the options. The forward is that of the decoder alone (no head, no
gradient) with the architecture of configs/grpo_pg.yaml on rows of the same length; it is timed on some of the rows and
scaled to all, and the scale is printed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.config_file import read_config
from benchmarks.measure import resident_peak_mib, time_in_turns
from benchmarks.options import add_common, begin_on, positive, write_json
from pl_grouprl.functional.token_groups import find_token_groups, token_group_advantages

CASES = {
    "threshold 4": (4.0, False),
    "threshold 1": (1.0, False),
    "no group ends before max_size": (1e9, False),
    "threshold 4, a tenth of the tokens masked": (4.0, True),
}
"""Threshold, and whether the mask has gaps."""


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Parse the command line, measure, print, and write JSON."""
    options = parse(arguments)
    conditions = begin_on("cpu", options)
    shape = f"B={options.rows}, T={options.length}, M={options.max_size}, float32"
    print(shape, flush=True)
    inputs = random_rows(options.rows, options.length)
    cases = {name: token_groups(inputs, options.max_size, *case) for name, case in CASES.items()}
    peak = resident_peak_mib(next(iter(cases.values())))  # before anything large has run
    forward = decoder_forward(options)
    forward()
    timings = time_in_turns({**cases, "forward": forward}, options.rounds, clock=options.clock)
    scale = options.rows / options.forward_rows
    seconds = timings["forward"].median * scale
    result: dict[str, Any] = {
        "shape": shape,
        "rounds": options.rounds,
        "forward": {
            "architecture": architecture(),
            "rows": options.forward_rows,
            "seconds": timings["forward"].seconds,
            "scale": scale,
            "seconds_scaled": seconds,
        },
        "peak_mib": peak,
        "token_groups": {
            name: {
                "seconds": timings[name].seconds,
                "share_of_forward": timings[name].median / seconds,
            }
            for name in cases
        },
    }
    print(
        f"forward: {timings['forward'].median:.3f} s for {options.forward_rows} rows of {options.length} tokens, "
        f"times {scale:g}: {seconds:.1f} s for all rows"
    )
    for name, case in result["token_groups"].items():
        print(
            f"{name}: {timings[name].median:.3f} s for find_token_groups and token_group_advantages, "
            f"{100 * case['share_of_forward']:.2f} % of the forward"
        )
    if options.step:
        result["share_of_step"] = share_of_step(options.step)
        shares = {name: f"{100 * value:.2f} %" for name, value in result["share_of_step"].items()}
        print(f"share of a step of configs/group_ppo.yaml, as {options.step} has it: {shares}")
    print(f"memory at its peak, {next(iter(cases))}: {peak:.0f} MiB beyond the inputs")
    write_json(options.output, conditions, result)
    return result


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=positive, default=512, help="B (default: 512)")
    parser.add_argument("--length", type=positive, default=4096, help="T (default: 4096)")
    parser.add_argument("--max-size", type=positive, default=16, help="M (default: 16)")
    parser.add_argument("--forward-rows", type=positive, default=8, help="rows of the timed forward (default: 8)")
    parser.add_argument("--step", type=Path, help="JSON of `step`, for the share of a GROUP PPO step")
    add_common(parser, rounds=3)
    return parser.parse_args(arguments)


def share_of_step(path: Path) -> dict[str, float]:
    """The share of a GROUP PPO step spent on token groups and their advantages, from the results of `step`."""
    runs = json.loads(path.read_text())["runs"]
    shares = [run["token_groups"] for run in runs if run["config"] == "group_ppo" and run["model"] == "default"]
    if not shares:
        raise ValueError(f"{path} has no run of group_ppo; run `python -m benchmarks step --config group_ppo`.")
    return shares[0]


def random_rows(rows: int, length: int) -> list[Tensor]:
    """Random errors, rewards and values (normal) and norms (uniform)."""
    generator = torch.Generator().manual_seed(0)
    normal = [torch.randn(rows, length, generator=generator) for _ in range(3)]
    return [*normal, torch.rand(rows, length, generator=generator)]


def token_groups(inputs: Sequence[Tensor], max_size: int, threshold: float, gaps: bool) -> Callable[[], None]:
    """A call of both functions."""
    errors, rewards, values, norms = inputs
    mask = norms > 0.1 if gaps else torch.ones_like(norms, dtype=torch.bool)

    def run() -> None:
        groups = find_token_groups(errors, norms, mask, threshold=threshold, max_size=max_size)
        token_group_advantages(rewards, values, groups, mask, gamma=1.0, lam=0.95)

    return run


def architecture() -> dict[str, Any]:
    """The tiny model's config, with a vocabulary about as large as its tokenizer's."""
    policy = read_config("grpo_pg")["model"]["init_args"]["policy"]
    return policy["init_args"]["architecture"] | {"vocab_size": 40}


def decoder_forward(options: argparse.Namespace) -> Callable[[], None]:
    """A call of the tiny model's decoder, row by row, which is fastest here."""
    from transformers import AutoConfig, AutoModel

    config = AutoConfig.for_model(**architecture() | {"max_position_embeddings": options.length})
    model = AutoModel.from_config(config).eval()
    shape = (options.forward_rows, options.length)
    rows = torch.randint(config.vocab_size, shape, generator=torch.Generator().manual_seed(0))

    @torch.no_grad()
    def run() -> None:
        for row in rows:
            model(input_ids=row[None], use_cache=False)

    return run
