import json
from types import SimpleNamespace

import pytest

from pl_grouprl.callbacks import RunSummary
from pl_grouprl.callbacks.curves import (
    PANELS,
    MetricHistory,
    draw_curves,
    other_metrics,
    panel_figure,
    robust_limits,
    select,
)
from pl_grouprl.callbacks.run_summary import summary_text

PNG = b"\x89PNG"


def test_statistics_worked_out_by_hand():
    history = MetricHistory()
    for step, value in [(0, 3.0), (10, 1.0), (29, 2.0), (30, 5.0), (35, 4.0), (40, 6.0)]:
        history.record(step, {"x": value})
    assert history.statistics("x") == {
        "first": 3.0, "last": 6.0, "min": 1.0, "max": 6.0, "mean": 3.5, "count": 6,
        "min_last_quarter": 4.0,  # steps 30 to 40
    }  # fmt: skip


def test_a_step_counts_once_and_what_is_not_finite_not_at_all():
    history = MetricHistory()
    history.record(1, {"x": 1.0, "y": float("nan")})
    history.record(1, {"x": 2.0})
    assert history.points == {"x": [(1, 2.0)]}


def test_summary_and_curves_are_written_from_the_logged_metrics(fit, counter, tmp_path, capsys):
    fit(counter, RunSummary(), max_steps=8)
    summary = json.loads((tmp_path / "version_0" / "summary.json").read_text())
    assert summary["steps"] == 8
    reward = summary["metrics"]["reward"]
    assert (reward["first"], reward["last"], reward["count"]) == (1.0, 8.0, 8)
    validation = summary["metrics"]["val/score"]
    assert (validation["first"], validation["last"], validation["count"]) == (20.0, 80.0, 4)
    assert (tmp_path / "version_0" / "curves.png").read_bytes().startswith(PNG)
    shown = capsys.readouterr().out
    assert "first 1.000, last 8.000" in shown
    assert "first 20.000, last 80.000, lowest over the last quarter 80.000" in shown


def test_a_resumed_run_is_summed_up_from_its_beginning(fit, counter, tmp_path):
    trainer = fit(counter, RunSummary(), max_steps=4)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    fit(counter, RunSummary(), max_steps=8, ckpt_path=tmp_path / "half.ckpt")
    reward = json.loads((tmp_path / "version_0" / "version_0" / "summary.json").read_text())["metrics"]["reward"]
    assert (reward["first"], reward["last"], reward["count"]) == (1.0, 8.0, 8)


def test_a_name_in_the_curves_is_no_mathematics(tmp_path):
    draw_curves({name: [(0, 1.0), (1, number)] for number, name in enumerate(("val/$\\x$", "val/$^$"))}, tmp_path / "a")
    assert (tmp_path / "a").read_bytes().startswith(PNG)
    draw_curves({"unknown": [(0, 1.0)]}, tmp_path / "b")  # there is nothing to draw
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("names", "patterns", "shown"),
    [
        (["val/b", "val/a", "kl", "reward"], ("kl", "val/*"), ["kl", "val/b", "val/a"]),
        (["val/episode/turns", "val/tools/call_frequency", "val/reward", "val/math/mean@4"], PANELS["validation"],
            ["val/reward", "val/math/mean@4"]),
        (["val/rewards/f/mean", "val/rewards/f/length", "val/reward"], PANELS["validation"],
            ["val/rewards/f/mean", "val/reward"]),  # other numbers of a reward would flatten the scores
        (["tools/call_frequency", "tools/failures/raised"], PANELS["tools: calls per rollout, failed share"],
            ["tools/call_frequency"]),
    ],
)  # fmt: skip
def test_what_a_panel_shows(names, patterns, shown):
    assert select({name: [(0, float(number))] for number, name in enumerate(names)}, patterns) == shown


def test_of_equal_lines_a_panel_shows_the_first():
    points = {"val/mean@2": [(0, 0.1), (9, 0.3)], "val/pass@1": [(0, 0.1), (9, 0.1 + 0.2)], "val/best@2": [(0, 0.1)]}
    assert select(points, ("val/*",)) == ["val/mean@2", "val/best@2"]


