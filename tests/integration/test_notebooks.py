"""The notebooks are committed without outputs, compile, import what exists, are listed in the docs, and run."""

import ast
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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
    sources = ["".join(cell["source"]) for cell in cells(notebook, "code")]
    for number, source in enumerate(sources):
        compile(source, f"{notebook.name}, code cell {number}", "exec")
    assert not list(missing_imports("\n".join(sources)))


def test_imports_that_do_not_exist_are_found():
    code = "import no_such_module\nfrom pl_grouprl import GRPO, NoSuchName\nfrom IPython.display import Image\n"
    assert list(missing_imports(code)) == ["no_such_module", "pl_grouprl.NoSuchName"]


@each_notebook
def test_no_outputs_are_committed_and_the_last_section_is_about_gpus(notebook):
    for cell in cells(notebook, "code"):
        assert not cell["outputs"], "clear the outputs of all cells"
        assert cell["execution_count"] is None
    headings = [line for cell in cells(notebook, "markdown") for line in cell["source"] if line.startswith("## ")]
    assert headings[-1].strip() == "## On a GPU"


def test_the_page_lists_all_in_order():
    page = (ROOT / "docs" / "notebooks.md").read_text(encoding="utf-8")
    places = [page.find(f"(../examples/notebooks/{notebook.name})") for notebook in NOTEBOOKS]
    assert len(places) == 5
    assert places == sorted(places)
    assert -1 not in places


@pytest.mark.slow
@each_notebook
def test_runs(notebook, tmp_path):
    copy = shutil.copy(notebook, tmp_path)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--nbmake", "--nbmake-timeout=1800", copy]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": ""}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "1 passed" in done.stdout
