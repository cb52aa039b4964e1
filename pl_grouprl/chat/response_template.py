"""Parses turns by a tokenizer's `response_template`, in a worker process: a pattern that backtracks can be stopped."""

from __future__ import annotations

import json
import logging
import signal
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from typing import Any

from pl_grouprl.chat.parsing import MalformedTurnError, Schema
from pl_grouprl.utilities.systems import require_system
from pl_grouprl.utilities.text import describe_error
from pl_grouprl.utilities.worker_process import (
    Reaper,
    WorkerExitError,
    WorkerProcess,
    WorkerTimeoutError,
    lead_session,
)

log = logging.getLogger(__name__)

LIMIT = 2.0
"""Seconds that parsing a turn may take; it usually takes milliseconds."""


class TemplateParser:
    """Parses turns by transformers' `parse_response`; only one thread may call it.

    Args:
        template: The tokenizer's `response_template`.

    Raises:
        ValueError: If the template is malformed, or the system cannot stop it.
    """

    def __init__(self, template: Mapping[str, Any]) -> None:
        from transformers.utils.chat_parsing.response_templates import load_response_template

        why, instead = "a pattern that backtracks could not be stopped", "set it to None"
        require_system(hasattr(signal, "setitimer"), "tokenizer.response_template", why, instead)
        load_response_template(dict(template))
        reaper = Reaper()
        self._process = WorkerProcess("response parser", _serve, (template, LIMIT), len, reaper, imports_main=False)
        self._has_warned = False
        # Runs at exit, before multiprocessing waits for its processes.
        self.close = Finalize(self, _close, (self._process, reaper), exitpriority=100)

    def parse(self, text: str, prefix: str, tools: Sequence[Schema]) -> Any:
        """Parse a turn.

        Args:
            text: The turn, special tokens included.
            prefix: All text before it.
            tools: Schemas of the tools, for the types of arguments.

        Raises:
            MalformedTurnError: If it cannot be parsed, or that takes too long.
        """
        try:
            answer = json.loads(self._process.ask(json.dumps([text, prefix, list(tools)]).encode(), 30 * LIMIT))
        except (WorkerTimeoutError, WorkerExitError) as error:
            answer = {"stopped": f"the process {error}"}
        if "stopped" in answer and not self._has_warned:
            self._has_warned = True
            log.warning(
                "tokenizer.response_template did not parse a turn of %d characters: %s. Such turns count as text "
                "without calls. Change its patterns so that they cannot backtrack, such as \\s*+ for \\s*, or set it "
                "to None if the chat template's family is built in.",
                len(text),
                answer["stopped"],
            )
        if "message" not in answer:
            raise MalformedTurnError(str(answer))
        return answer["message"]


def _serve(pipe: Connection, template: Mapping[str, Any], limit: float) -> None:
    """Parse turns until the pipe is closed."""
    lead_session()
    from transformers.utils.chat_parsing import parse_response
    from transformers.utils.chat_parsing.response_templates import load_response_template

    signal.signal(signal.SIGALRM, _stop)  # the library `regex` lets a signal interrupt a search
    loaded = load_response_template(dict(template))
    pipe.send_bytes(b"ready")
    while True:
        try:
            text, prefix, tools = json.loads(pipe.recv_bytes())
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_REAL, limit)
        try:
            answer = json.dumps({"message": parse_response(text, loaded, prefix=prefix, tools=tools)})
        except TimeoutError:
            answer = json.dumps({"stopped": f"it took longer than {limit:g} seconds"})
        except Exception as error:  # templates may raise anything
            answer = json.dumps({"error": describe_error(error)})
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        pipe.send_bytes(answer.encode())


def _stop(*_: Any) -> None:
    raise TimeoutError


def _close(process: WorkerProcess, reaper: Reaper) -> None:
    process.end()
    reaper.close()
