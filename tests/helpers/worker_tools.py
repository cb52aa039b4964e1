"""Tools and environments that worker processes can import, some of which misbehave."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path


def multiply(a: int, b: int) -> int:
    """Multiply.

    Args:
        a: The one.
        b: The other.
    """
    return a * b


async def async_multiply(a: int, b: int) -> int:
    """Multiply.

    Args:
        a: The one.
        b: The other.
    """
    await asyncio.sleep(0)
    return a * b


def process_id() -> int:
    """The process."""
    return os.getpid()


def misbehave(how: str) -> object:
    """Do harm.

    Args:
        how: Which harm.
    """
    return HARMS[how]()


def hang_with_child(file: str) -> None:
    """Hang with a child, and write the ids of both.

    Args:
        file: Where to.
    """
    child = subprocess.Popen(["sleep", "1000"])
    Path(file).write_text(f"{os.getpid()} {child.pid}")
    time.sleep(1000)


def change(values: list, options: dict) -> str:
    """Change the arguments.

    Args:
        values: A list.
        options: A dictionary.
    """
    values.append(1)
    options["more"] = 1
    return "changed"


def _raise(error):
    raise error


def _flood():
    for _ in range(100):
        print("x" * 100)
    os.write(1, b'{"value": "y"}')
    return "dry"


async def _coroutine():
    pass


class _NoText:
    def __str__(self):
        raise ValueError("no text")


class _NoTextError(Exception):
    def __str__(self):
        raise ValueError("no text")


class _ExitTextError(Exception):
    def __str__(self):
        sys.exit(3)


class _HardExitTextError(Exception):
    def __str__(self):
        os._exit(3)


def _fork():
    return "parent" if os.fork() else "child"


def _answer(answer):
    """Write an answer into every pipe of the worker, as code that the model wrote could."""
    data = len(answer).to_bytes(4, "big") + answer
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > 2 and os.path.exists(f"/proc/self/fd/{number}"):
            with contextlib.suppress(OSError):
                os.write(number, data)
    time.sleep(1000)


def _image():
    return [{"type": "text", "text": "see"}, {"type": "image", "image": "no-image.png"}]


def _picture():
    from PIL import Image

    red = Image.new("RGB", (3, 2), (255, 0, 0))
    texts = [{"type": "text", "text": text} for text in ("see", " this")]
    return [texts[0], {"type": "image", "image": red}, texts[1]]


HARMS = {
    "raise": lambda: _raise(KeyError("no such key")),
    "type": lambda: len(3),
    "raise without text": lambda: _raise(_NoTextError()),
    "raise exit text": lambda: _raise(_ExitTextError()),
    "raise hard exit text": lambda: _raise(_HardExitTextError()),
    "raise megabytes": lambda: _raise(ValueError("x" * 2**21)),
    "recurse": lambda: HARMS["recurse"](),
    "exit": lambda: sys.exit(3),
    "hard exit": lambda: os._exit(3),
    "interrupt": lambda: _raise(KeyboardInterrupt()),
    "cancel": lambda: _raise(asyncio.CancelledError()),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "hang": lambda: time.sleep(1000),
    "long": lambda: "x" * (2**20 + 1),
    "100 MB": lambda: "x" * 10**8,
    "almost long": lambda: "x" * 2**20,
    "flood": _flood,
    "no text": _NoText,
    "coroutine": _coroutine,
    "generator": lambda: (i for i in range(3)),
    "image": _image,
    "picture": _picture,
    "video": lambda: [{"type": "video"}],
    "texts": lambda: [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
    "numbers": lambda: [1, 2],
    "mappings": lambda: [{"type": ["list"]}],
    "none": lambda: None,
    "bytes": lambda: b"\xff",
    "nan": lambda: float("nan"),
    "surrogate": lambda: "a\ud800b",
    "big number": lambda: 10**5000,
}


class Stepped:
    """Rewards each step by its number, once; step 0 has no reward, step 9 a reward that fails."""

    def reset(self, **row):
        self.reward = None

    def step(self, number: int) -> str:
        """Take a step.

        Args:
            number: Refused if negative.
        """
        self.reward = number or None
        if number < 0:
            raise ValueError("no such step")
        return "done"

    async def async_step(self, number: int) -> str:
        """Take a step.

        Args:
            number: Refused if negative.
        """
        await asyncio.sleep(0)
        return self.step(number)

    def get_step_reward(self):
        reward, self.reward = self.reward, None
        return float("ten") if reward == 9 else reward


class Counter:
    """Counts."""

    def __init__(self):
        self.thread = threading.current_thread()

    def reset(self, start=0, **row):
        self.row = row
        self.count = start
        return f"It is {start}." if start else None

    def add(self, number: int) -> int:
        """Add to the count.

        Args:
            number: How much.
        """
        assert threading.current_thread() is self.thread
        self.count += number
        return self.count

    async def async_add(self, number: int) -> int:
        """Add to the count.

        Args:
            number: How much.
        """
        await asyncio.sleep(0)
        self.count += number
        return self.count

    def process_id(self) -> int:
        """The process."""
        return os.getpid()

    def misbehave(self, how: str) -> object:
        """Do harm.

        Args:
            how: Which harm.
        """
        return HARMS[how]()

    def get_reward(self):
        return self.count


class Echo:
    """Has no reward."""

    def reset(self, **row):
        self.row = row

    def say(self, text: str) -> str:
        """Say it.

        Args:
            text: What.
        """
        return text


class Rewards:
    """Rewards as its row says."""

    def reset(self, reward):
        self.reward = reward

    def get_reward(self):
        return HARMS[self.reward]() if isinstance(self.reward, str) else self.reward


class AsyncRewards(Rewards):
    """The same, awaited."""

    async def reset(self, reward):
        await asyncio.sleep(0)
        self.reward = reward
        return "begun"

    async def get_reward(self):
        await asyncio.sleep(0)
        return super().get_reward()


class Resets:
    """Resets as its row says."""

    def reset(self, how):
        return HARMS[how]()


class OnlyHere:
    """Can be sent, and cannot be made from what was sent."""

    __name__ = "only_here"

    def __reduce__(self):
        return int, ("not a number",)

    def __call__(self) -> str:
        """Answer."""
        return "here"


FORGERIES = {
    "fork": _fork,
    "no JSON": lambda: _answer(b"{"),
    "no text at all": lambda: _answer(b"\xff"),
    "no value": lambda: _answer(b"{}"),
    "no mapping": lambda: _answer(b"[]"),
    "no result": lambda: _answer(b'{"value": 3}'),
    "result of other fields": lambda: _answer(b'{"value": {"name": "misbehave"}}'),
    "result without text": lambda: _answer(b'{"value": {"name": "misbehave", "content": 3, "seconds": 0.0}}'),
    "error without text": lambda: _answer(b'{"error": 3}'),
}
"""What only a worker survives."""


def forge(how: str) -> object:
    """Write an answer in place of the worker.

    Args:
        how: Which answer.
    """
    return FORGERIES[how]()
