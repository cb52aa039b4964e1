"""Rewards in worker processes: the same numbers, and a function that misbehaves costs its own rollouts alone."""

import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import worker_rewards as functions
from helpers.rewards import group_of, rewards_of
from helpers.watched_processes import runs, until, zombies

from pl_grouprl.rewards import (
    CosineLengthReward,
    FunctionFromFile,
    MathVerify,
    PendingRewards,
    RewardConfigurationError,
    Weighted,
    apply_rewards,
    check_calls,
    prepare_rewards,
)

pytestmark = pytest.mark.skipif(not hasattr(os, "killpg"), reason="needs process groups")


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
        return [group_of("one", "three"), group_of("nine"), group_of("", "two", "seventeen")]

    here, elsewhere = groups(), groups()
    workers = make_workers(rewards, 2)
    pending = PendingRewards(elsewhere, rewards, workers=workers)
    metrics_here, metrics = apply_rewards(here, rewards), pending.wait()

    def pop_ids(of_groups):
        return {rollout.rewards.pop("process_id") for group in of_groups for rollout in group.rollouts}

    assert pop_ids(here) == {os.getpid()}
    assert pop_ids(elsewhere) <= set(workers.process_ids)
    assert elsewhere == here
    for name in [name for name in metrics if name.startswith("rewards/process_id/")]:
        del metrics[name], metrics_here[name]
    assert metrics == metrics_here
    assert {"rewards/graded/right", "rewards/compute_score/mean"} <= metrics.keys()


def test_calls_run_side_by_side(make_workers, tmp_path):
    groups = [group_of("a", folder=str(tmp_path)), group_of("b", folder=str(tmp_path))]
    apply_rewards(groups, functions.meets_another, workers=make_workers(functions.meets_another, 2, timeout=60))
    assert rewards_of(*groups) == [1.0, 1.0]


def test_a_hang_is_killed_with_its_children_and_its_rollout_masked(make_workers, tmp_path, caplog):
    workers = make_workers(functions.hangs_with_a_child, timeout=1.0)
    (before,) = workers.process_ids
    group = group_of("a", "hang", "b", answer="", extra_info={"file": str(tmp_path / "ids")})
    metrics = apply_rewards([group], functions.hangs_with_a_child, workers=workers)
    assert rewards_of(group) == [1.0, None, 1.0]
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
    workers = make_workers(functions.hangs_with_daemons, 2, timeout=1.5 if ends == "timeout" else None)
    group = group_of("a", "hang", "b", answer="", extra_info={"file": str(file)})
    pending = PendingRewards([group], functions.hangs_with_daemons, workers=workers)
    until(lambda: file.exists() and len(file.read_text().split()) == 2)
    if ends == "timeout":
        pending.wait()
    ids = [*workers.process_ids, *map(int, file.read_text().split())]
    workers.close()
    until(lambda: not any(map(runs, ids)))
    assert zombies() == []
    record_property("figure", f"{sum(map(runs, ids))} survivors of a child with setsid and a double fork")
    if ends == "close":
        with pytest.raises(RuntimeError, match="being closed"):
            pending.wait()
    with pytest.raises(RuntimeError, match="closed"):
        PendingRewards([group], functions.hangs_with_daemons, workers=workers)


def test_failures_cost_their_own_rollouts(make_workers):
    workers = make_workers(functions.misbehaves, 2, timeout=60)
    group = group_of("fine", "raise", "leave", "die", "nan", "inf", "none", "big", "good")
    metrics = apply_rewards([group], functions.misbehaves, workers=workers, max_failed_share=0.7)
    assert rewards_of(group) == [1.0, *[None] * 7, 1.0]
    assert (metrics["rewards/misbehaves/invalid"], metrics["rewards/misbehaves/none"]) == (6.0, 1.0)
    with pytest.raises(RuntimeError, match=r"'misbehaves' raised KeyError: 'no such key'.* 2 of 3 .*=0.5") as caught:
        apply_rewards([group_of("nan", "raise", "ok")], functions.misbehaves, workers=workers)
    assert 'raise KeyError("no such key")' in str(caught.value.__cause__)  # the worker's own traceback
    with pytest.raises(RuntimeError, match="ended its process with exit code 7"):
        apply_rewards([group_of("die")], functions.misbehaves, workers=workers)
    assert zombies() == []


