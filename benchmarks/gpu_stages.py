"""The stages of `python -m benchmarks unattended --profile gpu`: what a GPU that is lent for minutes has to answer.

Each stage is a process. It writes its JSON after every measurement, so a stage that is killed keeps what it has, and a
measurement that fails does not stop the others. `--dry-run` runs the same code on a CPU with tiny shapes.

    python -m benchmarks gpu-stages decode --dry-run

Legend: P tokens of a prompt, R tokens of a rollout, G rollouts of a prompt.
"""

from __future__ import annotations

import argparse
import functools
import gc
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.cases import QWEN3_0_6B, QWEN3_4B, Case
from benchmarks.config_file import build_run, read_config
from benchmarks.head_methods import Head, run
from benchmarks.measure import Conditions, now
from benchmarks.methods import find_method, make_optimizer, missing, place_gradients
from benchmarks.operators import WAITS
from benchmarks.options import write_json
from benchmarks.step_parts import StepParts
from pl_grouprl.attention import shared_prefix
from pl_grouprl.attention.support import compile_layers
from pl_grouprl.checks import check_parity
from pl_grouprl.functional import logprobs
from pl_grouprl.functional import logprobs as linear_head
from pl_grouprl.models.score import score
from pl_grouprl.packing import pack
from pl_grouprl.rollout import HFRolloutEngine
from pl_grouprl.types import Rollout, SamplingConfig
from pl_grouprl.utilities.device_defaults import Checkpointing

TINY = {
    "hidden": 64, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16, "intermediate": 96, "vocabulary": 500,
    "device": "cpu",
}  # fmt: skip
"""Sizes of every model of a dry run."""

PAD, END, FIRST_WORD = 0, 1, 5
"""Token ids. Random tokens begin at `FIRST_WORD`, so no prompt or recorded rollout contains a special one."""


@dataclass
class Stage:
    """What a stage runs on, and its results so far.

    Attributes:
        dry: Whether shapes are tiny and the device is the CPU.
        output: Where to write the JSON, without suffix; None prints only.
        rows: One per measurement: `seconds_in`, the seconds since the stage began, and what was measured; `failed` and
            `error`, or `missing` for an optional package, where nothing was.
    """

    dry: bool = False
    output: Path | None = None
    rows: list[dict[str, Any]] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.device = "cpu" if self.dry else "cuda"
        self.conditions = Conditions.here(self.device, "wall")

    def add(self, **row: Any) -> None:
        """Print a row and write all of them."""
        self.rows.append({"seconds_in": round(time.monotonic() - self.started, 1), **row})
        shown = {name: f"{value:.5g}" if isinstance(value, float) else value for name, value in row.items()}
        print(", ".join(f"{name} {value}" for name, value in shown.items()), flush=True)
        write_json(self.output, self.conditions, {"rows": self.rows})

    def measure(
        self, label: str, function: Callable[..., Any], *args: Any, needs: Sequence[str] = (), **kw: Any
    ) -> Any:
        """Call a function that adds rows, and go on if it fails or a package is missing; None then."""
        for package in needs:
            if note := missing(package, package.replace("_", "-")):
                self.add(label=label, missing=note)
                return None
        if not self.dry:
            torch.cuda.reset_peak_memory_stats()
        result = None
        try:
            result = function(*args, **kw)
        except Exception as error:  # whatever it is, the next measurement may work
            where = traceback.format_exc().splitlines()[-12:]
            self.add(label=label, failed=type(error).__name__, error=str(error)[:500], where=where)
        gc.collect()
        if not self.dry:
            torch.cuda.empty_cache()
        return result

    def pick(self, real: Any, tiny: Any) -> Any:
        """The second value in a dry run."""
        return tiny if self.dry else real

    def case(self, case: Case, **changes: Any) -> Case:
        """A case with changes, and in a dry run with the sizes of a tiny model."""
        return replace(case, **changes | (TINY if self.dry else {}))

    def peak_gib(self) -> float | None:
        """Peak of the memory that tensors took during this measurement; None on a CPU."""
        return None if self.dry else torch.cuda.max_memory_allocated() / 2**30


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Run one stage; exit code 1 if one of its measurements failed."""
    options = parse(arguments)
    if not options.dry_run and not torch.cuda.is_available():
        raise SystemExit("gpu-stages needs a CUDA device and there is none; use --dry-run.")
    stage = Stage(options.dry_run, options.output)
    print(f"conditions: {stage.conditions}", flush=True)
    STAGES[options.stage](stage)
    if failed := [row["label"] for row in stage.rows if "failed" in row]:
        raise SystemExit(f"failed: {', '.join(failed)}")
    return {"rows": stage.rows}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=list(STAGES), help="what to measure")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on the CPU")
    parser.add_argument("--output", type=Path, help="write OUTPUT.json")
    return parser.parse_args(arguments)


def seconds_of(function: Callable[[], Any], times: int = 1) -> float:
    """Mean seconds of a call, the GPU's work included."""
    start = now("wall")
    for _ in range(times):
        function()
    return (now("wall") - start) / times


