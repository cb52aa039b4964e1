"""Hooks for mkdocs: the site has the pages of `site_pages` instead of the files in docs/."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from site_pages import llms_txt, site_pages, source_of

_CODE = re.compile(r"(?<=<code>)[^<]+")


def on_files(files: Any, config: Any, **_: Any) -> Any:
    """Add the pages generated from other files, with links translated for the site."""
    from mkdocs.structure.files import File

    pages, copied = site_pages()
    for uri, text in pages.items():
        file = File.generated(config, uri, content=text)
        file.edit_uri = source_of(uri) if config.repo_url else None
        _replace(files, file)
    for uri, path in copied.items():
        _replace(files, File.generated(config, uri, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rank guides above the reference, and both above source files, in the search."""
    folder = page.file.src_uri.partition("/")[0]
    page.meta["search"] = {"boost": {"reference": 0.001, "project": 0.0001}.get(folder, 1.0)}
    return markdown


def on_post_build(config: Any, **_: Any) -> None:
    """Write the site's map for language models."""
    pages, _ = site_pages()
    Path(config.site_dir, "llms.txt").write_text(llms_txt(pages, config.site_description, config.nav), encoding="utf-8")


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
