"""Rewards in worker processes: the same numbers, and a function that misbehaves costs its own rollouts alone."""

import asyncio
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import worker_rewards as functions
from helpers.watched_processes import runs, until, zombies

from pl_grouprl.rewards import (
    FunctionFromFile,
    RewardConfigurationError,
    RewardWorkers,
    Weighted,
    apply_rewards,
    prepare_rewards,
    start_rewards,
)
from pl_grouprl.types import Rollout, RolloutGroup

pytestmark = pytest.mark.skipif(not hasattr(os, "killpg"), reason="needs process groups")


def make_group(*texts, **columns):
    rollouts = [Rollout([7], text=text) for text in texts]
    return RolloutGroup([1], rollouts, columns={"answer": "one"} | columns, prompt="p")


@pytest.fixture
def make_workers():
    made = []

    def make(rewards, count=1, timeout=None):
        made.append(RewardWorkers(prepare_rewards(rewards), count, timeout))
        return made[-1]

    yield make
    for workers in made:
        workers.close()


def test_workers_give_what_this_process_gives(make_workers, tmp_path):
    file = tmp_path / "graders.py"
    file.write_text("def compute_score(data_source, solution_str, ground_truth):\n    return 0.3\n")
    rewards = [
        Weighted(functions.length, 0.1),
        functions.graded,
        functions.of_groups,
        functions.patient,
        functions.with_signals,
        FunctionFromFile(str(file)),
        Weighted(functions.process_id, 0.0),
    ]

    def groups():
        return [make_group("one", "three"), make_group("nine"), make_group("", "two", "seventeen")]

    here, elsewhere = groups(), groups()
    workers = make_workers(rewards, 2)
    pending = start_rewards(elsewhere, rewards, workers=workers)
    metrics_here, metrics = apply_rewards(here, rewards), pending.wait()
    ids = {rollout.rewards.pop("process_id") for group in elsewhere for rollout in group.rollouts}
    assert os.getpid() not in ids
    assert ids <= set(workers.process_ids)
    for group in here:
        for rollout in group.rollouts:
            assert rollout.rewards.pop("process_id") == os.getpid()
    assert elsewhere == here
    for name in [name for name in metrics if name.startswith("rewards/process_id/")]:
        del metrics[name], metrics_here[name]
    assert metrics == metrics_here
    assert {"rewards/graded/right", "rewards/compute_score/mean"} <= metrics.keys()


def test_calls_run_side_by_side(make_workers, tmp_path):
    workers = make_workers(functions.meets_another, 2, timeout=60)
    groups = [make_group("a", folder=str(tmp_path)), make_group("b", folder=str(tmp_path))]
    apply_rewards(groups, functions.meets_another, workers=workers)
    assert [group.rollouts[0].reward for group in groups] == [1.0, 1.0]


def test_a_hang_is_killed_with_its_children_and_its_rollout_masked(make_workers, tmp_path, caplog):
    workers = make_workers(functions.hangs_with_a_child, 1, timeout=1.0)
    (before,) = workers.process_ids
    group = make_group("a", "hang", "b", extra_info={"file": str(tmp_path / "ids")})
    metrics = apply_rewards([group], functions.hangs_with_a_child, workers=workers)
    assert [rollout.reward for rollout in group.rollouts] == [1.0, None, 1.0]
    assert metrics["rewards/hangs_with_a_child/invalid"] == 1.0
    assert "'hangs_with_a_child' took longer than reward_calls.timeout=1.0 seconds. 1 of 3 rollouts" in caplog.text
    worker, child = map(int, (tmp_path / "ids").read_text().split())
    assert worker == before
    assert workers.process_ids != [before]
    assert not Path(f"/proc/{worker}").exists()
    until(lambda: not runs(child))
    assert zombies() == []


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc")
@pytest.mark.parametrize("ends", ["timeout", "close"])
def test_children_in_other_sessions_are_killed_too(make_workers, tmp_path, ends, record_property):
    file = tmp_path / "ids"
    workers = make_workers(functions.hangs_with_daemons, 1, timeout=2.0 if ends == "timeout" else None)
    group = make_group("a", "hang", "b", extra_info={"file": str(file)})
    pending = start_rewards([group], functions.hangs_with_daemons, workers=workers)
    until(lambda: file.exists() and len(file.read_text().split()) == 2)
    if ends == "timeout":
        pending.wait()
    workers.close()
    child, orphan = map(int, file.read_text().split())
    until(lambda: not runs(child) and not runs(orphan))
    record_property("figure", f"{runs(child) + runs(orphan)} survivors of a child with setsid and a double fork")


