"""The picture of several runs in docs/reading_the_logs.md."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

import draw_runs

METRICS = ("reward", "completions/mean_length", "entropy", "kl", "grad_norm", "frac_reward_zero_std")


def test_runs_are_drawn_over_each_other(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(draw_runs, "draw_panel", lambda axes, title, points: drawn.append((len(axes), title, points)))
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.csv").write_text(f"step,{','.join(METRICS)}\n0{',0.5' * 6}\n1{',0.75' * 6}\n")
    draw_runs.main([str(tmp_path / "x.png"), f"at = 1={tmp_path / 'a'}", f"other={tmp_path / 'b'}"])
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    assert [title for _, title, _ in drawn[:5]] == [*draw_runs.PANELS]
    assert all((own, [*points]) == (1, ["at = 1", "other"]) for own, _, points in drawn)
    assert all([*own] == ["frac_reward_zero_std"] for own in drawn[5][2].values())


def test_a_run_without_a_metric_has_no_line_and_one_without_a_name_is_refused(tmp_path, capsys):
    (tmp_path / "metrics.csv").write_text("step,reward\n0,0.5\n1,0.75\n")
    draw_runs.main([str(tmp_path / "x.png"), f"a={tmp_path}"])
    assert (tmp_path / "x.png").is_file()
    with pytest.raises(SystemExit):
        draw_runs.main(["x.png", "runs/a"])
    assert "'runs/a' has no name" in capsys.readouterr().err