def test_a_call_that_raised_is_repeated_and_what_no_retry_mends_ends_the_run(make_workers, tmp_path):
    broken = {
        functions.wrong_length: (ValueError, "'wrong_length' returned 1 rewards"),
        functions.wrong_type: (ValueError, "'wrong_type' .* of type str"),
        functions.cannot_work: (RewardConfigurationError, "cannot work without a key"),
    }
    workers = make_workers([functions.raises_once, functions.length, *broken])
    for retries, expected in ((0, None), (1, 1.0)):
        (tmp_path / "marker").unlink(missing_ok=True)
        group = group_of("a", answer="", extra_info={"file": str(tmp_path / "marker")})
        apply_rewards([group], functions.raises_once, workers=workers, retries=retries, max_failed_share=1.0)
        assert rewards_of(group) == [expected]
    for function, (error, message) in broken.items():
        with pytest.raises(error, match=message):
            apply_rewards([group_of("a", "b")], function, workers=workers, max_failed_share=1.0)
    with pytest.raises(ValueError, match="'length' cannot run in a worker, because its arguments"):
        apply_rewards([group_of("a", column=lambda: 0)], functions.length, workers=workers)


def local():
    def local(completions):
        return [1.0]

    return local


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        (local(), {}, "'local' cannot be sent to a worker"),
        (functions.patient, {}, r"reward_calls.workers is 1, but each of \['patient'\]"),
        (functions.OnlyHere(), {}, r"'OnlyHere' could not be loaded in a worker .*ValueError"),
        (functions.NeedsAKey(), {}, "NeedsAKey needs a key"),
        (functions.length, {"timeout": 0}, "reward_calls.timeout is 0"),
        (functions.length, {"timeout": math.nan}, "reward_calls.timeout is nan"),
        (functions.length, {"count": 0}, "reward_calls.workers is 0"),
        (functions.length, {"memory_limit_mb": 0}, "reward_calls.memory_limit_mb is 0"),
    ],
)
def test_what_cannot_run_in_workers_is_refused_when_they_are_made(make_workers, function, options, message):
    with pytest.raises(ValueError, match=message):
        make_workers(function, **options)


@pytest.mark.parametrize(("workers", "timeout"), [(0, 5.0), (1, None)])
def test_what_may_take_forever_needs_workers_with_a_time_limit(workers, timeout):
    pytest.importorskip("math_verify")
    for reward in (MathVerify(), CosineLengthReward(MathVerify(), max_len=9)):
        rewards = prepare_rewards(reward)
        with pytest.raises(ValueError, match=r"reward_calls.* timeout|reward_calls.timeout"):
            check_calls(rewards, workers, timeout)
        check_calls(rewards, 1, 5.0)


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


@pytest.mark.parametrize("text", ["hang", "fine"])
def test_workers_and_their_children_end_with_their_parent(tmp_path, text):
    """It is killed, or ends without closing them."""
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(functions.__file__).parents[1]), *sys.path])}
    command = [sys.executable, "script.py", text]
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True)
    ids = [int(word) for word in process.stdout.readline().split()]
    assert len(ids) == 2
    if text == "hang":
        file = tmp_path / "ids"
        until(lambda: file.exists() and len(file.read_text().split()) == 2)
        ids.append(int(file.read_text().split()[1]))
        assert all(map(runs, ids))
        process.send_signal(signal.SIGKILL)
    assert process.wait(timeout=60) == (-signal.SIGKILL if text == "hang" else 0)
    until(lambda: not any(map(runs, ids)))


def test_a_worker_starts_without_pytorch():
    """Its import takes seconds, and half a GiB of each worker's memory limit."""
    script = (
        "import sys, pl_grouprl.rewards.workers; print({'torch', 'lightning', 'transformers'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
