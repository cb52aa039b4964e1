import re
from html.parser import HTMLParser

import pytest
from helpers.recorded_runs import COMPLETIONS, recorded

from pl_grouprl.report import main, report_page, write_report


class Elements(HTMLParser):
    """Checks that elements are closed in order, and collects what would be fetched."""

    VOID = ("meta", "br", "img", "link")

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.fetched = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        self.fetched += [value for name, value in attrs if name in ("src", "href", "xlink:href") and value[0] != "#"]

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def bare(name, **fields):
    """A run with a single point: its pictures are drawn quickly."""
    run = recorded(name, **fields)
    run.history.points.clear()
    run.history.record(0, {"reward": 0.5})
    return run


FIGURE = r'<figure class="(\w+)" aria-label="([^"]+)"'


def test_a_page_is_whole_needs_no_other_file_and_compares_the_runs():
    text = "<script>alert(1)</script>"
    rows = [*COMPLETIONS, COMPLETIONS[0] | {"prompt": text, "completion": text, "finish_reason": text}]
    rows.append(COMPLETIONS[0] | {"messages": [{"role": "assistant", "content": text}]})
    runs = [recorded(text, completions=rows, options={text: text}, training_seconds=3700.0), recorded("b", reward=0.25)]
    page = report_page(runs)
    elements = Elements()
    elements.feed(page)
    assert elements.open == []
    assert elements.fetched == []
    assert not re.search(r"@import|url\((?!#)", page)
    assert elements.tags.count("svg") == 3  # reward, validation, time
    # Runs with one line share axes, and others stand side by side.
    assert re.findall(FIGURE, page) == [("one", "reward"), ("two", "validation"), ("two", "seconds per step")]
    validation = page.partition('aria-label="validation"')[2].partition("</figure>")[0]
    assert re.findall(r">(b)</", validation) == ["b"]  # the runs, above their axes
    cells = [re.findall(r"<td><div>(.*?)</div>", row) for row in re.findall("<tr>(.*?)</tr>", page)]
    assert ["training time", "1:01:40", "not ended"] in cells
    assert ["reward", "0.500 → 0.900", "0.250 → 0.650"] in cells
    assert ["seconds per step", "mean 3.00", "mean 3.00"] in cells
    # Nothing of a run is taken as HTML.
    assert "<script" not in page
    assert page.count("&lt;script&gt;") > 8


def test_metrics_without_a_panel_have_one_each():
    runs = [bare("a"), bare("b")]
    for run in runs:
        run.history.record(1, {"mine/share": 0.25, "val/rewards/grade/steps": 3.0})
    runs[0].history.record(1, {"only/one": 1.0})
    page = report_page(runs)
    folded = page.partition("<details><summary>Other metrics (3)</summary>")[2].partition("</details>")[0]
    titles = ["mine/share", "only/one", "val/rewards/grade/steps"]
    assert re.findall(FIGURE, folded) == [("one", title) for title in titles]
    assert page.count('aria-label="mine/share"') == 1
    assert "Other metrics" not in report_page([bare("a")])


def test_names_are_no_mathematics_and_none_is_left_out_of_a_legend():
    runs = [bare(name) for name in ("$\\x$/version_0", "_b/version_0")]
    panel = report_page(runs).partition('aria-label="reward"')[2].partition("</figure>")[0]
    assert [name in panel for name in (r">$\x$/version_0<", ">_b/version_0<")] == [True, True]


@pytest.mark.parametrize(
    ("options", "told", "cells"),
    [
        ([{"beta": 0.1, "seed": 0}, {"beta": 0.2, "seed": 0}], "", ["beta", "0.1", "0.2"]),
        ([{"beta": 0.1}, {"beta": 0.1}], "<p>None.</p>", []),
        ([{"beta": 0.1}, {"beta": 0.2}, {}], "Not recorded: 2 (no config.yaml or", ["beta", "0.1", "0.2", ""]),
        ([{"beta": 0.2}, {}], "Not recorded: 1", []),
        ([{"beta": 0.1}], "", None),
    ],
)
def test_options_that_differ_are_listed(options, told, cells):
    page = report_page([bare(str(number), options=own) for number, own in enumerate(options)])
    assert told in page
    assert ("Options that differ" in page) == (cells is not None)
    different = page.partition("Options that differ")[2].partition("</table>" if cells else "</h2>")[0]
    assert re.findall(r"<td><div>(.*?)</div>", different) == (cells or [])
    assert ("None." in page) == ("None" in told)


def test_completions_are_text_and_the_last_step_is_unfolded():
    page = report_page([bare("a", completions=COMPLETIONS)])
    assert "&lt;b&gt;yes&lt;/b&gt;" in page
    assert "<b>yes" not in page
    assert page.count("1 &lt; 2?") == 1  # a prompt stands once
    assert "add(a=1) -&gt; 2" in page
    assert re.findall(r"<details( open)?><summary>Step (\d+)", page) == [("", "1"), (" open", "9")]


def test_of_many_steps_some_are_shown():
    rows = [COMPLETIONS[0] | {"step": step} for step in range(11) for _ in range(20)]
    page = report_page([bare("a", completions=rows)])
    assert re.findall(r"Step (\d+) \((\d+) of (\d+)\)", page) == [(str(s), "16", "20") for s in (0, 2, 4, 6, 8, 10)]


def test_the_command_writes_the_page_and_replaces_only_reports(tmp_path, capsys):
    folder = tmp_path / "version_0"
    folder.mkdir()
    (folder / "metrics.csv").write_text("step,reward\n0,0.25\n")
    output = tmp_path / "out" / "page.html"
    for _ in range(2):
        main([str(folder), "--output", str(output)])
    assert capsys.readouterr().out == f"Report: {output}\n" * 2
    output.write_text("<p>mine</p>")
    with pytest.raises(SystemExit, match=r"exists and is not a report; pass another file as --output"):
        main([str(folder), "--output", str(output)])
    assert output.read_text() == "<p>mine</p>"
    with pytest.raises(FileExistsError):
        write_report([bare("a")], tmp_path)
    with pytest.raises(SystemExit, match=r"has no metrics.csv"):
        main([str(tmp_path)])
    with pytest.raises(SystemExit, match=r"nowhere has no metrics.csv; there is no such folder"):
        main([str(tmp_path / "nowhere")])
