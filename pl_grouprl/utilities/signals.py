"""Signals that ask a run to stop, remembered until it can."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class StopRequest:
    """Remembers the first signal that asks to stop. A second Ctrl-C ends the process at once.

    Attributes:
        signum: The signal, 0 for none so far.
    """

    def __init__(self) -> None:
        self.signum = 0

    def listen(self) -> None:
        """Handle the signals, replacing handlers that act at once. Only the main thread can."""
        if threading.current_thread() is threading.main_thread():
            for signum in STOP_SIGNALS:
                signal.signal(signum, self._remember)

    def _remember(self, signum: int, frame: FrameType | None) -> None:
        if signum == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # works even if no Python code runs, as in a collective
        if not self.signum:
            self.signum = signum
            name = signal.Signals(signum).name
            # No print: the signal may have come in the middle of one.
            os.write(2, f"\n{name}: the run saves a checkpoint after this batch and stops.\n".encode())
