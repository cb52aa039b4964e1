"""Checks of a run at setup: options, prompts, overrides, and shared prefixes."""

from __future__ import annotations

import contextlib
import difflib
import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from lightning.pytorch.callbacks import BatchSizeFinder, GradientAccumulationScheduler, LearningRateFinder
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch._dynamo import OptimizedModule
from torch.utils.data import DataLoader, default_collate

from pl_grouprl.attention import shared_prefix
from pl_grouprl.attention.backends.choice import get_backend
from pl_grouprl.checks import ParityReport
from pl_grouprl.data.loaders import PromptBatch, TrainPromptLoader
from pl_grouprl.models.policy import PolicySource
from pl_grouprl.packing import Sharing
from pl_grouprl.rollout.engine import declares, length_limits, vocabulary
from pl_grouprl.training.ahead import check_max_staleness
from pl_grouprl.training.objective import LossSums
from pl_grouprl.training.optimizer import OptimizerConfig
from pl_grouprl.training.run import Run
from pl_grouprl.types import Prompt, SamplingConfig
from pl_grouprl.utilities.checkpoint_files import refuse_unloadable
from pl_grouprl.utilities.describe import check_allowed
from pl_grouprl.utilities.distributed import num_ranks
from pl_grouprl.utilities.modes import naming_memory
from pl_grouprl.utilities.options import check_options

# Finds overridden methods, and checks what they return and raise.
#
# Errors name the class and method, what was found and what was expected.


def is_custom(method: Callable[..., Any]) -> bool:
    """Whether a method, or what replaces it on an instance, is not this package's."""
    return not method.__module__.startswith("pl_grouprl.")


def refuse_stop_iteration(trainer: Any) -> None:
    """Make a StopIteration that a hook raises an error. A second call changes nothing.

    Lightning would take it for the end of the data. It profiles every hook of modules, callbacks, strategies and data
    modules, but not the end of the data.
    """
    profiler = trainer.profiler
    if "profile" in vars(profiler):
        return
    profile = profiler.profile

    def refusing_profile(action: str) -> ExitStack:
        def refuse(kind: Any, error: BaseException | None, traceback: Any) -> None:
            if isinstance(error, StopIteration):
                raise RuntimeError(
                    f"{action} raised StopIteration, as next() does without a default at the end of an iterator."
                ) from error

        # With contextlib's contextmanager, the original StopIteration would be raised again.
        with ExitStack() as stack:
            stack.push(refuse)
            stack.enter_context(profile(action))
            return stack.pop_all()

    profiler.profile = refusing_profile


def checked_tensor(value: Any, where: str, *shapes: tuple[Sequence[int], str], boolean: bool = False) -> Tensor:
    """Check a tensor that an override returned; returns it detached and on the CPU.

    Args:
        value: What the override returned.
        where: Class, method and field, for the error.
        *shapes: The shapes it may have, each with a description of its axes for the error.
        boolean: Whether it must be a bool tensor rather than real numbers.

    Raises:
        TypeError: If it is not a tensor, or has the wrong dtype.
        ValueError: If its shape differs, or a value is NaN or infinite.
    """
    expected = "expected a tensor of shape " + ", or ".join(f"{list(shape)}, {meaning}" for shape, meaning in shapes)
    if not isinstance(value, Tensor):
        raise TypeError(f"{where} returned a {type(value).__name__}; {expected}.")
    if list(value.shape) not in [list(shape) for shape, _ in shapes]:
        raise ValueError(f"{where} returned shape {list(value.shape)}; {expected}.")
    if boolean != (value.dtype == torch.bool) or value.is_complex():
        kind = "of bool" if boolean else "of floating-point numbers"
        raise TypeError(f"{where} returned {value.dtype}; {expected}, {kind}.")
    value = value.detach().cpu()
    return value if boolean else _finite(value if value.is_floating_point() else value.float(), where)


