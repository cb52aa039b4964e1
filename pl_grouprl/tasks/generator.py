"""Generates entries with reasoning-gym in a separate process.

Some generators iterate over sets of strings, whose order differs between Python processes, or use the global generators
of Python and NumPy. A process with fixed hash and random seeds always gives the same entries, and the training process
is left unchanged.
"""

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
from collections.abc import Mapping
from typing import Any

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
        if all(type(key) is str for key in value) and _KIND not in value:
            return {key: _to_json(item) for key, item in value.items()}
        return {_KIND: "dict", _ITEMS: [[_to_json(key), _to_json(item)] for key, item in value.items()]}
    raise TypeError(f"an entry contains a value of type {type(value).__module__}.{type(value).__qualname__}: {value!r}")


def _restore(value: dict[str, Any]) -> Any:
    if _KIND not in value:
        return value
    return tuple(value[_ITEMS]) if value[_KIND] == "tuple" else dict(value[_ITEMS])


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
        GeneratorError: If a task is unknown, rejects its configuration, or has too few different questions.
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
    if "rejected" in received:
        raise GeneratorError(f"ReasoningGym: {received['rejected']}")
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
    """Generate in this process; returns `tasks`, the result of `generate`, or `rejected`, the reason."""
    try:
        return {"tasks": [_generate_task(task, request) for task in request["tasks"]]}
    except GeneratorError as error:
        return {"rejected": str(error)}


def _generate_task(task: dict[str, Any], request: dict[str, Any]) -> dict[str, Any]:
    """The `examples` and `levels` of one task, whose questions are all different."""
    from reasoning_gym.factory import DATASETS

    name, configs = task["name"], task["configs"]
    known = sorted(DATASETS.keys() - {"composite"})
    if name not in known:
        nearest = " or ".join(map(repr, difflib.get_close_matches(name, known)))
        hint = f"did you mean {nearest}?" if nearest else f"use {known}."
        raise GeneratorError(f"there is no task {name!r}; {hint}")
    if request["levels"] is not None:
        configs = library_levels(name, configs[0], request["levels"])
    asked: set[str] = set()
    drawn: dict[str, list[list[dict[str, Any]]]] = {}
    for split in _DRAWING_ORDER[: _DRAWING_ORDER.index(request["split"]) + 1]:
        drawn[split] = []
        for level, (config, count) in enumerate(zip(configs, task["counts"][split], strict=True)):
            text = json.dumps([request["seed"], name, level, split])
            # Halved so the index can be added: NumPy's seeds must be below 2**32.
            seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") // 2
            drawn[split].append(_draw(name, config, count, seed, asked))
    levels = [{"config": c, "entries": e} for c, e in zip(configs, drawn[request["split"]], strict=True)]
    return {"examples": [entry for level in drawn["examples"] for entry in level], "levels": levels}


def _draw(name: str, config: dict[str, Any], count: int, seed: int, asked: set[str]) -> list[dict[str, Any]]:
    """Draw entries whose questions were not asked before, and add these to `asked`."""
    from reasoning_gym.factory import DATASETS, create_dataset

    drawn: list[dict[str, Any]] = []
    if count == 0:
        return drawn
    attempts = 20 * count + 1000
    try:
        dataset = create_dataset(name, **config, seed=seed, size=attempts)
    except (TypeError, ValueError, AssertionError) as error:
        fields = dataclasses.fields(DATASETS[name][1])
        options = [field.name for field in fields if field.name not in ("seed", "size")]
        raise GeneratorError(f"task {name!r} rejects {config}: {error}; its options are {options}.") from error
    for index in range(attempts):
        _seed_global_generators(seed + index)
        entry = dataset[index]
        if entry["question"] not in asked:
            asked.add(entry["question"])
            drawn.append({key: entry[key] for key in ("question", "answer")} | {"entry": encode_entry(entry)})
        if len(drawn) == count:
            return drawn
    raise GeneratorError(
        f"task {name!r} with {config} has too few different questions: {len(drawn)} of {count} in {attempts} attempts, "
        f"in addition to {len(asked) - len(drawn)} drawn before. Ask for fewer (size, val_size, test_size), or widen "
        "the task's options."
    )


def _seed_global_generators(seed: int) -> None:
    import numpy as np

    random.seed(seed)
    np.random.seed(seed)


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
        attributes = curriculum.attributes.values()  # a range also sets its lower bound
        names = {attribute.lower_field_name for attribute in attributes if hasattr(attribute, "lower_field_name")}
        names |= set(curriculum.get_global_level() or {})
        if clashing := sorted(names & config.keys()):
            raise GeneratorError(
                f"{clashing[0]!r} of task {name!r} is set by its curriculum; omit it, or omit `levels`."
            )
        configs.append(config | {option: chosen[option] for option in sorted(names)})
    if len({json.dumps(options) for options in configs}) < levels:
        raise GeneratorError(f"the library's curriculum of task {name!r} has fewer than {levels} different levels.")
    return configs
