"""Starts table_run.py in processes of its own, with a time limit for all of them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).with_name("table_run.py")


class RunFailedError(Exception):
    """A training ended with an error or ran out of time; the text is the end of what it printed."""


def train(
    folder: Path, row: dict[str, Any], time_limit: float, checkpoint: Path | None = None, *, evaluate: bool = False
) -> None:
    """Train, or only evaluate the checkpoint, in processes of their own, and leave none of them behind.

    Raises:
        RunFailedError: If it fails or takes longer than the limit, in seconds.
    """
    folder.mkdir(parents=True)
    order = row | {"checkpoint": None if checkpoint is None else str(checkpoint), "evaluate": evaluate}
    command = [sys.executable, str(SCRIPT), str(folder), json.dumps(order)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    log = folder / "log.txt"
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            code = process.wait(time_limit)
        except subprocess.TimeoutExpired:
            raise RunFailedError(f"it takes longer than {time_limit:.0f} s:\n{tail(log)}") from None
        finally:
            end_session(process)
    if code:
        raise RunFailedError(f"it ended with code {code}:\n{tail(log)}")


def end_session(process: subprocess.Popen[bytes]) -> None:
    """End the process and the ranks that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def tail(log: Path, lines: int = 25) -> str:
    """The last lines of a log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