def _finite(value: Tensor, where: str) -> Tensor:
    broken = int((~value.isfinite()).sum())
    if broken:
        raise ValueError(f"{where} returned {broken} of {value.numel()} values that are NaN or infinite.")
    return value


def check_loss_sums(loss_sums: Any, owner: str) -> LossSums:
    """Check what `compute_loss` returned.

    Raises:
        TypeError: If it is not `LossSums` made of pairs of tensors.
        ValueError: If a loss or a count is not a scalar.
    """
    where = f"{owner}.compute_loss"
    if not isinstance(loss_sums, LossSums):
        raise TypeError(f"{where} returned a {type(loss_sums).__name__}; expected LossSums(losses, metrics).")
    for kind, pairs in (("losses", loss_sums.losses), ("metrics", loss_sums.metrics)):
        for name, pair in pairs.items():
            if not isinstance(pair, tuple) or len(pair) != 2:
                raise TypeError(f"{where}: {kind}[{name!r}] is a {type(pair).__name__}; expected a sum and its count.")
            for part, what in zip(pair, ("sum", "count"), strict=True):
                _check_scalar(part, f"{where}: the {what} of {kind}[{name!r}]")
    for name, value in loss_sums.extremes.items():
        _check_scalar(value, f"{where}: extremes[{name!r}]")
    return loss_sums


def check_denominators(denominators: Any, owner: str) -> dict[str, Tensor]:
    """Check what `loss_denominators` returned.

    Raises:
        TypeError: If it is not a mapping of tensors.
        ValueError: If one is not a scalar.
    """
    where = f"{owner}.loss_denominators"
    if not isinstance(denominators, Mapping):
        raise TypeError(f"{where} returned a {type(denominators).__name__}; expected a scalar tensor by part.")
    for name, count in denominators.items():
        _check_scalar(count, f"{where}: {name!r}")
    return dict(denominators)


def _check_scalar(value: Any, where: str) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{where} is a {type(value).__name__}; expected a scalar tensor.")
    if value.dim():
        raise ValueError(f"{where} has shape {list(value.shape)}; expected a scalar tensor, shape [].")


_RENAMED = {
    "prepare": "compute_targets",
    "estimate_advantages": "compute_targets",
    "prepare_scores": "score_rollouts_before_update",
    "policy_terms": "compute_loss",
    "recorded_routers": "compute_loss",
    "collect_groups": "collect_rollouts",
    "reward_groups": "collect_rollouts",
    "map_rollouts": "score_rollouts",
    "start_rewards": "collect_rollouts",
    "sample_with": "generate",
    "divide": "compute_loss",
    "total_denominators": "loss_denominators",
}


def refuse_renamed(cls: type) -> None:
    """Refuse a subclass that overrides a method which is no longer called, or misspells the name of one that is.

    A name is taken as misspelt if it is new, public and close to a method that the class does not override.

    Raises:
        TypeError: Names the method to override instead.
    """
    for old, new in _RENAMED.items():
        if old in vars(cls):
            raise TypeError(f"{cls.__name__}.{old} would never be called; override {new}, see RLModule.")
    hooks = _hooks(cls.__mro__[1:])
    for name, value in vars(cls).items():
        if (
            not inspect.isfunction(value)
            or name.startswith("_")
            or any(hasattr(base, name) for base in cls.__mro__[1:])
        ):
            continue
        for hook in difflib.get_close_matches(name, hooks - vars(cls).keys(), n=1, cutoff=0.85):
            raise TypeError(
                f"{cls.__name__}.{name} would never be called; did you mean to override {hook}? If it is a method of "
                "your own, name it differently."
            )


def _hooks(bases: Sequence[type]) -> set[str]:
    """Public methods of this package's classes with more than one word in their names."""
    return {
        name
        for base in bases
        if base.__module__.startswith("pl_grouprl.")
        for name, value in vars(base).items()
        if "_" in name.strip("_") and not name.startswith("_") and inspect.isfunction(value)
    }


# Refuses Trainer options that a fit cannot honour, or that would end it before it begins.

