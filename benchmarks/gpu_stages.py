"""The stages of `python -m benchmarks unattended --profile gpu`: what a GPU that is lent for minutes has to answer.

Each stage is a process. It writes its JSON after every measurement, so a stage that is killed keeps what it has, and a
measurement that fails does not stop the others. `--dry-run` runs the same code on a CPU with tiny shapes.

    python -m benchmarks gpu-stages decode --dry-run

Legend: P tokens of a prompt, R tokens of a rollout, G rollouts of a prompt.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import inspect
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import torch

from benchmarks import vs_trl
from benchmarks.cases import QWEN3_0_6B, QWEN3_4B
from benchmarks.config_file import build_run, read_config
from benchmarks.head_methods import Head
from benchmarks.head_methods import run as run_head
from benchmarks.measure import in_fresh_process, now, peak_flops
from benchmarks.methods import find_method, make_optimizer, missing, place_gradients
from benchmarks.operators import WAITS
from benchmarks.stage import FIRST_WORD, PAD, Stage, liger_layers, seconds_of
from benchmarks.vs_trl import Run
from pl_grouprl.attention import shared_prefix
from pl_grouprl.callbacks import RunSummary
from pl_grouprl.checks import check_parity
from pl_grouprl.functional import logprobs
from pl_grouprl.models.kernels import compile_layers
from pl_grouprl.models.score import score
from pl_grouprl.packing import pack
from pl_grouprl.rollout import HFRolloutEngine
from pl_grouprl.rollout.hf import step_graph
from pl_grouprl.types import SamplingConfig
from pl_grouprl.utilities.device_defaults import Checkpointing

REAL_RUN = 60
"""Seconds that the real run trains."""


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Run one stage; exit code 1 if one of its measurements failed."""
    options = parse(arguments)
    stage = Stage.begin(options)
    STAGES[options.stage](stage)
    return stage.finish()


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=list(STAGES), help="what to measure")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on the CPU")
    parser.add_argument("--output", type=Path, help="write OUTPUT.json")
    return parser.parse_args(arguments)


# ---- the card


def ceilings(stage: Stage) -> None:
    """Seconds of imports, the rate of matrix products, and that of copies: what all other figures are compared with."""
    for name in ("transformers", "lightning.pytorch", "triton", "peft", "trl"):
        stage.measure(f"import {name}", _import, stage, name, needs=(name.partition(".")[0],))
    size = stage.pick(8192, 256)
    for dtype in (torch.bfloat16, torch.float32):
        stage.measure(f"products in {dtype}", _product_rate, stage, size, dtype)
    stage.measure("copy", _copy_rate, stage, stage.pick(2**31, 2**20))


def _import(stage: Stage, name: str) -> None:
    """Import in a separate process, since this one has imported half of it."""
    command = [sys.executable, "-c", f"import {name}"]
    stage.add(label=f"import {name}", s=seconds_of(lambda: subprocess.run(command, check=True)))  # noqa: S603


def _product_rate(stage: Stage, size: int, dtype: torch.dtype) -> None:
    left, right = (torch.randn(size, size, device=stage.device, dtype=dtype) for _ in range(2))
    torch.mm(left, right)
    rate = 2 * size**3 / seconds_of(lambda: torch.mm(left, right), 5)
    stage.add(label=f"products in {dtype}", size=size, tflops_per_s=rate / 1e12)


def _copy_rate(stage: Stage, size: int) -> None:
    source = torch.empty(size, device=stage.device, dtype=torch.uint8)
    target = torch.empty_like(source).copy_(source)
    rate = 2 * size / seconds_of(lambda: target.copy_(source), 10)
    stage.add(label="copy", bytes=size, tb_per_s=rate / 1e12)


# ---- decoding


