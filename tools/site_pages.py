"""The pages of the documentation site: those in docs/, and those generated from other files.

    docs/*.md              as they are
    README, CHANGELOG, ... the root's pages, under the names in ROOT_PAGES
    reference/*.md         one page for each public package, from its `__init__`; mkdocstrings fills in the docstrings
    project/*              every other file or folder that a page links to

Links work both in the repository and on the site: `rebased` translates them. Nothing here needs mkdocs, so the fast
tests check links and navigation without it; `site_hook` passes the pages to mkdocs.
"""

from __future__ import annotations

import ast
import json
import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ROOT_PAGES = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
LANGUAGES = {".py": "python", ".yaml": "yaml", ".sh": "bash", ".toml": "toml", ".txt": "text"}
NOTEBOOK = ".ipynb"
_LOSSES = ("policy_loss", "token_groups")
# Modules whose public names are documented although no `__init__` exports them.
MODULES = {
    **{f"pl_grouprl.{name}": (f"{name}.py",) for name in ("loggers", "plots", "report", "types")},
    **{f"pl_grouprl.functional.{name}": (f"functional/{name}.py",) for name in _LOSSES},
    "pl_grouprl.functional": ("functional/*.py",),
    "pl_grouprl.training": tuple(  # what a subclass, or a loop of one's own, meets
        f"training/{name}.py" for name in ("buffer", "checkpoint", "micro_batches", "objective", "run")
    ),
}

_REFERENCE = """# Reference

Every public name, with its docstring. `import pl_grouprl` gives these directly: {top}.

| package | contents |
|---|---|
{rows}"""
_PACKAGE = """# {name}

::: {name}
    options: {{members: false, show_root_heading: false, show_root_toc_entry: false}}
"""
_FENCE = re.compile(r"^(`{3,}|~{3,}).*?^\1\s*$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<=\]\()([^()\s]+)(?=\))")
_HEADING = re.compile(r"^#{1,6} (.+)$", re.MULTILINE)


def site_pages(root: Path = ROOT) -> tuple[dict[str, str], dict[str, Path]]:
    """All pages of the site as Markdown, and the files copied as they are, both by their path on the site.

    Raises:
        FileNotFoundError: If a page links to a file that does not exist.
    """
    pages = reference_pages(root)
    files: dict[str, Path] = {}
    waiting = [*ROOT_PAGES, *(path.relative_to(root).as_posix() for path in sorted((root / "docs").glob("*.md")))]
    seen = set(waiting)
    while waiting:
        source = waiting.pop()
        path = root / source
        if _is_page(path):
            text = _as_markdown(path)
            pages[site_path(source, root)] = rebased(text, source, root)
            found = {target for target, _ in links(text, source) if target} - seen
            waiting += sorted(found)
            seen |= found
        elif path.is_file():
            files[site_path(source, root)] = path
        else:
            raise FileNotFoundError(f"A page links to {source}, which does not exist.")
    return pages, files


def site_path(source: str, root: Path = ROOT) -> str:
    """The path on the site of a file or folder of the project."""
    if source in ROOT_PAGES:
        return ROOT_PAGES[source]
    if source.startswith("docs/"):
        return source.removeprefix("docs/")
    path = root / source
    if path.is_dir():
        return f"project/{source}/index.md"
    return f"project/{source}.md" if path.suffix in {NOTEBOOK, *LANGUAGES} else f"project/{source}"


def source_of(page: str) -> str | None:
    """The file that a person edits to change a page of the site; None if it is made from others."""
    if page.startswith(("reference/", "project/")):
        return None
    return {own: source for source, own in ROOT_PAGES.items()}.get(page, f"docs/{page}")


def llms_txt(pages: dict[str, str], description: str, navigation: list[dict[str, list[dict[str, str]]]]) -> str:
    """The map of the site for language models (llmstxt.org): each page of the navigation, with its first sentence."""
    lines = ["# pl_grouprl", "", f"> {description}", ""]
    for section in navigation:
        for name, entries in section.items():
            lines += [f"## {name}", ""]
            for entry in entries:
                for title, page in entry.items():
                    if page.startswith("reference/pl_grouprl"):
                        continue  # the index names them
                    target = page.removesuffix(".md") + ".html"
                    lines.append(f"- [{title}]({target}): {_first_sentence(pages[page])}")
            lines.append("")
    return "\n".join(lines)


def links(text: str, source: str) -> Iterator[tuple[str, str]]:
    """Target, relative to the project's root ("" is the page itself), and anchor of each relative link outside code."""
    for match in _LINK.finditer(_without_code(text)):
        link = match.group(1)
        if "://" not in link and not link.startswith("mailto:"):
            target, _, anchor = link.partition("#")
            yield (posixpath.normpath(posixpath.join(posixpath.dirname(source), target)) if target else ""), anchor


def rebased(text: str, source: str, root: Path = ROOT) -> str:
    """The page with its relative links pointing to where their targets are on the site."""
    here = posixpath.dirname(site_path(source, root))

    def replace(match: re.Match[str]) -> str:
        link = match.group(1)
        if "://" in link or link.startswith(("#", "mailto:")):
            return link
        target, separator, anchor = link.partition("#")
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        return posixpath.relpath(site_path(target, root), here or ".") + separator + anchor

    return _outside_code(text, lambda part: _LINK.sub(replace, part))


