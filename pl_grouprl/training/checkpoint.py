"""The run's part of a checkpoint, and resuming from it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Protocol

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from pl_grouprl.models.adapters import adapter_options
from pl_grouprl.rewards import prepare_rewards
from pl_grouprl.training.buffer import RolloutBuffer
from pl_grouprl.training.checks import accumulation_schedule
from pl_grouprl.training.optimizer import ADDED_OPTIONS, saved_options
from pl_grouprl.training.run import Run
from pl_grouprl.types import SamplingConfig
from pl_grouprl.utilities.checkpoint_files import load_verified
from pl_grouprl.utilities.describe import (
    Changes,
    changed_options,
    changes_since,
    compare_lineage,
    describe,
    describe_misfit,
    identity,
    lineage,
    options_of,
    plain,
    refused_changes,
    remedy,
)
from pl_grouprl.utilities.distributed import gather_plain, num_ranks
from pl_grouprl.utilities.modes import random_state, set_random_state

# The global random number generators of a run: saved, restored, and unaffected by validation.


class RandomNumbers:
    """Python's, NumPy's and torch's generators on each rank, as part of a checkpoint.

    Args:
        run: The run.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._per_rank: list[dict[str, Any]] = []
        self._earlier: dict[str, Any] | None = None

    @property
    def _device(self) -> torch.device:
        return self._run.device

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the states of all ranks; while some are set aside, those."""
        return gather_plain(self._earlier or random_state(self._device), self._device)

    def load_state_dict(self, state: list[dict[str, Any]]) -> None:
        """Keep the states until `restore`."""
        self._per_rank = state

    def restore(self) -> None:
        """Restore the loaded state, on ranks that the saved run had; called last, because setup draws numbers too."""
        states, self._per_rank, self._earlier = self._per_rank, [], None
        if self._run.global_rank < len(states):
            set_random_state(states[self._run.global_rank], self._device)

    def set_aside(self) -> None:
        """Remember the state before what a resumed run skips (validation) or repeats (rollouts that failed)."""
        self._earlier = random_state(self._device)

    def keep(self) -> None:
        """Forget the state that was set aside."""
        self._earlier = None

    def continue_training(self) -> None:
        """Restore the state that was set aside."""
        if self._earlier is not None:
            set_random_state(self._earlier, self._device)
        self._earlier = None


# Checkpoint parts: what a run saves besides weights, optimizer and position in the data.


class Stateful(Protocol):
    """Has a state made of plain containers, numbers, strings and tensors."""

    def state_dict(self) -> Any:
        """Return the state."""

    def load_state_dict(self, state: Any) -> None:
        """Restore the state, or refuse it."""


class Attributes:
    """Saves and restores some attributes of an object."""

    def __init__(self, owner: Any, *names: str) -> None:
        self.owner = owner
        self.names = names

    def state_dict(self) -> dict[str, Any]:
        """Return their values by name."""
        return {name: getattr(self.owner, name) for name in self.names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set those that the state has."""
        for name in self.names:
            if name in state:
                setattr(self.owner, name, state[name])


class ConsistencyCheck:
    """A fact that is recorded in a checkpoint and compared when it is loaded.

    Args:
        current: Returns the fact as it is now.
        compare: Takes the recorded and the current fact; raises or warns if they conflict. None only records it.
    """

    def __init__(self, current: Callable[[], Any], compare: Callable[[Any, Any], None] | None = None) -> None:
        self.current = current
        self.compare = compare

    def state_dict(self) -> Any:
        """Return the current fact."""
        return self.current()

    def load_state_dict(self, state: Any) -> None:
        """Compare the recorded fact with the current one."""
        if self.compare is not None:
            self.compare(state, self.current())


class PerRankState:
    """State that differs between ranks; a checkpoint holds a list of all ranks' states.

    Args:
        run: Its device is where ranks communicate.
        save: Returns this rank's state.
        load: Takes the states of all saved ranks, however many there were.
    """

    def __init__(self, run: Any, save: Callable[[], Any], load: Callable[[list[Any]], None]) -> None:
        self.run = run
        self.save = save
        self.load = load

    def state_dict(self) -> list[Any]:
        """Gather all ranks' states; every rank must call it."""
        return gather_plain(self.save(), self.run.device)

    def load_state_dict(self, state: list[Any]) -> None:
        """Restore this rank's state."""
        self.load(state)


