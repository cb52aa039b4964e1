import importlib
import json
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.tiny_gguf import vocabulary, write_gguf
from helpers.versions import needs
from helpers.watched_processes import runs, until
from torch.utils.flop_counter import FlopCounterMode

OPTIONS = {
    "prefix": 4, "rollout": 2, "group-size": 2, "hidden": 8, "layers": 1, "heads": 2, "kv-heads": 1, "head-dim": 4,
    "intermediate": 16, "vocabulary": 10,
}  # fmt: skip


def shape(without=()):
    return [text for name, size in OPTIONS.items() if name not in without for text in (f"--{name}", str(size))]


METHODS = ["repeated, padded", "repeated, one by one", "repeated, packed", "prefix_grouper", "cascade", "reference"]


@pytest.mark.parametrize("measured", ["scoring", "update"])
def test_table_and_results_of_a_tiny_case(load, measured, tmp_path, capsys):
    output = tmp_path / "result"
    (comparison,) = getattr(load("passes"), measured)(
        [*shape(), "--rounds", "2", "--no-memory", "--methods", *METHODS, "flex", "--output", str(output)]
    )
    # Weights 64 + 32 + 32 + 64 + 3 * 128 = 576, so 1152 operations per token; 4 * 4 * 2 = 32 per pair;
    # head 2 * 8 * 10 * 4 = 640. Repeated: 12 tokens, 42 pairs. Shared: 8 tokens, 10 + 2 * 11 = 32 pairs.
    repeated, shared = 1152 * 12 + 32 * 42 + 640, 1152 * 8 + 32 * 32 + 640
    passes = {"scoring": 1, "update": 3}[measured]
    assert comparison.ideal_ratio == pytest.approx(repeated / shared)
    assert comparison.teraflops["shared"] == pytest.approx(passes * shared / 1e12)
    assert comparison.token_ratio == pytest.approx(12 / 8)
    assert [row.method for row in comparison.rows] == [*METHODS, "flex"]
    rows = {row.method: row for row in comparison.rows}
    flex = rows.pop("flex") if measured == "update" else None
    for row in rows.values():
        assert row.note is None
        assert row.difference < 1e-5
        assert len(row.timing.seconds) == 2
        assert row.tokens_per_second == pytest.approx(12 / row.timing.median)
    base, cascade = rows["repeated, packed"], rows["cascade"]
    assert base.share_of_ideal == 1.0
    assert cascade.share_of_ideal == pytest.approx(cascade.speedup[0] * shared / repeated)
    assert rows[comparison.fastest_repeated].share_of_fastest == 1.0
    printed = capsys.readouterr().out
    assert "conditions: device" in printed
    if flex is not None:
        assert flex.note == "FlexAttention has no backward pass on CPU"
        assert "not run: FlexAttention" in printed
        assert "not part of the ideal" in printed
    written = json.loads(output.with_suffix(".json").read_text())
    assert written["conditions"]["threads"] >= 1
    assert written["cases"][0]["case"]["prefix"] == 4
    assert output.with_suffix(".png").stat().st_size > 1000


@needs("torch", "2.13")
def test_operations_are_those_that_torch_counts(load):
    case = replace(load("cases").Case("tiny"), prefix=9, rollout=1, group_size=1, hidden=32, vocabulary=50)
    model = case.make_model()
    model.config._attn_implementation = "eager"  # computes all pairs, also those that the mask hides
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.arange(10)[None], logits_to_keep=1, use_cache=False)
    (per_pair,) = case.cost.per_pair.values()
    hidden_pairs = 10 * 10 - 55
    assert counter.get_total_flops() == case.operations("shared") + per_pair * hidden_pairs
    assert case.operations("repeated") == case.operations("shared")