def test_failures_cost_their_own_rollouts(make_workers, caplog):
    workers = make_workers(functions.misbehaves, 2, timeout=60)
    texts = ["fine", "raise", "leave", "die", "nan", "inf", "none", "big", "good"]
    group = make_group(*texts)
    metrics = apply_rewards([group], functions.misbehaves, workers=workers, max_failed_share=0.7)
    assert [rollout.reward for rollout in group.rollouts] == [1.0, *[None] * 7, 1.0]
    assert (metrics["rewards/misbehaves/invalid"], metrics["rewards/misbehaves/none"]) == (6.0, 1.0)
    with pytest.raises(RuntimeError, match=r"'misbehaves' raised KeyError: 'no such key'.* 2 of 3 .*=0.5") as caught:
        apply_rewards([make_group("nan", "raise", "ok")], functions.misbehaves, workers=workers)
    assert 'raise KeyError("no such key")' in str(caught.value.__cause__)  # the worker's own traceback
    with pytest.raises(RuntimeError, match="ended its process with exit code 7"):
        apply_rewards([make_group("die")], functions.misbehaves, workers=workers)
    assert zombies() == []


def test_a_call_that_raised_is_repeated(make_workers, tmp_path):
    workers = make_workers(functions.raises_once, 1)
    for retries, expected in ((0, None), (1, 1.0)):
        (tmp_path / "marker").unlink(missing_ok=True)
        group = make_group("a", extra_info={"file": str(tmp_path / "marker")})
        apply_rewards([group], functions.raises_once, workers=workers, retries=retries, max_failed_share=1.0)
        assert group.rollouts[0].reward == expected


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (functions.wrong_length, ValueError, "'wrong_length' returned 1 rewards for 2 completions"),
        (functions.wrong_type, ValueError, "'wrong_type' returned 'good' of type str"),
        (functions.cannot_work, RewardConfigurationError, "cannot work without a key"),
    ],
)
def test_what_no_retry_mends_ends_the_run(make_workers, function, error, message):
    workers = make_workers(function)
    with pytest.raises(error, match=message):
        apply_rewards([make_group("a", "b")], function, workers=workers, max_failed_share=1.0)


def test_async_functions_have_the_time_limit_too(make_workers):
    rewards = [Weighted(functions.never, 0.0), functions.length]
    group = make_group("ab")
    metrics = apply_rewards([group], rewards, workers=make_workers(rewards, timeout=0.5), max_failed_share=1.0)
    assert group.rollouts[0].rewards == {"never": None, "length": 2.0}
    assert metrics["rewards/never/invalid"] == 1.0


def test_what_cannot_run_in_workers_is_refused_when_they_are_made(make_workers):
    def local(completions):
        return [1.0]

    for function, message in (
        (local, "'local' cannot be sent to a worker"),
        (functions.patient, r"reward_calls.workers is 1, but each of \['patient'\]"),
        (functions.OnlyHere(), r"'OnlyHere' could not be loaded in a worker .*ValueError"),
        (functions.NeedsAKey(), "NeedsAKey needs a key"),
    ):
        with pytest.raises(ValueError, match=message):
            make_workers(function)
    with pytest.raises(ValueError, match=r"reward_calls.timeout is 0; it must be larger than 0"):
        make_workers(functions.length, timeout=0)
    with pytest.raises(ValueError, match=r"reward_calls.workers is 0; .*at least 1"):
        make_workers(functions.length, 0)


