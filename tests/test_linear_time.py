"""Whatever a model or a server writes is read in linear time: parsers, graders, and every pattern of their packages."""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
import re
import signal
from collections.abc import Iterator
from itertools import combinations, product
from typing import Any

import pytest
from helpers.tiny_tokenizers import bytes_tokenizer

import pl_grouprl
from pl_grouprl.chat import parsing as families
from pl_grouprl.chat.parsing import MalformedTurnError, cast_arguments
from pl_grouprl.rewards.answers import NumericAnswer, _last_boxed
from pl_grouprl.rewards.code_tests import _parts, extract_code
from pl_grouprl.rewards.judge import NoReplyError, read_completion, read_grade
from pl_grouprl.rewards.models import step_ends
from pl_grouprl.rewards.penalties import RepetitionPenalty
from pl_grouprl.tasks.reasoning_gym import extract_answer
from pl_grouprl.utilities.text import mask_secret

LENGTH = 100_000
LIMIT = 2.0
"""CPU seconds of one call, which takes milliseconds in linear time, and seconds or hours otherwise."""
SEEN = ("chat", "demo", "episodes", "harnesses", "media", "rewards", "rollout", "tasks")
"""Packages that read what models and servers write."""
COMMON = [" ", "\n", "1", '"']
TOKENIZER = bytes_tokenizer()
SCHEMA = {"function": {"name": "f", "parameters": {"properties": {"x": {"type": ["integer", "number", "array"]}}}}}


def parse(name: str, text: str) -> None:
    parser = next(parser for parser in families._PARSERS if parser.name == name)
    cast_arguments(parser.parse(text, [SCHEMA]), [SCHEMA])


QWEN = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_end|>", '{"name": "f", "arguments": {']
TAGS = ["<tool_call>", "<function=f>", "<parameter=x>", "</parameter>", "</tool_call>", "<function=", "</think>"]
JUDGE = ["```json", "Grade: 5", "grade", "{", '{"score": ', "*", "/", ".", "out of"]
READERS = {
    "judge, text": (lambda text: read_grade(text, "text", (0, 10)), JUDGE),
    "judge, json": (lambda text: read_grade(text, "json", (0, 10)), JUDGE),
    "judge, answer": (read_completion, ['{"choices": [{"message": {"content": "', "[", "{"]),
    "number, strict": (NumericAnswer("strict").extract_answer, ["####", "#### ", "$", "-", ",", "."]),
    "number, flexible": (NumericAnswer("flexible").extract_answer, ["####", "$", "-", ",", "."]),
    "program": (extract_code, ["```python\n", "```", "```\n"]),
    "output of a program": (_parts, ["\r", "\t\n"]),
    "tags": (lambda text: extract_answer("<answer>{answer}</answer>", text), ["<answer>", "</answer>"]),
    "line": (lambda text: extract_answer("Answer: {answer}", text), ["Answer:", "Answer: 1\n"]),
    "end": (lambda text: extract_answer("{answer} END", text), ["END", "EN"]),
    "box": (_last_boxed, ["\\boxed", "\\boxed{", "}", "{", "\\"]),
    "words": (lambda text: RepetitionPenalty(3, -1.0)([], [text], [[]]), []),
    "key": (lambda text: mask_secret(text, "sk-s/s+s\\s"), ["s", "\\", "%25", "&#0"]),
    "plain": (lambda text: parse("plain", text), ["<call>", "<call>f", "<end>"]),
    "qwen3": (lambda text: parse("qwen3", text), QWEN),
    "qwen3_5": (lambda text: parse("qwen3_5", text), TAGS),
    "nemotron_3": (lambda text: parse("nemotron_3", text), TAGS),
    "llama3": (lambda text: parse("llama3", text), ['{"name": "', '{"name":', '", "parameters": ', "}<|eot_id|>", "}"]),
}


def hostile(pieces: list[str]) -> Iterator[str]:
    """Each pair of pieces, alternating or the second repeated, without the end that would match."""
    pieces = [*dict.fromkeys([*pieces, *COMMON])]
    for first, second in combinations(pieces, 2):
        yield (first + second) * (LENGTH // len(first + second)) + "~"
    for first, second in product(pieces, repeat=2):
        yield first + second * (LENGTH // len(second)) + "~"


@contextlib.contextmanager
def bounded(what: str) -> Iterator[None]:
    """Fail if the body needs more than `LIMIT` seconds of this process."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"{what} does not take linear time")

    former = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, former)


def patterns() -> dict[str, re.Pattern[str]]:
    """The compiled patterns of the modules in `SEEN` that can be imported here."""
    found = {}
    for package in SEEN:
        for module in pkgutil.walk_packages([f"{pl_grouprl.__path__[0]}/{package}"], f"pl_grouprl.{package}."):
            with contextlib.suppress(ImportError):
                for name, value in vars(importlib.import_module(module.name)).items():
                    if isinstance(value, re.Pattern):
                        found[f"{module.name}.{name}"] = value
    return found


@pytest.mark.parametrize("name", READERS)
def test_of_readers(name: str) -> None:
    read, pieces = READERS[name]
    for text in hostile(pieces):
        with (
            bounded(f"{name} of {text[:20]!r}...{text[-20:]!r}"),
            contextlib.suppress(MalformedTurnError, NoReplyError, ValueError),
        ):
            read(text)


def test_of_patterns() -> None:
    found = patterns()
    assert len(found) >= 10
    for name, pattern in found.items():
        pieces = re.findall(r"[\w<>=|#:{}/.`-]+", re.sub(r"\(\?P?<\w+>|\\[sdwbZ]|\(\?:", " ", pattern.pattern))
        for text in hostile([piece.replace("\\", "") for piece in pieces][:4]):
            with bounded(f"{name} in {text[:20]!r}...{text[-20:]!r}"):
                for _ in pattern.finditer(text):
                    pass


@pytest.mark.parametrize("text", ["\n", "\n\n", "x", "x\n", "x\n\n", " \n"], ids=repr)
def test_of_steps(text: str) -> None:
    """Work is counted: of how many tokens a completion is decoded."""
    decoded = []

    class Counting:
        all_special_ids = TOKENIZER.all_special_ids

        def decode(self, token_ids: list[int], **options: Any) -> str:
            decoded.append(len(token_ids))
            return TOKENIZER.decode(token_ids, **options)

    token_ids = TOKENIZER(text * 500, add_special_tokens=False)["input_ids"]
    step_ends(token_ids, Counting(), "\n")
    assert sum(decoded) < 20 * len(token_ids)