# ---- 0: the card


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


# ---- 1: decoding


def decode(stage: Stage) -> None:
    """Milliseconds per decoding step by number of sequences and dtype, against `generate`, and what a step launches."""
    prompt, rollout = stage.pick((512, 64), (16, 4))
    model = _sampled_model(stage, prompt, rollout, "bfloat16")
    for method, sequences in stage.pick(
        [("hf", 64), ("generate", 64), ("hf", 8), ("hf", 256), ("hf", 128), ("generate", 256)],
        [("hf", 8), ("generate", 8)],
    ):
        _decoding(stage, model, method, sequences, prompt, rollout, "bfloat16")
    stage.measure("profile", _decoding_profile, stage, model, stage.pick(64, 8), prompt)
    del model
    model = _sampled_model(stage, prompt, rollout, "float32")
    _decoding(stage, model, "hf", stage.pick(64, 8), prompt, rollout, "float32")


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
        sample(4)
        prefill, whole = seconds_of(lambda: sample(1)), seconds_of(lambda: sample(rollout))
        stage.add(
            label=label, prompt=prompt, rollout=rollout, prefill_s=prefill,
            ms_per_step=1e3 * (whole - prefill) / (rollout - 1), tokens_per_s=sequences * rollout / whole,
            peak_gib=stage.peak_gib(),
        )  # fmt: skip

    stage.measure(label, measured)


