"""The documentation site: every page is in the navigation, every link leads to a page and a heading that exists."""

import re
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

import site_pages
from site_pages import headings, links, public_names, rebased, site_path

ROOT = Path(__file__).resolve().parents[2]


def navigation():
    """Pages of the navigation, in order."""

    def pages(part):
        if isinstance(part, str):
            return [part]
        return [page for item in (part.values() if isinstance(part, dict) else part) for page in pages(item)]

    # BaseLoader reads mkdocs' Python tags as plain text.
    return pages(yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), yaml.BaseLoader)["nav"])


@pytest.fixture(scope="module")
def site():
    return site_pages.site_pages()


def broken_links(pages, files):
    for page, text in pages.items():
        for target, anchor in links(text, page):
            target = target or page
            if target not in pages and target not in files:
                yield f"{page}: {target} does not exist"
            # Anchors of the reference are names, checked when the site is built.
            elif (
                target in pages and not target.startswith("reference/") and anchor not in {"", *headings(pages[target])}
            ):
                yield f"{page}: {target} has no heading #{anchor}"


def test_every_page_is_in_the_navigation_once(site):
    listed = navigation()
    assert len(listed) == len(set(listed))
    assert set(listed) == {page for page in site[0] if not page.startswith("project/")}


def test_links_lead_to_pages_and_headings_that_exist(site):
    assert not list(broken_links(*site))
    pages = {"a.md": "[x](b.md) [y](b.md#one) [z](b.md#two) [w](#here)\n```\n[code](c.md)\n```\n", "b.md": "## One\n"}
    assert list(broken_links(pages, {})) == ["a.md: b.md has no heading #two", "a.md: a.md has no heading #here"]
    assert list(broken_links({"a.md": "[x](b.md)"}, {})) == ["a.md: b.md does not exist"]
    linked = {target for page, text in site[0].items() for target, _ in links(text, page) if target != page}
    assert {path.name for path in (ROOT / "docs").glob("*.md")} <= linked


def test_links_are_translated_outside_of_code_only():
    text = "[a](../README.md#top) [b](data.md) [c](https://x.y/z) `[0](d)`\n\n```yaml\nx: [e](../README.md)\n```\n"
    assert rebased(text, "docs/options.md").startswith("[a](index.md#top) [b](data.md) [c](https://x.y/z)")
    assert "[e](../README.md)" in rebased(text, "docs/options.md")
    assert rebased("![p](docs/images/p.png)", "README.md") == "![p](images/p.png)"
    cell = "````python\nrewards[0](prompt)\n```\nrewards[1](prompt)\n````\n"
    assert rebased(cell, "docs/options.md") == cell


def test_where_a_file_is_on_the_site():
    for source, page in {
        "README.md": "index.md",
        "docs/data.md": "data.md",
        "configs/ppo.yaml": "project/configs/ppo.yaml.md",
        "configs": "project/configs/index.md",
        "examples/first.ipynb": "project/examples/first.ipynb.md",
        "benchmarks/results/packing.json": "project/benchmarks/results/packing.json",
    }.items():
        assert site_path(source) == page


def test_a_notebook_is_a_page_of_its_cells(site):
    page = site[0]["project/examples/notebooks/1_first_grpo_run.ipynb.md"]
    assert page.startswith("# A first GRPO run\n")
    assert "\n\n````python\narchitecture = {\n" in page
    assert "\n\n````text\n[1.0, 0.0, 0.0]\n````\n\n" in page
    assert '<img alt="What the cell draws" src="data:image/png;base64,' in page
    assert "(../../../rewards.md)" in page


def test_anchors_are_those_of_github():
    text = "# Is it the same? `check_parity`\n## 1. The GRPO module\n## a_b [c](d.md)\n## Two\n## Two\n"
    text += "```bash\n# a comment\n```\n"
    assert headings(text) == {"is-it-the-same-check_parity", "1-the-grpo-module", "a_b-c", "two", "two_1"}


def test_a_missing_file_is_named(tmp_path):
    (tmp_path / "docs").mkdir()
    for name in site_pages.ROOT_PAGES:
        (tmp_path / name).write_text("# x\n")
    for folder in ("functional", "training"):
        (tmp_path / "pl_grouprl" / folder).mkdir(parents=True)
    for name in ("__init__.py", "functional/__init__.py", "training/__init__.py"):
        (tmp_path / "pl_grouprl" / name).write_text('"""x."""\n')
    (tmp_path / "docs" / "a.md").write_text("[b](../missing.py)\n")
    with pytest.raises(FileNotFoundError, match=r"missing\.py"):
        site_pages.site_pages(tmp_path)


def test_the_reference_has_the_public_names():
    names = public_names()
    assert "pl_grouprl.algorithms.GRPO" in names["pl_grouprl.algorithms"]
    assert "pl_grouprl.functional.advantages.opo_advantages" in names["pl_grouprl.functional.advantages"]
    assert "pl_grouprl.functional.validation.best_at_k" in names["pl_grouprl.functional"]
    assert "pl_grouprl.types.SamplingConfig" in names["pl_grouprl.types"]
    training = {"objective.LossSums", "micro_batches.MicroBatch", "buffer.RolloutBuffer", "run.PlainRun"}
    assert {f"pl_grouprl.training.{name}" for name in training} <= {*names["pl_grouprl.training"]}
    for members in names.values():
        assert not any(member.rpartition(".")[2].startswith("_") for member in members)


def test_lists_begin_after_a_blank_line(site):
    """GitHub shows such a list as one; the site would show a paragraph."""
    for page, text in site[0].items():
        lines = re.sub(r"^(```|~~~).*?^\1$", "", text, flags=re.MULTILINE | re.DOTALL).splitlines()
        for before, line in pairwise(lines):
            if re.match(r"([-*]|1\.) ", line):
                assert not before.strip() or re.match(r"([-*]|\d+\.) |\s", before), f"{page}: {before!r}"


def test_the_command_is_strict_and_installs_what_the_extra_names():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "mkdocs build --strict" in makefile
    extra = re.search(r"^docs = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)[1]
    for requirement in re.findall(r'"([^"]+)"', extra):
        assert f"'{requirement}'" in makefile


def test_the_map_for_language_models_has_a_sentence_for_each_page(site):
    sections = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), yaml.BaseLoader)["nav"]
    text = site_pages.llms_txt(site[0], "What it is", sections)
    assert text.startswith(
        "# pl_grouprl\n\n> What it is\n\n## Start\n\n- [Overview](index.html): PyTorch Lightning modules"
    )
    entries = re.findall(r"^- \[.+\]\((\S+)\): (.+\.)$", text, re.MULTILINE)
    listed = [page for page, _ in entries]
    assert listed == [p.replace(".md", ".html") for p in navigation() if not p.startswith("reference/pl_grouprl")]
