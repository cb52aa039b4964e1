"""Hooks for mkdocs: the site has the pages of `site_pages` instead of the files in docs/."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from site_pages import site_pages

_CODE = re.compile(r"(?<=<code>)[^<]+")


def on_files(files: Any, config: Any, **_: Any) -> Any:
    """Add the pages generated from other files, with links translated for the site."""
    from mkdocs.structure.files import File

    pages, copied = site_pages()
    for uri, text in pages.items():
        _replace(files, File.generated(config, uri, content=text))
    for uri, path in copied.items():
        _replace(files, File.generated(config, uri, abs_src_path=str(path)))
    return files


def on_page_content(html: str, **_: Any) -> str:
    """Let the browser break long names in tables after a dot, an underscore or a slash."""
    return re.sub(r"(?<=<td>).*?(?=</td>)", lambda cell: _CODE.sub(_with_breaks, cell.group()), html, flags=re.DOTALL)


def _with_breaks(code: re.Match[str]) -> str:
    return re.sub(r"([._/])(?=\w)", r"\1<wbr>", code.group())


def _replace(files: Any, file: Any) -> None:
    present = files.get_file_from_path(file.src_uri)
    if present is not None:
        files.remove(present)
    files.append(file)
