"""Runs for reports, made without training."""

from pathlib import Path

from pl_grouprl.callbacks.curves import MetricHistory
from pl_grouprl.report import RecordedRun

MESSAGES = [
    {"role": "assistant", "content": "", "tool_calls": [{"name": "add", "arguments": {"a": 1}}]},
    {"role": "tool", "content": "2"},
]
COMPLETIONS = [
    {
        "step": 1,
        "prompt": "1 < 2?",
        "completion": "<b>yes</b>",
        "reward": 1.0,
        "num_tokens": 3,
        "finish_reason": "stop",
    },
    {"step": 1, "prompt": "1 < 2?", "completion": "no", "reward": None, "num_tokens": 2, "finish_reason": "length"},
    {"step": 9, "prompt": "2?", "completion": "", "reward": 0.5, "num_tokens": 9, "finish_reason": "stop"}
    | {"messages": MESSAGES},
]


def recorded(name, reward=0.5, **fields):
    history = MetricHistory()
    for step in range(5):
        history.record(
            step,
            {"reward": reward + step / 10, "reward_std": 0.1, "val/math/mean@4": 0.25, "val/math/pass@4": 0.5}
            | {"time/rollout": 2.0, "time/update": 1.0, "time/step": 3.0},
        )
    return RecordedRun(name, Path("runs") / name, history, **fields)