def save_parts(parts: Mapping[str, Stateful]) -> dict[str, Any]:
    """Save parts by name; all ranks call it."""
    return {name: part.state_dict() for name, part in parts.items()}


def load_parts(parts: Mapping[str, Stateful], state: Mapping[str, Any], leave_out: Container[str]) -> None:
    """Load parts in their order.

    Args:
        parts: Parts by name. One that an older checkpoint lacks is left as it is.
        state: What `save_parts` returned.
        leave_out: Parts that start over.
    """
    for name, part in parts.items():
        if name in state and name not in leave_out:
            part.load_state_dict(state[name])


# Records the options that decide what a run optimizes, for comparison when it is resumed.

FREE_OPTIONS = frozenset(
    {
        "policy",  # its base model, adapter and weights are compared elsewhere
        "engine",
        "sharing",
        "share_across_groups",
        "attention_backend",
        "verify",
        "max_nonfinite_steps",
        "max_unrewarded_batches",
        "allow_changed",
        "val_num_generations",
        "val_sampling",
        "pass_threshold",
        "reward_workers",
        "reward_timeout",
        "reward_memory_limit_mb",
        "reward_retries",
        "max_failed_share",
        "tool_timeout",
        "tool_workers",
        "max_tokens_per_micro_batch",
        "sequence_parallel_size",
        # How a critic was initialized and how it runs: its weights come from the checkpoint.
        *(
            f"critic.{name}"
            for name in (
                "path",
                "gguf_file",
                "revision",
                "trust_remote_code",
                "dtype",
                "attn_implementation",
                "head_std",
                "seed",
            )
        ),
        "critic.gradient_checkpointing",
        # These select among the same rows; the loader refuses changes that it cannot resume with.
        "data.max_prompt_length",
        "data.overlong_prompts",
    }
)
"""Constructor options that may differ when a run is resumed; all others are compared."""

PASSED_ON = frozenset(
    {
        "rewards",
        "sampling",
        "engine",
        "harness",
        "seed",
        "num_generations",
        "branching",
        "num_mini_batches",
        "sharing",
        "share_across_groups",
        "attention_backend",
        "verify",
        "max_tokens_per_micro_batch",
        "sequence_parallel_size",
        "mask_truncated_completions",
        "dynamic_sampling",
        "max_staleness",
    }
)
"""Constructor options that were passed on to parts of the run, so setting the attribute later would have no effect."""

_OF_OPTIMIZER_STATE = re.compile(
    r"(\w+_)?optimizer\.(learning_rate|weight_decay|betas|eps|state_bits|optim|optim_args(\..+)?)"
)
"""Options stored in the optimizer's state; `compare_optimizers` refuses changes to them."""


def note_options(module: Any, options: Mapping[str, Any]) -> None:
    """Record constructor arguments as plain values, before anything can change them."""
    noted = module.__dict__.setdefault("_noted_options", {})
    for name, value in options.items():
        for former in [key for key in noted if key == name or key.startswith(f"{name}.")]:
            del noted[former]
        if name == "engine":  # may hold secrets of servers
            noted[name] = None if value is None else identity(type(value))
        else:
            noted |= _describe_rewards(value) if name == "rewards" else describe(name, value)


def recorded_options(module: Any) -> dict[str, Any]:
    """Everything that decides what a run optimizes, by name, as plain values.

    The constructors' arguments, `rollout_options` and, once a Trainer is attached, its gradient options and the
    `resume_facts()` of its data module.
    """
    noted = module.__dict__.get("_noted_options", {})
    noted = {name: value for name, value in noted.items() if _is_compared(name, module.free_options)}
    # Derived entries such as `beta > 0` add nothing to `beta`.
    more = {name: value for name, value in module.rollout_options().items() if name.split(" ")[0] not in noted}
    trainer = getattr(module, "_trainer", None)
    of_trainer = {} if trainer is None else _trainer_options(trainer) | _data_options(trainer)
    options = {"model": type(module).__name__} | more | noted | of_trainer
    return {name: value for name, value in options.items() if name not in module.free_options}


def evaluation_options(module: Any) -> dict[str, Any]:
    """What decides the metrics of validation and test, except data and rewards, by name, as plain values."""
    sampling = {
        f"val_sampling.{field.name}": getattr(module.val_sampling, field.name) for field in fields(SamplingConfig)
    }
    own = {"val_num_generations": module.val_num_generations, "pass_threshold": module.evaluator.pass_threshold}
    return own | {name: plain(value) for name, value in sampling.items()}