_REWARD = re.compile(r"((val|test)/)?(reward|rewards/.+/mean|.+/(mean|best|maj|pass)@\d+)")
"""Names of metrics of which more is better."""


def check_device(device: torch.device) -> None:
    """Refuse Apple's GPUs, which a Trainer chooses by itself on a Mac.

    Raises:
        ValueError: Says what to choose.
    """
    if device.type == "mps":
        raise ValueError(
            "trainer.accelerator is 'mps', which has no float64: sampling and the statistics of rewards need it. Set "
            "it to 'cpu'. (SharedPrefixCallback in a LightningModule of your own takes mps.)"
        )


def check_trainer(trainer: Any, stage: str) -> None:
    """Refuse finders of batch sizes and learning rates, and Trainer options that a fit cannot honor.

    Raises:
        ValueError: Names the option, its value and what it must be, or the finder.
    """
    for callback in getattr(trainer, "callbacks", ()):
        for finder, reason in _FINDERS.items():
            if isinstance(callback, finder):
                raise ValueError(f"callbacks has a {type(callback).__name__}, {reason}.")
    if stage != "fit":
        return
    if num_ranks() not in (1, trainer.world_size):
        raise ValueError(
            f"a process group of {num_ranks()} ranks exists, but the Trainer has {trainer.world_size}; gradients "
            "would not be averaged over it. Pass devices and strategy for all ranks, or destroy the group."
        )
    for callback in trainer.callbacks:
        name, monitor = type(callback).__name__, str(getattr(callback, "monitor", ""))
        if getattr(callback, "mode", None) == "min" and _REWARD.fullmatch(monitor):
            raise ValueError(f"{name}(monitor={monitor!r}) has mode='min', under which the lowest is best; pass 'max'.")
    every_epoch, interval = trainer.check_val_every_n_epoch, trainer.val_check_interval
    clip, limit = trainer.gradient_clip_val, trainer.limit_train_batches
    accumulated = trainer.accumulate_grad_batches
    check_options(
        {
            "trainer.accumulate_grad_batches": (accumulated, _is_count(accumulated), "a whole number, at least 1"),
            "trainer.val_check_interval": (
                interval,
                not isinstance(interval, int | float) or interval > 0,
                "larger than 0; for no validation leave the data module's val out, or set limit_val_batches to 0",
            ),
            "trainer.check_val_every_n_epoch": (
                every_epoch,
                every_epoch is None or _is_count(every_epoch),
                "a whole number, at least 1, or None",
            ),
            "trainer.gradient_clip_val": (clip, clip is None or clip >= 0, "0 (off) or larger, or None"),
            "trainer.limit_train_batches": (limit, limit > 0, "larger than 0: otherwise the run would end immediately"),
            "trainer.overfit_batches": (
                trainer.overfit_batches,
                not _is_no_batch(trainer),
                "0 (off), a number of batches, or a share that is at least one batch of validation",
            ),
            "trainer.max_steps": (trainer.max_steps, trainer.max_steps != 0, "at least 1, or -1 for no limit"),
            "trainer.max_epochs": (trainer.max_epochs, trainer.max_epochs != 0, "at least 1, or -1 for no limit"),
        }
    )


_FINDERS = {
    BatchSizeFinder: "but batch_size decides what is optimized, not how much memory it takes; leave it out, and set "
    "max_tokens_per_micro_batch (on a GPU its default is what fits)",
    LearningRateFinder: "which compares losses, but the loss of a policy gradient does not say how good the policy is; "
    "leave it out, and compare the rewards of short runs",
}


def accumulation_schedule(trainer: Any) -> dict[int, int]:
    """Batches per optimizer step, by the epoch in which that number begins."""
    schedulers = [callback for callback in trainer.callbacks if isinstance(callback, GradientAccumulationScheduler)]
    return schedulers[0].scheduling if schedulers else {0: trainer.accumulate_grad_batches}


