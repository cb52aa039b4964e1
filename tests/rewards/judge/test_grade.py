"""The grade in a reply."""

import pytest

from pl_grouprl.rewards.judge import read_grade


@pytest.mark.parametrize(
    ("reply", "grade"),
    [
        ("Grade: 7", 7.0),
        ("Good work.\n\n**Grade:** 7.5\n", 7.5),
        ("grade: 7/10", 7.0),
        ("**Grade: 7 out of 10.**", 7.0),
        ("Grade: 2\nOn reflection:\nGrade: 3", 3.0),
        ("<think>Grade: 9? No.</think>\n### Grade = 4", 4.0),
        (" 6\n", 6.0),
        ("Grade: -0", 0.0),
        ("Grade: .5", 0.5),
    ],
)
def test_of_text(reply, grade):
    assert read_grade(reply, "text", (0.0, 10.0)) == grade


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ("", "no line `Grade: N`"),
        ("Seven.", "no line"),
        ("It deserves a 7", "no line"),
        ("Grade: 7,5", "no line"),
        ("Grade: 7 or 8", "no line"),
        ("The grade: 7 is what it asks for", "no line"),
        ("Grade: 4/5", "out of 5 rather than 10"),
        ("Grade: 11", "11.0 is not between 0 and 10"),
        ("Grade: -3", "-3.0 is not between 0 and 10"),
        ("1e3", "no line"),
        pytest.param("\n" * 500_000 + "x", "no line", id="blank lines"),  # in linear time
    ],
)
def test_text_without_one_is_refused(reply, message):
    with pytest.raises(ValueError, match=message):
        read_grade(reply, "text", (0.0, 10.0))


def test_scales_may_go_below_0():
    assert read_grade("Grade: -3", "text", (-5.0, 5.0)) == -3.0


@pytest.mark.parametrize("reply_format", ["json", "json_schema"])
@pytest.mark.parametrize(
    "reply",
    [
        '{"reason": "braces } and {", "score": 3}',
        'Here:\n```json\n{"reason": "x", "score": 3.0}\n```',
        'I thought of {"score": 9}, but: {"reason": "x", "score": 3} is fair.',
    ],
)
def test_of_json(reply, reply_format):
    assert read_grade(reply, reply_format, (1.0, 5.0)) == 3.0


@pytest.mark.parametrize(
    "reply",
    [
        "Grade: 3",
        "3",
        '{"grade": 3}',
        '{"score": "3"}',
        '{"score": true}',
        "[" * 100_000,
        '{"score": NaN}',
        pytest.param(f'{{"score": 1{"0" * 400}}}', id="beyond float64"),
    ],
)
def test_json_without_one_is_refused(reply):
    with pytest.raises(ValueError, match=r"score|is not between 1 and 5"):
        read_grade(reply, "json", (1.0, 5.0))
