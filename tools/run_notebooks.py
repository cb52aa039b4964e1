"""Runs the notebooks in examples and stores what they print and draw: `python tools/run_notebooks.py [FILE...]`.

Stored outputs are compared by the tests with those of another run: word for word; in a cell tagged `measured` without
its numbers; and in a cell tagged `trained`, whose text depends on rounding, only by their kinds.
"""

from __future__ import annotations

import argparse
import base64
import io
import re
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from PIL import Image

NOTEBOOKS = sorted((Path(__file__).resolve().parents[1] / "examples" / "notebooks").glob("*.ipynb"))
_NUMBER = re.compile(r"\d+(\.\d+)?(e[-+]\d+)?")
_NOISE = re.compile(r"^(\[\d{4}-|.*: \d+/\d+(,|$)).*\n|\x1b\[[\d;]*m", re.MULTILINE)
"""Log lines with a time, progress, and colors of a terminal."""

_WIDEST = 1100
"""Pixels across a stored picture."""


def run(path: Path) -> Any:
    """Run a notebook in a folder of its own and return it with its outputs, as `clean` leaves them."""
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        resources = {"metadata": {"path": folder}}
        NotebookClient(notebook, timeout=3600, resources=resources, record_timing=False).execute()
        clean(notebook, Path(folder))
    return notebook


def clean(notebook: Any, folder: Path) -> None:
    """Remove warnings, progress and paths of this machine from the outputs, and make pictures small."""
    notebook.metadata.language_info = {"name": "python"}
    for cell in code_cells(notebook):
        outputs = []
        for output in cell.outputs:
            if output.get("name") == "stderr":
                continue
            data = output.get("data", {})
            data.pop("text/html", None)  # the same table as in the text
            if "image/png" in data:
                data["image/png"], data["text/plain"], output.metadata = _small(data["image/png"]), "<Figure>", {}
            elif data:
                data["text/plain"] = _NOISE.sub("", data["text/plain"])
            elif outputs and "text" in outputs[-1]:
                outputs[-1].text += output.text
                continue
            outputs.append(output)
        for output in outputs:
            if "text" in output:
                output.text = _NOISE.sub("", output.text.replace(f"{folder.resolve()}/", "")).strip("\n") + "\n"
        cell.outputs = [output for output in outputs if output.get("text") != "\n"]


def code_cells(notebook: Any) -> list[Any]:
    """The cells with code, in order."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def comparable(cell: Any) -> list[Any]:
    """What a cell's outputs must have in common with those of another run."""
    kinds = [sorted(output.get("data", {"text": ""})) for output in cell.outputs]
    tags = cell.metadata.get("tags", ())
    texts = [output.get("text") or output.get("data", {}).get("text/plain", "") for output in cell.outputs]
    if "measured" in tags:
        texts = [re.sub(r" +", " ", _NUMBER.sub("#", text)) for text in texts]
    return [kinds, [] if "trained" in tags else texts]


def _small(png: str) -> str:
    picture = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB")
    picture.thumbnail((_WIDEST, 10 * _WIDEST))
    small = io.BytesIO()
    picture.quantize(128, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(small, format="png", optimize=True)
    return base64.b64encode(small.getvalue()).decode()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Run notebooks and store their outputs.")
    parser.add_argument("notebooks", nargs="*", type=Path, default=NOTEBOOKS)
    for path in parser.parse_args().notebooks:
        nbformat.write(run(path), path)