def _is_no_batch(trainer: Any) -> bool:
    """Whether `overfit_batches` is a share that comes to less than one validation batch."""
    data = getattr(trainer, "datamodule", None)
    prompts = getattr(data, "prompts", {}).get("val", ())
    batches = math.ceil(len(prompts) / getattr(data, "val_batch_size", 1))
    share = trainer.overfit_batches
    return isinstance(share, float) and 0 < share < 1 and batches > 0 and share * batches < 1


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def refuse_manual_optimization(module: Any) -> None:
    """Refuse manual optimization, under which no optimizer would ever step and `max_steps` would never be reached.

    Raises:
        ValueError: Names the module's class.
    """
    if not module.automatic_optimization:
        raise ValueError(
            f"{type(module).__name__}.automatic_optimization is False, but RLModule steps the optimizer by Lightning's "
            "automatic optimization; leave it at True and override optimizer_step or configure_optimizers instead."
        )


def refuse_compiled(modules: Mapping[str, Any]) -> None:
    """Refuse compiled modules.

    Args:
        modules: Modules by name, for the error.

    Raises:
        ValueError: Says what to compile instead.
    """
    for name, part in modules.items():
        compiled = isinstance(part, OptimizedModule) or part._compiled_call_impl is not None
        if compiled or getattr(part, "_compiler_ctx", None) is not None:
            raise ValueError(
                f"{name} is compiled, which is not supported yet; leave out torch.compile({name}) and "
                f"{name}.compile(). The policy's decoder layers can be compiled: compile_layers of its source."
            )


def check_updates(trainer: Any, num_iterations: int, num_mini_batches: int) -> None:
    """Refuse more mini-batches than prompts, accumulation over several passes, and epochs that end between updates.

    Raises:
        ValueError: Names the options.
    """
    data = trainer.fit_loop._data_source.instance
    batch_size = getattr(data, "batch_size", None)
    if batch_size is not None and num_mini_batches > batch_size:
        raise ValueError(
            f"num_mini_batches is {num_mini_batches} with batch_size={batch_size} prompts; groups are not split, so it "
            f"can be at most {batch_size}."
        )
    accumulated = max(accumulation_schedule(trainer).values())
    if num_iterations > 1 and accumulated > num_mini_batches:
        raise ValueError(
            f"accumulate_grad_batches is {accumulated} with num_mini_batches={num_mini_batches} and "
            f"num_iterations={num_iterations}: one optimizer step would add up several passes over the same "
            "rollouts, which is the same as one pass. Set num_iterations to 1, or accumulate less."
        )
    updates, limit = num_iterations * num_mini_batches, trainer.limit_train_batches
    num_batches = len(data) if isinstance(data, TrainPromptLoader) else getattr(data, "num_train_batches", math.inf)
    used = min(num_batches, limit) if isinstance(limit, int) else num_batches * limit
    if used < math.inf and int(used) % updates and not trainer.fast_dev_run:
        name = "overfit_batches" if trainer.overfit_batches else "limit_train_batches"
        raise ValueError(
            f"trainer.{name} is {limit}, which ends each epoch after {int(used)} batches, amid the {updates} updates "
            f"(num_iterations={num_iterations} x num_mini_batches={num_mini_batches}) of a batch of rollouts; make it "
            f"a multiple of {updates}."
        )


# Checks all prompts against the model's limits before anything is sampled.

_REMEDY = (
    "rollouts need a pl_grouprl.data.PromptBatch: prompts, and which update of their rollouts it is. Put the prompts "
    "into a PromptDataModule and pass it as datamodule; a custom loader must yield PromptBatch objects, each "
    "module.updates_per_rollout times in a row."
)
_SPLITS_OF_STAGE = {"fit": ("train", "val"), "validate": ("val",), "test": ("test",)}


def limits_of_source(source: PolicySource) -> dict[str, int]:
    """The model's maximum sequence length, if its source knows it before loading; see `length_limits`."""
    load_config = getattr(source, "load_config", None)
    if load_config is not None:
        limit = getattr(load_config().get_text_config(decoder=True), "max_position_embeddings", None)
    else:
        architecture = getattr(source, "architecture", None)
        limit = architecture.get("max_position_embeddings") if isinstance(architecture, dict) else None
    return {} if limit is None else {"max_position_embeddings": int(limit)}