@pytest.mark.slow
def test_memory_is_that_of_activations_and_not_of_gradients(load):
    sizes = {"prefix": 68, "rollout": 16, "group_size": 2, "layers": 2, "intermediate": 4096, "vocabulary": 64}
    case = replace(load("cases").Case("few tokens, wide layers"), **sizes)
    method = load("methods").find_method("cascade")
    comparison = load("compare").compare(case, load("compare").Plan([method], "update", 1))
    # By layer 512 * (512 + 256 + 256 + 512) of attention, 3 * 512 * 4096, two norms of 512 and two of 64; then the
    # embedding and the last norm.
    weights = 2 * (512 * 1536 + 3 * 512 * 4096 + 2 * 512 + 2 * 64) + 64 * 512 + 512
    assert comparison.gradient_mib == pytest.approx(weights * 4 / 2**20)
    # The backward pass needs what the gate, the other projection and their product are for each of the 100 tokens.
    kept = 2 * 100 * 3 * 4096 * 4 / 2**20
    assert kept < comparison.rows[0].peak_mib < comparison.gradient_mib


def test_gpu_profile_lists_both_models(load):
    shapes = {(case.hidden, case.prefix, case.group_size) for case in load("cases").profile_cases("gpu")}
    assert shapes == {(h, p, g) for h in (1024, 2560) for p in (4096, 8192) for g in (4, 8, 16)}


def test_peak_of_a_device(load, monkeypatch):
    peak_flops = load("measure").peak_flops
    assert peak_flops("float32") is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    assert peak_flops("bfloat16") == 989e12
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 PCIe")
    assert peak_flops("bfloat16") == 756e12
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    assert peak_flops("bfloat16") is None


def test_line_of_growth(load):
    fit = load("growth").fit
    line = fit([1, 2, 4], [5, 7, 11])  # 3 + 2 x
    assert (line.intercept, line.slope) == (pytest.approx(3), pytest.approx(2))
    assert line.largest == pytest.approx(0, abs=1e-12)
    # Weights 1, 1, 1/4; means x 4/3, y 10/9 (in units of the first cost): slope 1/2, intercept 4/9.
    bent = fit([0, 2, 2], [1, 1, 2])
    assert bent.slope == pytest.approx(0.1)
    assert bent.intercept == pytest.approx(1)
    assert bent.deviations == pytest.approx([0, 1 / 1.2 - 1, 2 / 1.2 - 1])


def test_growth_and_sweep_write_figures(load, tmp_path):
    once = ["--rounds", "1", "--no-memory", "--output"]
    sizes = ["--group-sizes", "1", "2", "4"]
    grown = load("growth").main([*shape(["group-size"]), *sizes, *once, str(tmp_path / "growth")])
    assert [row["tokens"] for row in grown["rows"]] == [6, 8, 12]
    # Pairs 10 + 11 G are linear in G like tokens 4 + 2 G are: so are operations.
    assert grown["lines"]["teraflops"]["largest_deviation"] < 1e-9
    sizes = ["--prefixes", "4", "8", "--ratios", "1", "4", "--group-sizes", "2"]
    swept = load("sweep").main([*shape(["prefix", "rollout", "group-size"]), *sizes, *once, str(tmp_path / "sweep")])
    assert {(row["prefix"], row["ratio"]) for row in swept["rows"]} == {(4, 1), (4, 4), (8, 1), (8, 4)}
    assert all(set(row["seconds"]) == {"repeated", "shared"} for row in swept["rows"])
    for name in ("growth", "sweep"):
        assert json.loads((tmp_path / f"{name}.json").read_text())["conditions"]["device"]
        assert (tmp_path / f"{name}.png").stat().st_size > 1000


TINY = {
    "attention": "--prefix 8 --rollout 4 --group-size 2 --heads 2 --kv-heads 1 --head-dim 16 --rounds 1",
    "head": "--tokens 256 --vocabulary 2048 --hidden 64 --rounds 1 --checked 4 --methods token_scores",
    "operators": "--prefix 8 --rollout 4 --group-size 2 --hidden 32 --layers 1 --vocabulary 64",
    "token-groups": "--rows 2 --length 16 --forward-rows 1 --rounds 1",
    "packing": "--batches 1",
    "rollouts": "--prompts 1 --prompt-length 4 --generations 2 --new-tokens 2 --rounds 1 --only generate hf",
}


@pytest.mark.parametrize("name", TINY)
def test_other_benchmarks_run_by_the_one_entry(load, name, tmp_path, capsys):
    load("__main__").main([name, *TINY[name].split(), "--output", str(tmp_path / "result")])
    written = json.loads((tmp_path / "result.json").read_text())
    assert name == "packing" or written["conditions"]["threads"] >= 1
    assert capsys.readouterr().out