def decode(stage: Stage) -> None:
    """Milliseconds per decoding step by number of sequences and dtype, as a graph, eagerly and by `generate`.

    Also what a step launches, seconds per capture, and the same after half of the sequences have ended.
    """
    prompt, rollout = stage.pick((512, 64), (64, 24))
    model = _sampled_model(stage, prompt, rollout, "bfloat16")
    for method, sequences in stage.pick(
        [
            ("graph", 64), ("eager", 64), ("graph", 8), ("graph", 256), ("eager", 256), ("generate", 64),
            ("graph", 128), ("eager", 8), ("generate", 256),
        ],
        [("graph", 8), ("eager", 8), ("generate", 8)],
    ):  # fmt: skip
        _decoding(stage, model, method, sequences, prompt, rollout, "bfloat16")
    for method in ("graph", "eager"):
        stage.measure(f"profile, {method}", _decoding_profile, stage, model, method, stage.pick(64, 8), prompt)
    if missing("liger_kernel") is None:
        liger_layers(model)
        for sequences in stage.pick((64, 256), (8,)):
            _decoding(stage, model, "graph", sequences, prompt, rollout, "bfloat16 with liger's layers")
    stage.measure("half end early", _half_end_early, stage, model, stage.pick(128, 16), prompt, rollout)
    del model
    model = _sampled_model(stage, prompt, rollout, "float32")
    _decoding(stage, model, "eager", stage.pick(64, 8), prompt, rollout, "float32")


def _sampled_model(stage: Stage, prompt: int, rollout: int, dtype: Any) -> Any:
    """A model without an end token, so all rollouts have full length."""
    model = (
        stage.case(QWEN3_0_6B, prefix=prompt, rollout=rollout + 9, dtype=dtype, checkpointing=False).make_model().eval()
    )
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = PAD
    return model


def _decoding(stage: Stage, model: Any, method: str, sequences: int, prompt: int, rollout: int, dtype: str) -> None:
    label = f"{method}, {dtype}, {sequences} sequences"

    def measured() -> None:
        sample = _sampler(model, method, sequences, prompt)
        sample(rollout)  # the first graph of a model takes longer
        prefill = seconds_of(lambda: sample(1))
        with _timed_captures() as captures:
            whole = seconds_of(lambda: sample(rollout))
        steps = whole - prefill - sum(captures)
        stage.add(
            label=label, prompt=prompt, rollout=rollout, prefill_s=prefill, captures=len(captures),
            capture_s=sum(captures), ms_per_step=1e3 * steps / (rollout - 1),
            tokens_per_s=sequences * rollout / whole, peak_gib=stage.peak_gib(),
        )  # fmt: skip

    stage.measure(label, measured)


@contextlib.contextmanager
def _timed_captures() -> Iterator[list[float]]:
    """Seconds of each capture of a step inside this context."""
    seconds: list[float] = []
    capture = step_graph.CUDACapture.capture

    def timed(self: Any, step: Callable[[], None]) -> None:
        seconds.append(seconds_of(lambda: capture(self, step)))

    with mock.patch.object(step_graph.CUDACapture, "capture", timed):
        yield seconds


