"""Reward functions that worker processes can import, some of which misbehave."""

import asyncio
import math
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

from pl_grouprl.rewards import RewardConfigurationError


def length(completions, **columns):
    return [float(len(text)) for text in completions]


def graded(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": 0.1 * len(solution_str), "right": float(solution_str == ground_truth)}


def of_groups(groups):
    return [[float(len(group.prompt_ids)) for _ in group.rollouts] for group in groups]


async def patient(completions):
    await asyncio.sleep(0)
    return [None if "n" in text else 2.0 for text in completions]


def steps(completion_ids, completions):
    """Rewards of tokens: none for the first, then 1, 2, ..."""
    return [[math.nan if i == 0 else float(i) for i in range(len(ids))] for ids in completion_ids]


def graded_steps(solution_str, ground_truth):
    """Rewards the last token with the number of characters."""
    return {"score": [*[None] * (len(solution_str) - 1), float(len(solution_str))], "right": 1.0}


def wrong_steps(completions):
    return [[0.0] * (len(text) + 1) for text in completions]


def process_id(completions):
    return [float(os.getpid()) for _ in completions]


def meets_another(completions, folder):
    """Ends only where two calls run at the same time."""
    Path(folder[0], str(os.getpid())).touch()
    while len(list(Path(folder[0]).iterdir())) < 2:
        time.sleep(0.01)
    return [1.0 for _ in completions]


def with_signals(solution_str, ground_truth):
    """A time limit of its own, as math-verify has it: signals work on the main thread only."""
    assert threading.current_thread() is threading.main_thread()
    previous = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.signal(signal.SIGALRM, previous)
    return 1.0


def hangs_with_a_child(solution_str, ground_truth, extra_info):
    """Hangs on "hang", with a child process whose id is written to a file."""
    if solution_str != "hang":
        return 1.0
    child = subprocess.Popen(["sleep", "1000"])
    Path(extra_info["file"]).write_text(f"{os.getpid()} {child.pid}")
    while True:
        time.sleep(1)


def hangs_with_daemons(solution_str, ground_truth, extra_info):
    """Hangs with a child in a session of its own and the orphan of a child; writes the ids of both."""
    if solution_str != "hang":
        return 1.0
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    orphan = subprocess.run(
        ["sh", "-c", "setsid sleep 1000 > /dev/null & echo $!"], stdout=subprocess.PIPE, text=True
    ).stdout.strip()
    Path(extra_info["file"]).write_text(f"{child.pid} {orphan}")
    while True:
        time.sleep(1)


def misbehaves(solution_str, ground_truth):
    if solution_str == "raise":
        raise KeyError("no such key")
    if solution_str == "leave":
        raise SystemExit(3)
    if solution_str == "die":
        os._exit(7)
    return {"nan": math.nan, "inf": math.inf, "none": None, "big": 10**400}.get(solution_str, 1.0)


def raises_always(completions, **columns):
    raise OSError("always")


def raises_once(solution_str, ground_truth, extra_info):
    marker = Path(extra_info["file"])
    if not marker.exists():
        marker.touch()
        raise OSError("first time")
    return 1.0


def wrong_length(completions):
    return [1.0]


def wrong_type(solution_str, ground_truth):
    return "good"


def cannot_work(completions):
    raise RewardConfigurationError("cannot work without a key")


async def never(completions):
    await asyncio.sleep(1000)


async def blocks(completions, **columns):
    time.sleep(5)


class NeedsAKey:
    """Refuses to be set up."""

    def set_up(self):
        raise RewardConfigurationError("NeedsAKey needs a key")

    def __call__(self, completions):
        return [1.0 for _ in completions]


class OnlyHere:
    """Can be sent, and cannot be made from what was sent."""

    def __reduce__(self):
        return int, ("not a number",)

    def __call__(self, completions):
        return [1.0 for _ in completions]


def ruin(value):
    """Change every list and dictionary in a value, in place."""
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    for item in list(inside):
        ruin(item)
    if isinstance(value, list):
        value[:] = [0]
    elif isinstance(value, dict):
        value.clear()


def vandal_trl(prompts, completions, completion_ids, **columns):
    rewards = [1.0 for _ in completions]
    ruin([prompts, completions, completion_ids, columns])
    return rewards


def vandal_verl(data_source, solution_str, ground_truth, extra_info):
    ruin([ground_truth, extra_info])
    return 1.0


def vandal_groups(groups):
    rewards = [[1.0 for _ in group.rollouts] for group in groups]
    for group in groups:
        for rollout in group.rollouts:
            ruin([rollout.token_ids, rollout.logprobs, rollout.loss_mask])
            rollout.text = "ruined"
        ruin([group.prompt, group.prompt_ids, group.columns, group.rollouts])
        group.data_source = "ruined"
    return rewards


async def vandal_async(prompts, completions, completion_ids, **columns):
    await asyncio.sleep(0)
    return vandal_trl(prompts, completions, completion_ids, **columns)


def score_of_environment(environments, completions):
    return [float(environment.score) for environment in environments]


def knows_environments(completions, **columns):
    return [float("environments" in columns) for _ in completions]


def library_with_alarms(completions, solution, seconds, log_extra=None, **kwargs):
    """Calls math-verify as TRL's `accuracy_reward` does: with alarms, which only work on the main thread."""
    import math_verify

    rewards = []
    for messages, text, limit in zip(completions, solution, seconds, strict=True):
        gold = math_verify.parse(text, parsing_timeout=limit)
        answer = math_verify.parse(
            messages[0]["content"], [math_verify.LatexExtractionConfig()], "first_match", parsing_timeout=limit
        )
        rewards.append(float(math_verify.verify(gold, answer, timeout_seconds=limit)))
    return rewards


def metric_with_alarms(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    """Calls math-verify as verl's `compute_score` does; the library's own time limit raises a BaseException."""
    from math_verify.errors import TimeoutException
    from math_verify.metric import math_metric
    from math_verify.parser import ExprExtractionConfig, LatexExtractionConfig

    score = math_metric((LatexExtractionConfig(),), (ExprExtractionConfig(), LatexExtractionConfig()))
    try:
        return float(score(["\\boxed{" + ground_truth + "}"], [solution_str])[0])
    except TimeoutException:
        return 0.0
