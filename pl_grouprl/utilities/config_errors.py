"""Condenses the parser's report on a bad configuration, which covers every type that it tried, to one sentence.

The report is an indented tree of keys and classes; the cause is at the deepest level.
"""

from __future__ import annotations

import difflib
import re
import sys
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import is_dataclass
from itertools import pairwise
from pydoc import locate
from typing import Any, get_args, get_type_hints

from lightning.pytorch import LightningDataModule, LightningModule, Trainer

from pl_grouprl.utilities.annotations import field_names
from pl_grouprl.utilities.arguments import config_class, suggestion
from pl_grouprl.utilities.option_notes import note_on_option, note_on_value
from pl_grouprl.utilities.option_paths import foreign_path
from pl_grouprl.utilities.origin import PACKAGE

AT_TOP = ("model", "data", "trainer", "ckpt_path", "seed_everything")
"""Groups and options at the top of a configuration."""

_TABLES = "docs/options.md maps the options of TRL and verl."
_SEARCHED = "; modules are searched in the working directory and in PYTHONPATH."
_SOURCES = {
    "PolicySource": "pl_grouprl.models.PretrainedPolicy",
    "CriticSource": "pl_grouprl.models.PretrainedCritic",
}
"""What takes the options of a model given by its path, by the protocol of the option."""

_UNION = "Does not validate against any of the Union subtypes"

_EXAMPLES = {
    LightningModule: "--model pl_grouprl.GRPO",
    LightningDataModule: "--data pl_grouprl.PromptDataModule",
}
"""The argument that chooses a group's class, by the group's base class."""

_KEY = re.compile(r"Parser key \"([\w.]+)\"")
_CLASS = re.compile(r"Problem with given class_path '([\w.]+)'")
_CLASS_OF_CALLABLE = re.compile(r"Got value: Namespace\(class_path='([\w.]+)'")
_OF_GROUP = re.compile(r"Group '(\w+)' does not accept option '([^']*)'")
_OPTION = re.compile(r"(?:Option|Subcommand '\w+' does not accept option) '([^']*)'(?: is not accepted|$)")
_MISSING = re.compile(r"module '([\w.]+)' has no attribute '(\w+)'")
_NOT_IMPORTED = re.compile(r"^\s+(No module named '[\w.]+')")
_FUNCTION_NOT_IMPORTED = re.compile(r"callable class: (No module named '[\w.]+')(?:\. Got value: ([\w.]+))?$")
_NO_SUBCLASS = re.compile(r"Import path ([\w.]+) does not correspond to a subclass of (\w+)")
_NO_GROUP = re.compile(r"Unable to load config \"(.*)\"$")
_EXPECTED = re.compile(r"- (?:Expected an?|Not a valid subclass of) (.+)$")
_SUBTYPE = re.compile(r"<class '([\w.]+)'>")
_GIVEN = re.compile(r"^\s+Given value: ")
_VALUE = re.compile(r"Expected a (.+?)\. Got value: (.*?)(?:\. Got value: Namespace\(.*)?$")
_NO_SOURCE = re.compile(r"- Does not implement protocol (\w+)$")
_ARGUMENTS = re.compile(r"unrecognized arguments: (.*)$")
_LITERAL = re.compile(r"typing\.Literal\[(.*)\]$")
_REQUIRED = re.compile(r"the following arguments are required: (.+)$")


def explain(message: str, options: Sequence[str] = ()) -> str | None:
    """Say which name or value is wrong, where, and what would be right. None if the report does not show it.

    Args:
        message: The parser's report.
        options: The options of the command line, such as `--trainer.max_steps`.
    """
    if unrecognized := _ARGUMENTS.match(message):
        return _about_arguments(unrecognized[1].split(), options)
    lines = [line for line in message.splitlines() if line.strip()]
    found = [number for number, line in enumerate(lines) if _sentence(line, None) is not None]
    if not found:
        return _explain_source(lines) or _explain_union(lines)
    # The first of the deepest. A wrong class counts only if nothing else is wrong: another type may take it.
    deepest = max(found, key=lambda number: (not _NO_SUBCLASS.search(lines[number]), _indent(lines[number])))
    above = [lines[deepest], *_ancestors(lines, deepest)]
    keys = [match[1] for line in reversed(above) if (match := _KEY.search(line))]
    classes = [match[1] for line in above if (match := _CLASS.search(line))]
    of_callable = _CLASS_OF_CALLABLE.search(" ".join(lines[deepest : deepest + 2]))
    owner = of_callable[1] if of_callable else next(iter(classes), None)
    sentence = _sentence(lines[deepest], owner, keys[-1] if keys else None)
    return f"{'.'.join(keys)}: {sentence}" if keys else sentence