def _half_end_early(stage: Stage, model: Any, sequences: int, prompt: int, tokens: int) -> None:
    """Half of the prompts have a quarter of the tokens, so their rows leave, and the rest is captured again."""
    engine = HFRolloutEngine(model)
    prompts = torch.randint(FIRST_WORD, model.config.vocab_size, (sequences // 8, prompt)).tolist()
    limits = [tokens // (4 if number % 2 else 1) for number in range(len(prompts))]
    for method in ("graph", "eager"):

        def sample(method: str = method) -> None:
            with _stepping(method):
                engine.generate(
                    prompts, SamplingConfig(max_new_tokens=tokens), num_generations=8, seed=0, max_new_tokens=limits
                )

        sample()
        with _timed_captures() as captures:
            seconds = seconds_of(sample)
        stage.add(label=f"half end early, {method}", sequences=sequences, s=seconds, captures=len(captures))


def _stepping(method: str) -> Any:
    """Steps run eagerly, or as a graph where there are as many as one needs."""
    least = math.inf if method == "eager" else step_graph.MIN_STEPS
    return mock.patch.object(step_graph, "MIN_STEPS", least)


def _sampler(model: Any, method: str, sequences: int, prompt: int) -> Callable[[int], Any]:
    """Samples that many tokens per sequence, for 8 rollouts of each prompt; prompts are new in each call."""
    engine = HFRolloutEngine(model)
    vocabulary = model.config.vocab_size

    @torch.no_grad()
    def sample(new_tokens: int) -> None:
        prompts = torch.randint(FIRST_WORD, vocabulary, (sequences // 8, prompt))
        if method != "generate":
            with _stepping(method):
                engine.generate(prompts.tolist(), SamplingConfig(max_new_tokens=new_tokens), num_generations=8, seed=0)
            return
        rows = prompts.repeat_interleave(8, dim=0).to(model.device)
        length = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens}
        model.generate(rows, attention_mask=torch.ones_like(rows), do_sample=True, top_k=0, **length)

    return sample


def _decoding_profile(stage: Stage, model: Any, method: str, sequences: int, prompt: int) -> None:
    from torch.profiler import ProfilerActivity, profile

    sample = _sampler(model, method, sequences, prompt)
    sample(2)
    activities = [ProfilerActivity.CPU, *([] if stage.dry else [ProfilerActivity.CUDA])]
    with profile(activities=activities) as profiler:
        sample(20)  # as a graph: one eager step, a capture and 18 replays (an earlier measurement captured this model)
        now("wall")
    events = profiler.key_averages()
    kernels = [event for event in events if event.self_device_time_total and not event.self_cpu_time_total]
    kernels.sort(key=lambda event: -event.self_device_time_total)

    def count(found: Callable[[str], bool]) -> int:
        return sum(event.count for event in events if found(event.key))

    stage.add(
        label=f"profile, {method}", sequences=sequences, tokens=20,
        kernel_ms=sum(event.self_device_time_total for event in kernels) / 1e3,
        kernels=sum(event.count for event in kernels),
        launches=count(lambda key: "LaunchKernel" in key),
        graph_launches=count(lambda key: "GraphLaunch" in key),
        waits=count(lambda key: key in WAITS),
        reads_by_host=count(lambda key: key == "aten::_local_scalar_dense"),
        top=[(event.key[:70], event.count, event.self_device_time_total / 1e3) for event in kernels[:10]],
    )  # fmt: skip


# ---- the update


def update(stage: Stage) -> None:
    """An update of the 4B shape with all 36 layers, then of 12 layers with each change that could make it faster."""
    long, short = stage.pick((4096, 512), (32, 16))
    both, whole = "liger layers, saved attention", {"rollout": 1024, "group_size": 4, "layers": 36}
    for label, prefix, sizes, goal in (
        (f"36 layers, {both}", stage.pick(8192, 48), whole, "MFU of at least 0.38"),
        (both, long, {}, "at most 0.220 s"),
    ):
        stage.measure(
            label, _update, stage, label, prefix, liger_layers, checkpointing="attention", goal=goal,
            needs=("liger_kernel",), **sizes,
        )  # fmt: skip
    for prefix, label, options in (
        (long, "as is", {}),
        (long, "saved attention", {"checkpointing": "attention"}),
        (long, "bf16-mixed", {"dtype": "float32"}),
        (long, "unfused AdamW", {"fused": False}),
        (short, "as is", {}),
    ):
        stage.measure(label, _update, stage, label, prefix, **options)
    for kind, checkpointing in (("plain", True), ("saved attention", "attention")):
        stage.measure(f"gradient, {kind}", _checkpointing_error, stage, kind, checkpointing)
    for prefix in (long, short):
        stage.measure("liger layers", _update, stage, "liger layers", prefix, liger_layers, needs=("liger_kernel",))
    stage.measure("36 layers, as is", _update, stage, "36 layers, as is", stage.pick(8192, 48), **whole)


def compiled_update(stage: Stage) -> None:
    """The same update with compiled layers; a separate stage, since compilation may take its whole limit."""
    prefix = stage.pick(4096, 32)
    stage.measure("compiled layers", _update, stage, "compiled layers", prefix, compile_layers)


def _update(
    stage: Stage,
    label: str,
    prefix: int,
    prepare: Callable[[Any], Any] = lambda model: None,
    *,
    dtype: Any = "bfloat16",
    fused: bool = True,
    checkpointing: Checkpointing = True,
    rollout: int = 512,
    group_size: int = 8,
    layers: int = 12,
    goal: str | None = None,
) -> None:
    """Time forward, backward and AdamW of one packed batch, and scoring; float32 weights compute under autocast."""
    rollout = stage.pick(rollout, 8)
    groups = stage.pick(max(1, 8192 // (prefix + group_size * rollout)), 1)
    case = stage.case(
        QWEN3_4B, layers=layers, prefix=prefix, rollout=rollout, group_size=group_size, groups=groups, dtype=dtype,
        checkpointing=checkpointing,
    )  # fmt: skip
    model = case.make_model().train()
    prepare(model)
    optimizer = make_optimizer(model) if fused else _unfused(model)
    batch = pack(case.make_groups(), "shared", device=case.device)

    def scored() -> Any:
        with torch.autocast(case.device, torch.bfloat16, enabled=dtype == "float32"):
            return score(model, batch).logprobs_N

    def step() -> None:
        scored().sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    with shared_prefix(model, "cascade"):
        first, second = seconds_of(step), seconds_of(step)
        seconds = seconds_of(step, 3)
        with torch.no_grad():
            mean = scored().float().mean().item()
            scoring = seconds_of(scored, 3)
    rate, peak = 3 * case.operations("shared") / seconds, peak_flops("bfloat16")
    stage.add(
        label=label, P=prefix, G=group_size, R=rollout, groups=groups, layers=case.layers, s=seconds,
        mfu=rate / peak if peak and not stage.dry else None, scoring_s=scoring, first_s=first, second_s=second,
        tflops_per_s=rate / 1e12, mean_logprob=mean, peak_gib=stage.peak_gib(), **{"goal": goal} if goal else {},
    )  # fmt: skip


def _unfused(model: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    place_gradients(model)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return optimizer


def _checkpointing_error(stage: Stage, kind: str, checkpointing: Checkpointing) -> None:
    """Relative error of the gradient against a run without checkpointing."""
    case = stage.case(
        QWEN3_0_6B, layers=4, prefix=stage.pick(600, 24), rollout=stage.pick(200, 8), group_size=4, groups=2,
        checkpointing=False,
    )  # fmt: skip

    def gradient(checkpointing: Checkpointing) -> torch.Tensor:
        model = replace(case, checkpointing=checkpointing).make_model()
        with shared_prefix(model, "cascade"):
            score(model, pack(case.make_groups(), "shared", device=case.device)).logprobs_N.sum().backward()
        return torch.cat([parameter.grad.flatten().float() for parameter in model.parameters()])

    expected = gradient(False)
    error = (gradient(checkpointing) - expected).norm() / expected.norm()
    stage.add(label=f"gradient, {kind}", relative_error=error.item())


# ---- whole steps, ours and TRL's


def whole_step(stage: Stage) -> None:
    """Steps that sample: 16 prompts of 512 tokens, 8 rollouts of 128, 0.6B shape; bf16-mixed against bf16-true, TRL."""
    prefix, rollout, groups = stage.pick((512, 128, 16), (24, 4, 2))
    free = stage.case(QWEN3_0_6B, prefix=prefix, rollout=rollout, groups=groups, checkpointing=False)
    saving = replace(free, checkpointing=True)
    ours, theirs = vs_trl.ARMS[vs_trl.OURS], vs_trl.ARMS["TRL, padded"]
    vs_trl.run_arm(stage, "ours, bf16-true, liger", vs_trl.ARMS[vs_trl.FUSED], Run(free), parts=True)
    plain, mixed, checkpointed = (
        vs_trl.run_arm(stage, label, ours, run, parts=True)
        for label, run in (
            ("ours, bf16-true", Run(free)),
            ("ours, bf16-mixed, checkpointing", Run(saving, "bf16-mixed")),
            ("ours, bf16-true, checkpointing", Run(saving)),
        )
    )
    for label, base in (("no checkpointing", plain), ("checkpointing", checkpointed)):
        if mixed and base:
            stage.add(label=f"bf16-mixed over bf16-true, {label}", ratio=mixed / base, goal="at most 1.10")
    best = vs_trl.ARMS["TRL, padded, liger"] if missing("liger_kernel") is None else theirs
    vs_trl.run_arm(stage, f"TRL, bfloat16 weights{', liger' if best.liger else ''}", best, Run(free))
    run = Run(saving, "bf16-mixed", steps=2)
    vs_trl.run_arm(stage, "TRL, autocast, checkpointing", theirs, run)


# ---- from the start of a run to its first steps


def default_run(stage: Stage) -> None:
    """Three steps of configs/grpo_pg.yaml as a user meets them: what happens between the warm start and step 1."""
    torch._logging.set_logs(recompiles=True)
    stage.measure("default run", _default_run, stage)


def _default_run(stage: Stage) -> None:
    config = read_config("grpo_pg")
    source = config["model"]["init_args"]["policy"]["init_args"]
    with tempfile.TemporaryDirectory() as folder:
        source |= {"cache_dir": f"{folder}/policy", "progress_bar": False} | stage.pick({}, {"steps": 4})
        _timed_fit(stage, config, folder, max_steps=3, **stage.pick({}, {"limit_val_batches": 1}))


def first_step(stage: Stage) -> None:
    """Seconds from the start of the process to the first step of `grpo_qwen3_gsm8k.yaml`, with a 0.6B model on disk.

    Weights and questions are random, so all answers have the greatest length, which is the worst case.
    """
    stage.measure("first step", _first_step, stage)


def _first_step(stage: Stage) -> None:
    config, began = read_config("grpo_qwen3_gsm8k"), time.monotonic()
    options, data = config["model"]["init_args"], config["data"]["init_args"]
    case = stage.case(QWEN3_0_6B, prefix=100, rollout=512, group_size=1, groups=stage.pick(2048, 32))
    with tempfile.TemporaryDirectory() as folder:
        in_fresh_process(_write_run, Run(case), folder)  # this one has imported nothing yet
        options["policy"]["init_args"]["path"] = f"{folder}/policy"
        data |= dict.fromkeys(("train", "val", "test"), f"{folder}/rows.jsonl")
        del data["chat_template_kwargs"]
        for sampling in stage.pick((), (options["sampling"], options["evaluation"]["sampling"])):
            sampling["max_new_tokens"] = 4
        data |= stage.pick({}, {"batch_size": 4, "val_batch_size": 4})
        imports = time.time() - psutil.Process().create_time() - (time.monotonic() - began)
        stage.add(label="imports", s=imports)
        _timed_fit(stage, config, folder, before=imports, goal=60, max_steps=1)


def _write_run(run: Run, folder: str) -> None:
    """Write a model, its tokenizer, and prompts with answers."""
    run.load("bfloat16").save_pretrained(f"{folder}/policy")
    run.load_tokenizer().save_pretrained(f"{folder}/policy")
    rows = [json.dumps(row | {"answer": "#### 7"}) for row in run.prompts()]
    Path(folder, "rows.jsonl").write_text("\n".join(rows))


def _timed_fit(
    stage: Stage, config: dict[str, Any], folder: str, *, before: float = 0.0, goal: float | None = None, **options: Any
) -> None:
    """Fit, and add a row for each phase: `s` since the call and `before` seconds earlier, `since_last` that phase's."""
    from lightning.pytorch import Callback

    for logger in config["trainer"]["logger"]:
        logger["init_args"]["save_dir"] = folder
    began, last = time.monotonic() - before, time.monotonic()

    def add(label: str, **more: Any) -> None:
        nonlocal last
        now("wall")
        at = time.monotonic()
        stage.add(label=label, s=at - began, since_last=at - last, **more)
        last = at

    class Phases(Callback):
        """Adds a row where a phase ends."""

        def on_fit_start(self, trainer: Any, module: Any) -> None:
            add("models are loaded")

        def on_train_start(self, trainer: Any, module: Any) -> None:
            add("checks are done")

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            add(f"step {batch_idx + 1} begins", **({"goal": f"at most {goal:.0f} s"} if goal and not batch_idx else {}))

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            add(f"step {batch_idx + 1} ends")

    trainer, module, data = build_run(
        config, accelerator="cpu" if stage.dry else "gpu", devices=1, default_root_dir=folder, **options
    )
    trainer.callbacks.insert(0, Phases())
    trainer.fit(module, datamodule=data)


def real_run(stage: Stage) -> None:
    """SmolLM2 on reasoning-gym: the run of `configs/grpo_smollm2_gpu.yaml`, for a share of its five minutes."""
    policy = read_config("grpo_smollm2_gpu")["model"]["init_args"]["policy"]["init_args"]
    if not Path(policy["path"], policy["gguf_file"]).exists():
        stage.add(label="SmolLM2", missing="the model is not there: python examples/prepare_smollm2.py")
        return
    stage.measure("SmolLM2", _real_run, stage, needs=("reasoning_gym", "gguf", "accelerate"))


def _real_run(stage: Stage) -> None:
    config = read_config("grpo_smollm2_gpu")
    if stage.dry:
        few: dict[str, Any] = {"num_generations": 2, "evaluation": {}, "sampling": {"max_new_tokens": 3}}
        config["model"]["init_args"] |= few | {"sharing": {"verify": False}}
        config["data"]["init_args"] |= {"batch_size": 1, "val_batch_size": 1}
        config["trainer"] |= {"precision": "32-true", "max_steps": 2, "limit_val_batches": 1, "limit_test_batches": 1}
    with tempfile.TemporaryDirectory() as folder:
        for logger in config["trainer"]["logger"]:
            logger["init_args"]["save_dir"] = folder
        trainer, module, data = build_run(
            config, accelerator="cpu" if stage.dry else "gpu", default_root_dir=folder, max_time={"seconds": REAL_RUN}
        )
        fit = seconds_of(lambda: trainer.fit(module, datamodule=data))
        points = next(own for own in trainer.callbacks if isinstance(own, RunSummary)).history.points
        (tested,) = trainer.test(module, datamodule=data, verbose=False)
    seconds = [step for _, step in points["time/step"]]
    rates = [rate for _, rate in points["perf/tokens_per_second"]]
    stage.add(
        label="SmolLM2", steps=trainer.global_step, fit_s=fit, step_s=statistics.median(seconds),
        tokens_per_s=statistics.median(rates), test=tested["test/reward"], validation=points["val/reward"],
        rewards=points["reward"], peak_gib=stage.peak_gib(),
    )  # fmt: skip


# ---- the head's blocks, a hybrid


def head_blocks(stage: Stage) -> None:
    """Log-probabilities from hidden states by the number of vocabulary entries in a block."""
    for tokens in stage.pick((1024, 8192), (64,)):
        for block in (None, *stage.pick((4096, 16384, 32768), (128, 256))):
            stage.measure(f"blocks of {block or 'its own choice'}", _head_block, stage, tokens, block)


def _head_block(stage: Stage, tokens: int, block: int | None) -> None:
    head = Head(tokens, stage.pick(151_936, 500), stage.pick(1024, 32), "bfloat16", stage.device)
    tensors = head.tensors()
    upstream_N = torch.randn(tokens, device=stage.device)
    width = logprobs.block_width if block is None else lambda device, tokens, max_logits: block
    with mock.patch.object(logprobs, "block_width", width):
        run_head("token_scores", tensors, upstream_N)
        seconds = {
            name: seconds_of(functools.partial(run_head, "token_scores", tensors, upstream), 5)
            for name, upstream in (("forward_s", None), ("forward_backward_s", upstream_N))
        }
    stage.add(label=f"blocks of {block or 'its own choice'}", tokens=tokens, **seconds, peak_gib=stage.peak_gib())


def hybrid(stage: Stage) -> None:
    """A Qwen3.5 shape (three of four layers are linear attention): parity, and scoring and updates by method.

    With the kernels of flash-linear-attention and causal-conv1d if they are installed, and with transformers' own.
    """
    notes = [missing("fla", "flash-linear-attention"), missing("causal_conv1d", "causal-conv1d")]
    stage.add(label="kernels", installed=not any(notes), missing="; ".join(note for note in notes if note))
    # Products in IEEE float32, as the tolerances of float32 assume; Triton's default is TF32.
    with mock.patch.dict(os.environ, TRITON_F32_DEFAULT="ieee"):
        stage.measure("parity", _hybrid_parity, stage, torch.float32)
    stage.measure("parity in bfloat16", _hybrid_parity, stage, torch.bfloat16)
    arms: list[tuple[str, AbstractContextManager[Any]]] = [("as installed", nullcontext())]
    if len([note for note in notes if note]) < 2:
        arms.append(("transformers' own", _own_kernels()))
    for kernels, patch in arms:
        with patch:
            for name in ("cascade", "repeated, padded"):
                stage.measure(f"hybrid, {name}, {kernels}", _hybrid_speed, stage, name, kernels)


@contextmanager
def _own_kernels() -> Iterator[None]:
    """Run transformers' own functions in PyTorch, although packages with kernels are installed."""
    from transformers.models.qwen3_5 import modeling_qwen3_5

    names = ("torch_chunk_gated_delta_rule", "causal_conv1d_fn")
    own = {name: inspect.unwrap(getattr(modeling_qwen3_5, name)) for name in names}
    with mock.patch.multiple(modeling_qwen3_5, **own):
        yield


def _hybrid_model(stage: Stage, dtype: torch.dtype, layers: int) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = stage.pick(
        {
            "hidden_size": 1024, "intermediate_size": 3584, "num_attention_heads": 8, "num_key_value_heads": 2,
            "head_dim": 256, "vocab_size": 151_936, "linear_num_key_heads": 16, "linear_num_value_heads": 16,
            "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        },
        {
            "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
            "head_dim": 16, "vocab_size": 500, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
            "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        },
    )  # fmt: skip
    config = AutoConfig.for_model(
        "qwen3_5_text", num_hidden_layers=layers, max_position_embeddings=32_768, tie_word_embeddings=True,
        pad_token_id=PAD, bos_token_id=None, eos_token_id=None, **sizes,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(stage.device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).train()


def _hybrid_parity(stage: Stage, dtype: torch.dtype) -> None:
    report = check_parity(_hybrid_model(stage, dtype, 4), padded_rows=False)
    stage.add(
        label="parity" if dtype == torch.float32 else "parity in bfloat16", dtype=str(dtype), passed=report.passed,
        logprobs=report.max_logprob_difference, gradients=report.gradient_difference,
    )  # fmt: skip


def _hybrid_speed(stage: Stage, name: str, kernels: str) -> None:
    prefix, rollout = stage.pick((2048, 256), (24, 8))
    case = stage.case(QWEN3_0_6B, prefix=prefix, rollout=rollout, group_size=8)
    model = _hybrid_model(stage, torch.bfloat16, stage.pick(24, 4))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    prepared = find_method(name).prepare(case, model, make_optimizer(model))
    with prepared.patched():
        prepared.update()
        stage.add(
            label=f"hybrid, {name}, {kernels}", kernels=kernels, P=prefix, G=8, R=rollout,
            scoring_s=seconds_of(prepared.score), update_s=seconds_of(prepared.update), peak_gib=stage.peak_gib(),
        )  # fmt: skip


STAGES: dict[str, Callable[[Stage], None]] = {
    "ceilings": ceilings,
    "decode": decode,
    "update-arms": update,
    "compiled": compiled_update,
    "whole-step": whole_step,
    "first-step": first_step,
    "default-run": default_run,
    "real-run": real_run,
    "head-blocks": head_blocks,
    "hybrid": hybrid,
}
"""By name, as on the command line; `unattended` has their order and limits."""
