"""Answer templates such as `Answer: {answer}`: fills them in, and finds answers in completions."""

from __future__ import annotations

import re

ANSWER, QUESTION = "{answer}", "{question}"


def check_template(name: str, template: str, placeholder: str) -> None:
    """Refuse a template that does not contain its placeholder exactly once.

    Raises:
        ValueError: Names the template.
    """
    if template.count(placeholder) != 1:
        raise ValueError(f"{name} is {template!r}; it must contain {placeholder} exactly once.")


def write_answer(template: str, answer: str) -> str:
    """Fill an answer into its template."""
    return template.replace(ANSWER, answer)


def extract_answer(template: str, completion: str, num_lines: int | None = None) -> str | None:
    """Find the last answer in a completion.

    Args:
        template: Text with `{answer}`, such as `Answer: {answer}` or `<answer>{answer}</answer>`. White space at its
            ends and around the answer is ignored.
        completion: What the model wrote.
        num_lines: Number of lines in the answer if the template ends with `{answer}`; None for all remaining lines.

    Returns:
        The stripped answer, or None if the template's text is not in the completion.
    """
    before, after = text_around(template)
    if after:
        # Without the alternative \Z, every unclosed answer would be searched to the end.
        found = re.findall(f"{re.escape(before)}(.*?)({re.escape(after)}|\\Z)", completion, re.DOTALL)
        return next((answer.strip() for answer, end in reversed(found) if end), None)
    if before not in completion:
        return None
    rest = completion.rpartition(before)[2] if before else completion
    return "\n".join(rest.strip().split("\n")[:num_lines]).strip()


def is_only_answer(template: str, completion: str, answer: str) -> bool:
    """Whether a completion says nothing before or after its answer.

    Args:
        template: As for `extract_answer`.
        completion: What the model wrote.
        answer: What `extract_answer` found in it.
    """
    before, after = text_around(template)
    text = completion.strip()
    return text.startswith(before) and text.removeprefix(before).removesuffix(after).strip() == answer


def is_recovered(template: str, answer: str) -> bool:
    """Whether `extract_answer` recovers an answer that was filled into a template."""
    num_lines = answer.strip().count("\n") + 1
    return extract_answer(template, write_answer(template, answer), num_lines) == answer.strip()


def text_around(template: str) -> tuple[str, str]:
    """The text before and after the answer, each stripped."""
    before, _, after = template.partition(ANSWER)
    return before.strip(), after.strip()