def cause_of_union(error: Exception) -> Exception:
    """Unwrap the parser's error about a union of types into the constructor's own; return other errors unchanged."""
    cause = error
    while str(cause).startswith(_UNION) and isinstance(cause.__cause__, Exception):
        cause = cause.__cause__
    return error if _raised_in(cause).startswith("jsonargparse.") else cause


def is_refusal(error: Exception) -> bool:
    """Whether this package's own code refused a value, rather than failed."""
    return isinstance(error, ValueError | OSError | ImportError) and _raised_in(error).startswith(PACKAGE + ".")


def _raised_in(error: Exception) -> str:
    """Name of the module that raised an error."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return frames[-1].f_globals.get("__name__", "") if frames else ""


def _explain_source(lines: Sequence[str]) -> str | None:
    """The same for `init_args` merged over a string, which has none."""
    sources = [
        number for number, line in enumerate(lines) if (match := _NO_SOURCE.search(line)) and match[1] in _SOURCES
    ]
    if not sources or not any("Given value: {'init_args': " in line for line in lines[sources[0] :]):
        return None
    keys = [match[1] for line in _ancestors(lines, sources[0]) if (match := _KEY.search(line))]
    source = _SOURCES[lines[sources[0]].split()[-1]]
    return (
        f"{'.'.join(reversed(keys))}: a path alone takes no init_args; write {keys[0]}: {{class_path: {source}, "
        "init_args: {path: ...}}."
    )


def _explain_union(lines: Sequence[str]) -> str | None:
    """The same for a value that fits no type of a union; None if a type failed for any other reason."""
    given = [number for number, line in enumerate(lines) if _GIVEN.search(line)]
    if not given:
        return None
    deepest = max(given, key=lambda number: _indent(lines[number]))
    keys = [match[1] for line in _ancestors(lines, deepest) if (match := _KEY.search(line))]
    tried = [_EXPECTED.search(line) for line in _tried(lines[:deepest], _indent(lines[deepest]))]
    if not keys or not tried or None in tried:
        return None
    names = [name for match in tried if match for name in _type_names(match[1])]
    value = lines[deepest].split(":", 1)[1].strip()
    config = _config_among(lines[:deepest], _indent(lines[deepest]))
    sentence = _not_one_of(value, names, keys[0]) if config is None else _not_a_config(value, config)
    return f"{'.'.join(reversed(keys))}: {sentence}"


def _tried(lines: Sequence[str], indent: int) -> list[str]:
    """The last list of errors at this indentation, one per type."""
    start = max(number for number, line in enumerate(lines) if line == f"{' ' * indent}Errors:")
    return [line for line in lines[start:] if line.startswith(f"{' ' * indent}  - ")]


def _config_among(lines: Sequence[str], indent: int) -> type | None:
    """The dataclass among the types of the last union at this indentation, if there is one."""
    types = [line for line in lines if line.startswith(f"{' ' * indent}Subtypes: ")]
    classes = [locate(name) for name in _SUBTYPE.findall(types[-1])]
    return next((cls for cls in classes if isinstance(cls, type) and is_dataclass(cls)), None)


def _ancestors(lines: Sequence[str], place: int) -> Iterable[str]:
    """The lines above a line in the tree, innermost first."""
    indent = _indent(lines[place])
    for line in reversed(lines[:place]):
        if _indent(line) < indent:
            indent = _indent(line)
            yield line


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


def _sentence(line: str, owner: str | None, key: str | None = "") -> str | None:
    """Explain a line of the report below a key, which is None at the top."""
    if match := _OF_GROUP.search(line):
        return _about_option(match[2], match[1], owner)
    if match := _OPTION.search(line):
        top = key is None and owner is None and not match[1].startswith("trainer.")
        return _about_top(match[1]) if top else _about_option(match[1], None, owner)
    if match := _MISSING.search(line):
        return f"{match[1]} has no {match[2]!r}{_nearest(match[2], _names_in(match[1]))}"
    if match := _VALUE.search(line):
        return _about_value(match[1], match[2], key)
    return _about_class(line, owner)


def _about_arguments(arguments: Sequence[str], options: Sequence[str]) -> str:
    """Say how options of TRL and verl, and ours without their path, are written on the command line."""
    flags = [number for number, argument in enumerate(arguments) if argument.startswith("--") or "=" in argument]
    for number, end in pairwise([*flags, len(arguments)]):
        name, *value = arguments[number].lstrip("-+").split("=", 1)
        path, note = foreign_path(name), note_on_option(name.split(".")[-1])
        if path is not None:
            shown = "..." if note else " ".join([*value, *arguments[number + 1 : end]]) or "..."
            return f"{arguments[number]} is written --{path} {shown} here.{note} {_TABLES}"
    nearest = [match for n in flags for match in difflib.get_close_matches(arguments[n].split("=")[0], options, n=1)]
    remedy = f"did you mean {nearest[0]}?" if nearest else f"options are written --trainer.max_steps 100. {_TABLES}"
    return f"unrecognized arguments: {' '.join(arguments)}; {remedy}"


def _about_top(name: str) -> str:
    path = None if name.split(".")[0] in AT_TOP else foreign_path(name)
    if path is not None:
        return f"the configuration has no {name!r}; here it is {path}.{note_on_option(name.split('.')[-1])} {_TABLES}"
    return f"the configuration has no {name!r}{_nearest(name.split('.')[0], AT_TOP)}"


def _about_option(option: str, group: str | None, owner: str | None) -> str:
    cls: Any = Trainer if owner is None else locate(owner)
    if cls is None:
        return f"there is no option {option!r}"
    if cls in _EXAMPLES:
        return f"no class_path is given; pass a configuration that has one, or {_EXAMPLES[cls]} before its options"
    name = option.removeprefix("trainer.").split(".")[0]
    if close := difflib.get_close_matches(name, ("class_path", "init_args"), n=1, cutoff=0.8):
        wrong = "" if name in ("class_path", "init_args") else f"{name!r} is not {close[0]!r}; "
        return f"{wrong}a class is written as class_path and init_args, and nothing else"
    cls = config_class(cls, group) if group is not None and owner is not None else cls
    return f"{cls.__name__} takes no {name!r}{suggestion(cls, name, in_yaml=True)}"


def _about_class(line: str, owner: str | None) -> str | None:
    if match := _NOT_IMPORTED.search(line):
        return f"{owner} cannot be imported: {match[1]}{_SEARCHED}"
    if match := _FUNCTION_NOT_IMPORTED.search(line):
        return f"{match[2] or 'the function'} cannot be imported: {match[1]}{_SEARCHED}"
    if match := _NO_SUBCLASS.search(line):
        return f"{match[1]} is not a {match[2]}"
    if match := _NO_GROUP.search(line):
        return f"{match[1]!r} is neither a mapping of options (`name: value`) nor a YAML file"
    if match := _REQUIRED.search(line):
        names = " and ".join(f"init_args.{name}" for name in match[1].split(", "))
        return f"{owner or 'the class'} needs {names}; add it to a configuration or to the command line"
    return None


def _about_value(expected: str, value: str, key: str | None) -> str:
    names = _type_names(expected)
    if len(names) == 1:
        return f"expected {names[0]}, got {value}"
    return _not_one_of(value, names, key)


def _not_one_of(value: str, names: Sequence[str], key: str | None) -> str:
    note = note_on_value(key or "", value)
    return f"{value!r} is not one of {', '.join(names)}{f'.{note}' if note else _nearest(value, names, default='.')}"


def _not_a_config(value: str, config: type) -> str:
    """Say that a value is no mapping, and how it is written if it is a choice of one of the options."""
    hints = get_type_hints(config)
    options = [name for name in field_names(config) if value in get_args(hints[name])]
    remedy = f"; write {{{options[0]}: {value}}}" if options else ""
    return f"{value!r} is not a mapping of the options of {config.__name__} ({', '.join(field_names(config))}){remedy}"


def _type_names(expected: str) -> list[str]:
    """The values of a literal type, or the name of any other."""
    if expected.startswith("dot import path string"):
        return ["class_path"]
    literal = _LITERAL.search(expected)
    if literal is None:
        name = expected.removeprefix("<class ").rstrip(">").strip("'")
        return ["null" if name == "NoneType" else name]
    return [name.strip().strip("'") for name in literal[1].split(",")]


def _names_in(module: str) -> Sequence[str]:
    return getattr(sys.modules.get(module), "__all__", dir(sys.modules.get(module)))


def _nearest(name: str, known: Sequence[str], default: str | None = None) -> str:
    nearest = difflib.get_close_matches(name, known, n=1)
    if nearest:
        return f"; did you mean {nearest[0]!r}?"
    return f"; it has {', '.join(known)}." if default is None else default