def check_prompts(
    prompts: Sequence[Prompt],
    split: str,
    sampling: SamplingConfig,
    option: str,
    engine: Any,
    limits: dict[str, int],
    vocab_size: int | None = None,
) -> None:
    """Refuse prompts that leave no room for a completion, or contain tokens outside the vocabulary.

    Unprocessed images and videos count as one token each; the sampler checks those prompts again.

    Args:
        prompts: The prompts of a split.
        split: Name of the split.
        sampling: Its `max_new_tokens` is the longest completion.
        option: Name of the option that sets `sampling`, for the error.
        engine: The rollout engine. Unless it reserves room for all of `max_new_tokens`, room for one token is enough.
        limits: Maximum length of prompt plus completion, by the name of what sets it.
        vocab_size: Size of the vocabulary; None if unknown.

    Raises:
        ValueError: Names the first such prompt's row and length, the limit, the number of such prompts and the remedy.
    """
    new_tokens = sampling.max_new_tokens if declares(engine, "reserves_max_new_tokens") else 1
    for name, limit in (limits | _engine_limit(engine)).items():
        reason = f"with {new_tokens} new ones exceeds the model's {name}={limit}"
        _refuse_longer(prompts, split, limit - new_tokens, reason, f"lower {option}.max_new_tokens")
    if vocab_size is not None:
        _refuse_unknown_tokens(prompts, split, vocab_size)


def _refuse_longer(prompts: Sequence[Prompt], split: str, room: int, reason: str, remedy: str) -> None:
    longer = [prompt for prompt in prompts if prompt.num_tokens > room]
    if not longer:
        return
    longest = max(prompt.num_tokens for prompt in longer)
    if room > 0:
        remedy = f"set max_prompt_length={room} of PromptDataModule (overlong_prompts: drop or truncate), or {remedy}"
    raise ValueError(
        f"{longer[0].where or split}: the prompt has {longer[0].num_tokens} tokens, which {reason}, as {len(longer)} "
        f"of {len(prompts)} prompts of `{split}` do (the longest has {longest}); {remedy}."
    )


def _refuse_unknown_tokens(prompts: Sequence[Prompt], split: str, vocab_size: int) -> None:
    for prompt in prompts:
        if max(prompt.token_ids) >= vocab_size:
            raise ValueError(
                f"{prompt.where or split}: the prompt has token id {max(prompt.token_ids)}, but the model has "
                f"vocab_size={vocab_size}; use the tokenizer that belongs to the model."
            )


def _engine_limit(engine: Any) -> dict[str, int]:
    """The longest sequence that the engine is configured to serve."""
    limit = getattr(engine, "max_model_len", None)
    return {} if limit is None else {"max_model_len": limit}


def prompts_of_stage(trainer: Any, stage: str) -> dict[str, Sequence[Prompt]]:
    """The prompts of a stage, by split, if the data module has them."""
    prompts = getattr(getattr(trainer, "datamodule", None), "prompts", {})
    return {split: prompts[split] for split in _SPLITS_OF_STAGE.get(stage, ()) if split in prompts}


def check_loader(trainer: Any, stage: str) -> None:
    """Refuse a stage without data, and loaders that cannot yield a `PromptBatch`.

    Raises:
        ValueError: If the Trainer has got no data.
        TypeError: If it has got rows, or a DataLoader that collates rows into tensors.
    """
    stage = str(getattr(stage, "value", stage))
    source = getattr(trainer, f"{stage}_loop")._data_source
    if not source.is_defined():
        raise ValueError(
            f"trainer.{stage} has no data: neither module nor data module defines {source.name}; pass "
            "datamodule=PromptDataModule(...)."
        )
    if not source.is_module() and _yields_rows(source.instance):
        raise TypeError(f"trainer.{stage} was given {_kind_of(source.instance)}; {_REMEDY}")


