"""Writes docs/reasoning_gym_tasks.md: which reasoning-gym tasks can be generated, split and scored.

    python tools/reasoning_gym_table.py --write docs/reasoning_gym_tasks.md
    python tools/reasoning_gym_table.py --tasks chain_sum gcd        # prints the page with these

For each task, with the library's default options: the three splits are generated twice and compared; their rows go
through a parquet file; reference answers, in tags, must score 1, and a wrong answer less; and a decoded entry must
score like the original.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import itertools
import json
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pl_grouprl.tasks import ReasoningGym, ReasoningGymScore
from pl_grouprl.tasks.generator import GeneratorError, decode_entry, encode_entry, library_levels
from pl_grouprl.tasks.score import FORMULA_TASKS, LITERAL_TASKS

SIZES = {"size": 8, "val_size": 2, "test_size": 2}
LEVEL_SECONDS = 5.0
TAGS = "<answer>{answer}</answer>"
PROMPT = f"Write your answer as {TAGS.replace('{answer}', 'answer')}."

FAULTY = {
    "base_conversion": "some questions have an empty reference, which scores 0",
    "game_of_life_halting": "its scorer takes any text for True, so any answer to half of the questions scores 1",
}
"""Tasks that do not pass, with the reason shown on the page."""

NOT_TASKS = {"composite": "mixes other tasks; name several in `ReasoningGym.tasks` instead"}
"""Names in the library's list that are not tasks, with the reason."""


@dataclass
class Findings:
    """The findings on a task.

    Attributes:
        rows: Rows of each split.
        seconds: Time to generate a row.
        reference: Source of the reference answers: `answer`, a key of the metadata, or empty.
        levels: Number of distinct levels of the library's curriculum.
        problems: What does not work.
        scores: Scores of reference answers and wrong ones, to compare between processes.
    """

    rows: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    reference: str = ""
    levels: int = 0
    problems: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)


def task_names() -> list[str]:
    """All tasks of the library."""
    from reasoning_gym.factory import DATASETS

    return sorted(DATASETS.keys() - NOT_TASKS.keys())


def examine(names: Sequence[str]) -> dict[str, Findings]:
    """Try everything with the given tasks."""
    found = {name: Findings() for name in names}
    splits = {split: _generate(names, split, found) for split in ("train", "val", "test")}
    again = _generate(names, "train", found)
    for name, findings in found.items():
        print(name, file=sys.stderr, flush=True)
        own = {split: rows.get(name, []) for split, rows in splits.items()}
        findings.rows = {split: len(rows) for split, rows in own.items()}
        questions = {row["prompt"][-1]["content"] for rows in own.values() for row in rows}
        if len(questions) < sum(findings.rows.values()):
            findings.problems.append("splits share questions")
        if again.get(name) != splits["train"].get(name):
            findings.problems.append("differs when generated again")
        if not findings.problems:
            _examine_scores(name, through_parquet([row for rows in own.values() for row in rows]), findings)
            findings.levels = count_levels(name)
    return found


def _generate(names: Sequence[str], split: str, found: Mapping[str, Findings]) -> dict[str, list[dict[str, Any]]]:
    """Rows of a split by task; if the tasks cannot be generated together, find out which one fails."""
    sizes = {name: number * len(names) for name, number in SIZES.items()}
    try:
        rows = ReasoningGym(list(names), system_prompt=PROMPT, answer_format=TAGS, **sizes).rows(split)  # type: ignore[arg-type]
    except (GeneratorError, RuntimeError) as error:
        if len(names) > 1:
            half = len(names) // 2
            return _generate(names[:half], split, found) | _generate(names[half:], split, found)
        if str(error) not in found[names[0]].problems:
            found[names[0]].problems.append(str(error))
        return {}
    return {name: [row for row in rows if row["data_source"] == name] for name in names}


