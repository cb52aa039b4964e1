"""Rollouts per second: the engines, and transformers' `generate`, on the same prompts and a random model.

`python -m benchmarks rollouts` takes minutes; README.md says how to read the table. vLLM is included if
installed. Every round has new prompts, so no cache has them.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.measure import Timing, time_in_turns
from benchmarks.options import add_common, begin_on, positive, write_json
from pl_grouprl.distributed.weight_stream import checkpoint_weights
from pl_grouprl.rollout import HFRolloutEngine, VLLMRolloutEngine
from pl_grouprl.types import SamplingConfig
from pl_grouprl.utilities import optional

METHODS = ("generate", "repeat cache", "hf", "vllm")

_SMALL = {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "head_dim": 64, "vocab_size": 32_000}

SHAPES: dict[str, dict[str, Any]] = {
    "small": _SMALL | {"num_hidden_layers": 4},
    "48m": _SMALL | {"num_hidden_layers": 8, "vocab_size": 44_544},
    "0.6b": {
        **{"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
        **{"head_dim": 128, "vocab_size": 32_000},
    },
}
"""Qwen3 with tied embeddings, two query heads per key/value head. `0.6b` is Qwen3-0.6B with a smaller vocabulary."""


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Parse the command line, measure, print, and write JSON."""
    options = parse(arguments)
    deadline = time.monotonic() + 60 * options.minutes
    conditions = begin_on(options.device, options)
    if options.threads:
        os.environ["OMP_NUM_THREADS"] = str(options.threads)  # for vLLM
    with torch.device(options.device):
        model = make_model(options.shape, getattr(torch, options.dtype))
    methods, sync = make_methods(model, options)
    for name, run in methods.items():
        print(f"warm-up: {name}", flush=True)
        run()
    timings = time_in_turns(methods, options.rounds, deadline, clock=options.clock)
    report = {
        "options": {name: value for name, value in vars(options).items() if name != "output"},
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "weight_sync": sync,
        "rounds": min(len(timing.seconds) for timing in timings.values()),
        "rows": rows(timings, options.prompts * options.generations, options.new_tokens),
    }
    show(report)
    write_json(options.output, conditions, report)
    return report


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="small", help="of the model (default: small)")
    parser.add_argument("--prompts", type=positive, default=4, help="different prompts (default: 4)")
    parser.add_argument("--prompt-length", type=positive, default=1024, help="tokens of each (default: 1024)")
    parser.add_argument("--generations", type=positive, default=8, help="rollouts of each prompt (default: 8)")
    parser.add_argument("--new-tokens", type=positive, default=64, help="tokens of each rollout (default: 64)")
    parser.add_argument("--minutes", type=float, default=30.0, help="no round begins later than that (default: 30)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the model")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="default: cpu")
    parser.add_argument("--only", nargs="+", choices=METHODS, help="leave the others out")
    add_common(parser, rounds=3)
    options = parser.parse_args(arguments)
    if options.prompt_length < 2:
        parser.error("--prompt-length is 1; continuing from a copied cache needs at least 2 tokens.")
    return options