def _yields_rows(data: Any) -> bool:
    """Whether it is text, rows, or a DataLoader that turns rows into tensors; a list may hold several loaders."""
    if isinstance(data, DataLoader):
        return data.collate_fn is default_collate
    if isinstance(data, list | tuple):
        return any(_yields_rows(item) for item in data[:1])
    return isinstance(data, Mapping | str)


def _kind_of(data: Any) -> str:
    return "a DataLoader of rows" if isinstance(data, DataLoader) else f"a {type(data).__name__} of rows"


def check_batch(batch: Any) -> None:
    """Refuse batches that are not prompts for rollouts.

    Raises:
        TypeError: If the batch is not a `PromptBatch`.
    """
    if not isinstance(batch, PromptBatch):
        raise TypeError(f"the loader yields {type(batch).__name__}; {_REMEDY}")


# Shares prefixes in a run's models for the whole fit, after verifying that results do not change.


class PrefixSharing:
    """Patches models to encode shared tokens once, until closed.

    Args:
        run: The run.
        sharing: `shared` or `repeated`, which patches nothing.
        backend: Attention backend for shared prefixes; see `pl_grouprl.attention.shared_prefix`.
        verify: Compare shared with repeated prefixes before the first step.

    Attributes:
        dense: Names of the open models that get dense masks, so that their groups cannot be split.

    Raises:
        ValueError: If an option is unknown.
    """

    def __init__(self, run: Run, sharing: Sharing = "shared", backend: str = "auto", verify: bool = True) -> None:
        if sharing not in ("shared", "repeated"):
            raise ValueError(f"sharing is {sharing!r}; pass 'shared' (each prompt encoded once) or 'repeated'.")
        get_backend(backend, "attention_backend")  # fail early if unknown
        self._run = run
        self.sharing: Sharing = sharing
        self.backend = backend
        self.verify = verify
        self.dense: list[str] = []
        self._contexts = contextlib.ExitStack()

    def open(self, models: Mapping[str, Any], reports: Callable[[], list[ParityReport]]) -> None:
        """Patch the models of a fit.

        Args:
            models: The transformers models to patch, by name.
            reports: Compares shared with repeated prefixes.
        """
        if self.sharing == "repeated":
            rank_zero_info("sharing='repeated': every rollout is encoded with its own copy of the prompt.")
            return
        if self.verify:
            memory = naming_memory("the check of shared prefixes before training", "verify=False skips it")
            with memory, self._run.support.forward_context():
                found = reports()
            for report in found:
                report.raise_if_failed()
                rank_zero_info(str(report))
        named: dict[str, list[str]] = {}
        for name, model in models.items():
            # Patched for the whole fit, because activation checkpointing repeats the forward during the backward.
            with self._run.support.whole_weights(model):  # entering runs a short forward
                patch = self._contexts.enter_context(shared_prefix(model, self.backend))
            if patch.dense:
                self.dense.append(name)
            how = f"{type(model).__name__}, attention backend {self.backend!r}: {patch.describe()}"
            named.setdefault(how, []).append(name)
        for how, names in named.items():
            rank_zero_info(f"sharing='shared': each prompt is encoded once by {' and '.join(names)} ({how}).")

    def close(self) -> None:
        """Restore the models."""
        self._contexts.close()
        self.dense.clear()


def refuse_dropout(owner: str, model: Any) -> None:
    """Refuse dropout: old and reference scores are without, so ratios would differ from 1 by chance alone.

    Raises:
        ValueError: If the model is in training mode and has dropout.
    """
    for name, module in model.named_modules() if model.training else ():
        numbers = {option: rate for option, rate in vars(module).items() if type(rate) in (int, float)}
        rates = {option: rate for option, rate in numbers.items() if 0 < rate <= 1}
        for option, rate in rates.items():
            if "drop" in option or (option == "p" and "Drop" in type(module).__name__):
                raise ValueError(
                    f"{owner} has dropout ({name}.{option}={rate}), and what it computes with it cannot be compared "
                    "with old values and log-probabilities, computed without; set it to 0 in the model's config "
                    "(disable_dropout=True of PretrainedPolicy does that) or in the module."
                )


