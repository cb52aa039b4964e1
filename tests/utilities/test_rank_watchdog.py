"""Runs of two ranks of which one freezes, hangs or fails: the other ends, names it, and leaves no process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.scripts import run_script

from pl_grouprl.callbacks import RankWatchdog
from pl_grouprl.distributed.lost_ranks import RankJudge, RankStatus
from pl_grouprl.utilities.processes import is_here, kill_process, process_identity

SCRIPT = Path(__file__).with_name("lost_ranks.py")
LINUX = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="the system has no /proc")


def run(*cases):
    """What came of each case: the exit codes of the ranks, and what they printed."""
    done = run_script(SCRIPT, json.dumps(cases), timeout=400)
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert [tuple(result["case"]) for result in results] == list(cases)
    return results


def check_lost(result, reason, phase):
    rank, pids = result["case"][1], result["pids"]
    assert result["codes"] is not None, result["log"][-3000:]
    assert result["codes"][1 - rank] == 70
    assert result["codes"][rank] in (-9, 70)
    lost = [line for line in result["log"].splitlines() if f"pid {pids[rank]}; last seen in phase {phase}" in line]
    assert lost, result["log"][-3000:]
    assert f"[rank watchdog] rank {rank} (host " in lost[0]
    assert f"is lost: {reason}" in lost[0]
    assert "ends with exit code 70; resume from the latest checkpoint. If nothing was wrong, raise guards." in lost[0]


def check_failure(result):
    (kind, rank), log = result["case"], result["log"]
    assert result["codes"] == ([70] if kind == "fails_and_stays" else [1, 1]), log[-3000:]
    said = [line for line in log.splitlines() if "SystemError: the disk of rewards is gone" in line]
    said = [line for line in said if line.startswith(f"[rank watchdog] rank {rank} ")]
    verb = "is lost: failed" if kind == "fails_and_stays" else "failed first,"
    assert f"last seen in phase training batch, step 2) {verb} with " in said[0]


@LINUX
def test_frozen_and_failed_ranks_are_named(record_property):
    result, failed = run(("freeze", 0), ("fails", 1))  # rank 0 holds the store that the ranks talk through
    check_lost(result, "frozen or gone, the store of rank 0 at 127.0.0.1:", "")
    assert result["codes"] == [-9, 70]
    check_failure(failed)
    record_property("figure", f"SIGSTOP to rank 0: exit codes {result['codes']}; an error on rank 1: {failed['codes']}")


@LINUX
@pytest.mark.slow
def test_lost_ranks_are_named(record_property):
    reasons = {
        ("freeze", 1): ("frozen: no sign of life for ", ""),
        ("loop", 1): ("hung: others have waited ", "reward, step 1"),
        ("loop", 0): ("hung: others have waited ", "reward, step 1"),
        ("hold_the_lock", 1): ("frozen: no sign of life for ", ""),
    }
    results = run(*reasons)
    for result, (reason, phase) in zip(results, reasons.values(), strict=True):
        check_lost(result, reason, phase)
    for result in results[1:3]:  # a rank whose threads still run says where it hangs
        assert 'lost_ranks.py", line ' in result["log"]
        assert " in loop\n" in result["log"]
    record_property("figure", f"{len(results)} of {len(reasons)} lost ranks were named; no process was left")


@LINUX
@pytest.mark.slow
def test_a_slow_rank_and_long_phases_are_left_alone():
    slow, both = run(("slow", 1), ("slow", -1))
    for result in (slow, both):
        assert result["codes"] == [0, 0], result["log"][-3000:]
        assert "rank watchdog" not in result["log"]


@LINUX
@pytest.mark.slow
def test_a_failure_on_one_rank_is_named_by_the_others():
    for result in run(("fails", 0), ("fails_and_stays", 1)):
        check_failure(result)


# Who is lost, by a clock of the test's own


def statuses(*ranks):
    return [RankStatus(rank, "host", 100 + rank, f"id {rank}", **said) for rank, said in enumerate(ranks)]


def said(beat, done=0, waits=0, **more):
    return {"beat": beat, "count": done, "collectives": {"world": waits}, **more}


def test_the_rank_that_others_wait_for_is_lost():
    judge = RankJudge(100)
    for now in range(0, 100, 10):
        judge.record(statuses(said(now, waits=5), said(now, waits=4)), now)
        assert judge.lost(now) == {}
    judge.record(statuses(said(100, waits=5), said(100, waits=4)), 100)
    assert judge.lost(100) == {1: "hung: others have waited 100 s for it, and it made no progress"}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(lambda now: said(now, waits=5), lambda now: said(now, waits=5), id="a long phase on all"),
        pytest.param(lambda now: said(now, waits=5), lambda now: said(now, now // 90, 4), id="slow"),
        pytest.param(lambda now: said(now, waits=5), lambda now: said(now, waits=4, state="done"), id="done"),
        pytest.param(
            lambda now: said(now, waits=4 + (now > 950)), lambda now: said(now, waits=4), id="a long phase, still"
        ),
    ],
)
def test_these_are_not_lost(first, second):
    judge = RankJudge(100)
    for now in range(0, 1000, 10):
        judge.record(statuses(first(now), second(now)), now)
        assert judge.lost(now) == {}


def test_a_rank_that_waits_for_a_hung_one_is_not_to_blame():
    """Ranks 1 and 2 share a group in which 1 waits for 2, so that 0 waits for both."""
    judge = RankJudge(100)
    pair = {"beat": 0, "count": 0}
    told = [
        {**pair, "collectives": {"world": 5}},
        {**pair, "collectives": {"world": 4, "pair": 3}},
        {**pair, "collectives": {"world": 4, "pair": 2}},
    ]
    for now in (0, 50, 100):
        judge.record(statuses(*({**own, "beat": now} for own in told)), now)
    assert list(judge.lost(100)) == [2]


def test_silence_is_measured_at_the_time_of_the_last_reading():
    judge = RankJudge(1000)
    for now in range(0, 290, 10):
        judge.record(statuses(said(now), said(0)), now)
        assert judge.lost(now) == {}
    judge.record(statuses(said(300), said(0)), 300)
    assert judge.lost(300) == {1: "frozen: no sign of life for 300 s"}


def test_after_a_pause_of_the_watcher_counting_starts_anew():
    judge = RankJudge(100)
    judge.record(statuses(said(0, waits=5), said(0, waits=4)), 0)
    judge.restart_clocks(5000)
    assert judge.lost(5050) == {}
    judge.record(statuses(said(1, waits=5), said(1, waits=4)), 5050)
    assert list(judge.lost(5100)) == [1]


@pytest.mark.parametrize(("state", "ends"), [("running", True), ("done", False), ("stopped", False)])
def test_a_process_that_has_ended_is_lost_unless_it_was_done(state, ends):
    judge = RankJudge(1000)
    judge.record(statuses(said(0), said(0)), 0)
    judge.record_end(1, 10)
    judge.record(statuses(said(80), said(0, state=state)), 80)
    assert judge.lost(60) == {}
    assert judge.lost(80) == ({1: "its process has ended"} if ends else {})


@LINUX
def test_no_other_process_is_killed():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        identity = process_identity(process.pid)
        assert is_here(identity)
        assert not kill_process(process.pid, identity + "0")  # the number has been used again
        assert not kill_process(process.pid, "another machine, 1 2")
        assert not kill_process(process.pid, "")
        assert process.poll() is None
        assert kill_process(process.pid, identity)
    assert process.returncode == -9
    assert process_identity(process.pid) == ""


def test_the_timeout_is_a_number_of_seconds():
    with pytest.raises(ValueError, match=r"rank_timeout is 0; it must be larger than 0, or None to wait"):
        RankWatchdog(0)
