"""The notebooks have the outputs of a run, compile, import what exists, and are listed in the docs."""

import ast
import importlib.util
import json
import re
import sys
from pathlib import Path

import nbformat
import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

from run_notebooks import code_cells, comparable, run

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))

each_notebook = pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)


def cells(notebook, kind):
    return [cell for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == kind]


def missing_imports(code):
    """The modules and names that the code imports and that do not exist."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if importlib.util.find_spec(alias.name) is None:
                    yield alias.name
        elif isinstance(node, ast.ImportFrom):
            if node.module.partition(".")[0] == "IPython":  # comes with Jupyter
                continue
            module = importlib.import_module(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names if not hasattr(module, alias.name))


@each_notebook
def test_code_compiles_and_imports_resolve(notebook):
    sources = [
        "".join(cell["source"]).replace("    %pip install -q pl-grouprl", "    ...") for cell in cells(notebook, "code")
    ]
    for number, source in enumerate(sources):
        compile(source, f"{notebook.name}, code cell {number}", "exec")
    assert not list(missing_imports("\n".join(sources)))


def test_imports_that_do_not_exist_are_found():
    code = "import no_such_module\nfrom pl_grouprl import GRPO, NoSuchName\nfrom IPython.display import Image\n"
    assert list(missing_imports(code)) == ["no_such_module", "pl_grouprl.NoSuchName"]


@each_notebook
def test_outputs_are_those_of_one_run_and_the_last_section_is_about_gpus(notebook):
    assert notebook.stat().st_size < 300_000
    code = cells(notebook, "code")
    assert [cell["execution_count"] for cell in code] == [*range(1, len(code) + 1)]  # `tools/run_notebooks.py`
    outputs = [output for cell in code for output in cell["outputs"]]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    text = json.dumps([output.get("text", "") for output in outputs])
    assert not re.search(r"/(tmp|home|work|root|Users)/", text)
    headings = [line for cell in cells(notebook, "markdown") for line in cell["source"] if line.startswith("## ")]
    assert headings[-1].strip() == "## On a GPU"


def test_numbers_that_are_measured_are_not_compared():
    def compared(text, *tags):
        output = nbformat.v4.new_output("stream", text=text)
        return comparable(nbformat.v4.new_code_cell(outputs=[output], metadata={"tags": list(tags)}))

    assert compared("0.5 s") != compared("10.25 s")
    assert compared("0.5 s", "measured") == compared("10.25 s", "measured") != compared("0.5 m", "measured")
    assert compared("seven", "trained") == compared("seve", "trained")


def test_the_page_lists_all_in_order():
    page = (ROOT / "docs" / "first_run.md").read_text(encoding="utf-8")
    places = [page.find(f"(../examples/notebooks/{notebook.name})") for notebook in NOTEBOOKS]
    assert len(places) == 5
    assert places == sorted(places)
    assert -1 not in places


@pytest.mark.slow
@each_notebook
def test_another_run_has_the_same_outputs(notebook, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    stored = nbformat.read(notebook, as_version=4)
    for cell, again in zip(code_cells(stored), code_cells(run(notebook)), strict=True):
        assert comparable(cell) == comparable(again), cell.source