def all_options(module: pl.LightningModule) -> dict[str, Any]:
    """All options of a run as plain values, to tell it from others: the module's, and the Trainer's most important.

    Args:
        module: Attached to its Trainer. Of one that is no `RLModule`, those that it saves by `save_hyperparameters`.
    """
    trainer = module.trainer
    noted = module.__dict__.get("_noted_options", {})
    hparams = {key: plain for name, value in module.hparams.items() for key, plain in describe(name, value).items()}
    of_trainer = {name: getattr(trainer, name) for name in ("max_steps", "max_epochs", "precision", "world_size")}
    of_trainer["strategy"] = type(trainer.strategy).__name__
    named = {f"trainer.{name}": value for name, value in of_trainer.items()}
    return hparams | options_of(module) | noted | _trainer_options(trainer) | named


def _is_compared(name: str, free: frozenset[str]) -> bool:
    """Whether no dotted prefix of the name is free, and the optimizer's state does not bring it along."""
    parts = name.split(".")
    is_free = any(".".join(parts[:end]) in free for end in range(1, len(parts) + 1))
    return not is_free and not _OF_OPTIMIZER_STATE.fullmatch(name)


def _trainer_options(trainer: pl.Trainer) -> dict[str, Any]:
    clips = trainer.gradient_clip_val or None
    algorithm = None if clips is None else str(getattr(trainer.gradient_clip_algorithm, "value", None) or "norm")
    schedule = accumulation_schedule(trainer)
    return {
        "trainer.gradient_clip_val": clips,
        "trainer.gradient_clip_algorithm": algorithm,
        "trainer.accumulate_grad_batches": schedule[0] if len(schedule) == 1 else sorted(map(list, schedule.items())),
        "trainer.overfit_batches": getattr(trainer, "overfit_batches", 0),
    }


def _data_options(trainer: pl.Trainer) -> dict[str, Any]:
    """The data module's `resume_facts`, if it has any."""
    facts = getattr(getattr(trainer, "datamodule", None), "resume_facts", dict)
    return {f"data.{name.removeprefix('data.')}": value for name, value in facts().items()}


def _describe_rewards(rewards: Any) -> dict[str, Any]:
    """Describe reward functions by their names in metrics, each with its weight."""
    try:
        weighted = prepare_rewards(rewards)
    except (TypeError, ValueError):
        return {}  # the constructor refuses them
    described: dict[str, Any] = {"rewards": [reward.name for reward in weighted]}
    for reward in weighted:
        described |= describe(f"rewards.{reward.name}", reward.function)
        described[f"rewards.{reward.name}.weight"] = reward.weight
    return described


# Resuming mid-epoch, or between the updates of a batch of rollouts.


def fix_loop_counters(checkpoint: dict[str, Any], num_batches: int | None = None) -> bool:
    """Correct the loop counters of a checkpoint, so that they describe the position at which the run was saved.

    Lightning gets two cases wrong. It counts an epoch as complete in the last checkpoint of a run that `max_steps`
    ended mid-epoch, so a resumed run would skip the rest of that epoch. And if the run ended with an epoch, Lightning
    2.6 skips the next epoch when `max_steps` is set.

    Args:
        checkpoint: What Lightning has loaded and is about to restore; changed in place.
        num_batches: Batches per epoch now, if known. An epoch that has had that many is complete, even if epochs were
            longer when the checkpoint was saved.

    Returns:
        Whether the epoch was complete, so that the run resumes with the next one.
    """
    loop = checkpoint.get("loops", {}).get("fit_loop")
    if loop is None:
        return False
    epochs, batches = loop["epoch_progress"], loop["epoch_loop.batch_progress"]
    too_many = num_batches is not None and batches["current"]["ready"] >= num_batches
    at_end = batches["is_last_batch"] = bool(batches["is_last_batch"] or too_many)
    for counts in (epochs["current"], epochs["total"]):
        if at_end:
            counts["ready"] = counts["processed"] = counts["completed"] = counts["started"]
        else:
            for name in ("processed", "completed"):
                counts[name] = min(counts[name], max(counts["ready"] - 1, 0))
    if at_end:
        for counts in (batches["current"], batches["total"]):
            counts["completed"] = counts["ready"]
        steps = loop["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"]["total"]["completed"]
        loop["epoch_loop.state_dict"]["_batches_that_stepped"] = steps
    return at_end