def test_a_peak_does_not_flatten_a_panel():
    values = [1.0, 2.0, 3.0] * 40
    assert robust_limits(values) is None
    low, high = robust_limits([*values, 100.0])  # cut: one 1 and the 100; left: 1 to 3, and a tenth at both ends
    assert (low, high) == pytest.approx((0.8, 3.2))
    assert robust_limits([5.0] * 200) is None
    assert robust_limits([*values[:99], 100.0]) is None  # few points are all shown
    assert robust_limits([*values[:99], 2.0, 100.0]) is not None


@pytest.mark.parametrize(
    ("title", "name", "cut"),
    [("reward", "reward", False), ("validation", "val/score", False), ("gradient norm", "grad_norm", True)],
)
def test_reward_and_validation_are_never_cut(title, name, cut):
    points = {name: [(0, -9.0), *((step, step % 2) for step in range(1, 150))]}
    (axes,) = panel_figure(title, {"": points}).axes
    assert (axes.get_ylim()[0] > -9.0) == cut


def text(*records, folder=None):
    history = MetricHistory()
    for step, metrics in enumerate(records):
        history.record(step, metrics)
    return summary_text({name: history.statistics(name) for name in history.points}, 3, 1.6, folder)


@pytest.mark.parametrize(
    ("records", "shown"),
    [
        ([{"perf/tokens_per_second": 1000.0}], "mean 1000"),
        ([{"prefix/token_ratio": 15.25}], "mean 15.25 (tokens with repeated prompts / tokens run)"),
        ([{"time/rollout": 0.5, "time/update": 0.25}], "rollout 0.500, update 0.250"),
        ([{"val/reward": -0.023}], "-0.023, measured once: trainer.val_check_interval says when"),
        ([{"val/reward": -0.023}, {"val/reward": 0.5}], "first -0.023, last 0.500"),
        ([{"frac_reward_zero_std": 1.0}], "all rewards equal   in 100% of groups"),
    ],
)
def test_text_names_what_was_logged(records, shown, tmp_path):
    found = text(*records, folder=tmp_path)
    assert shown in found
    assert str(tmp_path) in found


def test_text_leaves_out_the_rest():
    assert text() == "Run summary: 3 steps in 2 s"
    assert "all rewards equal" not in text({"frac_reward_zero_std": 0.5})
    assert "all rewards equal" not in text({"frac_reward_zero_std": 1.0, "value/explained_variance": 0.0})


def test_names_that_only_begin_like_validation_are_training_metrics(fit, counter, tmp_path):
    step = counter.training_step
    counter.training_step = lambda batch, batch_idx: (counter.log("value/loss", 3.0), step(batch, batch_idx))[1]
    summary = RunSummary(curves_filename=None)
    fit(counter, summary)
    assert summary.history.points["value/loss"] == [(1, 3.0), (2, 3.0), (3, 3.0), (4, 3.0)]
    assert "value/loss" not in summary_text({"value/loss": summary.history.statistics("value/loss")}, 4, 1.0, None)


def test_interval_below_one_is_refused():
    with pytest.raises(ValueError, match=r"RunSummary\.every_n_steps is 0; it must be at least 1"):
        RunSummary(every_n_steps=0)


def test_rounding_between_sampler_and_trainer_looks_flat():
    title = "sampler and trainer: largest ratio"
    (axes,) = panel_figure(title, {"": {"sampling/largest_ratio": [(0, 1.0), (1, 1.0 + 1e-6)]}}).axes
    assert axes.get_ylim() == pytest.approx((0.999, 1.02), abs=1e-6)
    spikes = [(step, 1.0 + 1e-6 * (step == 70)) for step in range(150)]
    (axes,) = panel_figure(title, {"": {"sampling/largest_ratio": spikes}}).axes
    assert axes.get_title(loc="left") == title  # nothing is cut off
    (axes,) = panel_figure(title, {"": {"sampling/largest_ratio": [(0, 1.0), (1, 1.5)]}}).axes
    assert axes.get_ylim() == pytest.approx((0.975, 1.525))


