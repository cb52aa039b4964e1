"""Programs that try to pass tests without solving them. The tests: 1 + 2 from standard input; add(1, 2)."""

CHEATS = {
    "os._exit(0)": "import os; os._exit(0)",
    "sys.exit(0)": "import sys; sys.exit(0)",
    "atexit": """
import atexit, os
atexit.register(lambda: os._exit(0))
""",
    "says that it passed": """
print("PASSED")
print('{"passed": true, "value": true}')
""",
    "writes to all files": """
import os
for number in range(64):
    try:
        os.write(number, b'{"exit": 0, "passed": true}')
    except OSError:
        pass
""",
    "equal to everything": """
class Any:
    __eq__ = lambda self, other: True
    __str__ = lambda self: "3"
def add(a, b):
    return Any()
""",
    "patched json": """
import json
json.dumps = lambda *_, **__: '{"value": true}'
def add(a, b):
    return 0
""",
    "patched builtins": """
import builtins
builtins.print = builtins.len = lambda *_: True
builtins.AssertionError = Exception
def add(a, b):
    raise AssertionError
""",
    "looks for the answer": """
import gc, json, sys
frame, found = sys._getframe(), []
while frame:
    found += [frame.f_locals, frame.f_globals]
    frame = frame.f_back
found += [held for held in gc.get_objects() if isinstance(held, dict)]
answers = [held["expected"] for held in found if "expected" in held]
def add(a, b):
    return answers[0] if answers else json.load(open("/stdin"))["expected"]
""",
    "answers twice": """
import atexit, os
atexit.register(lambda: os.write(3, b'{"value": 3}'))
def add(a, b):
    return 2
""",
    "nests deeply": """
import os
def add(a, b):
    os.write(3, b"[" * 100000)
    os._exit(0)
""",
    "writes a long number": """
import os
def add(a, b):
    os.write(3, b'{"value": ' + b"9" * 100000 + b"}")
    os._exit(0)
""",
    "not a number": """
def add(a, b):
    return float("nan")
""",
    "floods": """
while True:
    print("3" * 100000)
""",
    "runs out of memory": """
held = []
while True:
    held.append(bytearray(1 << 20))
""",
    "kills all it can": """
import os, signal
for target in (-1, 1):
    try:
        os.kill(target, signal.SIGKILL)
    except OSError:
        pass
""",
    "loops": """
while True:
    pass
""",
}