def through_parquet(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Write rows to a file and read them back."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.parquet"
        pq.write_table(pa.Table.from_pylist(rows), path)
        return pq.read_table(path).to_pylist()


def _examine_scores(name: str, rows: Sequence[Mapping[str, Any]], findings: Findings) -> None:
    score, scores = ReasoningGymScore(), []
    entries = [decode_entry(row["extra_info"]["entry"]) for row in rows]
    references = [reference_answer(entry) for entry in entries]
    findings.reference = references[0][0]
    for row, (_, reference), (_, other) in zip(rows, references, references[1:] + references[:1], strict=True):
        score.check_row(row)
        info = row["extra_info"]
        wrong = score(name, "<answer>no such answer</answer>", info)
        scores += [wrong, score(name, "no answer", info)]
        if reference is None:
            continue
        right, swapped = (score(name, TAGS.replace("{answer}", answer), info) for answer in (reference, other))
        scores += [right, swapped]
        if right != 1.0:
            findings.problems.append(f"reference {reference!r} scores {right}")
        if not wrong < 1.0:
            findings.problems.append(f"a wrong answer scores {wrong}")
    if not all(0.0 <= value <= 1.0 for value in scores):
        findings.problems.append(f"scores from {min(scores)} to {max(scores)}")
    findings.problems += list(dict.fromkeys(_compare_with_library(name, findings)))
    findings.scores = scores


def reference_answer(entry: Mapping[str, Any]) -> tuple[str, str | None]:
    """A correct answer to an entry, and its source."""
    if entry["answer"] is not None:
        return "`answer`", entry["answer"]
    for key in ("possible_answer", "example_answer", "example_correct_answer"):
        if (found := entry["metadata"].get(key)) is not None:
            text = found if isinstance(found, str) else json.dumps({str(k): v for k, v in found.items()})
            return f"`metadata.{key}`", text
    return "none", None


def _compare_with_library(name: str, findings: Findings) -> Iterator[str]:
    """Check that entries score the same before and after encoding."""
    from reasoning_gym.factory import create_dataset

    dataset = create_dataset(name, seed=5, size=4)
    start = time.perf_counter()
    entries = [dataset[index] for index in range(4)]
    findings.seconds = (time.perf_counter() - start) / 4
    for entry, other in zip(entries, entries[1:] + entries[:1], strict=True):
        for answer in (reference_answer(entry)[1], reference_answer(other)[1], "17", "", None):
            same = _try(dataset, answer, decode_entry(encode_entry(entry))) == _try(dataset, answer, entry)
            if not same:
                yield f"{answer!r} scores differently after the entry was encoded"


def _try(dataset: Any, answer: str | None, entry: dict[str, Any]) -> Any:
    try:
        return dataset.score_answer(answer, entry)
    except Exception as error:
        return type(error)


def count_levels(name: str) -> int:
    """Number of distinct levels of the library's curriculum that give a row within `LEVEL_SECONDS` of CPU time."""
    from reasoning_gym.factory import create_dataset

    for level in itertools.count():
        try:
            config = library_levels(name, {}, level + 1)[-1]
            with _limited(LEVEL_SECONDS):
                create_dataset(name, seed=1, size=1, **config)[0]
        except (GeneratorError, ValueError, AssertionError, IndexError, TimeoutError):
            return level
    raise AssertionError("unreachable")


@contextlib.contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raise TimeoutError after this much CPU time."""

    def stop(*_: Any) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def page(found: Mapping[str, Findings]) -> str:
    """The whole page."""
    good = [name for name, findings in found.items() if not findings.problems]
    lines = [_HEADER.format(conditions=conditions(), good=len(good), all=len(found), seconds=LEVEL_SECONDS)]
    lines += [_row(name, found[name]) for name in good]
    bad = {name: FAULTY.get(name, "; ".join(found[name].problems)) for name in found if name not in good} | NOT_TASKS
    lines += [_NOT_AVAILABLE, *(f"| `{name}` | {reason} |" for name, reason in bad.items())]
    return "\n".join(lines) + "\n"


def _row(name: str, findings: Findings) -> str:
    evaluated = "literal" if name in LITERAL_TASKS else "formula" if name in FORMULA_TASKS else ""
    return f"| `{name}` | {findings.reference} | {findings.levels} | {evaluated} | {_power_of_ten(findings.seconds)} |"


def _power_of_ten(seconds: float) -> str:
    return next(
        (f"< {bound} s" for bound in (0.001, 0.01, 0.1) if seconds < bound), "< 1 s" if seconds < 1 else "> 1 s"
    )


def conditions() -> str:
    """Versions that the table depends on."""
    return f"reasoning-gym {importlib.metadata.version('reasoning-gym')}, Python {platform.python_version()}"


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", type=Path, help="file to write the page to; by default it is printed")
    parser.add_argument("--tasks", nargs="*", help="only these tasks")
    parser.add_argument("--scores", action="store_true", help="print only the scores of each task, as JSON")
    options = parser.parse_args()
    found = examine(options.tasks or task_names())
    if options.scores:
        print(json.dumps({name: findings.scores for name, findings in found.items()}))
    elif options.write:
        options.write.write_text(page(found))
    else:
        print(page(found))


_HEADER = """# Tasks of reasoning-gym

With {conditions}, {good} of {all} tasks build, split and score, and
[data.md](data.md#generated-tasks) says how to train on them. *Reference* is where a right answer comes from
(`num_examples` needs `answer`), *levels* counts the library's levels that give a row in {seconds:.0f} s, *evaluates*
says what the scorer evaluates as Python, and *per row* is the time to generate one, rounded up to a power of ten.

| task | reference | levels | evaluates | per row |
|---|---|---|---|---|"""

_NOT_AVAILABLE = """
## Not available

| name | reason |
|---|---|"""

if __name__ == "__main__":
    main()