def test_the_band_of_the_reward_ends_where_rewards_do():
    points = {"reward": [(0, 0.5), (1, 0.9)], "reward_std": [(0, 0.6), (1, 0.3)]}
    bounds = {"reward_min": [(0, 0.0), (1, 0.25)], "reward_max": [(0, 1.0), (1, 1.0)]}
    for given, low, high in ((points, -0.1, 1.2), (points | bounds, 0.0, 1.0)):
        (axes,) = panel_figure("reward", {"": given}).axes
        edges = axes.collections[0].get_paths()[0].vertices[:, 1]
        assert (edges.min(), edges.max()) == pytest.approx((low, high))
    assert other_metrics([points | bounds]) == []
    resumed = points | {"reward_min": [(1, 0.8)], "reward_max": [(1, 1.0)]}  # step 0 is of a version without them
    (axes,) = panel_figure("reward", {"": resumed}).axes
    edges = {tuple(edge) for edge in axes.collections[0].get_paths()[0].vertices.round(6).tolist()}
    assert edges == {(0, -0.1), (0, 1.1), (1, 0.8), (1, 1.0)}


def test_runs_side_by_side_are_all_inside_the_same_scale():
    def validated(value):
        return {"val/x": [(0, 0.0), (1, value)], "val/y": [(0, 0.0), (1, value / 2)]}

    for values in ((0.0, 1.0), (1.0, 0.0)):
        figure = panel_figure("validation", {f"run {value}": validated(value) for value in values})
        assert len(figure.axes) == 2
        for axes in figure.axes:
            assert axes.get_ylim() == pytest.approx((-0.05, 1.05))
    sped = [{"prefix/token_ratio": [(0, ratio)], "prefix/measured_speedup": [(0, 1.0)]} for ratio in (2.0, 14.0)]
    figure = panel_figure("token ratio, measured speedup", dict(zip("ab", sped, strict=True)))
    assert all(axes.get_ylim()[0] == 0 and axes.get_ylim()[1] > 14 for axes in figure.axes)


def test_twenty_runs_are_told_apart():
    runs = {str(run): {"kl": [(0, 0.0), (1, run)]} for run in range(20)}
    (axes,) = panel_figure("kl", runs).axes
    assert len({(line.get_color(), str(line._dash_pattern)) for line in axes.lines}) == 20
    figure = panel_figure("validation", {run: {"val/x": own["kl"], "val/y": [(0, 1.0)]} for run, own in runs.items()})
    assert len(figure.axes) == 20
    assert figure.get_size_inches()[0] == 15  # three a row


def test_two_speedups_are_points_on_an_axis_from_zero():
    points = {"prefix/token_ratio": [(step, 14.0) for step in range(99)]}
    points["prefix/measured_speedup"] = [(30, 29.0), (60, 34.0)]
    (axes,) = panel_figure("token ratio, measured speedup", {"": points}).axes
    assert [line.get_linestyle() for line in axes.lines] == ["-", "None"]
    low, high = axes.get_ylim()
    assert low == 0
    assert 34 < high < 40


def test_runs_that_coincide_have_different_dashes_and_one_without_data_has_no_axes():
    same = [(0, 0.25), (1, 0.5)]
    overlaid = panel_figure("kl", {"a": {"kl": same}, "b": {"kl": same}}).axes[0]
    assert len({line.get_linestyle() for line in overlaid.lines}) == 2
    figure = panel_figure("validation", {"a": {"val/x": same, "val/y": [(0, 1.0)]}, "b": {"kl": same}})
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["validation\na"]


def test_the_picture_names_the_run(fit, counter, tmp_path, monkeypatch):
    titles = []
    monkeypatch.setattr("pl_grouprl.callbacks.run_summary.draw_curves", lambda *given: titles.append(given[2]))
    counter.policy = SimpleNamespace(config=SimpleNamespace(name_or_path="Qwen/Qwen3-0.6B"))
    fit(counter, RunSummary(), max_steps=2)
    assert titles == [f"{tmp_path.name}/version_0: {type(counter).__name__}, Qwen/Qwen3-0.6B, 2 steps"]
