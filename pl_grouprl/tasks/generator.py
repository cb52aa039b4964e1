"""Generates entries with reasoning-gym in a separate process."""

from __future__ import annotations

import dataclasses
import difflib
import enum
import hashlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

# Encodes entries of reasoning-gym as JSON text, which survives file formats and process boundaries unchanged.

_KIND, _ITEMS = "__kind__", "__items__"


def encode_entry(entry: Mapping[str, Any]) -> str:
    """Write an entry as JSON, with markers for tuples and for dictionaries whose keys are not strings.

    NumPy numbers and enum members become plain values.

    Raises:
        TypeError: If the entry contains any other type.
    """
    return json.dumps(_to_json(entry))


def decode_entry(text: str) -> dict[str, Any]:
    """Read an entry written by `encode_entry`.

    Raises:
        ValueError: If the text is not JSON.
    """
    return json.loads(text, object_hook=_restore)


def _to_json(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        value = value.value
    if hasattr(value, "dtype") and hasattr(value, "item") and not getattr(value, "shape", ()):
        value = value.item()
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, list):
        return [_to_json(item) for item in value]
    if isinstance(value, tuple):
        return {_KIND: "tuple", _ITEMS: [_to_json(item) for item in value]}
    if isinstance(value, Mapping):
        return _mapping_to_json(value)
    raise TypeError(f"an entry contains a value of type {type(value).__module__}.{type(value).__qualname__}: {value!r}")


def _mapping_to_json(value: Mapping[Any, Any]) -> dict[str, Any]:
    if all(type(key) is str for key in value) and _KIND not in value:
        return {key: _to_json(item) for key, item in value.items()}
    return {_KIND: "dict", _ITEMS: [[_to_json(key), _to_json(item)] for key, item in value.items()]}


def _restore(value: dict[str, Any]) -> Any:
    if _KIND not in value:
        return value
    return tuple(value[_ITEMS]) if value[_KIND] == "tuple" else dict(value[_ITEMS])


# Generates entries with reasoning-gym in a separate process.
#
# Some generators iterate over sets of strings, whose order differs between Python processes, or use the global
# generators
# of Python and NumPy. A process with fixed hash and random seeds always gives the same entries, and the training
# process
# is left unchanged.

_PROGRAM = "from pl_grouprl.tasks.generator import main; main()"
_DRAWING_ORDER = ("examples", "val", "test", "train")
"""Splits in the order of drawing: the training split comes last, so its size does not change the others."""


class GeneratorError(ValueError):
    """A task that cannot be generated as configured."""


def generate(request: dict[str, Any]) -> list[dict[str, Any]]:
    """Generate the entries of one split in a new process.

    Args:
        request: `tasks`: for each, `name`, `configs` (options, one mapping per level) and `counts` (by split, rows per
            level); `levels`: how many levels to take from the library's curriculum, or None to use `configs` as they
            are; `seed`; `split`.

    Returns:
        For each task, its `examples` and its `levels`, each with its `config` and its `entries` in the split. Examples
        and entries are dictionaries with `question`, `answer` and the encoded `entry`.

    Raises:
        GeneratorError: If a task is unknown, refuses its configuration, or has too few different questions.
        RuntimeError: If the process dies.
    """
    path = os.pathsep.join(folder for folder in sys.path if folder)
    process = subprocess.run(  # noqa: S603 (our own program)
        [sys.executable, "-c", _PROGRAM],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONHASHSEED": "0", "PYTHONPATH": path},
    )
    if process.returncode != 0:
        raise RuntimeError(
            f"The process that generates the tasks ended with code {process.returncode}:\n{process.stderr[-4000:]}"
        )
    received = json.loads(process.stdout)
    if "refused" in received:
        raise GeneratorError(f"ReasoningGym: {received['refused']}")
    tasks: list[dict[str, Any]] = received["tasks"]
    return tasks


def main() -> None:
    """Read a request from standard input, and write the entries to standard output, both as JSON."""
    request = json.load(sys.stdin)
    output = os.dup(1)
    os.dup2(2, 1)  # generators print
    with os.fdopen(output, "w") as file:
        json.dump(respond(request), file)


def respond(request: dict[str, Any]) -> dict[str, Any]:
    """Generate in this process; returns `tasks`, the result of `generate`, or `refused`, the reason."""
    try:
        return {"tasks": [_Task(task, request).generate() for task in request["tasks"]]}
    except GeneratorError as error:
        return {"refused": str(error)}


