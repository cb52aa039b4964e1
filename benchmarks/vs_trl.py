"""A GRPO step by this package and by TRL's trainers: time, memory, and the error of the gradient.

    python -m benchmarks vs-trl --output results/vs_trl                   # on recorded rollouts, the same for all arms
    python -m benchmarks vs-trl --rollouts sampled --output results/sampled  # and with `generate` and HFRolloutEngine
    python -m benchmarks vs-trl --model 4b --rollouts sampled --output results/4b  # a whole step of a 4B model
    python -m benchmarks vs-trl --vllm --output results/vllm              # and with vLLM inside each trainer
    python -m benchmarks vs-trl --dry-run                                 # tiny shapes on a CPU

Weights are random, and all rollouts of a shape are equally long, which is the best case for padding. An arm whose
package is not installed is listed as missing. README.md says how to read the table.

Legend: P tokens of a prompt, R tokens of a rollout, G rollouts of a prompt.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import logging
import os
import queue
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from benchmarks.cases import QWEN3_0_6B, QWEN3_4B, Case
from benchmarks.measure import now, peak_flops
from benchmarks.methods import find_method
from benchmarks.stage import END, FIRST_WORD, PAD, Stage, liger_layers
from benchmarks.step_parts import StepParts
from pl_grouprl.attention import shared_prefix
from pl_grouprl.functional.advantages import group_relative_advantages
from pl_grouprl.models.score import score
from pl_grouprl.packing import Sharing
from pl_grouprl.training import micro_batches
from pl_grouprl.types import Rollout, RolloutGroup, SamplingConfig

SHAPES = ((128, 512, 8), (1024, 512, 8), (4096, 1024, 8), (8192, 256, 32))
"""Prompt, rollout and group size of each comparison on recorded rollouts."""

SAMPLED_SHAPES = ((512, 128, 8),)
"""The same where rollouts are sampled."""

TOKENS_OF_STEP, TOKENS_OF_MICRO_BATCH = 49_152, 32_768
"""Tokens of all sequences of a step, each with its prompt, and of a padded micro-batch, if a group is not larger."""

MOST_REPEATED = 65_536
"""Tokens above which the float32 gradient is computed with shared prompts: repeated ones would take a minute."""

OURS, FUSED = "ours", "ours, liger's layers"
STEPS = 3
"""Optimizer steps of an arm; the first one warms up."""


# ---- what all arms train


@dataclass(frozen=True)
class Run:
    """A GRPO run on random prompts.

    Attributes:
        case: The model and the shape: `groups` prompts of `prefix` tokens with `group_size` rollouts of `rollout`.
        precision: Lightning's; `bf16-mixed` has float32 weights, which TRL runs under autocast.
        liger: Whether the model has liger's layers.
        rollouts: `recorded` ones are given; others are `sampled` with transformers, or with `vllm`.
        steps: Optimizer steps; the first one warms up.
    """

    case: Case
    precision: str = "bf16-true"
    liger: bool = False
    rollouts: str = "sampled"
    steps: int = STEPS

    @property
    def kernels(self) -> str:
        """As of a policy, which would take liger's layers on a GPU by default."""
        return "liger" if self.liger else "none"

    def load(self, dtype: Any = None) -> Any:
        """Return a new model, in the dtype of `precision` by default; the weights are always the same."""
        dtype = dtype or ("float32" if self.precision == "bf16-mixed" else "bfloat16")
        model = replace(self.case, dtype=dtype).make_model()
        model.config.eos_token_id = model.generation_config.eos_token_id = END
        model.generation_config.pad_token_id = PAD
        if self.liger:
            liger_layers(model)
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
        return [{"prompt": words(tokens), "answer": "x"} for tokens in self.tokens(1)]

    def tokens(self, per_prompt: int) -> list[list[int]]:
        """Random tokens: `per_prompt` prompts (1), or rollouts (G), for each group."""
        length = self.case.prefix if per_prompt == 1 else self.case.rollout
        generator = torch.Generator().manual_seed(per_prompt)
        shape = (self.case.groups * per_prompt, length)
        return torch.randint(FIRST_WORD, self.case.vocabulary, shape, generator=generator).tolist()

    @functools.cached_property
    def groups(self) -> list[RolloutGroup]:
        """The recorded rollouts."""
        size, rollouts = self.case.group_size, self.tokens(self.case.group_size)
        return [
            RolloutGroup(prompt, [Rollout(list(tokens), finish_reason="length") for tokens in rollouts[i : i + size]])
            for i, prompt in zip(range(0, len(rollouts), size), self.tokens(1), strict=True)
        ]

    @functools.cached_property
    def advantages_B(self) -> Tensor:
        """Advantages of the recorded rollouts."""
        size = self.case.group_size
        texts = [words(rollout.token_ids) for group in self.groups for rollout in group.rollouts]
        return group_relative_advantages(torch.tensor(reward(texts)), torch.arange(len(texts)) // size)

    @property
    def num_rollouts(self) -> int:
        """Rollouts of a step."""
        return self.case.groups * self.case.group_size

    @property
    def num_tokens(self) -> int:
        """Tokens of a step's sequences, each with its prompt, so that all arms count the same."""
        return self.num_rollouts * (self.case.prefix + self.case.rollout)

    @property
    def rows(self) -> int:
        """Sequences of a padded micro-batch, which divide those of a step."""
        most = max(1, TOKENS_OF_MICRO_BATCH // (self.case.prefix + self.case.rollout))
        return next(rows for rows in range(min(most, self.num_rollouts), 0, -1) if self.num_rollouts % rows == 0)


def words(tokens: Sequence[int]) -> str:
    """The text of tokens."""
    return " ".join(f"w{token}" for token in tokens)


def reward(completions: Sequence[str], **columns: Any) -> list[float]:
    """A number in [0, 1) that tells texts apart."""
    return [sum(map(ord, text)) % 97 / 97 for text in completions]


class Replay:
    """A rollout engine that returns a run's recorded rollouts, whatever the prompts."""

    def __init__(self, recorded: Run) -> None:
        self.recorded = recorded

    def bind(self, model: Any, tokenizer: Any = None) -> None:
        """Nothing to bind."""

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingConfig, *, num_generations: int, seed: int
    ) -> list[list[Rollout]]:
        """Return the first rollouts for the first prompt, and so on."""
        return [[replace(rollout) for rollout in group.rollouts] for group in self.recorded.groups[: len(prompts)]]


class Reference:
    """The gradient of a run's first step in float32, and the log-probabilities of its rollouts.

    Each prompt is repeated for its rollouts and runs through transformers' own attention, unless that takes too long.
    """

    def __init__(self, run: Run) -> None:
        name = "repeated, padded" if run.num_tokens <= MOST_REPEATED else "cascade"
        method, case = find_method(name), run.case
        model = run.load("float32")
        self.logprobs: list[list[float]] = []
        with nullcontext() if method.backend is None else shared_prefix(model, method.backend):
            for group, advantages_G in zip(run.groups, run.advantages_B.split(case.group_size), strict=True):
                (batch,) = method.make_batches([group], case.device)
                logprobs_N = score(model, batch).logprobs_N
                weights_N = advantages_G.to(case.device)[batch.rollout_index_N]
                (-(weights_N * logprobs_N).sum() / run.num_rollouts / case.rollout).backward()
                self.logprobs += logprobs_N.detach().view(case.group_size, -1).tolist()
        self.name = f"float32, {name}"
        self.gradient = {name: weight.grad.cpu() for name, weight in model.named_parameters()}

    def error_of(self, model: Any) -> float:
        """Relative error of a model's gradient up to its scale, since clipping scales it."""
        dot = own = expected = 0.0
        for name, weight in model.named_parameters():
            found, right = weight.grad.double(), self.gradient[name].to(weight.device).double()
            dot, own, expected = (
                total + (one * other).sum().item()
                for total, one, other in ((dot, found, right), (own, found, found), (expected, right, right))
            )
        return max(0.0, 2 - 2 * dot / (own * expected) ** 0.5) ** 0.5


@dataclass
class Meter:
    """Times the steps of a trainer, each until the next one begins, and looks at the first gradient.

    Attributes:
        stage: Where memory is measured.
        reference: What the gradient is compared with, if anything.
        steps: Seconds of each step.
        rollouts: Seconds of sampling in each step.
        gradient_error: Of the first step.
    """

    stage: Stage
    reference: Reference | None = None
    steps: list[float] = field(default_factory=list)
    rollouts: list[float] = field(default_factory=list)
    gradient_error: float | None = None
    _began: float | None = None

    def mark(self) -> None:
        """End a step, if one has begun, and begin the next. Peak memory counts from the second one."""
        at = now("wall")
        if self._began is not None:
            self.steps.append(at - self._began)
            if len(self.steps) == 1 and not self.stage.dry:
                torch.cuda.reset_peak_memory_stats()
        self._began = at
        if len(self.rollouts) <= len(self.steps):
            self.rollouts.append(0.0)

    def look(self, model: Any) -> None:
        """Compare the first gradient."""
        if self.reference is not None and not self.steps and self.gradient_error is None:
            self.gradient_error = self.reference.error_of(model)

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, which samples."""

        def call(*args: Any, **kwargs: Any) -> Any:
            start = now("wall")
            result = function(*args, **kwargs)
            self.rollouts[-1] += now("wall") - start
            return result

        return call

    def add_row(self, label: str, run: Run, sharing: Sharing, **more: Any) -> float:
        """Add the row of a run; returns the median seconds of its steps after the first."""
        case, seconds = run.case, statistics.median(self.steps[1:])
        sampling = statistics.median(self.rollouts[1 : len(self.steps)])
        rate, peak = 3 * case.operations(sharing) / (seconds - sampling), peak_flops("bfloat16")
        self.stage.add(
            label=label, model=case.name, precision=run.precision, P=case.prefix, R=case.rollout, G=case.group_size,
            prompts=case.groups, rollouts=run.rollouts, s=seconds, rollouts_s=sampling,
            tokens_per_s=run.num_tokens / seconds, tflops_per_s=rate / 1e12,
            mfu=rate / peak if peak and not self.stage.dry else None,
            peak_gib=self.stage.peak_gib(), gradient_error=self.gradient_error, steps=self.steps,
            first_gradient_against=self.reference.name if self.reference else None, **more,
        )  # fmt: skip
        return seconds


# ---- ours


def our_steps(
    stage: Stage,
    label: str,
    run: Run,
    reference: Reference | None = None,
    *,
    backend: str = "auto",
    packed: bool = False,
    parts: bool = False,
) -> float:
    """Train with this package's GRPO; returns the median seconds of a step.

    Args:
        stage: Where the row goes.
        label: Name of the row.
        run: What is trained.
        reference: What the gradient is compared with.
        backend: Attention over shared prefixes.
        packed: Whether prompts are repeated, and the sequences packed into rows without padding.
        parts: Whether to time the parts of a step, too, which waits for the GPU between them.
    """
    from lightning.pytorch import Callback, Trainer

    from pl_grouprl import GRPO, OptimizerConfig, PromptDataModule

    case, meter, stack = run.case, Meter(stage, reference), ExitStack()
    module = GRPO(
        run, reward, num_generations=case.group_size, sampling=SamplingConfig(max_new_tokens=case.rollout),
        optimizer=OptimizerConfig(learning_rate=1e-9), engine=_engine(run),
        sharing={"mode": "repeated" if packed else "shared", "backend": backend, "verify": False},
    )  # fmt: skip

    class Watch(Callback):
        """Calls the meter."""

        def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
            stack.enter_context(mock.patch.object(module.engine, "generate", meter.timed(module.engine.generate)))
            if packed:
                stack.enter_context(shared_prefix(module.policy, "cascade"))

        def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
            meter.mark()

        def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
            meter.look(module.policy)

        def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
            meter.mark()

    timed = [StepParts("wall")] if parts else []
    repeated = find_method("repeated, packed")
    with stack, tempfile.TemporaryDirectory() as folder:
        if packed:
            pack = lambda groups, *args, device, **options: repeated.make_batches(list(groups), device)[0]  # noqa: E731
            stack.enter_context(mock.patch.object(micro_batches, "pack", pack))
        trainer = Trainer(
            accelerator="cpu" if stage.dry else "gpu", devices=1, precision=run.precision, max_steps=run.steps,
            max_epochs=-1, default_root_dir=folder, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, callbacks=[Watch(), *timed], gradient_clip_val=1.0,
        )  # fmt: skip
        trainer.fit(module, PromptDataModule(run.prompts(), batch_size=case.groups, shuffle=False))
    steps = timed[0].steps[1:] if timed else []
    named = [{part: round(seconds, 4) for part, seconds in step.items() if seconds > 1e-3} for step in steps]
    return meter.add_row(label, run, "repeated" if packed else "shared", **{"parts": named} if parts else {})


def _engine(run: Run) -> Any:
    from pl_grouprl.rollout import HFRolloutEngine, VLLMRolloutEngine

    if run.rollouts == "recorded":
        return Replay(run)
    if run.rollouts == "vllm":
        return VLLMRolloutEngine(max_model_len=run.case.prefix + run.case.rollout, gpu_memory_utilization=0.3)
    return HFRolloutEngine()


# ---- TRL's


def trl_steps(stage: Stage, label: str, run: Run, reference: Reference | None = None) -> float:
    """Train with TRL's GRPOTrainer and the same model, prompts and reward; returns the median seconds of a step."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    case, meter = run.case, Meter(stage, reference)
    with tempfile.TemporaryDirectory() as folder:
        sampler: dict[str, Any] = {}
        if run.rollouts == "vllm":
            sampler = {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.3}
            sampler["vllm_max_model_length"] = case.prefix + case.rollout
        config = GRPOConfig(
            **_common_config(stage, run, folder), per_device_train_batch_size=run.rows, beta=0.0,
            gradient_accumulation_steps=run.num_rollouts // run.rows, num_generations=case.group_size,
            max_completion_length=case.rollout, shuffle_dataset=False, loss_type="dapo", **sampler,
        )  # fmt: skip
        trainer = GRPOTrainer(
            model=_loaded(run, Path(folder)), reward_funcs=reward, args=config, callbacks=[_watch(meter)],
            train_dataset=Dataset.from_list(run.prompts()), processing_class=run.load_tokenizer(),
            rollout_func=functools.partial(_recorded_for_trl, run) if run.rollouts == "recorded" else None,
        )  # fmt: skip
        with mock.patch.object(trainer, "_generate", meter.timed(trainer._generate)):
            trainer.train()
    return meter.add_row(label, run, "repeated")


def tree_steps(stage: Stage, label: str, run: Run, reference: Reference) -> float:
    """Train with TRL's asynchronous trainer, which packs rollouts into a tree; returns the median seconds of a step.

    Its attention kernel comes from a hub; PyTorch's varlen attention, the same algorithm, takes its place.
    """
    from datasets import Dataset
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer, packing

    meter, model = Meter(stage, reference), run.load()
    packing.register_tree_attention()
    model.set_attn_implementation(packing.TREE_ATTENTION)
    kernel = SimpleNamespace(flash_attn_varlen_func=_eager_varlen if stage.dry else _torch_varlen)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        # All rollouts of a step in one row, where they share most.
        config = AsyncGRPOConfig(
            **_common_config(stage, run, folder), per_device_train_batch_size=run.num_rollouts,
            num_generations=run.case.group_size, token_budget=0, max_staleness=1000,
        )  # fmt: skip
        stack.enter_context(mock.patch.object(packing, "_flash_attn", return_value=kernel))
        stack.enter_context(mock.patch.object(async_grpo_trainer, "create_model_from_path", return_value=model))
        if stage.dry:  # it asks for the name of a GPU
            stack.enter_context(mock.patch.object(async_grpo_trainer, "get_peak_flops_per_device", return_value=1.0))
        trainer = AsyncGRPOTrainer(
            "recorded", reward, config, Dataset.from_list(run.prompts()), run.load_tokenizer(), [_watch(meter)],
            rollout_worker=_recorded_worker(run, reference), weight_transfer=mock.MagicMock(),
        )  # fmt: skip
        trainer.train()
    return meter.add_row(label, run, "shared")


def _common_config(stage: Stage, run: Run, folder: str) -> dict[str, Any]:
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    return {
        "output_dir": folder, "report_to": "none", "use_cpu": stage.dry, "disable_tqdm": True, "save_strategy": "no",
        "bf16": run.precision == "bf16-mixed" and not stage.dry, "gradient_checkpointing": run.case.checkpointing,
        "gradient_checkpointing_kwargs": {"use_reentrant": False}, "logging_strategy": "no", "max_steps": run.steps,
        "learning_rate": 1e-9, "use_liger_kernel": run.liger and not stage.dry,
    }  # fmt: skip


def _loaded(run: Run, folder: Path) -> Any:
    """The model; vLLM loads it from a folder, too."""
    model = replace(run, liger=False).load()  # TRL applies liger's kernels itself
    if run.rollouts == "vllm":
        model.save_pretrained(folder / "model")
        run.load_tokenizer().save_pretrained(folder / "model")
        model.config._name_or_path = model.name_or_path = str(folder / "model")
    return model


@contextmanager
def _globals_kept() -> Iterator[None]:
    """Undo what liger does to the module of all Qwen3 models."""
    from transformers.models.qwen3 import modeling_qwen3

    before = dict(vars(modeling_qwen3))
    try:
        yield
    finally:
        vars(modeling_qwen3).update(before)


def _watch(meter: Meter) -> Any:
    from transformers import TrainerCallback

    class Watch(TrainerCallback):
        """Calls the meter."""

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            meter.mark()

        def on_pre_optimizer_step(self, *args: Any, model: Any, **kwargs: Any) -> None:
            meter.look(model)

        def on_train_end(self, *args: Any, **kwargs: Any) -> None:
            meter.mark()

    return Watch()


def _recorded_for_trl(run: Run, prompts: list[str], trainer: Any) -> dict[str, Any]:
    """TRL's `rollout_func`: prompts come repeated, G times each."""
    prompt_ids = [group.prompt_ids for group in run.groups for _ in group.rollouts]
    completion_ids = [rollout.token_ids for group in run.groups for rollout in group.rollouts]
    return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": None}


def _recorded_worker(run: Run, reference: Reference) -> Any:
    """TRL's rollout worker: the recorded rollouts with their advantages, for all steps and one more."""
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

    worker = mock.MagicMock(rollout_buffer=queue.Queue(), metrics_queue=queue.Queue())
    prefix, rollout = run.case.prefix, run.case.rollout
    mask = np.array([0] * prefix + [1] * rollout)
    for step in range(run.steps + 1):
        for row, advantage in enumerate(run.advantages_B.tolist()):
            group = run.groups[row // run.case.group_size]
            tokens = np.array([*group.prompt_ids, *group.rollouts[row % run.case.group_size].token_ids])
            old = np.array([0.0] * prefix + reference.logprobs[row])
            number = step * run.case.groups + row // run.case.group_size
            worker.rollout_buffer.put(RolloutSample([], [], tokens, mask, old, advantage, 0, number, {}))
    return worker


def _torch_varlen(
    query: Tensor, key: Tensor, value: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, *,
    softmax_scale: float | None, **options: Any,
) -> Tensor:  # fmt: skip
    """FlashAttention's varlen function by PyTorch's, whose options have changed."""
    from torch.nn.attention.varlen import varlen_attn

    known = inspect.signature(varlen_attn).parameters
    causal: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    if "enable_gqa" in known:
        causal["enable_gqa"] = True
    if "scale" in known:
        causal["scale"] = softmax_scale
    return varlen_attn(query, key, value, cu_q, cu_k, max_q, max_k, **causal)


def _eager_varlen(
    query: Tensor, key: Tensor, value: Tensor, cu_q: Tensor, cu_k: Tensor, *lengths: int,
    softmax_scale: float | None, **options: Any,
) -> Tensor:  # fmt: skip
    """The same on a CPU: the last query of each problem is at its last key."""
    parts = []
    for (start, stop), (first, last) in zip(cu_q.unfold(0, 2, 1).tolist(), cu_k.unfold(0, 2, 1).tolist(), strict=True):
        seen = torch.ones(stop - start, last - first, dtype=torch.bool).tril(last - first - (stop - start))
        tensors = (tensor.transpose(0, 1) for tensor in (query[start:stop], key[first:last], value[first:last]))
        attend = torch.nn.functional.scaled_dot_product_attention
        parts.append(attend(*tensors, attn_mask=seen, scale=softmax_scale, enable_gqa=True).transpose(0, 1))
    return torch.cat(parts)


# ---- the comparison


@dataclass(frozen=True)
class Arm:
    """One row of a table.

    Attributes:
        steps: Trains; takes stage, label, run, reference.
        needs: Packages, by import name.
        liger: Whether the model has liger's layers.
        recorded: Whether it needs recorded rollouts.
    """

    steps: Callable[..., float]
    needs: tuple[str, ...] = ()
    liger: bool = False
    recorded: bool = False


TRL = ("trl", "datasets")
ARMS = {
    OURS: Arm(our_steps),
    FUSED: Arm(our_steps, ("liger_kernel",), liger=True),
    "TRL, padded": Arm(trl_steps, TRL),
    "TRL, padded, liger": Arm(trl_steps, (*TRL, "liger_kernel"), liger=True),
    "TRL, tree": Arm(tree_steps, TRL, recorded=True),
    "repeated, packed": Arm(functools.partial(our_steps, packed=True), recorded=True),
    "prefix_grouper": Arm(functools.partial(our_steps, backend="prefix_grouper"), ("prefix_grouper",), recorded=True),
}
"""By name. `use_liger_kernel` of TRL has meant liger's loss in former versions, and means its layers in later ones."""


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Run all arms on all shapes, print, and write OUTPUT.json and OUTPUT.md after each row."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")  # transformers' trainer would spread over all GPUs
    options = parse(arguments)
    stage = Stage.begin(options)
    compare(stage, options)
    print(table(stage.rows), flush=True)
    return stage.finish()


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS), help="default: all")
    parser.add_argument("--shapes", nargs="+", type=_shape, metavar="P:R:G", help="default: four shapes")
    parser.add_argument("--model", choices=list(MODELS), default="0.6b", help="shape of the model (default: 0.6b)")
    parser.add_argument("--rollouts", choices=("recorded", "sampled"), default="recorded", help="default: recorded")
    parser.add_argument("--vllm", dest="rollouts", action="store_const", const="vllm", help="sample with vLLM")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of each arm, the first not timed (default: {STEPS})")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on the CPU")
    parser.add_argument("--output", type=Path, help="write OUTPUT.json and OUTPUT.md")
    return parser.parse_args(arguments)