def headings(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site form them."""
    found: set[str] = set()
    for match in _HEADING.finditer(_without_code(text)):
        title = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", match.group(1)).lower().strip()
        slug = re.sub(r"[^\w\- ]", "", title).replace(" ", "-")
        copies = sum(other == slug or other.startswith(f"{slug}_") for other in found)
        found.add(f"{slug}_{copies}" if copies else slug)
    return found


def reference_pages(root: Path = ROOT) -> dict[str, str]:
    """One page for each public package, and an index of them."""
    pages, rows = {}, []
    for name, sections in sorted(public_names(root).items()):
        page = f"reference/{name}.md"
        body = "".join(f"\n::: {member}\n" for member in sections)
        pages[page] = _PACKAGE.format(name=name) + body
        rows.append(f"| [`{name}`]({name}.md) | {_summary(root, name)} |\n")
    pages["reference/index.md"] = _REFERENCE.format(top=", ".join(_top_level(root)), rows="".join(rows))
    return pages


def public_names(root: Path = ROOT) -> dict[str, list[str]]:
    """The full public names of each documented package or module: its `__all__`, or its modules' public definitions."""
    found = {}
    for path in sorted((root / "pl_grouprl").rglob("__init__.py")):
        package = ".".join(path.parent.relative_to(root).parts)
        exported = _exported(path)
        exported_above = _exported(path.parents[1] / "__init__.py") if package.count(".") > 1 else []
        names = [f"{package}.{name}" for name in exported if name not in exported_above]
        if names and package != "pl_grouprl":
            found[package] = names
    for name, patterns in MODULES.items():
        names = [
            f"{'.'.join(path.relative_to(root).with_suffix('').parts)}.{definition}"
            for pattern in patterns
            for path in sorted((root / "pl_grouprl").glob(pattern))
            if name.count(".") > 1 or path.stem not in _LOSSES
            for definition in _exported(path) or _definitions(path)
        ]
        exported = found.get(name, [])
        names = exported + [full for full in names if full.rpartition(".")[2] not in _last_parts(exported)]
        if names:
            found[name] = names
    return found


def _top_level(root: Path) -> Iterator[str]:
    """The names that the package itself exports, linked to their homes."""
    homes = {name: package for package, names in public_names(root).items() for name in _last_parts(names)}
    for name in _exported(root / "pl_grouprl" / "__init__.py"):
        yield f"[`{name}`]({homes[name]}.md#{homes[name]}.{name})"


def _last_parts(names: list[str]) -> list[str]:
    return [name.rpartition(".")[2] for name in names]


def _exported(path: Path) -> list[str]:
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == "__all__":
            return sorted(ast.literal_eval(node.value), key=str.lower)
    return []


def _definitions(path: Path) -> list[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    kinds = ast.ClassDef, ast.FunctionDef
    return [node.name for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_")]


def _first_sentence(page: str) -> str:
    paragraphs = [part.strip() for part in _without_code(page).split("\n\n")]
    text = next((part for part in paragraphs if part[:1].isalpha()), "")
    return re.split(r"(?<=\.)\s", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", " ".join(text.split())))[0]


def _summary(root: Path, name: str) -> str:
    path = root.joinpath(*name.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n", 1)[0]


def _is_page(path: Path) -> bool:
    return path.is_dir() or path.suffix in {".md", NOTEBOOK, *LANGUAGES}


def _as_markdown(path: Path) -> str:
    """A page unchanged, a file as a code block, a notebook as cells and outputs, a folder as a list of its files."""
    if path.is_dir():
        names = sorted(one.name for one in path.iterdir() if not one.name.startswith(("_", ".")) and one.name != "runs")
        return f"# {path.name}\n\n" + "".join(f"- [{name}]({path.name}/{name})\n" for name in names)
    text = path.read_text(encoding="utf-8")
    if path.suffix == NOTEBOOK:
        return "\n\n".join(part for cell in json.loads(text)["cells"] for part in _cell(cell)) + "\n"
    return text if path.suffix == ".md" else f"# {path.name}\n\n````{LANGUAGES[path.suffix]}\n{text}````\n"


def _cell(cell: dict[str, Any]) -> Iterator[str]:
    """A cell of a notebook: its text, or its code and what it printed and drew."""
    source = "".join(cell["source"])
    yield source if cell["cell_type"] == "markdown" else f"````python\n{source}\n````"
    for output in cell.get("outputs", ()):
        data = output.get("data", {})
        if "image/png" in data:
            yield f'<img alt="What the cell draws" src="data:image/png;base64,{"".join(data["image/png"]).strip()}">'
        else:
            printed = "".join(output.get("text") or data.get("text/plain", "")).rstrip("\n")
            yield f"````text\n{printed}\n````"


def _outside_code(text: str, change: Callable[[str], str]) -> str:
    """Change text outside fenced blocks."""
    parts, end = [], 0
    for match in _FENCE.finditer(text):
        parts += [change(text[end : match.start()]), match.group()]
        end = match.end()
    return "".join([*parts, change(text[end:])])


def _without_code(text: str) -> str:
    return _FENCE.sub("", text)
