"""Reward for mathematical answers, compared symbolically by the library math-verify."""

from __future__ import annotations

import functools
import re
from typing import Any, Literal

from pl_grouprl.rewards.numeric_answer import NumericAnswer, equal_numbers
from pl_grouprl.rewards.references import ReferenceGrader, accepted_answers
from pl_grouprl.utilities.arguments import checked_arguments
from pl_grouprl.utilities.optional import MATH_VERIFY_AVAILABLE, require

_BRACES = re.compile(r"(?P<box>\\boxed *\{)|(?<!\\)[{}]")


@checked_arguments
class MathVerify(ReferenceGrader):
    r"""1 if the completion's answer is mathematically equal to the reference, else 0. Has verl's signature.

    `\frac{1}{2}`, `0.5` and `2^{-1}` are equal; the reference may be a list of accepted answers. With the default
    extraction and `reference="solution"` the reward is that of TRL's `accuracy_reward`. With `reference="answer"` the
    reference is read as in verl's `math_verify.compute_score`; and if it and the last box are equal numbers, as
    `NumericAnswer` reads them, the reward is 1 whatever math-verify says. If nothing in the reference can be parsed,
    the result is None: the reward does not apply.

    Comparing `9^{9^{9}}` with anything takes forever. The library's own time limit is switched off: it uses a signal,
    which works only on the main thread, and it counts the answer as wrong. Instead, a run must set `reward_workers` and
    `reward_timeout`: a worker that takes too long is killed, and the rollout has no reward rather than 0.

    Args:
        reference: `answer`: the reference is the bare answer, such as `x^2+1`. `solution`: it is text that contains
            the answer, as in TRL's column `solution`.
        column: Data column with the reference; None looks for verl's `reward_model.ground_truth`, then for the columns
            `ground_truth` and `answer`.
        extraction: `latex` accepts answers in LaTeX: `\boxed{...}`, or else `$...$` after words like "the answer is".
            `any` also accepts bare numbers and expressions.

    Raises:
        ModuleNotFoundError: If math-verify is not installed.
    """

    needs_time_limit = True
    """Runs are refused without `reward_workers` and `reward_timeout`."""

    def __init__(
        self,
        reference: Literal["answer", "solution"] = "answer",
        column: str | None = None,
        extraction: Literal["latex", "any"] = "latex",
    ) -> None:
        require(MATH_VERIFY_AVAILABLE, "MathVerify", "math")
        self.reference = reference
        self.column = self.ground_truth_column = column
        self.extraction = extraction

    def set_up(self) -> None:
        """Import the library now, because calls have a time limit."""
        self("", r"\boxed{1}", "1")

    def check_reference(self, reference: str) -> None:
        """Refuse a worked solution where a bare answer is expected; its words would be parsed as products of letters.

        Raises:
            ValueError: Names the remedy.
        """
        text = reference.strip()
        if self.reference == "answer" and ("\n" in text or "####" in text):
            raise ValueError(
                f"MathVerify: the reference {text!r:.80} is a worked solution rather than a bare answer; pass "
                "MathVerify(reference='solution'), which looks for the answer in it."
            )

    def __call__(
        self, data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
    ) -> float | None:
        """Score one completion; None if the reference cannot be parsed."""
        answers = accepted_answers(ground_truth)
        boxed = _last_boxed(solution_str) if self.reference == "answer" else None
        if boxed is not None and any(equal_numbers(boxed, answer) for answer in answers):
            return 1.0
        gold = [form for answer in answers for form in _parse_reference(answer, self.reference)]
        if not gold:
            return None
        return float(_library().verify(gold, _parse(solution_str, self.extraction), timeout_seconds=None))

    def extract_answer(self, text: str) -> str | None:
        r"""The answer in a completion as text, for majority votes; None if there is none.

        It is the content of the last `\boxed{...}`. Without a box, `extraction="any"` takes the last number. Nothing is
        evaluated, so no time limit is needed.
        """
        boxed = _last_boxed(text)
        if boxed is not None or self.extraction == "latex":
            return boxed
        return NumericAnswer("flexible").extract_answer(text)


@functools.lru_cache(maxsize=64)
def _parse_reference(text: str, form: Literal["answer", "solution"]) -> list[Any]:
    parsed: list[Any] = _library().parse(f"\\boxed{{{text}}}" if form == "answer" else text, parsing_timeout=None)
    return parsed


def _parse(text: str, extraction: Literal["latex", "any"]) -> list[Any]:
    library = _library()
    latex = functools.partial(
        library.LatexExtractionConfig,
        normalization_config=library.LatexNormalizationConfig(units=True),
        boxed_match_priority=0,
    )
    parsed: list[Any]
    if extraction == "latex":
        targets = [latex(try_extract_without_anchor=False)]
        parsed = library.parse(text, targets, extraction_mode="first_match", parsing_timeout=None)
    else:
        parsed = library.parse(text, [latex(), library.ExprExtractionConfig()], parsing_timeout=None)
    return parsed


@functools.cache
def _library() -> Any:
    import math_verify
    from math_verify import grader, parser

    for module in (grader, parser):  # silences their warnings that the time limit is off
        module.TIMEOUT_WARNING_SHOWN = True
    return math_verify


def _last_boxed(text: str) -> str | None:
    r"""The stripped content of the `\boxed{...}` that closes last, found in one pass."""
    opened: list[int | None] = []  # for each open brace: where its content begins, or None if it does not open a box
    last = slice(0)
    for match in _BRACES.finditer(text):
        if match[0] != "}":
            opened.append(match.end() if match["box"] else None)
        elif opened and (start := opened.pop()) is not None:
            last = slice(start, match.start())
    return text[last].strip() if last.start is not None else None
