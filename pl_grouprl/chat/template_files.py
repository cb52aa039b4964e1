"""Finds chat templates: built-in ones, files, and source text."""

from __future__ import annotations

from pathlib import Path

_FOLDER = Path(__file__).parent / "templates"


def builtin_templates() -> list[str]:
    """Names of the chat templates that come with the package."""
    return sorted(path.stem for path in _FOLDER.glob("*.jinja"))


def read_template(chat_template: str) -> str:
    """Return the source of a chat template.

    Args:
        chat_template: A built-in template's name, a path, or the source itself.

    Raises:
        ValueError: If it is none of them.
    """
    if chat_template in builtin_templates():
        return (_FOLDER / f"{chat_template}.jinja").read_text(encoding="utf-8")
    if "{{" in chat_template or "{%" in chat_template:
        return chat_template
    path = Path(chat_template)
    if not path.is_file():
        raise ValueError(
            f"chat_template is {chat_template!r}, which is neither a file, nor a Jinja template (it has no "
            f"'{{{{' or '{{%'), nor a built-in one: {', '.join(builtin_templates())}."
        )
    return path.read_text(encoding="utf-8")