@needs("transformers", "5.23")
def test_a_pretrained_model_is_measured(load, tmp_path, capsys):
    write_gguf(tmp_path / "tiny.gguf")
    sizes = "--sizes 8:2 --group-size 2 --groups 1 --rounds 1 --rows shared repeated"
    result = load("real_model").main(
        ["--model", str(tmp_path / "tiny.gguf"), *sizes.split(), "--output", str(tmp_path / "result")]
    )
    assert json.loads((tmp_path / "result.json").read_text())["steps"] == result["steps"]
    assert [(one["measured"], one["case"]["vocabulary"]) for one in result["passes"]] == [
        ("scoring", len(vocabulary())),
        ("update", len(vocabulary())),
    ]
    assert all(row["difference"] < 1e-4 for one in result["passes"] for row in one["rows"])
    (steps,) = result["steps"]
    assert [(row["method"], len(row["seconds"])) for row in steps["rows"]] == [("shared", 1), ("repeated", 1)]
    assert "s a step" in capsys.readouterr().out


def test_help_lists_all_and_each_has_its_own(load, capsys):
    entry = load("__main__")
    entry.main([])
    listed = capsys.readouterr().out
    for name in entry.COMMANDS:
        assert f"\n  {name} " in listed
        with pytest.raises(SystemExit) as raised:
            entry.main([name, "--help"])
        assert raised.value.code == 0
        assert f"usage: python -m benchmarks {name} " in capsys.readouterr().out
    with pytest.raises(SystemExit, match="'scorin' is not a benchmark"):
        entry.main(["scorin"])


def test_unattended_run_chooses_and_records_its_parts(load, tmp_path, monkeypatch, capsys):
    unattended = load("unattended")

    def ended_with(*options):
        with pytest.raises(SystemExit) as raised:
            unattended.main([*options, "--output", str(tmp_path)])
        return raised.value.code

    def outcomes():
        return [(own["part"], own["outcome"]) for own in json.loads((tmp_path / "summary.json").read_text())]

    assert ended_with("--minutes", "0", "--only", "packing") == 1  # nothing begins when the time is over
    assert outcomes() == [("packing", "ended")]
    parts = tuple(unattended.Part(name, 1, (), ()) for name in ("growth", "packing"))
    monkeypatch.setitem(unattended.PROFILES, "cpu", parts)
    records = iter([{"outcome": "failed", "exit_code": 2}, {"outcome": "done", "exit_code": 0}])
    monkeypatch.setattr(unattended, "run_limited", lambda *_: {"seconds": 1.0} | next(records))
    assert ended_with() == 1
    assert outcomes() == [("growth", "failed"), ("packing", "done")]
    assert ended_with("--only", "sweep") == 2
    assert "--only sweep is not a part" in capsys.readouterr().err
    monkeypatch.setattr(unattended, "run_limited", lambda *_: {"outcome": "done", "seconds": 1.0, "exit_code": 0})
    unattended.main(["--output", str(tmp_path)])
    assert "done" in capsys.readouterr().out


def test_limits_leave_the_tests_their_time(load):
    unattended = load("unattended")
    long, short = unattended.Part("decode", 0, limit=100), unattended.Part("head", 0, limit=50)
    tests = unattended.Part("tests", 0, limit=150)
    shares = unattended.Part("scoring", 3), unattended.Part("update", 1)
    assert unattended.limit_of([long, short, tests, *shares], 1000) == 100
    assert unattended.limit_of([long, short, tests, *shares], 210) == 60  # 150 are the tests'
    assert unattended.limit_of([short, tests], 120) == 0
    assert unattended.limit_of([tests, *shares], 120) == 120
    assert unattended.limit_of(shares, 80) == 60
    assert unattended.limit_of([shares[0], tests, shares[1]], 230) == 60
    options = unattended.parse(["--profile", "gpu", "--dry-run", "--output", "results"])  # which leaves time for all
    parts = unattended.chosen_parts(options)
    assert unattended.limit_of(parts, 60 * options.minutes) == parts[0].limit


