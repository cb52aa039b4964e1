import json

import pytest

PROMPT, LENGTH, SIZE = 6, 16, 2
OPTIONS = {
    "prefix": PROMPT, "rollout": LENGTH, "group-size": SIZE, "hidden": 8, "layers": 1, "heads": 2, "kv-heads": 1,
    "head-dim": 4, "intermediate": 16, "vocabulary": 10, "rounds": 2, "max-size": 8,
}  # fmt: skip
SHAPE = [text for name, size in OPTIONS.items() for text in (f"--{name}", str(size))]


@pytest.fixture
def benchmark(load):
    return load("critic_update")


def test_critic_runs_to_the_last_start_and_learns_the_same_from_both_encodings(benchmark):
    options = [*SHAPE, "--groups", "1", "--mini-batches", "1", "--targets", "0.5", "0.75", "--measure", "critic"]
    result = benchmark.main(options)
    rows = {(row["prompt"], row["algorithm"]): row for row in result["critic_update"]}
    assert len(rows) == 6
    assert (rows["shared", "PPO"]["positions"], rows["shared", "PPO"]["compression"]) == (SIZE * LENGTH, 0)
    assert rows["shared", "PPO"]["tokens_run"] == PROMPT + SIZE * LENGTH
    assert rows["repeated", "PPO"]["tokens_run"] == SIZE * (PROMPT + LENGTH)

    data = benchmark.draw_rollouts(benchmark.make_case(benchmark.parse(options)))
    for cut in result["thresholds"]:
        starts = data.cut(cut["threshold"], 8).starts
        ends = [int(row.nonzero().max()) + 1 for row in starts]
        shared, repeated = (rows[name, f"GROUP PPO, target {cut['target']:g}"] for name in ("shared", "repeated"))
        assert shared["positions"] == repeated["positions"] == int(starts.sum()) < SIZE * LENGTH
        assert shared["compression"] == pytest.approx(1 - int(starts.sum()) / (SIZE * LENGTH))
        assert shared["tokens_run"] == PROMPT + sum(ends)
        assert repeated["tokens_run"] == SIZE * (PROMPT + max(ends))
    assert rows["shared", "PPO"]["ratio_to_ppo"] == (1, 1, 1)
    for (_, algorithm), row in rows.items():
        assert row["loss"] == pytest.approx(rows["repeated", algorithm]["loss"], rel=1e-5)
        assert len(row["seconds"]) == 2


def test_steps_by_part_with_one_update_and_with_several(benchmark, tmp_path, capsys):
    output = tmp_path / "result"
    benchmark.main(
        [*SHAPE, "--groups", "2", "--mini-batches", "2", "--targets", "0.75", "--beta", "0.1", "--output", str(output)]
    )
    written = json.loads(output.with_suffix(".json").read_text())
    assert written["case"]["prefix"] == PROMPT
    assert written["conditions"]["device"]
    rows = {(row["updates_per_rollout"], row["algorithm"]): row for row in written["steps"]}
    assert list(rows) == [(count, name) for count in (1, 2) for name in ("PPO, prompt repeated", "PPO", "GROUP PPO")]
    for (count, name), row in rows.items():
        parts = {part: sum(seconds) for part, seconds in row["parts"].items()}
        unused = {part for part, seconds in parts.items() if seconds == 0}
        assert unused == ({"old scores"} if count == 1 and name != "GROUP PPO" else set())
        assert sum(parts.values()) <= sum(row["seconds"])
        expected = written["thresholds"][0]["compression"] if name == "GROUP PPO" else 0
        assert row["compression"] == pytest.approx(expected)
    printed = capsys.readouterr().out
    assert "compression" in printed
    assert "speedup" not in printed


def test_threshold_settles_where_the_target_can_be_reached(benchmark):
    data = benchmark.draw_rollouts(benchmark.Case("rows", prefix=1, rollout=256, group_size=8, shortest=0.5))
    starts = data.cut(data.find_threshold(0.75, 16), 16).starts
    assert benchmark.compression_of(starts, data.mask) == pytest.approx(0.75, abs=5e-3)
    assert data.lengths.tolist() == [256, 238, 219, 201, 183, 165, 146, 128]


@pytest.mark.parametrize(
    ("options", "error"),
    [(["--groups", "1", "--mini-batches", "2"], "raise --groups"), (["--step-target", "0.6"], "one of --targets")],
)
def test_options_that_do_not_fit_together(benchmark, options, error, capsys):
    with pytest.raises(SystemExit) as raised:
        benchmark.main([*SHAPE, *options])
    assert error in str(raised.value) + capsys.readouterr().err
