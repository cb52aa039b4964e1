"""Runs functions concurrently, in threads that do not keep the process alive."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence


def run_concurrently(functions: Sequence[Callable[[], None]]) -> None:
    """Run each function in a thread, and wait for all.

    The threads are daemons, named after the calling thread.

    Raises:
        BaseException: The first error of a function, once all functions have ended.
    """
    errors: list[BaseException] = []

    def run(function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    name = threading.current_thread().name
    threads = [
        threading.Thread(target=run, args=(function,), name=f"{name}-{index}", daemon=True)
        for index, function in enumerate(functions)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
