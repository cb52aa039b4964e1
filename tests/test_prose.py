"""The docs and public docstrings are plain English, and the guides are few enough to read."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "tools"))

from prose import docstring_tics, found, pages, tics, words


def test_no_phrase_that_a_native_engineer_would_not_write():
    assert not list(found())


def test_phrases_are_found_outside_code():
    text = "It refuses `None is` here.\n\n```py\nx: None: refused\n```\nThose that\nnormalise"
    assert [(line, phrase) for line, phrase, _ in tics(text)] == [(0, "refuses"), (5, "Those that"), (6, "normalise")]


def test_code_in_longer_fences_is_skipped_and_a_line_that_begins_with_none_is_not():
    assert not list(tics("````py\nrefuses\n```\nrefuses\n````\n"))
    docstring = "Args:\n    refused: Requests.\n    budget: Tokens.\n        None: no limit."
    assert [phrase for _, phrase, _ in docstring_tics(docstring)] == ["None:"]


def test_the_guides_are_few_and_short():
    assert len(pages()) <= 30
    assert sum(words(page.read_text(encoding="utf-8")) for page in pages()) <= 35_000
