"""The size and cut of the package: lines of code, files, functions, helpers. `tests/test_house.py` keeps its limits.

python tools/house.py [FOLDER ...]
"""

from __future__ import annotations

import ast
import sys
import tokenize
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
_HAVE_DOCSTRINGS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass
class House:
    """What is counted in a folder; lines of code are those without docstrings, comments and blanks."""

    files: dict[str, int] = field(default_factory=dict)
    """Lines of code by file."""

    functions: list[int] = field(default_factory=list)
    """Lines of code of each function and method."""

    helpers: Counter[str] = field(default_factory=Counter)
    """Definitions by name, of functions and methods that begin with one underscore."""

    uses: Counter[str] = field(default_factory=Counter)
    """Names and attributes that are read or called, by name."""

    constructors: dict[str, int] = field(default_factory=dict)
    """Parameters of each `__init__`, self included."""

    raises: int = 0
    """Lines of raise statements."""

    @property
    def figures(self) -> dict[str, float]:
        """The figures that are limited."""
        return {
            "lines of code": sum(self.files.values()),
            "files": len(self.files),
            "files under 40 lines": sum(lines < 40 for lines in self.files.values()),
            "mean function": sum(self.functions) / max(len(self.functions), 1),
            "private helpers used once": sum(self.uses[name] <= 1 for name in self.helpers),
            "parameters of the largest constructor": max(self.constructors.values(), default=0),
            "lines of raise statements": self.raises,
        }


def measure(folder: Path) -> House:
    """Count all Python files below a folder."""
    house = House()
    for path in sorted(folder.rglob("*.py")):
        with tokenize.open(path) as file:
            source = file.read()
        tree = ast.parse(source)
        code: set[int] = set()
        for token in tokenize.generate_tokens(iter(source.splitlines(keepends=True)).__next__):
            if token.type not in _NO_CODE:
                code.update(range(token.start[0], token.end[0] + 1))
        nodes = list(ast.walk(tree))
        for node in nodes:
            if isinstance(node, _HAVE_DOCSTRINGS) and ast.get_docstring(node, clean=False) is not None:
                code -= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
        for node in nodes:
            lines = len(code & set(range(node.lineno, (node.end_lineno or 0) + 1))) if isinstance(node, ast.stmt) else 0
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                house.functions.append(lines)
                if node.name.startswith("_") and not node.name.startswith("__"):
                    house.helpers[node.name] += 1
                if node.name == "__init__":
                    arguments = node.args
                    place = f"{path}:{node.lineno}"
                    house.constructors[place] = len(arguments.posonlyargs + arguments.args + arguments.kwonlyargs)
            elif isinstance(node, ast.Raise):
                house.raises += lines
            elif isinstance(node, ast.Name | ast.Attribute):
                house.uses[node.id if isinstance(node, ast.Name) else node.attr] += 1
        house.files[str(path)] = len(code)
    return house


def main(folders: list[str]) -> None:
    """Print the figures of each folder."""
    for folder in folders or ["pl_grouprl", "tests"]:
        print(folder)
        for name, figure in measure(Path(folder)).figures.items():
            print(f"  {name}: {figure:.1f}" if isinstance(figure, float) else f"  {name}: {figure:,}")


if __name__ == "__main__":
    main(sys.argv[1:])
