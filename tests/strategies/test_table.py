"""The command that compares strategies: what it says of runs that are made up; and each of its rows, which is slow."""

import json
import sys
import time
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

import table
import table_train

ON_CPU = [row for row in table.table_rows(num_gpus=0) if row.accelerator == "cpu"]


def write_run(folder, losses, weight=1.0, reward=0.2):
    """What table_run.py leaves in a folder, but for the exported policy."""
    folder.mkdir(parents=True)
    steps = [{"loss": loss} for loss in losses]
    found = {"steps": steps, "rollouts": [*range(5)], "validations": [0.1, 0.2], "passes": [3] * 10, "splits": [1] * 10}
    (folder / "run.json").write_text(json.dumps(found))
    (folder / "evaluation.json").write_text(json.dumps(reward))
    torch.save({"policy.w": torch.tensor([weight])}, folder / "weights.pt")
    torch.save(torch.zeros(1, 2, 3), folder / "logits.pt")


@pytest.fixture
def made_up(monkeypatch):
    """Trains by writing files: a loss, the resumed weight, the export's logits and a reward are off by so much."""

    def make(loss=0.0, weight=0.0, logit=0.0, reward=0.0):
        def train(folder, row, time_limit, checkpoint=None, *, evaluate=False):
            losses = [0.5] * 10
            losses[7] += loss if row["name"] != "reference" else 0.0
            write_run(folder, losses, 1.0 + (weight if checkpoint else 0.0), 0.2 + (reward if evaluate else 0.0))

        monkeypatch.setattr(table, "train", train)
        monkeypatch.setattr(table, "exported_logits", lambda policy: torch.full((1, 2, 3), logit))

    return make


def test_runs_that_agree_are_ok(tmp_path, made_up, capsys):
    made_up(loss=5e-5)
    assert table.main(["--only", "ddp x2", "--keep", str(tmp_path), "--json", str(tmp_path / "table.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    algorithms = ("GRPO", "GROUP", "GRPO", "Distillation")
    assert [line.split()[:3] for line in lines[1:]] == [["ddp", "x2", name] for name in algorithms]
    assert "5.0e-05" in lines[1]
    results = json.loads((tmp_path / "table.json").read_text())
    assert [result["status"] for result in results] == ["ok"] * 4
    assert results[0]["row"]["strategy"] == "ddp"
    assert results[0]["passes"] == 30


@pytest.mark.parametrize(
    ("off", "told"),
    [
        ({"loss": 2e-4}, "losses differ by 2.0e-04"),
        ({"loss": float("nan")}, "losses differ by nan"),
        ({"weight": 1e-6}, "resumed weights differ"),
        ({"logit": 1e-4}, "logits of the export differ"),
        ({"reward": 1e-2}, "later evaluations differ"),
    ],
)
def test_runs_that_differ_fail_the_command(off, told, tmp_path, made_up, capsys):
    made_up(**off)
    assert table.main(["--only", "single GRPO", "--keep", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert "FAILED" in printed.splitlines()[1]
    assert f"single, GRPO: {told}" in printed


def test_a_row_that_ends_with_an_error_does_not_end_the_others(tmp_path, made_up, monkeypatch, capsys):
    made_up()
    whole = table.train

    def train(folder, row, *args, **kwargs):
        if row["algorithm"] == "GRPO" and row["name"] != "reference":
            raise table.RunFailedError("it ended with code 3:\nout of luck")
        whole(folder, row, *args, **kwargs)

    monkeypatch.setattr(table, "train", train)
    assert table.main(["--only", "ddp x2", "--keep", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert printed.count("FAILED") == 1
    assert "ddp x2, GRPO: it ended with code 3:\nout of luck" in printed


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_gpu_rows_are_not_run_without_a_gpu(tmp_path, made_up, capsys):
    made_up()
    assert table.main(["--only", "yaml", "--keep", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    assert len(lines) == 12  # six fragments, two algorithms
    assert all(line.endswith("not run here") for line in lines)


def test_the_processes_of_a_run_that_times_out_are_ended(tmp_path, monkeypatch):
    script = tmp_path / "script.py"
    script.write_text(
        "import pathlib, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "pathlib.Path(sys.argv[1], 'child').write_text(str(child.pid))\n"
        "print('waiting', flush=True)\n"
        "time.sleep(600)\n"
    )
    monkeypatch.setattr(table_train, "SCRIPT", script)
    with pytest.raises(table_train.RunFailedError, match=r"longer than 2 s:\nwaiting"):
        table_train.train(tmp_path / "run", {}, time_limit=2.0)
    status = Path("/proc", (tmp_path / "run" / "child").read_text(), "status")
    for _ in range(100):
        if not status.exists() or "zombie" in status.read_text():
            return
        time.sleep(0.1)
    pytest.fail("the run's child lives on")


def test_every_strategy_has_a_row_with_each_algorithm():
    names = ["single", "ddp x2", "fsdp2 x2", "fsdp1 x2, on CPU", "ZeRO-2 x2, on CPU", "ZeRO-3 x2, on CPU", "ulysses x2"]
    tools = [names[1], names[2], names[4], names[5]]
    expected = [(a, name) for a in ("GRPO", "GROUP PPO") for name in names] + [("GRPO tools", name) for name in tools]
    expected += [("Distillation", name) for name in names[1:6]]
    assert [(row.algorithm, row.name) for row in ON_CPU] == expected


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Trains what rows are compared with once for all of them."""
    return table.Table(tmp_path_factory.mktemp("table"))


@pytest.mark.slow
@pytest.mark.parametrize("row", ON_CPU, ids=lambda row: f"{row.name} {row.algorithm}")
def test_row(row, runs):
    if (row.strategy or "").startswith("deepspeed"):
        pytest.importorskip("deepspeed")
    result = runs.run(row)
    assert result.status == "ok", result.error