def test_a_stage_keeps_its_rows_and_goes_on(load, tmp_path, monkeypatch):
    stages = load("gpu_stages")

    def measured(stage):
        stage.measure("works", lambda: stage.add(label="works", s=1.0))
        stage.measure("not there", stage.add, needs=("no_such_package",))
        stage.measure("breaks", lambda: 1 / 0)

    monkeypatch.setitem(stages.STAGES, "decode", measured)
    with pytest.raises(SystemExit, match="failed: breaks"):
        stages.main(["decode", "--dry-run", "--output", str(tmp_path / "decode")])
    works, lacking, breaks = json.loads((tmp_path / "decode.json").read_text())["rows"]
    assert works["s"] == 1.0
    assert "pip install no-such-package" in lacking["missing"]
    assert breaks["failed"] == "ZeroDivisionError"


@pytest.mark.slow
def test_a_dry_run_of_the_gpu_script_goes_through_every_stage(load, tmp_path, capsys):
    unattended = load("unattended")
    unattended.main(["--profile", "gpu", "--dry-run", "--output", str(tmp_path)])
    summary = json.loads((tmp_path / "summary.json").read_text())
    names = [part.label for part in unattended.PROFILES["gpu"] if part.limit is not None]
    assert [(own["part"], own["outcome"]) for own in summary] == [(name, "done") for name in names]
    for name in names:
        if name == "tests" or (name == "real-run" and not Path("data/smollm2").exists()):
            continue
        rows = json.loads((tmp_path / f"{name}.json").read_text())["rows"]
        assert any(not {"failed", "missing"} & row.keys() for row in rows), name
    printed = capsys.readouterr().out
    assert "decode           60 s expected on an H100" in printed


def test_every_arm_of_ours_takes_the_same_step_on_the_same_rollouts(load, tmp_path):
    stage, vs_trl = load("stage").Stage(dry=True), load("vs_trl")
    case = stage.case(load("cases").QWEN3_0_6B, prefix=12, rollout=4, group_size=2, groups=2, layers=1)
    run = vs_trl.Run(case, rollouts="recorded", steps=2)
    reference = vs_trl.Reference(run)
    for label in ("ours", "repeated, packed", "prefix_grouper"):
        assert vs_trl.run_arm(stage, label, vs_trl.ARMS[label], run, reference) > 0
    for row in stage.rows:
        assert row["gradient_error"] < 0.02  # bfloat16
        assert row["tokens_per_s"] == pytest.approx(2 * 2 * 16 / row["s"])
    ours, repeated, _ = (row["tflops_per_s"] * row["s"] for row in stage.rows)
    assert repeated / ours == pytest.approx(case.ideal_ratio, rel=0.05)


@pytest.mark.parametrize("label", ["TRL, padded", "TRL, tree"])
def test_trls_trainers_take_that_step_too(load, label):
    pytest.importorskip("trl", minversion="1.16")
    stage, vs_trl = load("stage").Stage(dry=True), load("vs_trl")
    case = stage.case(load("cases").QWEN3_0_6B, prefix=12, rollout=4, group_size=2, groups=2, layers=1)
    run = vs_trl.Run(case, rollouts="recorded", steps=2)
    vs_trl.run_arm(stage, label, vs_trl.ARMS[label], run, vs_trl.Reference(run))
    (row,) = stage.rows
    assert row["gradient_error"] < 0.02


def test_the_gradients_error_does_not_depend_on_its_scale(load):
    reference = object.__new__(load("vs_trl").Reference)
    reference.gradient = {"weight": torch.tensor([[3.0, 4.0]])}
    model = torch.nn.Linear(2, 1, bias=False)
    model.weight.grad = torch.tensor([[0.3, 0.4]])
    assert reference.error_of(model) == pytest.approx(0.0, abs=1e-3)
    model.weight.grad = torch.tensor([[4.0, -3.0]])  # a right angle
    assert reference.error_of(model) == pytest.approx(2**0.5)