def test_columns_that_cannot_be_pickled_are_named(make_workers):
    workers = make_workers(functions.length)
    with pytest.raises(ValueError, match="'length' cannot run in a worker, because its arguments"):
        apply_rewards([make_group("a", column=lambda: 0)], functions.length, workers=workers)


def test_closed_workers_are_gone(make_workers, tmp_path):
    workers = make_workers(functions.hangs_with_a_child, 2)
    group = make_group("hang", extra_info={"file": str(tmp_path / "ids")})
    pending = start_rewards([group], functions.hangs_with_a_child, workers=workers)
    until(lambda: (tmp_path / "ids").exists() and len((tmp_path / "ids").read_text().split()) == 2)
    ids = [*workers.process_ids, int((tmp_path / "ids").read_text().split()[1])]
    workers.close()
    until(lambda: not any(runs(process_id) for process_id in ids))
    assert zombies() == []
    with pytest.raises(RuntimeError, match="the reward workers are being closed"):
        pending.wait()
    with pytest.raises(RuntimeError, match="closed"):
        start_rewards([group], functions.hangs_with_a_child, workers=workers)


SCRIPT = """
import sys
from helpers import worker_rewards as functions
from pl_grouprl.rewards import RewardWorkers, apply_rewards, prepare_rewards
from pl_grouprl.types import Rollout, RolloutGroup

if __name__ == "__main__":
    workers = RewardWorkers(prepare_rewards(functions.hangs_with_a_child), 2)
    print(*workers.process_ids, flush=True)
    group = RolloutGroup([1], [Rollout([7], text=sys.argv[1])], columns={"answer": "a", "extra_info": {"file": "ids"}})
    apply_rewards([group], functions.hangs_with_a_child, workers=workers)
"""


def start_script(tmp_path, text):
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": str(Path(functions.__file__).parents[1])}
    command = [sys.executable, "script.py", text]
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True)
    return process, [int(word) for word in process.stdout.readline().split()]


def test_workers_and_their_children_die_with_a_killed_parent(tmp_path):
    process, ids = start_script(tmp_path, "hang")
    file = tmp_path / "ids"
    until(lambda: file.exists() and len(file.read_text().split()) == 2)
    ids.append(int(file.read_text().split()[1]))
    assert all(map(runs, ids))
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    until(lambda: not any(map(runs, ids)))


def test_a_program_ends_without_closing_them(tmp_path):
    process, ids = start_script(tmp_path, "fine")
    assert process.wait(timeout=60) == 0
    until(lambda: not any(map(runs, ids)))


def test_a_timeout_of_nan_is_refused():
    with pytest.raises(ValueError, match=r"reward_calls.timeout is nan"):
        RewardWorkers(prepare_rewards(functions.length), 1, math.nan)


def test_async_functions_alone_may_have_a_time_limit():
    async def slow(completions, **columns):
        await asyncio.sleep(60)

    prepared = prepare_rewards(slow)
    with pytest.raises(ValueError, match="give async ones a timeout"):
        RewardWorkers(prepared, 1)
    workers = RewardWorkers(prepared, 1, timeout=0.05)
    try:
        groups = [RolloutGroup([1], [Rollout([2], text="a")])]
        with pytest.raises(RuntimeError, match=r"reward_calls.timeout=0\.05"):
            start_rewards(groups, slow, workers=workers).wait()
    finally:
        workers.close()


def test_a_worker_starts_without_pytorch():
    """Its import takes seconds, and half a GiB of each worker's memory limit."""
    script = (
        "import sys, pl_grouprl.rewards.workers; print({'torch', 'lightning', 'transformers'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
