"""Prompts that servers share, and updates that fail on one of them."""

import os
import signal
import threading
import time

import pytest

from pl_grouprl.rollout.server.fleet import map_over_servers


def test_results_keep_the_order_of_tasks():
    assert map_over_servers(lambda server, task: (task, server < 2), 7, 2, 3) == [(task, True) for task in range(7)]
    assert map_over_servers(lambda server, task: task, 0, 2, 3) == []


def test_after_an_interruption_no_task_is_begun():
    begun = []

    def ask(server, task):
        begun.append(task)
        time.sleep(0.2)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    try:
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            map_over_servers(ask, 100, 1, 2)
    finally:
        signal.signal(signal.SIGINT, before)
    count = len(begun)
    time.sleep(0.5)
    assert count == len(begun) < 20


def test_after_a_failure_no_task_is_begun():
    begun = []

    def ask(server, task):
        begun.append(task)
        time.sleep(0.05)
        if task == 1:
            raise KeyError("one")

    with pytest.raises(KeyError, match="one"):
        map_over_servers(ask, 100, 2, 1)
    assert len(begun) < 10
