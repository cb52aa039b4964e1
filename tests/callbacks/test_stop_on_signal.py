"""A signal, whenever and to whichever rank it comes, ends a run with a checkpoint from which it goes on exactly."""

from __future__ import annotations

import json
import os
import signal
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers.counting import Counter, fit, step_of
from helpers.scripts import run_script
from lightning.pytorch import Callback

from pl_grouprl.callbacks import StoppedBySignal
from pl_grouprl.callbacks.checkpoints import STOP_SIGNALS, StopRequest
from pl_grouprl.utilities.checkpoint_files import corruption_reason

SCRIPT = Path(__file__).with_name("signal_ranks.py")
CODES = {"SIGTERM": 143, "SIGHUP": 129, "SIGUSR1": 138, "SIGINT": 130}
FAST = [("ddp", "update", 1, "SIGTERM")]
SLOW = [
    ("single", "export", 0, "SIGINT"), ("single", "reward", 0, "SIGINT"), ("single", "rollout", 0, "SIGTERM"),
    ("single", "update", 0, "SIGUSR1"), ("single", "save", 0, "SIGTERM"), ("single", "validation", 0, "SIGTERM"),
    ("single", "last validation", 0, "SIGTERM"), ("ddp", "export", 1, "SIGTERM"), ("fsdp2", "export", 1, "SIGUSR1"),
    ("ddp", "rollout", 0, "SIGUSR1"), ("ddp", "reward", 1, "SIGUSR1"), ("ddp", "save", 0, "SIGTERM"),
    ("ddp", "update", -1, "SIGINT"), ("fsdp2", "update", 1, "SIGTERM"), ("fsdp2", "save", 0, "SIGTERM"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def _terminal():
    """The tests may run under nohup, which ignores SIGHUP."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def check(cases):
    done = run_script(SCRIPT, json.dumps(cases), timeout=600)
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(results) == len(cases), done.stderr
    for result in results:
        *_, name = result["case"]
        assert result["codes"][0] == CODES[name], result
        assert set(result["codes"][1:]) <= {0, CODES[name]}, result  # 0 where the launcher counts it as its child
        assert result["flaw"] is None, result
        assert result["same"], result


def test_signals_to_one_rank():
    check(FAST)


@pytest.mark.slow
def test_signals_at_all_moments():
    check(SLOW)


def signaled(*signums):
    """A module that gets signals amid its third batch."""

    def send(module):
        if module.batches == 3:
            for signum in signums:
                os.kill(os.getpid(), signum)

    return Counter(send)


def run(folder, module, *callbacks, **options):
    return fit(folder, module, *callbacks, steps=5, **{"every_n_train_steps": 100} | options)


def saved(folder):
    assert corruption_reason(folder / "last.ckpt") is None
    return torch.load(folder / "last.ckpt", weights_only=True)


@pytest.mark.parametrize("name", CODES)
def test_the_batch_at_hand_is_finished_and_saved(tmp_path, name):
    before = [signal.getsignal(signum) for signum in STOP_SIGNALS]
    first, later = getattr(signal, name), () if name == "SIGINT" else (signal.SIGTERM, signal.SIGUSR1)
    module = signaled(first, *later)  # several requests are one
    with pytest.raises(StoppedBySignal) as end:
        run(tmp_path, module)
    assert end.value.code == CODES[name]
    assert saved(tmp_path)["global_step"] == 3
    assert module.weight.item() == 3
    assert [signal.getsignal(signum) for signum in STOP_SIGNALS] == before
    run(tmp_path / "whole", Counter())
    assert [signal.getsignal(signum) for signum in STOP_SIGNALS] == before


def test_gradients_that_are_accumulated_are_stepped_first(tmp_path):
    module = signaled(signal.SIGTERM)
    with pytest.raises(StoppedBySignal):
        run(tmp_path, module, trainer={"accumulate_grad_batches": 2})
    assert module.batches == 4
    assert saved(tmp_path)["global_step"] == 2


class After(Callback):
    """Notes which hooks ran after the last batch; sends a signal in one of them."""

    def __init__(self, hook, signum):
        self.ran = []
        for name in ("on_train_epoch_end", "on_train_end"):
            setattr(self, name, partial(self.note, name, hook, signum))

    def note(self, name, hook, signum, trainer, module):
        self.ran.append((name, sorted(path.name for path in Path(trainer.default_root_dir).glob("*.ckpt"))))
        if name == hook:
            os.kill(os.getpid(), signum)


@pytest.mark.parametrize(
    ("name", "hook"), [*((name, "on_train_end") for name in CODES), ("SIGTERM", "on_train_epoch_end")]
)
def test_after_the_last_batch_the_run_is_saved_and_finished_first(tmp_path, name, hook):
    after = After(hook, getattr(signal, name))
    with pytest.raises(StoppedBySignal) as end:
        run(tmp_path, Counter(), after)
    assert end.value.code == CODES[name]
    assert after.ran == [("on_train_epoch_end", []), ("on_train_end", ["step=5.ckpt"])]  # saved before the export
    assert step_of(tmp_path / "step=5.ckpt") == 5


def test_a_signal_while_the_trainer_cleans_up_counts(tmp_path, monkeypatch):
    from lightning.pytorch.strategies import SingleDeviceStrategy

    own = SingleDeviceStrategy.teardown
    kills = iter([signal.SIGTERM])

    def teardown(self):
        os.kill(os.getpid(), next(kills, 0))
        own(self)

    monkeypatch.setattr(SingleDeviceStrategy, "teardown", teardown)
    with pytest.raises(StoppedBySignal) as end:
        run(tmp_path, Counter())
    assert end.value.code == 143
    assert list(tmp_path.glob("*step=5.ckpt"))


def test_a_signal_saves_the_end_of_a_run_that_saves_nothing_else(tmp_path):
    with pytest.raises(StoppedBySignal):
        run(tmp_path, Counter(), After("on_train_epoch_end", signal.SIGTERM), save_top_k=0)
    assert saved(tmp_path)["global_step"] == 5


def test_a_signal_repeated_later_ends_a_process_that_hangs(monkeypatch):
    killed, now, before = [], [0.0], {signum: signal.getsignal(signum) for signum in STOP_SIGNALS}
    monkeypatch.setattr("pl_grouprl.callbacks.checkpoints.time.monotonic", lambda: now[0])
    request = StopRequest()
    try:
        request.listen()
        handler = signal.getsignal(signal.SIGTERM)
        monkeypatch.setattr("os.kill", lambda pid, signum: killed.append(signum))
        for now[0], signum in ((0.0, "SIGTERM"), (1.0, "SIGTERM"), (60.0, "SIGUSR1"), (61.0, "SIGUSR1")):
            handler(getattr(signal, signum), None)
        assert not killed  # a launcher and a scheduler may both have sent them
        handler(signal.SIGTERM, None)
        assert killed == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        for signum, own in before.items():
            signal.signal(signum, own)


def test_under_nohup_a_closed_terminal_is_ignored(tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert run(tmp_path, signaled(signal.SIGHUP)).global_step == 5
    finally:
        signal.signal(signal.SIGHUP, before)


SCRIPT_OF_A_RUN = """
import os, signal, sys
from pathlib import Path
sys.path[:0] = sys.argv[1:3]
from test_stop_on_signal import Counter, run, signaled
"""
CLOSED_TERMINAL = """
import fcntl, termios
signal.signal(signal.SIGHUP, signal.SIG_DFL)
if os.getpid() != os.getsid(0):
    os.setsid()
master, terminal = os.openpty()
fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
for descriptor in (1, 2):
    os.dup2(terminal, descriptor)

def close(module):
    if module.batches == 3:
        os.close(master)  # the kernel sends SIGHUP
    print("the terminal is gone", flush=True)

run(Path(sys.argv[3]), Counter(close))
"""
TWO_INTERRUPTS = "run(Path(sys.argv[3]), signaled(signal.SIGINT, signal.SIGINT))"


@pytest.mark.parametrize(
    ("script", "code"), [(CLOSED_TERMINAL, 129), (TWO_INTERRUPTS, -signal.SIGINT)], ids=["closed", "interrupts"]
)
def test_a_closed_terminal_saves_a_checkpoint_and_a_second_interrupt_ends_at_once(tmp_path, script, code):
    (tmp_path / "script.py").write_text(SCRIPT_OF_A_RUN + script)
    folder = Path(__file__).parent
    done = run_script(tmp_path / "script.py", folder, folder.parent, tmp_path, check=False)
    assert done.returncode == code
    if script == CLOSED_TERMINAL:
        assert saved(tmp_path)["global_step"] == 3
    else:
        assert not (tmp_path / "last.ckpt").exists()


def test_signals_can_be_left_to_lightning(tmp_path):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    try:
        with pytest.raises(SystemExit) as end:
            run(tmp_path, signaled(signal.SIGINT), stop_on_signal=False)
    finally:
        signal.signal(signal.SIGINT, before)
    assert end.value.code == 1
    assert not (tmp_path / "last.ckpt").exists()


def test_under_slurm_its_signal_saves_what_lightning_resumes_from_and_requeues(tmp_path, monkeypatch):
    from lightning.pytorch.plugins.environments import SLURMEnvironment

    commands = []
    monkeypatch.setattr("subprocess.run", lambda command, **kwargs: commands.append(command))
    for name, value in {"JOB_ID": "17", "NTASKS": "1", "PROCID": "0", "LOCALID": "0", "NODEID": "0"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    environment = SLURMEnvironment(requeue_signal=signal.SIGUSR1)
    with pytest.raises(StoppedBySignal):
        run(tmp_path, signaled(signal.SIGUSR1), trainer={"plugins": [environment]})
    assert commands == [["scontrol", "requeue", "17"]]
    assert corruption_reason(tmp_path / "hpc_ckpt_1.ckpt") is None
