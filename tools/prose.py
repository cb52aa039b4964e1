"""Phrases that no native engineer writes, in the docs and in public docstrings, and the size of the docs.

python tools/prose.py            # each hit with its place; exit status 1 if there are any
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = {"options.md", "metrics.md", "models.md", "reasoning_gym_tasks.md", "status.md"}
"""Pages of tables, which are looked up rather than read."""
BETTER = {
    r"\b(?-i:None):": "None means ..., or a sentence",
    r"\b(?-i:None) (is|leaves|takes)\b": "defaults to ..., or no limit if None",
    r"\brefus(e|ed|es|ing|als?)\b": "raises, rejects, does not support",
    r"\b(one that|those that|that of)\b": "repeat the noun",
    r"\b(most tokens of|least seconds)\b": "maximum, minimum",
    r"\bleaves? (it|them) out\b": "omit",
    r"\bfor everyone who\b": "this page covers",
    r"\bwhat travels\b": "is passed",
    r"\blines that call a part\b": "calls into",
    r"\b(behaviour|colour|centre|honour|favour|neighbour|grey|licence|artefact)(s|ed|ing)?\b": "American spelling",
    r"\b(model|label|cancel|travel)l(ed|ing)\b": "one l",
    r"\b(normal|optim|general|initial|special|serial|summar|organ|minim|maxim|quant|token)is(e|ed|es|ing)\b": "-ize",
}  # fmt: skip
_TICS = {re.compile(pattern, re.IGNORECASE): better for pattern, better in BETTER.items()}
_ARGUMENT = re.compile(r"^ +(?!None:)\w+(?=: )", re.MULTILINE)
_CODE = re.compile(r"^(`{3,}|~{3,}).*?^\1\s*$|`[^`\n]+`", re.MULTILINE | re.DOTALL)


def words(text: str) -> int:
    """Words of a page: what stands between spaces and has a letter or a digit, code included."""
    return len(re.findall(r"\S*[A-Za-z0-9]\S*", text))


def pages(root: Path = ROOT) -> list[Path]:
    """The pages that are read: the README and the guides, without the reference."""
    return [root / "README.md", *(path for path in sorted((root / "docs").glob("*.md")) if path.name not in REFERENCE)]


def public_docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of the docstrings of a module, its public classes and functions, and their public members."""

    def visit(node: ast.AST) -> Iterator[tuple[int, str]]:
        if docstring := ast.get_docstring(node):  # type: ignore[arg-type]
            yield node.body[0].lineno, docstring  # type: ignore[attr-defined]
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef) and not child.name.startswith("_"):
                yield from visit(child)

    yield from visit(ast.parse(path.read_text(encoding="utf-8")))


def tics(text: str) -> Iterator[tuple[int, str, str]]:
    """Line, phrase and what to write instead, outside code."""
    text = _CODE.sub(lambda code: re.sub(r"[^\n]", " ", code.group()), text)
    for pattern, better in _TICS.items():
        for match in pattern.finditer(text):
            yield text.count("\n", 0, match.start()), match.group(), better


def docstring_tics(docstring: str) -> Iterator[tuple[int, str, str]]:
    """The same for a docstring, without the names of arguments."""
    return tics(_ARGUMENT.sub("", docstring))


def found(root: Path = ROOT) -> Iterator[str]:
    """All hits, as `file:line: phrase -> better`."""
    for page in [root / "README.md", root / "CONTRIBUTING.md", *sorted((root / "docs").glob("*.md"))]:
        for line, phrase, better in tics(page.read_text(encoding="utf-8")):
            yield f"{page.relative_to(root)}:{line + 1}: {phrase!r} -> {better}"
    for path in sorted((root / "pl_grouprl").rglob("*.py")):
        for first, docstring in public_docstrings(path):
            for line, phrase, better in docstring_tics(docstring):
                yield f"{path.relative_to(root)}:{first + line}: {phrase!r} -> {better}"
            if "\n" not in docstring and docstring.count(";") > 1:
                yield f"{path.relative_to(root)}:{first}: a chain of semicolons -> two sentences"


if __name__ == "__main__":
    hits = list(found())
    print("\n".join(hits))
    print(f"{len(hits)} phrases; {len(pages())} pages, {sum(words(page.read_text()) for page in pages()):,} words")
    sys.exit(bool(hits))