def make_model(shape: str, dtype: torch.dtype) -> Any:
    """A Qwen3 with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "qwen3",
        **SHAPES[shape],
        num_key_value_heads=SHAPES[shape]["num_attention_heads"] // 2,
        max_position_embeddings=32_768,
        tie_word_embeddings=True,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def make_methods(model: Any, options: argparse.Namespace) -> tuple[dict[str, Callable[[], Any]], dict[str, float]]:
    """The functions to time by name, and the cost of sending the weights to vLLM; empty without vLLM."""
    sampling = SamplingConfig(max_new_tokens=options.new_tokens)
    asked = {"num_generations": options.generations, "seed": 0}
    sync: dict[str, float] = {}
    hf = HFRolloutEngine(model)
    methods: dict[str, Callable[[], Any]] = {
        "generate": on_new_prompts(options, lambda prompts: generate(model, prompts, options)),
        "repeat cache": on_new_prompts(options, lambda prompts: repeat_cache(model, prompts, options)),
        "hf": on_new_prompts(options, lambda prompts: hf.generate(prompts, sampling, **asked)),
    }
    wanted = options.only or [name for name in METHODS if name != "vllm" or optional.VLLM_AVAILABLE]
    if "vllm" in wanted:
        length = options.prompt_length + options.new_tokens
        vllm = VLLMRolloutEngine(max_model_len=length, enforce_eager=options.device == "cpu")
        vllm.bind(model)
        for version in (1, 2):  # the first one also starts vLLM
            started = time.perf_counter()
            sync = vllm.update_weights(checkpoint_weights(model, model.named_parameters()), version=version)
            sync["seconds"] = time.perf_counter() - started
        methods["vllm"] = on_new_prompts(options, lambda prompts: vllm.generate(prompts, sampling, **asked))
    return {name: methods[name] for name in wanted}, sync


def on_new_prompts(options: argparse.Namespace, run: Callable[[list[list[int]]], Any]) -> Callable[[], Any]:
    """Call a function with new random prompts each time; the n-th call has the same prompts for all methods."""
    rng, vocab_size = random.Random(0), SHAPES[options.shape]["vocab_size"]

    def tokens() -> list[int]:
        return [rng.randrange(1, vocab_size) for _ in range(options.prompt_length)]

    return lambda: run([tokens() for _ in range(options.prompts)])


@torch.no_grad()
def generate(model: Any, prompts: Sequence[Sequence[int]], options: argparse.Namespace) -> Any:
    """Plain transformers: every rollout has its own copy of the prompt."""
    repeated = [list(prompt) for prompt in prompts for _ in range(options.generations)]
    inputs = torch.tensor(repeated, device=options.device)
    return _generate(model, inputs, options)


@torch.no_grad()
def repeat_cache(model: Any, prompts: Sequence[Sequence[int]], options: argparse.Namespace) -> Any:
    """Plain transformers with a copied cache: encode the prompts once, and copy their cache for every rollout.

    The last prompt token is left to `generate`, which needs at least one token that is not in the cache.
    """
    from transformers import DynamicCache

    inputs, cache = torch.tensor(prompts, device=options.device), DynamicCache(config=model.config)
    model(inputs[:, :-1], past_key_values=cache, logits_to_keep=1)
    cache.batch_repeat_interleave(options.generations)
    return _generate(model, inputs.repeat_interleave(options.generations, dim=0), options, past_key_values=cache)


def _generate(model: Any, inputs: torch.Tensor, options: argparse.Namespace, **kwargs: Any) -> Any:
    length = {"max_new_tokens": options.new_tokens, "min_new_tokens": options.new_tokens}
    return model.generate(inputs, attention_mask=torch.ones_like(inputs), do_sample=True, top_k=0, **length, **kwargs)


def rows(timings: dict[str, Timing], rollouts: int, new_tokens: int) -> list[dict[str, Any]]:
    """The table: medians, and speedups over `generate` by round, if that was run."""
    table = []
    for name, timing in timings.items():
        row: dict[str, Any] = {
            "method": name,
            "seconds": timing.median,
            "rollouts_per_second": rollouts / timing.median,
        }
        row["tokens_per_second"] = rollouts * new_tokens / timing.median
        if "generate" in timings:
            row["speedup"], row["smallest"], row["largest"] = timing.speedup_over(timings["generate"])
        table.append(row)
    return table


def show(report: dict[str, Any]) -> None:
    """Print the report."""
    options = report["options"]
    print(
        f"Qwen3 {options['shape']}, {report['parameters'] / 1e6:.0f} M parameters, {options['dtype']}; "
        f"{options['prompts']} prompts of {options['prompt_length']} tokens, {options['generations']} rollouts of "
        f"{options['new_tokens']} tokens each; {report['rounds']} rounds"
    )
    print(f"{'':12} {'seconds':>9} {'rollouts/s':>11} {'tokens/s':>10} {'speedup':>8}  (range)")
    for row in report["rows"]:
        spread = f"{row['speedup']:8.2f}  ({row['smallest']:.2f}-{row['largest']:.2f})" if "speedup" in row else ""
        figures = f"{row['seconds']:9.2f} {row['rollouts_per_second']:11.2f} {row['tokens_per_second']:10.0f}"
        print(f"{row['method']:12} {figures} {spread}")
    if report["weight_sync"]:
        sync = report["weight_sync"]
        print(f"weights to vLLM: {sync['bytes'] / 2**20:.0f} MiB in {sync['seconds']:.2f} s, checksums included")
