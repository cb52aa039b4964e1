import importlib.util
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    spec = importlib.util.spec_from_file_location("benchmark_shared_prefix", ROOT / "benchmarks" / "shared_prefix.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


OPTIONS = {
    "prefix": 4, "rollout": 2, "group-size": 2, "hidden": 8, "layers": 1, "heads": 2, "kv-heads": 1, "head-dim": 4,
    "intermediate": 16, "vocabulary": 10,
}  # fmt: skip
SHAPE = [text for name, size in OPTIONS.items() for text in (f"--{name}", str(size))]
METHODS = ["repeated, padded", "repeated, one by one", "repeated, packed", "prefix_grouper", "cascade", "reference"]


def test_table_and_results_of_a_tiny_case(benchmark, tmp_path, capsys):
    output = tmp_path / "result"
    (comparison,) = benchmark.main(
        [*SHAPE, "--rounds", "2", "--no-memory", "--methods", *METHODS, "--output", str(output)]
    )
    # Weights 64 + 32 + 32 + 64 + 3 * 128 = 576, so 1152 operations per token; 4 * 4 * 2 = 32 per pair;
    # head 2 * 8 * 10 * 4 = 640. Repeated: 12 tokens, 42 pairs. Shared: 8 tokens, 10 + 2 * 11 = 32 pairs.
    assert comparison.ideal_ratio == pytest.approx((1152 * 12 + 32 * 42 + 640) / (1152 * 8 + 32 * 32 + 640))
    assert comparison.token_ratio == pytest.approx(12 / 8)
    assert [row.method for row in comparison.rows] == METHODS * 2
    for row in comparison.rows:
        assert row.note is None
        assert row.difference < 1e-5
        assert len(row.timing.seconds) == 2
    printed = capsys.readouterr().out
    assert "conditions: device" in printed
    assert "cascade" in printed
    written = json.loads(output.with_suffix(".json").read_text())
    assert written["cases"][0]["case"]["prefix"] == 4
    assert output.with_suffix(".png").stat().st_size > 1000


def test_what_cannot_run_says_why(benchmark, capsys):
    (comparison,) = benchmark.main([*SHAPE, "--rounds", "1", "--no-memory", "--passes", "forward+backward"])
    notes = {row.method: row.note for row in comparison.rows}
    assert notes["flex"] == "FlexAttention has no backward pass on CPU"
    assert "not run: FlexAttention" in capsys.readouterr().out


def test_gpu_profile_lists_both_models(benchmark):
    shapes = [(case.hidden, case.prefix, case.group_size) for case in benchmark.profile_cases("gpu")]
    assert shapes == [(h, p, g) for h in (1024, 2560) for p in (4096, 8192) for g in (4, 8, 16)]
