import json

import pytest

from pl_grouprl.report import different_options, read_run, read_runs

METRICS = "epoch,reward,step,val/reward\n0,0.25,0,\n,,0,0.5\n0,0.75,1,\n"


@pytest.fixture
def make_run(tmp_path):
    def make(name, metrics=METRICS, config=None, completions=None, seconds=None):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        (folder / "metrics.csv").write_text(metrics)
        if config is not None:
            (folder / "config.yaml").write_text(config)
        if completions is not None:
            (folder / "completions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in completions))
        if seconds is not None:
            (folder / "summary.json").write_text(json.dumps({"training_seconds": seconds}))
        return folder

    return make


def test_rows_of_a_step_are_merged_and_epochs_left_out(make_run):
    run = read_run(make_run("version_0", seconds=60.0))
    assert run.history.points == {"reward": [(1, 0.25), (2, 0.75)], "val/reward": [(1, 0.5)]}
    assert (run.steps, run.training_seconds, run.options, run.completions) == (2, 60.0, {}, [])


@pytest.mark.parametrize(
    ("rows", "rewards", "validation"),
    [
        # Validation before the first step, and after steps 1 and 2; steps are logged from 0.
        ("0,,.1 0,.5, 0,,.2 1,.6, 1,,.3", [1, 2], [0, 1, 2]),
        # A run resumed after step 7.
        ("7,,.1 7,.5, 7,,.2", [8], [7, 8]),
        # Every 5th step is logged, validation before the first step, after step 2 and after step 5.
        ("0,,.1 1,,.2 4,.5, 4,,.3", [5], [0, 2, 5]),
        # No step is logged yet.
        ("0,,.1", None, [0]),
    ],
)
def test_steps_are_counted_as_done(rows, rewards, validation, make_run):
    points = read_run(make_run("version_0", "step,reward,val/reward\n" + rows.replace(" ", "\n") + "\n")).history.points
    assert [step for step, _ in points["val/reward"]] == validation
    assert rewards is None or [step for step, _ in points["reward"]] == rewards


def test_runs_are_named_by_as_much_of_their_paths_as_tells_them_apart(make_run):
    folders = [make_run("x/a/version_0"), make_run("x/b/version_0"), make_run("y/a/version_0")]
    assert [run.name for run in read_runs(folders[:2])] == ["a/version_0", "b/version_0"]
    assert [run.name for run in read_runs(folders)] == ["x/a/version_0", "x/b/version_0", "y/a/version_0"]


def test_options_that_differ_are_found_in_mappings_and_lists(make_run):
    config = "model: {beta: %s, list: [{a: 1}, %s]}\nsame: {}\n"
    runs = read_runs([make_run("a", config=config % (0.1, "{b: 2}")), make_run("b", config=config % (0.2, "{c: 2}"))])
    assert read_run(make_run("c", config="a: []\nb: null\n")).options == {"a": [], "b": None}
    assert read_run(make_run("d", config="")).options == {}
    assert runs[0].options == {"model.beta": 0.1, "model.list.0.a": 1, "model.list.1.b": 2, "same": {}}
    differ = {"model.beta": [0.1, 0.2], "model.list.1.b": [2, None], "model.list.1.c": [None, 2]}
    assert different_options(runs) == differ


def test_a_folder_above_is_refused_with_the_runs_below(make_run, tmp_path):
    folder = make_run("version_3")
    with pytest.raises(FileNotFoundError, match=rf"has no metrics.csv; pass one of {folder}"):
        read_run(tmp_path)
    (folder / "metrics.csv").unlink()
    with pytest.raises(FileNotFoundError, match="a CSVLogger writes it every `flush_logs_every_n_steps` steps"):
        read_run(folder)


@pytest.mark.parametrize(
    ("text", "error"),
    [("", "has no metrics yet"), ("a,b\n1,2\n", "is not a file of metrics"), ("step,a\n1,x\n", "could not convert")],
)
def test_empty_and_damaged_metrics_are_refused(text, error, make_run):
    with pytest.raises(ValueError, match=error):
        read_run(make_run("version_0", metrics=text))


COMPLETION = {"step": 1, "prompt": "p", "completion": "c", "reward": None, "num_tokens": 1, "finish_reason": None}


@pytest.mark.parametrize("character", ["\u2028", "\x85", "\x0b", "\x1c"])
def test_line_separators_of_unicode_stay_inside_a_completion(character, make_run):
    folder = make_run("version_0")
    row = COMPLETION | {"completion": f"a{character}b"}
    (folder / "completions.jsonl").write_text(json.dumps(row, ensure_ascii=False) + "\n", encoding="utf-8")
    assert read_run(folder).completions == [row]


def test_a_line_that_is_being_written_is_left_out(make_run):
    folder = make_run("version_0", metrics="step,reward\n0,0.5\n1", completions=[COMPLETION])
    with (folder / "completions.jsonl").open("a") as file:
        file.write('{"step": 2, "pro')
    run = read_run(folder)
    assert run.history.points == {"reward": [(1, 0.5)]}
    assert run.completions == [COMPLETION]
    (folder / "metrics.csv").write_text("step,reward\n0,0.5\n,")
    assert read_run(folder).steps == 1


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("metrics.csv", b"step,reward\n0,\xff\n"), ("metrics.csv", b"step,reward\n0," + b"1" * 200_000 + b"\n"),
        ("config.yaml", b"a: [b\n"), ("config.yaml", b"a: !!python/object:x.Y {}\n"),
        ("completions.jsonl", b'{"step": 1\n'), ("completions.jsonl", b'{"step": 1}\n'),
        ("completions.jsonl", b"[1]\n"), ("summary.json", b"{"), ("summary.json", b"{}"), ("summary.json", b"[]"),
    ],
)  # fmt: skip
def test_a_damaged_file_is_named(name, content, make_run):
    folder = make_run("version_0")
    (folder / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"(?s){folder / name} is not a .*; restore it or move it away"):
        read_run(folder)


def test_a_run_passed_twice_is_refused(make_run):
    folder = make_run("version_0")
    with pytest.raises(ValueError, match="is passed twice"):
        read_runs([folder, folder / "."])


def test_runs_are_compared_by_a_file_that_all_have(make_run):
    folders = [make_run("a", config="model: {init_args: {seed: 0}}"), make_run("b"), make_run("c")]
    for number, folder in enumerate(folders):
        (folder / "options.json").write_text(json.dumps({"seed": number, "optimizer.learning_rate": 1e-6}))
    assert different_options(read_runs(folders)) == {"seed": [0, 1, 2]}
    assert read_runs(folders)[0].options["optimizer.learning_rate"] == 1e-6
    assert read_run(folders[0]).options == {"model.init_args.seed": 0}