def test_attention_of_trls_tree_on_a_cpu_is_causal_from_the_end(load):
    query, key, value = torch.randn(5, 2, 4), torch.randn(7, 1, 4), torch.randn(7, 1, 4)
    offsets = torch.tensor([0, 3, 5]), torch.tensor([0, 3, 7])  # a prompt, and two tokens behind two of it
    out = load("vs_trl")._eager_varlen(query, key, value, *offsets, 3, 4, softmax_scale=0.5)
    scores_K = 0.5 * (query[3, 1] * key[3:6, 0]).sum(-1)  # its own key is the third of four
    assert torch.allclose(out[3, 1], scores_K.softmax(0) @ value[3:6, 0], atol=1e-6)


def test_the_comparison_says_where_ours_is_slower_and_what_is_missing(load):
    vs_trl, shape = load("vs_trl"), {"P": 8, "R": 4, "G": 2, "prompts": 1, "rollouts": "recorded"}
    measured = {"rollouts_s": 0.0, "tokens_per_s": 24.0, "mfu": None, "peak_gib": 1.5, "steps": [], **shape}
    measured |= {"model": "Qwen3-0.6B shape", "precision": "bf16-true"}
    rows = [
        {"label": "ours", "s": 2.0, "gradient_error": 0.01, **measured},
        {"label": "TRL, tree", "s": 1.0, "gradient_error": None, **measured},
        {"label": "prefix_grouper", "missing": "prefix_grouper is not installed"},
        {"label": "TRL, padded", "failed": "OutOfMemoryError", "error": "CUDA out of memory\nmore"},
    ]
    table = vs_trl.table(rows)
    assert "| ours | 2.000 | 0.000 | 24 |  | 1.5 | 1.0e-02 | 1.00 |" in table
    assert "| TRL, tree | 1.000 | 0.000 | 24 |  | 1.5 |  | 0.50 |" in table
    assert "Ours is slower than TRL, tree at P = 8: 2.00 times its time." in table
    assert table.endswith(
        "prefix_grouper: prefix_grouper is not installed\nTRL, padded: failed: OutOfMemoryError: CUDA out of memory"
    )


def test_arms_without_their_packages_are_listed(load, monkeypatch):
    stage, vs_trl = load("stage").Stage(dry=True), load("vs_trl")
    monkeypatch.setattr(load("stage"), "missing", lambda package, distribution: f"{distribution} is missing")
    options = vs_trl.parse(["--vllm", "--arms", "ours", "TRL, padded", "TRL, tree"])
    vs_trl.compare(stage, options)
    assert {(row["label"], row["missing"]) for row in stage.rows} == {
        ("ours", "vllm is missing"), ("TRL, padded", "trl is missing")
    }  # fmt: skip


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_run_as_an_exception_does(load, number):
    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as raised, load("unattended").exiting_on(number):
        signal.raise_signal(number)
    assert raised.value.code == 128 + number
    assert signal.getsignal(number) is before


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("scoring", ["--rounds", "0"], "'0' is not a positive integer"),
        ("scoring", ["--group-size", "0"], "'0' is not a positive integer"),
        ("sweep", ["--ratios", "0"], "'0' is not a positive integer"),
        ("update", ["--heads", "3", "--kv-heads", "2"], "--heads 3 is not a multiple of --kv-heads 2"),
        ("rollouts", ["--prompt-length", "1"], "needs at least 2 tokens"),
    ],
)
def test_wrong_sizes_are_refused(load, capsys, name, options, said):
    with pytest.raises(SystemExit) as raised:
        load("__main__").main([name, *options])
    assert said in f"{raised.value} {capsys.readouterr().err}"


def test_a_method_that_cannot_run_leaves_the_others(load, monkeypatch):
    methods, compare = load("methods"), load("compare")
    shared_prefix = methods.shared_prefix

    def refuse(model, backend):
        if backend == "reference":
            raise ValueError("not this model\nfor a reason")
        return shared_prefix(model, backend)

    monkeypatch.setattr(methods, "shared_prefix", refuse)
    case = replace(load("cases").Case("tiny"), prefix=4, rollout=2, group_size=2, hidden=8, layers=1, vocabulary=10)
    names = ["repeated, packed", "reference"]
    plan = compare.Plan([methods.find_method(name) for name in names], "scoring", rounds=1, memory=False)
    ran, left = compare.compare(case, plan).rows
    assert ran.timing is not None
    assert ran.share_of_fastest is None  # there is nothing to choose from
    assert left.timing is None
    assert left.note == "ValueError: not this model"