def _sampler(model: Any, method: str, sequences: int, prompt: int) -> Callable[[int], Any]:
    """Samples that many tokens per sequence, for 8 rollouts of each prompt; prompts are new in each call."""
    engine = HFRolloutEngine(model)
    vocabulary = model.config.vocab_size

    @torch.no_grad()
    def sample(new_tokens: int) -> None:
        prompts = torch.randint(FIRST_WORD, vocabulary, (sequences // 8, prompt))
        if method == "hf":
            sampling = SamplingConfig(max_new_tokens=new_tokens)
            engine.generate(prompts.tolist(), sampling, num_generations=8, seed=0)
            return
        rows = prompts.repeat_interleave(8, dim=0).to(model.device)
        length = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens}
        model.generate(rows, attention_mask=torch.ones_like(rows), do_sample=True, top_k=0, **length)

    return sample


def _decoding_profile(stage: Stage, model: Any, sequences: int, prompt: int) -> None:
    from torch.profiler import ProfilerActivity, profile

    sample = _sampler(model, "hf", sequences, prompt)
    sample(2)
    activities = [ProfilerActivity.CPU, *([] if stage.dry else [ProfilerActivity.CUDA])]
    with profile(activities=activities) as profiler:
        sample(9)
        now("wall")
    events = profiler.key_averages()
    kernels = [event for event in events if event.self_device_time_total and not event.self_cpu_time_total]
    kernels.sort(key=lambda event: -event.self_device_time_total)

    def count(found: Callable[[str], bool]) -> int:
        return sum(event.count for event in events if found(event.key))

    stage.add(
        label="profile", sequences=sequences, tokens=9,
        kernel_ms=sum(event.self_device_time_total for event in kernels) / 1e3,
        kernels=sum(event.count for event in kernels),
        launches=count(lambda key: "LaunchKernel" in key),
        waits=count(lambda key: key in WAITS),
        reads_by_host=count(lambda key: key == "aten::_local_scalar_dense"),
        top=[(event.key[:70], event.count, event.self_device_time_total / 1e3) for event in kernels[:10]],
    )  # fmt: skip


# ---- 2: the update


def update(stage: Stage) -> None:
    """An update of 12 layers of the 4B shape: as is, and with each change that could make it faster."""
    long, short = stage.pick((4096, 512), (32, 16))
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
    for prefix in (long, short):  # at the end: liger patches the module of all models
        stage.measure("liger layers", _update, stage, "liger layers", prefix, liger_layers, needs=("liger_kernel",))


def compiled_update(stage: Stage) -> None:
    """The same update with compiled layers; a separate stage, since compilation may take its whole limit."""
    prefix = stage.pick(4096, 32)
    stage.measure("compiled layers", _update, stage, "compiled layers", prefix, compile_layers)


def liger_layers(model: Any) -> None:
    """Replace a Qwen3 model's RMSNorm, rotary positions and SwiGLU by liger's kernels; nothing on a CPU."""
    if model.device.type == "cuda":
        from liger_kernel.transformers import apply_liger_kernel_to_qwen3

        apply_liger_kernel_to_qwen3(
            rope=True, rms_norm=True, swiglu=True, cross_entropy=False, fused_linear_cross_entropy=False, model=model
        )


def _update(
    stage: Stage,
    label: str,
    prefix: int,
    prepare: Callable[[Any], Any] = lambda model: None,
    *,
    dtype: Any = "bfloat16",
    fused: bool = True,
    checkpointing: Checkpointing = True,
) -> None:
    """Time forward, backward and AdamW of one packed batch, and scoring; float32 weights compute under autocast."""
    rollout = stage.pick(512, 8)
    groups = stage.pick(max(1, 8192 // (prefix + 8 * rollout)), 1)
    case = stage.case(
        QWEN3_4B, layers=12, prefix=prefix, rollout=rollout, group_size=8, groups=groups, dtype=dtype,
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
    stage.add(
        label=label, P=prefix, G=8, R=rollout, groups=groups, s=seconds, scoring_s=scoring, first_s=first,
        second_s=second, tflops_per_s=3 * case.operations("shared") / seconds / 1e12, mean_logprob=mean,
        peak_gib=stage.peak_gib(),
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


# ---- 3 and 4: whole steps, ours and TRL's


@dataclass(frozen=True)
class Run:
    """A GRPO run on random prompts.

    Attributes:
        case: The model and the shape: `groups` prompts of `prefix` tokens with `group_size` rollouts of `rollout`.
        precision: Lightning's; `bf16-mixed` has float32 weights, which TRL runs under autocast.
        liger: Whether TRL's model has liger's layers.
        recorded: Whether rollouts are given instead of sampled.
        steps: Optimizer steps; the first one warms up.
    """

    case: Case
    precision: str = "bf16-true"
    liger: bool = False
    recorded: bool = False
    steps: int = 3

    def load(self) -> Any:
        """Return a new model; the learning rate is tiny, so all steps work with about the same weights."""
        dtype: Any = "float32" if self.precision == "bf16-mixed" else "bfloat16"
        model = replace(self.case, dtype=dtype).make_model()
        model.config.eos_token_id = model.generation_config.eos_token_id = END
        model.generation_config.pad_token_id = PAD
        return model

    def load_tokenizer(self) -> Any:
        """Return a tokenizer whose word `w7` is token 7."""
        from tokenizers import Tokenizer
        from tokenizers.models import WordLevel
        from tokenizers.pre_tokenizers import WhitespaceSplit
        from transformers import PreTrainedTokenizerFast

        special = {"pad_token": "<pad>", "eos_token": "<end>", "unk_token": "<unknown>"}
        ids = {"<pad>": PAD, "<end>": END, "<unknown>": END + 1}
        ids |= {f"w{token}": token for token in range(FIRST_WORD, self.case.vocabulary)}
        words = Tokenizer(WordLevel(ids, unk_token=special["unk_token"]))
        words.pre_tokenizer = WhitespaceSplit()
        return PreTrainedTokenizerFast(tokenizer_object=words, padding_side="left", **special)

    def prompts(self) -> list[dict[str, str]]:
        """Prompts of random words."""
        return [{"prompt": " ".join(f"w{token}" for token in tokens), "answer": "x"} for tokens in self.tokens(1)]

    def tokens(self, per_prompt: int) -> list[list[int]]:
        """Random tokens: `per_prompt` prompts (1), or rollouts (G), for each group."""
        length = self.case.prefix if per_prompt == 1 else self.case.rollout
        generator = torch.Generator().manual_seed(per_prompt)
        shape = (self.case.groups * per_prompt, length)
        return torch.randint(FIRST_WORD, self.case.vocabulary, shape, generator=generator).tolist()


class Replay:
    """A rollout engine that returns a run's recorded rollouts, whatever the prompts."""

    def __init__(self, recorded: Run) -> None:
        self.group_size = recorded.case.group_size
        self.rollouts = recorded.tokens(self.group_size)

    def bind(self, model: Any, tokenizer: Any = None) -> None:
        """Nothing to bind."""

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingConfig, *, num_generations: int, seed: int
    ) -> list[list[Rollout]]:
        """Return the first rollouts for the first prompt, and so on."""
        rollouts = [Rollout(list(tokens), finish_reason="length") for tokens in self.rollouts]
        return [rollouts[i * num_generations : (i + 1) * num_generations] for i in range(len(prompts))]


def reward(completions: Sequence[str], **columns: Any) -> list[float]:
    """A number in [0, 1) that tells texts apart."""
    return [sum(map(ord, text)) % 97 / 97 for text in completions]


def our_steps(stage: Stage, label: str, planned: Run) -> float | None:
    """Train with this package's GRPO; one row per step after the first. Returns the fastest step's seconds."""
    from lightning.pytorch import Trainer

    from pl_grouprl import GRPO, OptimizerConfig, PromptDataModule

    case = planned.case
    module = GRPO(
        planned, reward, num_generations=case.group_size, sampling=SamplingConfig(max_new_tokens=case.rollout),
        optimizer=OptimizerConfig(learning_rate=1e-9), sharing={"verify": False},
        engine=Replay(planned) if planned.recorded else None,
    )  # fmt: skip
    parts = StepParts("wall")
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            accelerator="cpu" if stage.dry else "gpu", devices=1, precision=planned.precision, max_steps=planned.steps,
            max_epochs=-1, default_root_dir=folder, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, callbacks=[parts], gradient_clip_val=1.0,
        )  # fmt: skip
        trainer.fit(module, PromptDataModule(planned.prompts(), batch_size=case.groups, shuffle=False))
    for step in parts.steps[1:]:
        named = {part: round(seconds, 4) for part, seconds in step.items() if seconds > 1e-3}
        _add_step(stage, label, planned, step["step"], step.get("rollouts", 0.0), parts=named)
    return min(step["step"] for step in parts.steps[1:])


def trl_steps(stage: Stage, label: str, planned: Run, micro_batch: int) -> None:
    """Train with TRL's GRPOTrainer and the same model, prompts and reward; one row per step after the first."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    case, model = planned.case, planned.load()
    checkpointing = model.is_gradient_checkpointing
    if planned.liger:
        liger_layers(model)
    rows = Dataset.from_list(planned.prompts())
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder, report_to="none", use_cpu=stage.dry, gradient_checkpointing=checkpointing,
            bf16=planned.precision == "bf16-mixed" and not stage.dry, disable_tqdm=True, save_strategy="no",
            logging_steps=1, max_steps=planned.steps, learning_rate=1e-9, per_device_train_batch_size=micro_batch,
            gradient_accumulation_steps=case.groups * case.group_size // micro_batch, beta=0.0,
            num_generations=case.group_size, max_completion_length=case.rollout, shuffle_dataset=False,
        )  # fmt: skip
        clock = _trl_clock()
        trainer = GRPOTrainer(
            model=model, reward_funcs=reward, args=config, train_dataset=rows, callbacks=[clock],
            processing_class=planned.load_tokenizer(),
            rollout_func=functools.partial(_recorded_for_trl, planned) if planned.recorded else None,
        )  # fmt: skip
        with mock.patch.object(trainer, "_generate", clock.timed(trainer._generate)):
            trainer.train()
    for step, rollouts in list(zip(clock.steps, clock.rollouts, strict=True))[1:]:
        _add_step(stage, label, planned, step, rollouts)


def _trl_clock() -> Any:
    """A callback that times TRL's steps, and the function that samples for them."""
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.steps: list[float] = []
            self.rollouts: list[float] = []

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            self.start = now("wall")

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            self.steps.append(now("wall") - self.start)

        def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                start = now("wall")
                result = function(*args, **kwargs)
                self.rollouts.append(now("wall") - start)
                return result

            return call

    return Clock()


def _recorded_for_trl(planned: Run, prompts: list[str], trainer: Any) -> dict[str, Any]:
    """TRL's `rollout_func`: prompts come repeated, G times each."""
    group_size = planned.case.group_size
    prompt_ids = [tokens for tokens in planned.tokens(1) for _ in range(group_size)]
    return {"prompt_ids": prompt_ids, "completion_ids": planned.tokens(group_size), "logprobs": None}


def _add_step(stage: Stage, label: str, planned: Run, seconds: float, rollouts: float, **more: Any) -> None:
    case = planned.case
    rest = seconds - rollouts
    stage.add(
        label=label, prompts=case.groups, P=case.prefix, G=case.group_size, R=case.rollout, s=seconds,
        rollouts_s=rollouts, rest_s=rest, tokens_per_s=case.groups * case.group_size * case.rollout / seconds,
        shared_tflops_per_s=3 * case.operations("shared") / rest / 1e12, peak_gib=stage.peak_gib(), **more,
    )  # fmt: skip


def replay(stage: Stage) -> None:
    """Steps on recorded rollouts, so that both trainers do the same work: 0.6B shape, bfloat16 weights."""
    for prefix, rollout, group_size, groups, micro in stage.pick(
        [(1024, 512, 8, 4, 16), (4096, 1024, 8, 2, 8), (8192, 256, 32, 1, 4), (128, 512, 8, 8, 32)],
        [(24, 8, 4, 2, 4)],
    ):
        case = stage.case(QWEN3_0_6B, prefix=prefix, rollout=rollout, group_size=group_size, groups=groups)
        ours = Run(case, recorded=True)
        stage.measure("ours, recorded", our_steps, stage, "ours, recorded", ours)
        _their_steps(stage, "TRL, recorded", ours, micro)


def whole_step(stage: Stage) -> None:
    """Steps that sample: 16 prompts of 512 tokens, 8 rollouts of 128, 0.6B shape; bf16-mixed against bf16-true, TRL."""
    prefix, rollout, groups = stage.pick((512, 128, 16), (24, 4, 2))
    free = stage.case(QWEN3_0_6B, prefix=prefix, rollout=rollout, groups=groups, checkpointing=False)
    saving = replace(free, checkpointing=True)
    fastest = {
        label: stage.measure(label, our_steps, stage, label, planned)
        for label, planned in (
            ("ours, bf16-true", Run(free)),
            ("ours, bf16-mixed, checkpointing", Run(saving, "bf16-mixed")),
            ("ours, bf16-true, checkpointing", Run(saving)),
        )
    }
    plain, mixed, checkpointed = fastest.values()
    for label, base in (("no checkpointing", plain), ("checkpointing", checkpointed)):
        if mixed and base:
            stage.add(label=f"bf16-mixed over bf16-true, {label}", ratio=mixed / base, goal="at most 1.10")
    micro = stage.pick(32, 8)
    _their_steps(stage, "TRL, bfloat16 weights", Run(free), micro)
    stage.measure(
        "TRL, autocast, checkpointing", trl_steps, stage, "TRL, autocast, checkpointing",
        Run(saving, "bf16-mixed", steps=2), micro, needs=("trl", "datasets"),
    )  # fmt: skip


def _their_steps(stage: Stage, label: str, planned: Run, micro_batch: int) -> None:
    """TRL at its best: with liger's layers where they are installed."""
    liger = missing("liger_kernel") is None
    label += ", liger" if liger else ""
    planned = replace(planned, liger=liger)
    stage.measure(label, trl_steps, stage, label, planned, micro_batch, needs=("trl", "datasets"))


# ---- 5: the default run


def default_run(stage: Stage) -> None:
    """Three steps of configs/grpo_pg.yaml as a user meets them: what happens between the warm start and step 1."""
    torch._logging.set_logs(recompiles=True)
    stage.measure("default run", _default_run, stage)


def _default_run(stage: Stage) -> None:
    from lightning.pytorch import Callback

    config = read_config("grpo_pg")
    source = config["model"]["init_args"]["policy"]["init_args"]
    with tempfile.TemporaryDirectory() as folder:
        source |= {"cache_dir": f"{folder}/policy", "progress_bar": False} | stage.pick({}, {"steps": 4})
        for logger in config["trainer"]["logger"]:
            logger["init_args"]["save_dir"] = folder
        trainer, module, data = build_run(
            config, accelerator="cpu" if stage.dry else "gpu", devices=1, max_steps=3, default_root_dir=folder,
            **stage.pick({}, {"limit_val_batches": 1}),
        )  # fmt: skip
        began, loaded = time.monotonic(), float("nan")
        load = type(module.policy_source).load

        def timed_load(policy: Any) -> Any:
            nonlocal loaded
            model = load(policy)
            if loaded != loaded:  # the reference policy loads the finished one again
                loaded = time.monotonic()
                stage.add(label="warm start", s=loaded - began)
            return model

        class Steps(Callback):
            """Adds a row when a step begins and when it ends."""

            def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
                now("wall")
                since = time.monotonic() - loaded
                goal = {"goal": "at most 15 s"} if batch_idx == 0 else {}
                stage.add(label=f"step {batch_idx + 1} begins", s_after_warm_start=since, **goal)

            def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
                now("wall")
                since = time.monotonic() - loaded
                stage.add(label=f"step {batch_idx + 1} ends", s_after_warm_start=since)

        trainer.callbacks.insert(0, Steps())
        with mock.patch.object(type(module.policy_source), "load", timed_load):
            trainer.fit(module, datamodule=data)


# ---- 6 and 7: the head's blocks, a hybrid


def head_blocks(stage: Stage) -> None:
    """Log-probabilities from hidden states by the number of vocabulary entries in a block."""
    for tokens in stage.pick((1024, 8192), (64,)):
        for block in stage.pick((4096, 16384, 32768), (128, 256)):
            stage.measure(f"blocks of {block}", _head_block, stage, tokens, block)


def _head_block(stage: Stage, tokens: int, block: int) -> None:
    head = Head(tokens, stage.pick(151_936, 500), stage.pick(1024, 32), "bfloat16", stage.device)
    tensors = head.tensors()
    upstream_N = torch.randn(tokens, device=stage.device)
    with mock.patch.object(linear_head, "BLOCK", block), mock.patch.object(logprobs, "BLOCK", block):
        run("token_scores", tensors, upstream_N)
        seconds = {
            name: seconds_of(functools.partial(run, "token_scores", tensors, upstream), 5)
            for name, upstream in (("forward_s", None), ("forward_backward_s", upstream_N))
        }
    stage.add(label=f"blocks of {block}", tokens=tokens, **seconds, peak_gib=stage.peak_gib())


def hybrid(stage: Stage) -> None:
    """A Qwen3.5 shape (three of four layers are linear attention): parity, and scoring and updates by method."""
    note = missing("fla", "flash-linear-attention")
    stage.add(label="delta rule", kernels="fla" if note is None else "transformers' own, in PyTorch")
    stage.measure("parity", _hybrid_parity, stage)
    for name in ("repeated, padded", "cascade"):
        stage.measure(f"hybrid, {name}", _hybrid_speed, stage, name)


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


def _hybrid_parity(stage: Stage) -> None:
    report = check_parity(_hybrid_model(stage, torch.float32, 4), padded_rows=False)
    stage.add(
        label="parity", passed=report.passed, logprobs=report.max_logprob_difference,
        gradients=report.gradient_difference,
    )  # fmt: skip


def _hybrid_speed(stage: Stage, name: str) -> None:
    prefix, rollout = stage.pick((2048, 256), (24, 8))
    case = stage.case(QWEN3_0_6B, prefix=prefix, rollout=rollout, group_size=8)
    model = _hybrid_model(stage, torch.bfloat16, stage.pick(24, 4))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    prepared = find_method(name).prepare(case, model, make_optimizer(model))
    with prepared.patched():
        prepared.update()
        stage.add(
            label=f"hybrid, {name}", P=prefix, G=8, R=rollout, scoring_s=seconds_of(prepared.score),
            update_s=seconds_of(prepared.update), peak_gib=stage.peak_gib(),
        )  # fmt: skip


STAGES: dict[str, Callable[[Stage], None]] = {
    "ceilings": ceilings,
    "decode": decode,
    "update-arms": update,
    "compiled": compiled_update,
    "replay": replay,
    "whole-step": whole_step,
    "default-run": default_run,
    "head-blocks": head_blocks,
    "hybrid": hybrid,
}
"""By name, as on the command line; `unattended` has their order and limits."""