class _Task:
    """One task of a request. Draws entries whose questions are all different."""

    def __init__(self, task: dict[str, Any], request: dict[str, Any]) -> None:
        self.name = task["name"]
        self.counts = task["counts"]
        self.split = request["split"]
        self.seed = request["seed"]
        _check_name(self.name)
        self.configs = task["configs"]
        if request["levels"] is not None:
            self.configs = library_levels(self.name, task["configs"][0], request["levels"])
        self._drawn_questions: set[str] = set()

    def generate(self) -> dict[str, Any]:
        drawn: dict[str, list[list[dict[str, Any]]]] = {}
        for split in _DRAWING_ORDER[: _DRAWING_ORDER.index(self.split) + 1]:
            drawn[split] = [self._draw(split, level, count) for level, count in enumerate(self.counts[split])]
        levels = [{"config": c, "entries": e} for c, e in zip(self.configs, drawn[self.split], strict=True)]
        return {"examples": [entry for level in drawn["examples"] for entry in level], "levels": levels}

    def _draw(self, split: str, level: int, count: int) -> list[dict[str, Any]]:
        drawn: list[dict[str, Any]] = []
        if count == 0:
            return drawn
        attempts = 20 * count + 1000
        for entry in self._entries(split, level, attempts):
            if entry["question"] not in self._drawn_questions:
                self._drawn_questions.add(entry["question"])
                drawn.append({name: entry[name] for name in ("question", "answer")} | {"entry": encode_entry(entry)})
            if len(drawn) == count:
                return drawn
        drawn_before = len(self._drawn_questions) - len(drawn)
        raise GeneratorError(
            f"task {self.name!r} with {self.configs[level]} has too few different questions: {len(drawn)} of {count} "
            f"for {split!r} in {attempts} attempts, in addition to {drawn_before} drawn before. Ask for fewer "
            "(size, val_size, test_size), or widen the task's options."
        )

    def _entries(self, split: str, level: int, count: int) -> Iterator[dict[str, Any]]:
        text = json.dumps([self.seed, self.name, level, split])
        # Halved so the index can be added: NumPy's seeds must be below 2**32.
        seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") // 2
        dataset = _create(self.name, self.configs[level], seed=seed, size=count)
        for index in range(count):
            _seed_global_generators(seed + index)
            yield dataset[index]


def _seed_global_generators(seed: int) -> None:
    import numpy as np

    random.seed(seed)
    np.random.seed(seed)


def _create(name: str, config: dict[str, Any], *, seed: int, size: int) -> Any:
    from reasoning_gym.factory import create_dataset

    try:
        return create_dataset(name, **config, seed=seed, size=size)
    except (TypeError, ValueError, AssertionError) as error:
        raise GeneratorError(f"task {name!r} refuses {config}: {error}; its options are {_options(name)}.") from error


def _check_name(name: str) -> None:
    from reasoning_gym.factory import DATASETS

    known = sorted(DATASETS.keys() - {"composite"})
    if name not in known:
        nearest = " or ".join(map(repr, difflib.get_close_matches(name, known)))
        raise GeneratorError(
            f"there is no task {name!r}; " + (f"did you mean {nearest}?" if nearest else f"use {known}.")
        )


def _options(name: str) -> list[str]:
    from reasoning_gym.factory import DATASETS

    return [field.name for field in dataclasses.fields(DATASETS[name][1]) if field.name not in ("seed", "size")]


def library_levels(name: str, config: dict[str, Any], levels: int) -> list[dict[str, Any]]:
    """Options of the first levels of the library's curriculum of a task.

    If a level is a range of values, it excludes the ranges of the levels below it.

    Args:
        name: The task.
        config: Options that the curriculum does not set.
        levels: Number of levels.

    Raises:
        GeneratorError: If there is no curriculum, it has fewer different levels, or it sets an option of `config`.
    """
    from reasoning_gym.coaching.base_curriculum import DefaultCurriculumContext, RangeAttributeMode
    from reasoning_gym.factory import create_curriculum, has_curriculum

    if not has_curriculum(name):
        raise GeneratorError(f"the library has no curriculum for task {name!r}; list the options of each level.")
    context = DefaultCurriculumContext(RangeAttributeMode.UPPER_BOUND)
    curriculum = create_curriculum(name)
    configs: list[dict[str, Any]] = []
    for level in range(levels):
        curriculum.set_global_level(level)
        chosen = dataclasses.asdict(curriculum.generate_configuration(context=context))
        names = _names_set_by(curriculum)
        if clashing := sorted(names & config.keys()):
            raise GeneratorError(
                f"{clashing[0]!r} of task {name!r} is set by its curriculum; leave it out, or leave out `levels`."
            )
        configs.append(config | {option: chosen[option] for option in sorted(names)})
    if len({json.dumps(options) for options in configs}) < levels:
        raise GeneratorError(f"the library's curriculum of task {name!r} has fewer than {levels} different levels.")
    return configs


def _names_set_by(curriculum: Any) -> set[str]:
    """The options that a curriculum sets; for a range, also its lower bound."""
    attributes = curriculum.attributes.values()
    lower_bounds = {range_.lower_field_name for range_ in attributes if hasattr(range_, "lower_field_name")}
    return lower_bounds | set(curriculum.get_global_level() or {})