def test_a_part_that_hangs_is_ended_with_all_that_it_started(load, tmp_path):
    command = f"sleep 100 & echo $! > {tmp_path}/pid; wait"
    record = load("unattended").run_limited(["sh", "-c", command], 1.0)
    assert record["outcome"] == "ended"
    until(lambda: not runs(int((tmp_path / "pid").read_text())))


@pytest.mark.parametrize("profile", ["cpu", "gpu"])
def test_every_part_of_a_profile_has_a_command_line_that_is_understood(load, profile, tmp_path):
    unattended = load("unattended")
    options = unattended.parse(["--profile", profile, "--threads", "1", "--output", str(tmp_path)])
    for part in unattended.PROFILES[profile]:
        if part.command == "tests":
            continue
        _, _, _, name, *rest = unattended.part_command(part, options, 60.0)
        assert name == part.command
        assert rest[-2:] == ["--output", str(tmp_path / part.label)]
        if name in ("scoring", "update"):
            load("passes").parse(None, rest)
        elif name != "packing":
            load(name.replace("-", "_")).parse(rest)


@pytest.fixture
def bare(monkeypatch):
    """As if the optional packages were not installed."""
    importlib.import_module("lightning.pytorch")  # torchmetrics asks the package index once, which says it is there
    for name in ("prefix_grouper", "matplotlib", *(own for own in sys.modules if own.startswith("matplotlib."))):
        monkeypatch.setitem(sys.modules, name, None)


def test_without_optional_packages_the_rest_is_measured(load, bare, tmp_path, capsys):
    names = ["repeated, packed", "prefix_grouper", "cascade"]
    options = ["--rounds", "1", "--no-memory", "--methods", *names, "--output", str(tmp_path / "result")]
    (comparison,) = load("passes").scoring([*shape(), *options])
    assert [row.method for row in comparison.rows if row.timing] == ["repeated, packed", "cascade"]
    printed = capsys.readouterr().out
    assert "pip install prefix_grouper" in printed
    assert "no figure: matplotlib is not installed" in printed
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]
    result = load("attention").main(TINY["attention"].split())
    assert "prefix_grouper" not in {row["method"] for row in result["rows"] if row["note"] is None}


def test_head_whose_run_takes_no_page(load, monkeypatch):
    head = load("head")
    monkeypatch.setattr(head, "in_fresh_process", lambda *arguments: 0.0)
    result = head.main([*TINY["head"].split(), "--methods", head.BASELINE, "token_scores"])
    assert not any("times_less_memory" in row for row in result["rows"])


def test_rates_and_the_prediction_of_two_processes(load, monkeypatch, capsys, tmp_path):
    """Made-up rollouts of 10 ms for each step and 1 ms for each token: 8 groups are 4 on each of two processes."""
    check = load("scaling_check")

    def run(ranks, groups, options):
        lengths = [[length] * 8 * (groups // ranks) for length in (20, 30, 25)]
        return [
            [
                {
                    "rollouts": 0.01 * max(own) + 0.001 * sum(own),
                    "scoring": groups / ranks,
                    "update": 3 * groups / ranks,
                    "lengths": own,
                    "longest": max(own),
                    "tokens": sum(own),
                }
                for own in lengths
            ]
            for _ in range(ranks)
        ]

    monkeypatch.setattr(check, "run", run)
    check.main(["--output", str(tmp_path / "found")])
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["decode_floor"] == pytest.approx(0.01)
    assert found["decode_sequence"] == pytest.approx(0.001)
    assert found["longest"] == 25
    assert found["one process"] == pytest.approx([0.01 * 25 + 0.001 * 25 * 64, 8, 24])
    # Tokens of 32 sequences of 25 on average, and decoding steps as many as the longest has.
    rollouts = 0.001 * 25 * 32 + 0.01 * found["longest_predicted"]
    assert found["two, predicted"] == pytest.approx([rollouts, 4, 12])
    assert found["two, rank 1"] == pytest.approx([0.01 * 25 + 0.001 * 25 * 32, 4, 12])
    assert "two, predicted" in capsys.readouterr().out
