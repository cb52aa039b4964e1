"""The run's part of a checkpoint, and resuming from it.

`RunCheckpoint` saves and loads what Lightning does not. It raises where continuing would be wrong: another algorithm,
adapter or frozen model, an option that the optimizer's state overrides, or rollouts left over that were sampled with
other options. Everything else that changed is one warning with a table.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from pl_grouprl.functional.entropy import EntropyOptions
from pl_grouprl.functional.importance import ImportanceSampling
from pl_grouprl.models.adapters import adapter_options
from pl_grouprl.rewards.base import as_weighted
from pl_grouprl.training.buffer import RolloutBuffer
from pl_grouprl.training.checks import GuardOptions, accumulation_schedule
from pl_grouprl.training.evaluation import EvaluationOptions
from pl_grouprl.training.micro_batches import SharingOptions
from pl_grouprl.training.objective import KLOptions
from pl_grouprl.training.optimizer import OptimizerConfig
from pl_grouprl.training.rewarder import RewardCallOptions
from pl_grouprl.training.run import Run
from pl_grouprl.training.sampler import EpisodeOptions
from pl_grouprl.types import SamplingConfig
from pl_grouprl.utilities.checkpoint_files import load_verified
from pl_grouprl.utilities.describe import (
    PACKAGE,
    Changes,
    changes_since,
    describe,
    identity,
    is_allowed,
    lineage,
    options_of,
    plain,
    refused_changes,
)
from pl_grouprl.utilities.distributed import gather_plain, num_ranks
from pl_grouprl.utilities.modes import random_state, set_random_state
from pl_grouprl.utilities.options import as_options, nearest_option

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

    def standard_parts(self) -> dict[str, Stateful]:
        """The parts that every algorithm saves, by name, in loading order."""
        module = self._module
        optimized = {} if module.policy is None else module.optimized_parts()
        adapters = {name: adapter_options(part) for name, (part, _) in optimized.items()}
        compare_policy = functools.partial(compare_reference, source=module.policy_source)
        return {
            "module": ConsistencyCheck(lambda: lineage(module), lambda then, now: self.compare_origin(then)),
            "random_numbers": module.random_numbers,
            "run_options": ConsistencyCheck(module.run_options),  # `load` compares them
            "reference_fingerprint": ConsistencyCheck(lambda: self.reference_fingerprint, compare_policy),
            "adapters": ConsistencyCheck(lambda: adapters, compare_adapters),
            "steps": Attributes(module.optimization, "nonfinite_steps"),
            "unrewarded": Attributes(module.rewarder, "unrewarded_batches"),
            "tokens": Attributes(module, "num_tokens"),
            "rollouts": self._unfinished,
            "rollout_queue": module.collector.ahead_state,
            "kl_controller": module.kl_penalty.controller,
            "entropy_controller": module.objective.entropy,
        }

    def save(self, checkpoint: dict[str, Any]) -> None:
        """Save all parts; all ranks call it. Within a batch, save the position before it: a resumed run repeats it.

        Raises:
            RuntimeError: If a resumed run could not repeat the batch.
        """
        module, trainer = self._module, self._module._trainer
        repeated = self._unfinished.to_repeat = 0 if trainer is None else batches_to_repeat(trainer)
        if repeated:
            accumulated, updates = trainer.accumulate_grad_batches, module.updates_per_rollout
            for reason, applies in {
                "the optimizer's step has begun": module.is_stepping,
                "rollouts have left the queue": module.max_staleness and module.last_rollouts is None,
                "gradients are accumulating over several batches of rollouts": repeated > 1 and updates % accumulated,
            }.items():
                if applies:
                    raise RuntimeError(
                        f"no checkpoint is saved within this batch, because a resumed run could not repeat it: {reason}"
                        "; resume from an earlier one."
                    )
            rewind(checkpoint, repeated)
        checkpoint[CHECKPOINT_KEY] = save_parts(module.saved_state())

    def load(self, checkpoint: dict[str, Any]) -> None:
        """Load all parts.

        Raises:
            ValueError: If continuing would be wrong; see the top of this file.
        """
        module, trainer = self._module, self._module._trainer
        is_resumed = trainer is not None and trainer.state.fn == "fit"  # rather than an evaluation of its weights
        datamodule = getattr(trainer, "datamodule", None) if is_resumed else None
        self._begins_epoch = fix_loop_counters(checkpoint, getattr(datamodule, "num_train_batches", None))
        state, changes = checkpoint.get(CHECKPOINT_KEY, {}), {}
        if is_resumed:  # per rank, since each reads its own data files
            per_rank: list[Changes] = gather_plain(changes_since(state, module), trainer.strategy.root_device)
            changes = {name: change for of_rank in per_rank for name, change in of_rank.items()}
        parts = module.saved_state()
        load_parts(parts, state, {name for name in parts if module.starts_over.get(name) in changes})
        compare_options(changes, module.guards.allow_changed, has_rollouts=self._unfinished.restored)

    def continue_training(self) -> None:
        """Continue a resumed run at its position in the data, with its random numbers."""
        trainer = self._module.trainer
        restore_loaders(trainer, begins_epoch=self._begins_epoch)
        schedule = accumulation_schedule(trainer)  # which Lightning looks up only at the beginning of an epoch
        trainer.accumulate_grad_batches = schedule[max(epoch for epoch in schedule if epoch <= trainer.current_epoch)]
        self._begins_epoch = False
        self._module.random_numbers.restore()

    def compare_origin(self, then: Sequence[str] | None, what: str = "the checkpoint") -> None:
        """Raise if another algorithm wrote the checkpoint; a subclass counts as its algorithm.

        Args:
            then: The `lineage` that it records, or None.
            what: What the error calls it.
        """
        now = lineage(self._module)
        if then and then[-1] != now[-1]:
            raise ValueError(
                f"{what} was written by {_title(then)}, and the module is {_title(now)}; a checkpoint belongs to the "
                f"algorithm that wrote it. Load it with {then[-1]}, or pass the policy that its run exported "
                "(ExportPolicy)."
            )
        self._lineage = then

    def describe_misfit(self, reason: str) -> str:
        """Error text for weights that do not fit the module: which module wrote them, then torch's reason."""
        writer = _title(self._lineage) if self._lineage else f"a module that is not one of {PACKAGE}'s"
        return (
            f"the weights of the checkpoint do not fit. It was written by {writer}, and the module is "
            f"{_title(lineage(self._module))} with other models: pass the policy, critic and adapter that it was "
            f"trained with. {reason}"
        )