MODELS = {"0.6b": QWEN3_0_6B, "4b": QWEN3_4B}


def compare(stage: Stage, options: argparse.Namespace) -> None:
    """Run the arms, shape by shape."""
    recorded = options.rollouts == "recorded"
    shapes = stage.pick(options.shapes or (SHAPES if recorded else SAMPLED_SHAPES), ((24, 8, 4),))
    for prompt, rollout, size in shapes:
        groups = stage.pick(max(1, TOKENS_OF_STEP // (size * (prompt + rollout))), 2)
        case = stage.case(MODELS[options.model], prefix=prompt, rollout=rollout, group_size=size, groups=groups)
        run = Run(case, rollouts=options.rollouts, steps=options.steps)
        reference = stage.measure("float32 gradient", Reference, run) if recorded else None
        for label in options.arms:
            if recorded or not ARMS[label].recorded:
                run_arm(stage, label, ARMS[label], run, reference)
                if stage.output is not None:
                    stage.output.with_suffix(".md").write_text(table(stage.rows) + "\n")


def run_arm(stage: Stage, label: str, arm: Arm, run: Run, *arguments: Any, **options: Any) -> float | None:
    """Run an arm; returns the median seconds of a step, or None if a package is missing or it fails."""
    needs = (*arm.needs, "vllm") if run.rollouts == "vllm" else arm.needs
    with _globals_kept():
        own = replace(run, liger=arm.liger)
        return stage.measure(label, arm.steps, stage, label, own, *arguments, needs=needs, **options)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A table in Markdown for each shape, and a sentence for each arm that is faster than ours.

    MFU counts the operations of the arm's own sharing, without recomputation and rollouts, over the card's peak.
    """
    lines, lost, missed = [], [], {}
    done = [row for row in rows if "steps" in row]
    for shape in dict.fromkeys((row["P"], row["R"], row["G"], row["prompts"]) for row in done):
        own = [row for row in done if (row["P"], row["R"], row["G"], row["prompts"]) == shape]
        seconds = {row["label"]: row["s"] for row in own}
        ours = seconds.get(FUSED, seconds.get(OURS))  # liger's layers are the default where liger is installed
        lines += [
            f"{own[0]['model']}, {own[0]['precision']}, P = {shape[0]}, R = {shape[1]}, G = {shape[2]}, "
            f"prompts: {shape[3]}, rollouts {own[0]['rollouts']}",
            "",
            "| arm | s a step | of it rollouts | tokens/s | MFU | peak GiB | gradient error | ours is faster |",
            "|---|---|---|---|---|---|---|---|",
        ]  # fmt: skip
        for row in own:
            ratio = None if ours is None else row["s"] / ours
            if ratio is not None and ratio < 1 and not row["label"].startswith(OURS):
                lost.append(f"Ours is slower than {row['label']} at P = {shape[0]}: {1 / ratio:.2f} times its time.")
            cells = [row["label"], f"{row['s']:.3f}", f"{row['rollouts_s']:.3f}", f"{row['tokens_per_s']:,.0f}"]
            cells += [_cell(row["mfu"], ".2f"), _cell(row["peak_gib"], ".1f"), _cell(row["gradient_error"], ".1e")]
            lines.append(f"| {' | '.join([*cells, _cell(ratio, '.2f')])} |")
        lines.append("")
    for row in rows:
        if "missing" in row or "failed" in row:
            missed[row["label"]] = row.get("missing") or f"failed: {row['failed']}: {row['error'].splitlines()[0]}"
    return "\n".join([*lines, *lost, *(f"{label}: {note}" for label, note in missed.items())]).strip()


def _cell(number: float | None, form: str) -> str:
    return "" if number is None else format(number, form)


def _shape(text: str) -> tuple[int, int, int]:
    prompt, rollout, size = map(int, text.split(":"))
    return prompt, rollout, size