# Checks at setup: most before models are loaded, those that need a model right after.


def check_before_loading(module: Any, stage: str) -> None:
    """Refuse options of module and Trainer, and prompts, that cannot work in a stage.

    Args:
        module: The `RLModule`, attached to its Trainer.
        stage: `fit`, `validate`, `test` or `predict`.

    Raises:
        ValueError: Names the option or the prompt, and what it must be.
        TypeError: If the data cannot hold prompts, or hyperparameters could not be loaded from a checkpoint.
    """
    trainer, is_fit = module.trainer, stage == "fit"
    check_loader(trainer, stage)
    if is_fit:
        refuse_manual_optimization(module)
        check_allowed(module.allow_changed, module.run_options(), module.free_options)
        for saved in (module, getattr(trainer, "datamodule", None)):  # by save_hyperparameters
            refuse_unloadable({"hyper_parameters": dict(getattr(saved, "hparams", {}))})
    check_device(trainer.strategy.root_device)
    check_trainer(trainer, stage)
    module.support.check(module)
    check_quantized(module)
    prompts = prompts_of_stage(trainer, stage)
    for split, prompts_of_split in prompts.items():
        module.rewarder.check_columns(prompts_of_split, split)
    _check_prompts(module, stage, limits_of_source(module.policy_source))
    if is_fit:
        _check_fit(module)
    train_prompts = prompts.get("train", ()) if is_fit else None
    longest = module.episodes.longest_completion(module.sampling.max_new_tokens, module.max_tokens_per_micro_batch)
    module.micro_batcher.check(trainer.world_size, train_prompts, longest)


def check_quantized(module: Any) -> None:
    """Refuse what a strategy that shards weights cannot do: moments and weights in blocks, another optimizer.

    bitsandbytes stores 8-bit moments and 4-bit weights in blocks of whole tensors. An optimizer that looks at whole
    matrices would compute something else from flat shards.

    Raises:
        ValueError: Names the option and the strategy.
    """
    if module.support.keeps_plain_weights:
        return
    strategy = type(module.trainer.strategy).__name__
    configs = [value for value in vars(module).values() if isinstance(value, OptimizerConfig)]
    if any(config.state_bits < 32 for config in configs):
        raise ValueError(
            f"state_bits=8 of an optimizer does not work under {strategy}, which shards weights and moments; leave it "
            "out, or use a single device or ddp."
        )
    other = [config.optim for config in configs if config.optim != OptimizerConfig.optim]
    if other and not module.support.keeps_shapes:
        raise ValueError(
            f"optim is {other[0]} under {strategy}, which flattens weights; use ModelParallelStrategy "
            "(strategy/fsdp2.yaml), ddp, or AdamW."
        )
    for name, value in vars(module).items():
        if name.endswith("_source") and getattr(value, "quantization", None) is not None:
            raise ValueError(
                f"{name.removesuffix('_source')} has a quantization, which does not work "
                f"under {strategy}, which shards weights; leave it out, or use a single device or ddp."
            )


def check_prompts_of_model(module: Any) -> None:
    """Refuse prompts that the loaded policy cannot take; nothing is checked without a running Trainer.

    Raises:
        ValueError: Names the prompt and the limit.
    """
    trainer = module._trainer
    if trainer is not None and trainer.state.fn is not None:
        _check_prompts(module, trainer.state.fn.value, length_limits(module.policy), vocabulary(module.policy))


def _check_prompts(module: Any, stage: str, limits: Mapping[str, int], vocab_size: int | None = None) -> None:
    for split, prompts in prompts_of_stage(module.trainer, stage).items():
        sampling = module.sampling if split == "train" else module.val_sampling
        option = "sampling" if sampling is module.sampling else "val_sampling"
        check_prompts(prompts, split, sampling, option, module.engine, dict(limits), vocab_size)