def _title(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} ({names[-1]})"


# Parts of a checkpoint.


class Stateful(Protocol):
    """Has a state made of plain containers, numbers, strings and tensors."""

    def state_dict(self) -> Any:
        """Return the state."""

    def load_state_dict(self, state: Any) -> None:
        """Restore the state, or raise if that would be wrong."""


class Attributes:
    """Saves and restores some attributes of an object."""

    def __init__(self, owner: Any, *names: str) -> None:
        self.owner = owner
        self.names = names

    def state_dict(self) -> dict[str, Any]:
        """Return their values by name."""
        return {name: getattr(self.owner, name) for name in self.names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the parts that the state has."""
        for name in self.names:
            if name in state:
                setattr(self.owner, name, state[name])


class ConsistencyCheck:
    """A fact that is recorded in a checkpoint and compared when it is loaded.

    Args:
        current: Returns the fact as it is now.
        compare: Takes the recorded and the current fact; raises or warns if they conflict. If None, the fact is only
            recorded.
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
        parts: Parts by name. A part that the state lacks stays as it is.
        state: What `save_parts` returned.
        leave_out: Parts that start over.
    """
    for name, part in parts.items():
        if name in state and name not in leave_out:
            part.load_state_dict(state[name])


class RandomNumbers:
    """Python's, NumPy's and torch's generators on each rank: saved, restored, and unaffected by validation.

    Args:
        run: The run.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._per_rank: list[dict[str, Any]] = []
        self._earlier: dict[str, Any] | None = None

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the states of all ranks; while some are set aside, those."""
        return gather_plain(self._earlier or random_state(self._run.device), self._run.device)

    def load_state_dict(self, state: list[dict[str, Any]]) -> None:
        """Keep the states until `restore`."""
        self._per_rank = state

    def restore(self) -> None:
        """Restore the loaded state, on ranks that the saved run had; called last, because setup draws numbers too."""
        states, self._per_rank, self._earlier = self._per_rank, [], None
        if self._run.global_rank < len(states):
            set_random_state(states[self._run.global_rank], self._run.device)

    def set_aside(self) -> None:
        """Remember the state before what a resumed run skips (validation) or repeats (rollouts that failed)."""
        self._earlier = random_state(self._run.device)

    def keep(self) -> None:
        """Forget the state that was set aside."""
        self._earlier = None

    def continue_training(self) -> None:
        """Restore the state that was set aside."""
        if self._earlier is not None:
            set_random_state(self._earlier, self._run.device)
        self._earlier = None


class UnfinishedRollouts:
    """The rollouts of every rank, while they have updates left.

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

    def load_state_dict(self, state: list[Any]) -> None:
        """Restore this rank's rollouts; distributes them anew over a different number of ranks.

        Raises:
            ValueError: If the saved run divided the rollouts into a different number of mini-batches.
        """
        self.restored = state[0] is not None
        if not self.restored:
            return
        rank = self._module.global_rank
        own = state[rank] if len(state) == num_ranks() else redistribute(state, rank, num_ranks())
        buffer = RolloutBuffer.from_state_dict(own)
        if buffer.num_mini_batches != self._num_mini_batches:
            raise ValueError(
                f"num_mini_batches is {self._num_mini_batches}, but the checkpoint has unfinished rollouts, split into "
                f"{buffer.num_mini_batches}; keep that number, or resume where a batch of rollouts ends."
            )
        self._module.last_rollouts = buffer


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


# Options: recorded when a module is constructed, compared when a run is resumed.

FREE_OPTIONS = frozenset(
    {
        "policy",  # its base model, adapter and weights are compared elsewhere
        *("engine", "sharing", "evaluation", "reward_calls", "max_tokens_per_micro_batch"),
        *("episodes.tool_timeout", "episodes.tool_workers"),
        *("guards.max_nonfinite_steps", "guards.max_unrewarded_batches", "guards.allow_changed"),
        # How a critic was initialized and how it runs: its weights come from the checkpoint.
        *("critic.path", "critic.gguf_file", "critic.revision", "critic.trust_remote_code", "critic.dtype"),
        *("critic.attn_implementation", "critic.head_std", "critic.seed", "critic.gradient_checkpointing"),
        # These select among the same rows; the loader raises if it cannot resume with a change.
        *("data.max_prompt_length", "data.overlong_prompts"),
    }
)
"""Constructor options that may differ when a run is resumed; all others are compared."""

PASSED_ON = frozenset(
    {
        *("rewards", "sampling", "engine", "seed", "num_generations", "num_mini_batches", "max_tokens_per_micro_batch"),
        *("mask_truncated_completions", "dynamic_sampling", "max_staleness"),
        *("sharing", "episodes", "evaluation", "reward_calls", "kl", "importance_sampling", "guards"),
    }
)
"""Constructor options that were passed on to parts of the run, so setting the attribute later would have no effect."""

CONFIGS = {
    "optimizer": OptimizerConfig,
    "critic_optimizer": OptimizerConfig,
    "sampling": SamplingConfig,
    "sharing": SharingOptions,
    "episodes": EpisodeOptions,
    "evaluation": EvaluationOptions,
    "reward_calls": RewardCallOptions,
    "kl": KLOptions,
    "importance_sampling": ImportanceSampling,
    "guards": GuardOptions,
}
"""Classes of the options that may be passed as mappings."""

_OF_OPTIMIZER_STATE = re.compile(
    r"(\w+_)?optimizer\.(learning_rate|weight_decay|betas|eps|state_bits|optim|optim_args(\..+)?)"
)
"""Options that the optimizer's state in a checkpoint would silently override."""

_OF_ROLLOUTS = (
    *("sampling", "num_generations", "episodes.branching", "seed", "kl.place"),
    "trainer.accumulate_grad_batches",  # decides whether their old log-probabilities were computed
)
"""Options that unfinished rollouts were made with."""


def record_options(initialize: Callable[..., None]) -> Callable[..., None]:
    """Make a constructor record its arguments, defaults included, before it runs; mappings become option classes.

    If one constructor calls another, the inner one's value of an option is recorded last.
    """
    signature = inspect.signature(initialize)

    @functools.wraps(initialize)
    def recording(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in CONFIGS.keys() & kwargs.keys():
            if kwargs[name] is not None:
                kwargs[name] = as_options(CONFIGS[name], kwargs[name], name)
        try:
            bound = signature.bind(self, *args, **kwargs)
        except TypeError:
            for name in kwargs.keys() - signature.parameters.keys():
                nearest = nearest_option(type(self), name)
                hint = "." if nearest is None else f"; did you mean {nearest!r}?"
                raise TypeError(f"{type(self).__name__} takes no {name!r}{hint}") from None
            raise
        bound.apply_defaults()
        for parameter in list(signature.parameters.values())[1:]:
            value = bound.arguments[parameter.name]
            if parameter.kind is parameter.VAR_KEYWORD:
                note_options(self, value)
            elif parameter.kind is not parameter.VAR_POSITIONAL:
                note_options(self, {parameter.name: value})
        initialize(self, *args, **kwargs)

    return recording


def note_options(module: Any, options: Mapping[str, Any]) -> None:
    """Record constructor arguments as plain values, before anything can change them."""
    noted = module.__dict__.setdefault("_noted_options", {})
    for name, value in options.items():
        for former in [key for key in noted if key == name or key.startswith(f"{name}.")]:
            del noted[former]
        if name == "policy_loss" and isinstance(value, Mapping) and value.keys() == {"name"}:  # means the same
            value = value["name"]
        elif name == "entropy_coef" and isinstance(value, EntropyOptions | Mapping):
            bonus = EntropyOptions.of(value)
            value = bonus.coef if bonus == EntropyOptions(bonus.coef) else bonus
        if name == "engine":  # may hold secrets of servers
            noted[name] = None if value is None else identity(type(value))
        elif name != "rewards":
            noted |= describe(name, value)
        elif value is not None:  # by their names in metrics, each with its weight
            try:
                functions = as_weighted(value)
            except (TypeError, ValueError):  # the constructor raises, or replaces them
                continue
            noted[name] = [reward.name for reward in functions]
            for reward in functions:
                noted |= describe(f"{name}.{reward.name}", reward.function)
                noted[f"{name}.{reward.name}.weight"] = reward.weight


def recorded_options(module: Any) -> dict[str, Any]:
    """Everything that decides what a run optimizes, by name, as plain values.

    The constructors' arguments and, once a Trainer is attached, its gradient options and the `resume_facts()` of its
    data module.
    """
    options = {"model": type(module).__name__} | module.__dict__.get("_noted_options", {})
    trainer = getattr(module, "_trainer", None)
    if trainer is not None:
        facts = getattr(getattr(trainer, "datamodule", None), "resume_facts", dict)
        of_data = {f"data.{name.removeprefix('data.')}": value for name, value in facts().items()}
        options |= _trainer_options(trainer) | of_data
    free = module.free_options
    return {name: value for name, value in options.items() if not is_allowed(name, free)}


def all_options(module: pl.LightningModule) -> dict[str, Any]:
    """All options of a run as plain values, to tell it from others: the module's, and the Trainer's most important.

    Args:
        module: Attached to its Trainer. If it is no `RLModule`, what it saves by `save_hyperparameters`.
    """
    trainer = module.trainer
    hparams = {key: plain for name, value in module.hparams.items() for key, plain in describe(name, value).items()}
    of_trainer = {name: getattr(trainer, name) for name in ("max_steps", "max_epochs", "precision", "world_size")}
    of_trainer["strategy"] = type(trainer.strategy).__name__
    named = {f"trainer.{name}": value for name, value in of_trainer.items()}
    noted = module.__dict__.get("_noted_options", {})
    return hparams | options_of(module) | noted | _trainer_options(trainer) | named


def _trainer_options(trainer: pl.Trainer) -> dict[str, Any]:
    clips = trainer.gradient_clip_val or None
    schedule = accumulation_schedule(trainer)
    return {
        "trainer.gradient_clip_val": clips,
        "trainer.gradient_clip_algorithm": clips and plain(trainer.gradient_clip_algorithm or "norm"),
        "trainer.accumulate_grad_batches": schedule[0] if len(schedule) == 1 else sorted(map(list, schedule.items())),
        "trainer.overfit_batches": getattr(trainer, "overfit_batches", 0),
    }


def compare_options(changes: Changes, allowed: Sequence[str], *, has_rollouts: bool) -> None:
    """Report the options that differ from the checkpoint's in one table: a warning, unless all are meant to change.

    Args:
        changes: By name, the value in the checkpoint and the value in this run.
        allowed: Options that are meant to change, by name or dotted prefix.
        has_rollouts: Whether the checkpoint has unfinished rollouts.

    Raises:
        ValueError: If the optimizer's state would override an option, or one contradicts the unfinished rollouts.
    """
    overridden = {name: pair for name, pair in changes.items() if _OF_OPTIMIZER_STATE.fullmatch(name)}
    if overridden:
        raise ValueError(
            f"{'; '.join(refused_changes(overridden, ()))}, but the optimizer's state in the checkpoint would override "
            "that; restore it, or start a new run from the exported policy."
        )
    for name, (then, now) in changes.items():
        if name == "kl.ref_model_sync_steps" and (then is None) != (now is None):
            raise ValueError(
                f"{name} is {now!r}, but {then!r} in the checkpoint, which has a reference only if it moves; restore "
                "it, or start a new run from the exported policy."
            )
        if has_rollouts and (is_allowed(name, _OF_ROLLOUTS) or (name == "beta" and not then)):
            raise ValueError(
                f"{name} is {now!r}, but the checkpoint has unfinished rollouts made with {then!r}; keep that value, "
                "or resume where a batch of rollouts ends."
            )
    if not changes:
        return
    rows = [("option", "checkpoint", "this run")] + [(name, *map(repr, pair)) for name, pair in changes.items()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    table = "\n  ".join(["The run continues with other options than those of the checkpoint:", *lines])
    if all(is_allowed(name, allowed) for name in changes):
        rank_zero_info(table)
    else:
        rank_zero_warn(table)


def compare_adapters(then: dict[str, dict[str, Any]], now: dict[str, dict[str, Any]]) -> None:
    """Raise if adapters' options differ from the checkpoint's, even if the weights have the same shapes.

    Args:
        then: Options in the checkpoint, by part (`policy`, `critic`), from `adapter_options`.
        now: The same for this run. Only parts in both are compared.
    """
    for part in then.keys() & now.keys():
        before, after = then[part], now[part]
        for name in sorted(before.keys() | after.keys()):
            if before.get(name) != after.get(name):
                raise ValueError(
                    f"the {part} has a different adapter from the one in the checkpoint: {name} is {after.get(name)!r} "
                    f"(was {before.get(name)!r}); restore its options, or start a new run."
                )


def compare_reference(
    then: float | None,
    now: float | None,
    source: Any,
    option: str = "policy",
    role: str = "reference, or the base of its adapter,",
) -> None:
    """Raise if a frozen model differs from the checkpoint's.

    Args:
        then: Fingerprint in the checkpoint.
        now: Fingerprint in this run.
        source: Where the model comes from, for the error.
        option: The option that sets it.
        role: Role of the model in the run, for the error.
    """
    if then is not None and now is not None and abs(then - now) > 1e-6 * abs(then):
        raise ValueError(
            f"{option}={source!r} is a different model (sum of absolute weights {now}) than the checkpoint was trained "
            f"with ({then}), so the {role} would differ; restore it or start a new run."
        )


# Lightning's loop: resuming mid-epoch, or between the updates of a batch of rollouts.


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


# Without a Trainer.


def module_from_checkpoint(
    cls: Any, path: str | Path, *, map_location: Any, strict: bool | None, weights_only: bool, arguments: dict[str, Any]
) -> Any:
    """Build a module and load a checkpoint's weights into it; see `RLModule.load_from_checkpoint`."""
    if not weights_only:
        raise ValueError("weights_only is False, which would let the checkpoint run code; omit it.")
    checkpoint = load_verified(path)
    saved = checkpoint.get(cls.CHECKPOINT_HYPER_PARAMS_KEY, {})  # if a subclass calls `save_hyperparameters`
    module = cls(**{name: value for name, value in saved.items() if not name.startswith("_")} | arguments)
    load_checkpoint(module, checkpoint, strict=strict)
    return module.to(map_location)


def load_checkpoint(module: Any, checkpoint: dict[str, Any], *, strict: bool | None = None) -> None:
    """Build the models and restore an in-memory checkpoint, in Lightning's order but without a Trainer."""
    module.configure_model()
    module.on_load_checkpoint(checkpoint)
    module.load_state_dict(checkpoint["state_dict"], strict=module.strict_loading if strict is None else strict)
