"""The text of tokens, and how it is set in lines."""

import pytest

from pl_grouprl.demo.tasks import digit_tokenizer
from pl_grouprl.plots import lines_of, token_texts


class ByteTokenizer:
    """One token per byte of UTF-8, as the pieces of a rare character."""

    def decode(self, ids, skip_special_tokens, clean_up_tokenization_spaces):
        assert not skip_special_tokens
        assert not clean_up_tokenization_spaces
        return bytes(ids).decode("utf-8", errors="replace")


class WordTokenizer:
    """Words whose space appears only after another word, as in sentencepiece."""

    def decode(self, ids, **options):
        return " ".join("word" if token == 0 else "other" for token in ids)


def test_every_token_has_the_text_that_it_adds():
    text = "seven ↵ 数学 é"
    texts = token_texts(list(text.encode()), ByteTokenizer())
    assert "".join(texts) == text
    assert texts[6:9] == ["", "", "↵"]  # a character of three tokens belongs to the last


def test_a_space_belongs_to_the_word_after_it():
    assert token_texts([0, 1, 0] * 5, WordTokenizer())[:4] == ["word", " other", " word", " word"]


def test_end_tokens_are_named():
    tokenizer = digit_tokenizer()
    ids = [*tokenizer("12")["input_ids"], tokenizer.eos_token_id]
    assert token_texts(ids, tokenizer) == ["1", "2", tokenizer.eos_token]


def places(lines):
    return [[(cell.number, cell.start, cell.width, cell.text) for cell in line] for line in lines]


def test_lines_break_before_a_token_that_does_not_fit():
    lines = lines_of(["abc", " de", "fgh", "i"], columns=7)
    assert places(lines) == [[(0, 0, 3, "abc"), (1, 3, 3, " de")], [(2, 0, 3, "fgh"), (3, 3, 1, "i")]]


def test_lines_break_after_a_line_break_which_is_shown():
    assert places(lines_of(["a\n", "b", "\tc"], columns=5)) == [
        [(0, 0, 2, "a↵")],
        [(1, 0, 1, "b"), (2, 1, 2, "→c")],
    ]


@pytest.mark.parametrize(
    ("text", "width", "shown"),
    [("", 1, ""), ("数", 2, "数"), ("e\u0301", 1, "e\u0301"), ("\x00", 1, "·"), ("x" * 30, 24, "x" * 23 + "…")],
)
def test_a_token_is_as_wide_as_what_is_shown(text, width, shown):
    assert lines_of([text], columns=40)[0][0][2:] in [(width * spread, shown) for spread in (1, 4)]


def test_a_short_response_is_spread():
    assert [cell.start for cell in lines_of(["1", "2", "3"], columns=96)[0]] == [0, 4, 8]
    assert [cell.start for cell in lines_of(["1", "2", "3"], columns=6)[0]] == [0, 2, 4]
