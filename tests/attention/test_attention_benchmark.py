"""The benchmark of attention alone: which ratio is the ideal, and what a run writes."""

import json

import pytest

from benchmarks.attention import BASELINE, Shape, main

SMALL = ["--prefix", "6", "--rollout", "4", "--shortest", "2", "--group-size", "2", "--head-dim", "16", "--rounds", "1"]


def test_lengths_are_evenly_spaced_between_shortest_and_longest():
    layout = Shape(prefix=5, rollout=10, shortest=4, group_size=4, groups=2).layout
    assert [segment.length for segment in layout.segments] == [5, 10, 8, 6, 4] * 2
    assert [segment.length for segment in Shape(prefix=5, rollout=3, group_size=2).layout.segments] == [5, 3, 3]


def test_a_run_writes_what_it_prints(tmp_path, capsys):
    result = main([*SMALL, "--output", str(tmp_path / "attention")])
    assert json.loads((tmp_path / "attention.json").read_text())["ideal_ratio"] == result["ideal_ratio"]
    # Repeated: 10 and 8 tokens, 55 + 36 pairs. Shared: 21 of the prompt, 10 + 24 and 3 + 12 of the rollouts.
    assert result["ideal_ratio"] == 91 / 70
    rows = {(row["measured"], row["method"]): row for row in result["rows"]}
    assert len(rows) == 8
    assert rows["forward", BASELINE]["share_of_ideal"] == 1
    assert rows["forward+backward", "flex"]["note"] == "FlexAttention has no backward pass on CPU"
    assert all(row["median"] > 0 for row in rows.values() if row["note"] is None)
    assert "ideal: pairs x1.30" in capsys.readouterr().out


def test_a_missing_device_is_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit, match="use --device cpu"):
        main([*SMALL, "--device", "cuda"])
