"""One sentence for an error of the configuration, out of the parser's report on all types that it tried.

The report is a tree by indentation: keys and classes, with what is wrong at the deepest place.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterable, Sequence
from pydoc import locate
from typing import Any

from lightning.pytorch import Trainer

from pl_grouprl.utilities.arguments import config_class, suggestion

AT_TOP = ("model", "data", "trainer", "ckpt_path", "seed_everything")
"""Groups and options at the top of a configuration."""

_KEY = re.compile(r"Parser key \"([\w.]+)\"")
_CLASS = re.compile(r"Problem with given class_path '([\w.]+)'")
_CLASS_OF_CALLABLE = re.compile(r"Got value: Namespace\(class_path='([\w.]+)'")
_OF_GROUP = re.compile(r"Group '(\w+)' does not accept option '([^']*)'")
_OPTION = re.compile(r"(?:Option|Subcommand '\w+' does not accept option) '([^']*)'(?: is not accepted|$)")
_MISSING = re.compile(r"module '([\w.]+)' has no attribute '(\w+)'")
_NOT_IMPORTED = re.compile(r"^\s+(No module named '[\w.]+')")
_NO_SUBCLASS = re.compile(r"Import path ([\w.]+) does not correspond to a subclass of (\w+)")
_NO_GROUP = re.compile(r"Unable to load config \"(.*)\"$")
_EXPECTED = re.compile(r"- (?:Expected an?|Not a valid subclass of) (.+)$")
_GIVEN = re.compile(r"^\s+Given value: ")
_VALUE = re.compile(r"Expected a (.+?)\. Got value: (.*?)(?:\. Got value: Namespace\(.*)?$")
_LITERAL = re.compile(r"typing\.Literal\[(.*)\]$")
_REQUIRED = re.compile(r"the following arguments are required: (.+)$")


def explain(message: str) -> str | None:
    """Say which name or value is wrong, where, and what would be right. None if the report shows no such place."""
    lines = message.splitlines()
    found = [number for number, line in enumerate(lines) if _sentence(line, None) is not None]
    if not found:
        return _explain_union(lines)
    # Of equal ones the first; a wrong class only if it is all that is wrong, since it may be right for another type.
    deepest = max(found, key=lambda number: (not _NO_SUBCLASS.search(lines[number]), _indent(lines[number])))
    above = [lines[deepest], *_ancestors(lines, deepest)]
    keys = [match[1] for line in reversed(above) if (match := _KEY.search(line))]
    classes = [match[1] for line in above if (match := _CLASS.search(line))]
    of_callable = _CLASS_OF_CALLABLE.search(" ".join(lines[deepest : deepest + 2]))
    owner = of_callable[1] if of_callable else next(iter(classes), None)
    sentence = _sentence(lines[deepest], owner, at_top=not keys)
    return f"{'.'.join(keys)}: {sentence}" if keys else sentence


def _explain_union(lines: Sequence[str]) -> str | None:
    """The same for a value that is none of several types; None if another error is among those of the types."""
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
    nearest = _nearest(value, names, default=".")
    return f"{'.'.join(reversed(keys))}: {value!r} is none of {', '.join(names)}{nearest}"


def _tried(lines: Sequence[str], indent: int) -> list[str]:
    """The last list of errors at an indent, one for each type."""
    start = max(number for number, line in enumerate(lines) if line == f"{' ' * indent}Errors:")
    return [line for line in lines[start:] if line.startswith(f"{' ' * indent}  - ")]


def _ancestors(lines: Sequence[str], place: int) -> Iterable[str]:
    """The lines that a line is below of, from the innermost."""
    indent = _indent(lines[place])
    for line in reversed(lines[:place]):
        if _indent(line) < indent:
            indent = _indent(line)
            yield line


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


def _sentence(line: str, owner: str | None, at_top: bool = False) -> str | None:
    if match := _OF_GROUP.search(line):
        return _about_option(match[2], match[1], owner)
    if match := _OPTION.search(line):
        top = at_top and owner is None and not match[1].startswith("trainer.")
        return _about_top(match[1]) if top else _about_option(match[1], None, owner)
    if match := _MISSING.search(line):
        return f"{match[1]} has no {match[2]!r}{_nearest(match[2], _names_in(match[1]))}"
    if match := _VALUE.search(line):
        return _about_value(*match.groups())
    return _about_class(line, owner)


def _about_top(name: str) -> str:
    return f"the configuration has no {name!r}{_nearest(name.split('.')[0], AT_TOP)}"


def _about_option(option: str, group: str | None, owner: str | None) -> str:
    cls: Any = Trainer if owner is None else locate(owner)
    if cls is None:
        return f"there is no option {option!r}"
    name = option.removeprefix("trainer.").split(".")[0]
    if close := difflib.get_close_matches(name, ("class_path", "init_args"), n=1, cutoff=0.8):
        wrong = "" if name in ("class_path", "init_args") else f"{name!r} is not {close[0]!r}; "
        return f"{wrong}a class is written as class_path and init_args, with nothing next to them"
    cls = config_class(cls, group) if group is not None and owner is not None else cls
    return f"{cls.__name__} takes no {name!r}{suggestion(cls, name)}"


def _about_class(line: str, owner: str | None) -> str | None:
    if match := _NOT_IMPORTED.search(line):
        return f"{owner} cannot be imported: {match[1]}"
    if match := _NO_SUBCLASS.search(line):
        return f"{match[1]} is not a {match[2]}"
    if match := _NO_GROUP.search(line):
        return f"{match[1]!r} is neither options as `name: value` nor a file of them"
    if match := _REQUIRED.search(line):
        names = " and ".join(f"init_args.{name}" for name in match[1].split(", "))
        return f"{owner or 'the class'} needs {names}; add it to a configuration or to the command line"
    return None


def _about_value(expected: str, value: str) -> str:
    names = _type_names(expected)
    if len(names) == 1:
        return f"expected {names[0]}, and it is {value}"
    return f"{value!r} is none of {', '.join(names)}{_nearest(value, names, default='.')}"


def _type_names(expected: str) -> list[str]:
    """What a type takes: the values of a literal, or its own name."""
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
