"""The benchmark of forests: its shapes, its ideal, and what a run writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import forests, shared_rows
from benchmarks.forest_shapes import SHAPES, branched, comb, conversation, tree
from pl_grouprl.rollout import Branching

SIZES = {"hidden": 32, "layers": 1, "heads": 2, "kv-heads": 1, "head-dim": 16, "intermediate": 48, "vocabulary": 64}
MODEL = [word for name, size in SIZES.items() for word in (f"--{name}", str(size))]


def test_trees_and_combs() -> None:
    full = tree(depth=2, width=2, length=5)
    assert [segment.parent for segment in full.segments] == [None, 0, 1, 1, 0, 4, 4]
    assert full.depths == (0, 1, 2, 2, 1, 2, 2)
    assert [segment.parent for segment in comb(depth=3, length=1).segments] == [None, 0, 0, 2, 2, 4, 4]
    assert max(SHAPES["comb-16-32"]().depths) == max(SHAPES["comb-16-256"]().depths) == 16


def test_a_conversation_goes_on_after_the_last_rollout_of_a_turn() -> None:
    layout = conversation(turns=2, rollouts=3, prompt=10, answer=4, reply=2)
    assert [segment.length for segment in layout.segments] == [10, 4, 4, 4, 2, 4, 4, 4]
    assert [segment.parent for segment in layout.segments] == [None, 0, 0, 0, 3, 4, 4, 4]
    assert layout.repeated_lengths == (14, 14, 20, 20, 20)


def test_branched_rollouts_are_what_an_engine_samples() -> None:
    sizes = {"prompt": 7, "roots": 2, "longest": 54}
    layout = branched(Branching("every_n", width=3, depth=2, every_n=18), vocabulary=2048, **sizes)
    assert layout.repeated_lengths == (7 + 54,) * 18
    assert [segment.length for segment in layout.segments] == [7, *[18, *[18, 18, 18, 18] * 3] * 2]
    # With 20 tokens to choose from, most rollouts end before they branch.
    short = branched(Branching("every_n", width=3, depth=2, every_n=18), vocabulary=20, **sizes)
    assert len(short.repeated_lengths) < 18
    assert len(set(short.repeated_lengths)) > 1
    again = branched(Branching("every_n", width=3, depth=2, every_n=18), vocabulary=20, **sizes)
    assert again.segments == short.segments


def test_shapes_by_name_or_first_word() -> None:
    assert forests.parse(["--shapes", "comb", "tree-3-32"]).shapes == ["comb-16-32", "comb-16-256", "tree-3-32"]
    assert forests.parse([]).shapes == list(SHAPES)
    with pytest.raises(SystemExit):
        forests.parse(["--shapes", "tree-3"])


def test_a_run_writes_what_it_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(forests.SHAPES, "tree-3-32", lambda: tree(depth=2, width=2, length=3))
    options = ["--shapes", "tree-3-32", "--rounds", "1", "--no-memory", "--output", str(tmp_path / "forests")]
    (result,) = forests.main([*MODEL, *options])
    # Repeated: 4 sequences of 9 tokens, 45 pairs each. Shared: 7 segments of 3 tokens, 6 pairs each, and prefixes.
    tokens, pairs = (36, 21), (180, 7 * 6 + 2 * 9 + 4 * 18)
    per_token = 2 * (32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 48)
    repeated, shared = (per_token * t + 4 * 32 * p for t, p in zip(tokens, pairs, strict=True))
    assert result["ideal_ratio"] == pytest.approx(repeated / shared)
    rows = {(row.measured, row.method): row for row in result["rows"]}
    assert rows["forward+backward", "flex"].note == "FlexAttention has no backward pass on CPU"
    cascade = rows["forward+backward", "cascade"]
    assert cascade.time_of_ideal == pytest.approx(cascade.speedup[0] / result["ideal_ratio"])
    written = json.loads((tmp_path / "forests.json").read_text())
    assert len(written["shapes"][0]["rows"]) == 6
    assert "depth 2, 7 segments, 21 tokens" in capsys.readouterr().out


def test_grouped_rows_share_three_quarters() -> None:
    ids = shared_rows.grouped_rows(16, 8)
    assert all((ids[row, :6] == ids[0, :6]).all() for row in range(8))
    assert (ids[0, :6] != ids[8, :6]).any()
    assert (ids[0, 6:] != ids[1, 6:]).any()
