"""The fault matrix: what may happen to a run, what must come of it, and which tests show it."""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    """One condition.

    Attributes:
        condition: What happens.
        expected: What must come of it.
        tests: Files or test ids, from the project's root, as pytest takes them.
    """

    condition: str
    expected: str
    tests: tuple[str, ...]


ROWS: tuple[Row, ...] = (
    Row(
        "kill -9 at a random moment: in saves, rollouts, rewards, updates",
        "the newest complete checkpoint loads, and the resumed run ends bit-exact",
        ("tests/integration/test_kill_and_resume.py",),
    ),
    Row(
        "300 steps",
        "memory does not grow; no thread, file or process is left",
        ("tests/attacks/test_soak.py",),
    ),
)
