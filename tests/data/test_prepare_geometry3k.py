"""The preparation script, on made rows, up to the tokens that the model of its configuration would read."""

import importlib.util
from pathlib import Path

import pyarrow as pa
import pytest
from helpers.tiny_vision import tiny_image, tiny_processor
from pyarrow import parquet

from pl_grouprl.data import PromptDataModule


@pytest.fixture(scope="module")
def script():
    path = Path(__file__).parents[2] / "examples" / "prepare_geometry3k.py"
    spec = importlib.util.spec_from_file_location("prepare_geometry3k", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def made_rows(folder):
    tiny_image(0).save(folder / "image.png")
    images = [{"bytes": (folder / "image.png").read_bytes(), "path": None}]
    answers = ("2,000", "4 \\sqrt{3}", "1.5")
    return [{"images": images, "problem": f"<image>find {i}", "answer": a} for i, a in enumerate(answers)]


def test_rows_have_the_shape_of_verl_and_a_number(script, tmp_path):
    rows = made_rows(tmp_path)
    first, second = script.convert_rows(rows, "train", instruction="think.")
    assert first == {
        "data_source": "hiyouga/geometry3k",
        "prompt": [{"role": "user", "content": "<image>find 0\n\nthink."}],
        "images": rows[0]["images"],
        "reward_model": {"style": "rule", "ground_truth": "2000"},
        "extra_info": {"split": "train", "index": 0},
    }
    assert second["extra_info"]["index"] == 2
    with pytest.raises(ValueError, match=r"test, row 0: no column \['answer', 'images'\]"):
        script.convert_rows([{"problem": "?"}], "test")


def test_files_serve_the_data_module(script, tmp_path, capsys):
    for split in ("train", "test"):
        parquet.write_table(pa.Table.from_pylist(made_rows(tmp_path)), tmp_path / f"{split}.parquet")
    script.main(["--input", str(tmp_path), "--output", str(tmp_path / "out")])
    assert "train.parquet: 2 of 3 rows" in capsys.readouterr().out
    processor = tiny_processor("qwen2_5_vl")
    data = PromptDataModule(
        str(tmp_path / "out" / "train.parquet"), batch_size=1, tokenizer=processor.tokenizer, processor=processor
    )
    data.setup("fit")
    assert [p.open().media["image_grid_thw"].tolist() for p in data.prompts["train"]] == [[[1, 4, 4]]] * 2


def test_the_input_is_never_overwritten(script, tmp_path):
    for split in ("train", "test"):
        parquet.write_table(pa.Table.from_pylist(made_rows(tmp_path)), tmp_path / f"{split}.parquet")
    before = (tmp_path / "train.parquet").read_bytes()
    with pytest.raises(SystemExit, match=r"--output: .*train\.parquet exists and is left untouched"):
        script.main(["--input", str(tmp_path), "--output", str(tmp_path)])
    assert (tmp_path / "train.parquet").read_bytes() == before