def batches_to_repeat(trainer: Any) -> int:
    """How many batches have begun since the last optimizer step; a checkpoint saved now has nothing of them."""
    loop, accumulated = trainer.fit_loop.epoch_loop, trainer.accumulate_grad_batches
    counts = loop.batch_progress.current
    if counts.processed == counts.ready and not loop._should_accumulate():
        return 0
    return int(counts.ready - counts.processed // accumulated * accumulated)


def rewind(checkpoint: dict[str, Any], batches: int) -> None:
    """Move a checkpoint's position in the data back, to before some batches of its epoch.

    Args:
        checkpoint: What Lightning is about to save; changed in place.
        batches: How many.
    """
    loop = checkpoint["loops"]["fit_loop"]
    progress = loop["epoch_loop.batch_progress"]
    for counts in (progress["current"], progress["total"]):
        counts.update(dict.fromkeys(counts, counts["ready"] - batches))
    progress["is_last_batch"] = False
    for state in loop["state_dict"].get("combined_loader", ()):
        state["position"] -= batches


def restore_rollouts(per_rank: Sequence[Any], rank: int, num_mini_batches: int) -> RolloutBuffer | None:
    """Rebuild this rank's rollouts from a checkpoint.

    Args:
        per_rank: The saved state of each rank's buffer, or None if its updates were finished.
        rank: This rank.
        num_mini_batches: Mini-batches per pass over the rollouts in this run.

    Returns:
        The rollouts, or None if their updates were finished.

    Raises:
        ValueError: If the saved run divided the rollouts into a different number of mini-batches.
    """
    if per_rank[0] is None:
        return None
    state = per_rank[rank] if len(per_rank) == num_ranks() else redistribute(per_rank, rank, num_ranks())
    buffer = RolloutBuffer.from_state_dict(state)
    if buffer.num_mini_batches != num_mini_batches:
        raise ValueError(
            f"num_mini_batches is {num_mini_batches}, but the checkpoint has unfinished rollouts, split into "
            f"{buffer.num_mini_batches}; keep that number, or resume where a batch of rollouts ends."
        )
    return buffer


def redistribute(per_rank: Sequence[dict[str, Any]], rank: int, num_ranks: int) -> dict[str, Any]:
    """Distribute the rollouts of all saved ranks over a different number of ranks; groups keep their mini-batch.

    Nothing is sampled or estimated again, so controllers that are updated once per batch of rollouts (the KL
    coefficient, the threshold of token groups) are not updated twice.

    Args:
        per_rank: The saved state of each rank's buffer.
        rank: This rank.
        num_ranks: Number of ranks now.

    Returns:
        The state of this rank's buffer. If there are fewer groups than ranks, some ranks get a dummy group, with no
        trained token.
    """
    places = [
        (state["mini_batches"][index], group["group_id"], owner, index)
        for owner, state in enumerate(per_rank)
        for index, group in enumerate(state["groups"])
        if state["mini_batches"][index] >= 0  # not a dummy
    ]
    places.sort(key=lambda place: place[:2])
    assigned = places[rank::num_ranks]
    numbers = [number for number, *_ in assigned]
    tokens = {
        name: [per_rank[owner]["tokens"][name][index] for *_, owner, index in assigned or places[:1]]
        for name in per_rank[0]["tokens"]
    }
    if not assigned:
        numbers = [-1]
        tokens["loss_mask"] = [torch.zeros_like(tokens["loss_mask"][0])]
    groups = [per_rank[owner]["groups"][index] for *_, owner, index in assigned or places[:1]]
    return {**per_rank[0], "groups": groups, "mini_batches": numbers, "tokens": tokens}


def compare_adapters(then: dict[str, dict[str, Any]], now: dict[str, dict[str, Any]]) -> None:
    """Refuse adapters whose options differ from the checkpoint's, even if the weights have the same shapes.

    Args:
        then: Options in the checkpoint, by part (`policy`, `critic`), from `adapter_options`.
        now: The same for this run. Only parts in both are compared.

    Raises:
        ValueError: If an option differs.
    """
    for part in (part for part in then if part in now):
        before, after = then[part], now[part]
        differing = [
            f"{name} is {after.get(name)!r} (was {before.get(name)!r})"
            for name in sorted(before.keys() | after.keys())
            if before.get(name) != after.get(name)
        ]
        if differing:
            raise ValueError(
                f"the {part} has a different adapter from the one in the checkpoint: {', '.join(differing)}; restore "
                "its options, or start a new run."
            )


def compare_options(then: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuse options that differ from those with which the checkpoint's unfinished rollouts were made.

    Raises:
        ValueError: If one differs.
    """
    for name, (before, after) in changed_options(then, now).items():
        raise ValueError(
            f"{name} is {after!r}, but the checkpoint has unfinished rollouts made with {before!r}; keep that "
            "value, or resume where a batch of rollouts ends."
        )


def check_changed_options(changes: Changes, allowed: Sequence[str]) -> None:
    """Refuse options that differ from the checkpoint's, and report those that may.

    Args:
        changes: By name, the value in the checkpoint and the value in this run.
        allowed: Options that may differ, by name or dotted prefix.

    Raises:
        ValueError: If any other option differs.
    """
    refused = refused_changes(changes, allowed)
    if refused:
        raise ValueError(
            f"the checkpoint is of a run with other options: {'; '.join(refused)}. Restore them; "
            f"{remedy(changes, allowed)}; or start a new run from the exported policy."
        )
    for name, (before, after) in changes.items():
        rank_zero_info(f"allow_changed: {name} is {after!r} from here on; the checkpoint was made with {before!r}.")


def compare_optimizers(then: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuse changed optimizer options, because the optimizer state in the checkpoint would override them.

    Args:
        then: In the checkpoint, by name, such as `policy.learning_rate`.
        now: The same of this run.

    Raises:
        ValueError: If one differs.
    """
    added = {name: ADDED_OPTIONS[option] for name in now if (option := name.rpartition(".")[2]) in ADDED_OPTIONS}
    differences = refused_changes(changed_options(added | then, now), ())
    if differences:
        raise ValueError(
            f"the optimizer's options differ from those in the checkpoint, whose state would override them: "
            f"{'; '.join(differences)}. Restore them, or start a new run from the exported policy."
        )


def warn_of_other_evaluation(then: dict[str, Any], now: dict[str, Any]) -> None:
    """Warn if a checkpoint is evaluated with other options than the run that saved it."""
    differing = refused_changes(changed_options(then, now), ())
    if differing:
        rank_zero_warn(
            f"Evaluation options differ from those of the checkpoint's run, which a checkpoint does not restore: "
            f"{'; '.join(differing)}. Metrics of the two are not comparable; pass the run's options for those that are."
        )


def compare_reference(
    then: float | None,
    now: float | None,
    source: Any,
    option: str = "policy",
    role: str = "reference, or the base of its adapter,",
) -> None:
    """Refuse a different frozen model.

    Args:
        then: Fingerprint in the checkpoint.
        now: Fingerprint in this run.
        source: Where the model comes from, for the error.
        option: The option that sets it.
        role: Role of the model in the run, for the error.

    Raises:
        ValueError: If they differ.
    """
    if then is not None and now is not None and abs(then - now) > 1e-6 * abs(then):
        raise ValueError(
            f"{option}={source!r} is a different model (sum of absolute weights {now}) than the checkpoint was trained "
            f"with ({then}), so the {role} would differ; restore it or start a new run."
        )


class UnfinishedRollouts:
    """Checkpoint part: the rollouts of every rank, while they have updates left.

    Args:
        module: Has `last_rollouts` and `updates_per_rollout`.
        num_mini_batches: Mini-batches per pass over the rollouts.

    Attributes:
        restored: Whether rollouts were loaded.
        to_repeat: How many of the last updates a resumed run repeats.
    """

    def __init__(self, module: Any, num_mini_batches: int) -> None:
        self._module = module
        self._num_mini_batches = num_mini_batches
        self.restored = False
        self.to_repeat = 0

    def state_dict(self) -> list[dict[str, Any] | None]:
        """Gather them. Collective."""
        buffer = self._module.last_rollouts
        done = 0 if buffer is None else max(buffer.updates_done - self.to_repeat, 0)
        finished = buffer is None or done >= self._module.updates_per_rollout
        state = None if finished else buffer.state_dict() | {"updates_done": done}
        return gather_plain(state, self._module.device)

    def load_state_dict(self, state: list[dict[str, Any] | None]) -> None:
        """Restore this rank's rollouts."""
        rollouts = restore_rollouts(state, self._module.global_rank, self._num_mini_batches)
        self._module.last_rollouts = rollouts or self._module.last_rollouts
        self.restored = rollouts is not None


def restore_loaders(trainer: Any, *, begins_epoch: bool) -> None:
    """Restore the position in the data where Lightning loses it; call before the first batch is read.

    Lightning loses it if the epoch was complete, or if a learning rate schedule asked for the number of steps, which
    sets up the loader before its state is restored.

    Args:
        trainer: The Trainer.
        begins_epoch: What `fix_loop_counters` returned.
    """
    loop = trainer.fit_loop
    states, loop._combined_loader_states_to_load = loop._combined_loader_states_to_load, []
    if states and loop._combined_loader is not None:
        loop._combined_loader._load_state_dicts(states)
    if begins_epoch:
        loop.epoch_loop.restarting = False


# Loads a module's checkpoint without a Trainer.


def module_from_checkpoint(
    cls: Any, path: str | Path, *, map_location: Any, strict: bool | None, weights_only: bool, arguments: dict[str, Any]
) -> Any:
    """Build a module and load a checkpoint's weights into it; see `RLModule.load_from_checkpoint`."""
    if not weights_only:
        raise ValueError("weights_only is False, which would let the checkpoint run code; leave it out.")
    checkpoint = load_verified(path)
    saved = checkpoint.get(cls.CHECKPOINT_HYPER_PARAMS_KEY, {})  # if a subclass calls `save_hyperparameters`
    arguments = {name: value for name, value in saved.items() if not name.startswith("_")} | arguments
    missing = [name for name in _required(cls) if name not in arguments]
    if missing:
        raise TypeError(
            f"{cls.__name__}.load_from_checkpoint lacks {' and '.join(missing)}: a checkpoint has weights but no "
            f"constructor arguments. Call {cls.__name__}.load_from_checkpoint(path, "
            f"{', '.join(f'{name}=...' for name in missing)}, ...) with the arguments of the run that saved it."
        )
    module = cls(**arguments)
    load_checkpoint(module, checkpoint, strict=strict)
    return module.to(map_location)


def load_checkpoint(module: Any, checkpoint: dict[str, Any], *, strict: bool | None = None) -> None:
    """Build the models and restore an in-memory checkpoint, in Lightning's order but without a Trainer."""
    module.configure_model()
    module.on_load_checkpoint(checkpoint)
    module.load_state_dict(checkpoint["state_dict"], strict=module.strict_loading if strict is None else strict)


def _required(cls: type) -> list[str]:
    """The constructor's arguments that have no default."""
    parameters = inspect.signature(cls).parameters.values()
    return [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


# The run's part of a Lightning checkpoint: what it saves, and what a resumed run must match.

CHECKPOINT_KEY = "pl_grouprl"


class RunCheckpoint:
    """Saves and loads what Lightning does not, such as random number generators and rollouts with updates left.

    Args:
        module: The `RLModule`.
        num_mini_batches: Updates in each pass over the rollouts.

    Attributes:
        reference_fingerprint: Fingerprint of the reference policy, or of an adapter's frozen base; None without either.
    """

    def __init__(self, module: Any, num_mini_batches: int) -> None:
        self._module = module
        self._unfinished = UnfinishedRollouts(module, num_mini_batches)
        self._lineage: Sequence[str] | None = None
        self._begins_epoch = False
        self.reference_fingerprint: float | None = None

    @property
    def _is_resumed(self) -> bool:
        """Whether a fit continues from the checkpoint, rather than an evaluation of its weights."""
        trainer = self._module._trainer
        return trainer is not None and trainer.state.fn == "fit"

    def standard_parts(self) -> dict[str, Stateful]:
        """The parts that every algorithm saves, by name, in loading order."""
        module = self._module
        optimized = {} if module.policy is None else module.optimized_parts()
        adapters = {name: adapter_options(part) for name, (part, _) in optimized.items()}
        rollouts_differ = self._compare_rollout_options
        return {
            "module": ConsistencyCheck(lambda: lineage(module), lambda then, now: self.compare_origin(then)),
            "random_numbers": module.random_numbers,
            "run_options": ConsistencyCheck(module.run_options),  # compared last, by `check_changed_options`
            "reference_fingerprint": ConsistencyCheck(lambda: self.reference_fingerprint, self._compare_reference),
            "adapters": ConsistencyCheck(lambda: adapters, compare_adapters),
            "optimizer": ConsistencyCheck(
                lambda: saved_options(optimized), compare_optimizers if self._is_resumed else None
            ),
            "steps": Attributes(module.optimization, "nonfinite_steps"),
            "unrewarded": Attributes(module.rewarder, "unrewarded_batches"),
            "tokens": Attributes(module, "num_tokens"),
            "rollouts": self._unfinished,
            "rollout_queue": module.collector.ahead_state,
            "options": ConsistencyCheck(module.rollout_options, rollouts_differ),
            "evaluation": ConsistencyCheck(
                lambda: evaluation_options(module), None if self._is_resumed else warn_of_other_evaluation
            ),
            "kl_controller": module.kl_penalty.controller,
        }

    def save(self, checkpoint: dict[str, Any]) -> None:
        """Save all parts; all ranks call it. Within a batch, save the position before it: a resumed run repeats it.

        Raises:
            RuntimeError: If a resumed run could not repeat the batch.
        """
        trainer = self._module._trainer
        repeated = self._unfinished.to_repeat = 0 if trainer is None else batches_to_repeat(trainer)
        if repeated:
            self._check_repeatable(repeated)
            rewind(checkpoint, repeated)
        checkpoint[CHECKPOINT_KEY] = save_parts(self._module.saved_state())

    def _check_repeatable(self, batches: int) -> None:
        module = self._module
        accumulated, updates = module.trainer.accumulate_grad_batches, module.updates_per_rollout
        for reason, applies in {
            "the optimizer's step has begun": module.is_stepping,
            "rollouts have left the queue": module.max_staleness and module.last_rollouts is None,
            "gradients are accumulating over several batches of rollouts": batches > 1 and updates % accumulated,
        }.items():
            if applies:
                raise RuntimeError(
                    f"no checkpoint is saved within this batch, because a resumed run could not repeat it: {reason}; "
                    "resume from an earlier one."
                )

    def load(self, checkpoint: dict[str, Any]) -> None:
        """Load all parts.

        Raises:
            ValueError: If another algorithm wrote it, a part rejects its state, or an option changed that must not.
        """
        module = self._module
        datamodule = getattr(module._trainer, "datamodule", None) if self._is_resumed else None
        self._begins_epoch = fix_loop_counters(checkpoint, getattr(datamodule, "num_train_batches", None))
        state, changes = checkpoint.get(CHECKPOINT_KEY, {}), {}
        if self._is_resumed:  # per rank, since each reads its own data files
            per_rank: list[Changes] = gather_plain(changes_since(state, module), module.trainer.strategy.root_device)
            changes = {name: change for of_rank in per_rank for name, change in of_rank.items()}
        parts = module.saved_state()
        load_parts(parts, state, {name for name in parts if module.starts_over.get(name) in changes})
        check_changed_options(changes, module.allow_changed)

    def continue_training(self) -> None:
        """Continue a resumed run at its position in the data, with its random numbers."""
        trainer = self._module.trainer
        restore_loaders(trainer, begins_epoch=self._begins_epoch)
        schedule = accumulation_schedule(trainer)  # which Lightning looks up at the beginning of an epoch alone
        trainer.accumulate_grad_batches = schedule[max(epoch for epoch in schedule if epoch <= trainer.current_epoch)]
        self._begins_epoch = False
        self._module.random_numbers.restore()

    def compare_origin(self, then: Sequence[str] | None, what: str = "the checkpoint") -> None:
        """Refuse a checkpoint of another algorithm.

        Args:
            then: The `lineage` that it records, or None.
            what: What the error calls it.
        """
        compare_lineage(self._module, then, what)
        self._lineage = then

    def describe_misfit(self, reason: str) -> str:
        """Error text for weights that do not fit the module: which module wrote them, then torch's reason."""
        return describe_misfit(self._module, self._lineage, reason)

    def _compare_reference(self, then: float | None, now: float | None) -> None:
        compare_reference(then, now, self._module.policy_source)

    def _compare_rollout_options(self, then: dict[str, Any], now: dict[str, Any]) -> None:
        if self._is_resumed and self._unfinished.restored:
            compare_options(then, now)