def _check_whole_logprobs(module: Any) -> None:
    if declares(module.engine, "truncates_logprobs"):
        raise ValueError(
            f"importance_sampling is {module.objective.importance_sampling['kind']!r}, but with top_k, top_p or min_p "
            f"{type(module.engine).__name__} reports log-probabilities of the truncated distribution, and the policy's "
            "are of the whole one; leave importance_sampling 'none', drop these filters from sampling, or sample with "
            "HFRolloutEngine."
        )


def _check_fit(module: Any) -> None:
    trainer = module.trainer
    data = getattr(trainer, "datamodule", None)
    if module.dynamic_sampling and not hasattr(data, "draw_extra"):
        raise ValueError(
            "dynamic_sampling=True needs more prompts than a batch holds; pass a PromptDataModule as datamodule."
        )
    if module.objective.corrects_sampling and module.sampling.is_truncated:
        _check_whole_logprobs(module)
    if module.max_staleness:
        check_max_staleness(module, module.engine, module.objective.corrects_sampling)
    check_updates(trainer, module.num_iterations, module.num_mini_batches)
    module.kl_penalty.check_horizon(getattr(data, "batch_size", None), module.max_rollouts)
    budget, ranks = module.micro_batcher.max_tokens, module.micro_batcher.sequence_parallel_size
    loss = module.objective.policy_loss
    if (budget is not None or ranks > 1) and loss.compares_tokens:
        rank_zero_warn(
            f"policy_loss {loss.name!r} selects tokens by comparing those of one micro-batch, so "
            f"max_tokens_per_micro_batch={budget} and sequence_parallel_size={ranks} change its selection."
        )


def check_groups_fit(module: Any) -> None:
    """Refuse a token budget below the largest possible group if a model gets dense masks, for which no group is split.

    Args:
        module: An `RLModule` whose models share prefixes, attached to its Trainer.

    Raises:
        ValueError: Names the models, the budget, the size of a group and the remedy.
    """
    budget, names = module.max_tokens_per_micro_batch, module.prefix_sharing.dense
    prompts = prompts_of_stage(module.trainer, module.trainer.state.fn.value).get("train", ())
    if budget is None or not names or not prompts:
        return
    prompt = max(prompt.num_tokens for prompt in prompts)
    completion = module.episodes.longest_completion(module.sampling.max_new_tokens, budget)
    largest = prompt + module.max_rollouts * completion
    if largest > budget:
        raise ValueError(
            f"max_tokens_per_micro_batch is {budget}, but a group may have {largest} tokens (a prompt of {prompt} and "
            f"{module.max_rollouts} rollouts of {completion}), and {' and '.join(names)} cannot be run on a part of a "
            "group: the layers compute with the attention mask themselves. Raise it, lower num_generations or "
            "sampling.max_new_tokens, or pass sharing='repeated'."
        )


def check_lengths_of_teacher(module: Any) -> None:
    """Refuse training prompts whose rollouts may become longer than the teacher reads.

    Args:
        module: An `RLModule` with a loaded `policy` and `teacher`, attached to its Trainer.

    Raises:
        ValueError: Names the limit, the longest sequence and the remedy.
    """
    prompts = prompts_of_stage(module.trainer, module.trainer.state.fn.value).get("train", ())
    if not prompts:
        return
    completion = module.episodes.longest_completion(module.sampling.max_new_tokens, module.max_tokens_per_micro_batch)
    prompt = max(prompt.num_tokens for prompt in prompts)
    longest = min([prompt + completion, *length_limits(module.policy).values()])
    for name, limit in length_limits(module.teacher).items():
        if longest > limit:
            raise ValueError(
                f"teacher has {name}={limit}, but sequences may have {longest} tokens (a prompt of {prompt} and a "
                f"completion of {completion}); lower PromptDataModule's max_prompt_length or "
                "sampling.max_new_tokens, or use another teacher."
            )
