"""Finds what a YAML parser silently accepts in a configuration: duplicate keys, and unknown empty groups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import yaml

Path = tuple[str | int, ...]

_MAY_BE_EMPTY = ("init_args", "dict_kwargs")
"""Groups that may be empty for any class."""


def refuse_duplicates(text: str, source: str) -> None:
    """Refuse text that is not a YAML mapping, and duplicate keys, of which YAML would silently use the last.

    Args:
        text: A YAML document.
        source: What to call it in the error, such as the file's path.

    Raises:
        TypeError: Names the source, the line and the key.
    """
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise TypeError(f"{source} is not YAML: {error}") from error
    if not isinstance(root, yaml.MappingNode):
        raise TypeError(f"{source} has no groups of options, such as `trainer: {{max_steps: 100}}`.")
    for path, node in _mappings(root):
        lines: dict[str, int] = {}
        for key, _ in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if name in lines and name != "<<":
                called = ".".join(map(str, (*path, name)))
                raise TypeError(f"{source}, line {line}: {called} is a duplicate key, first in line {lines[name]}.")
            lines[name] = line


def empty_groups(text: str) -> list[Path]:
    """Find the paths of empty mappings in a YAML document."""
    return [path for path, node in _mappings(yaml.compose(text, Loader=yaml.SafeLoader)) if path and not node.value]


def refuse_unknown_groups(text: str, source: str, config: Mapping[str, Any]) -> None:
    """Refuse empty groups that are not options of the parsed configuration; the parser silently drops them.

    Raises:
        ValueError: Names the source and the group.
    """
    for path in empty_groups(text):
        parent: Any = config
        for key in path[:-1]:
            found = isinstance(parent, Mapping) and key in parent
            found = found or (isinstance(parent, list) and isinstance(key, int) and key < len(parent))
            parent = parent[key] if found else None
        if isinstance(parent, Mapping) and path[-1] not in (*parent, *_MAY_BE_EMPTY):
            raise ValueError(
                f"{source}: {'.'.join(map(str, path))} is an empty group and not an option; options there are "
                f"{', '.join(map(str, parent))}. Leave it out."
            )


def _mappings(node: Any, path: Path = ()) -> Iterator[tuple[Path, yaml.MappingNode]]:
    """Yield all mappings of a document with their paths."""
    if isinstance(node, yaml.MappingNode):
        yield path, node
        for key, value in node.value:
            yield from _mappings(value, (*path, str(key.value)))
    elif isinstance(node, yaml.SequenceNode):
        for place, value in enumerate(node.value):
            yield from _mappings(value, (*path, place))
