import pytest

from pl_grouprl.tasks.reasoning_gym import extract_answer, is_recovered, write_answer

TAGS, LINE = "<answer>{answer}</answer>", "Answer: {answer}"


@pytest.mark.parametrize(
    ("template", "completion", "num_lines", "answer"),
    [
        (LINE, "Answer: 12", 1, "12"), (LINE, "So 5 + 7.\nAnswer:12\nBecause 5 + 7 is 12.", 1, "12"),
        (LINE, "Answer:\n\n12 \nand more", 1, "12"), (LINE, "Answer: 3. No. Answer: 4", 1, "4"),
        (LINE, "Answer:\n1 2\n3 4\nDone.", 2, "1 2\n3 4"), (LINE, "Answer: 1\n2", None, "1\n2"),
        (LINE, "12", 1, None), (LINE, "Answer:", 1, ""), (TAGS, "<think>2?</think><answer> 12\n</answer>.", 1, "12"),
        (TAGS, "<answer>1</answer><answer>2</answer>", 1, "2"), (TAGS, "<answer>1\n2</answer>", 1, "1\n2"),
        (TAGS, "<answer>12", 1, None), ("{answer}", " 12 \nNext question: 5 + 5?", 1, "12"), ("{answer}", "", 1, ""),
        ("{answer} is it.", "I say 12 is it.", 1, "I say 12"),
    ],
)  # fmt: skip
def test_the_last_answer_is_extracted(template, completion, num_lines, answer):
    assert extract_answer(template, completion, num_lines) == answer


@pytest.mark.parametrize(
    "completion", ["", "<answer>1</answer>", "a<answer>x<answer>\n y </answer></answer>", "<answer>"]
)
def test_tags_are_read_as_the_library_reads_them(completion):
    from reasoning_gym.utils import extract_answer as of_library

    assert extract_answer(TAGS, completion) == of_library(completion)


def test_braces_of_an_answer_stay():
    assert extract_answer(LINE, write_answer(LINE, '{"a": {answer}}'), 1) == '{"a": {answer}}'


@pytest.mark.parametrize(
    ("template", "answer", "expected"),
    [
        (TAGS, "3.5", True), (LINE, " 1 2\n\n3 4 ", True), ("{answer}", "a\nb", True), ("[{answer}]", "5", True),
        ("[{answer}]", "[1, 2]", False), ("{answer}.", "3.5", False), (LINE, "Answer: 3", False),
        (r"\boxed{{answer}}", r"\frac{1}{2}", False),
    ],
)  # fmt: skip
def test_some_answers_cannot_be_told_from_their_template(template, answer, expected):
    assert is_recovered(template, answer) is expected
