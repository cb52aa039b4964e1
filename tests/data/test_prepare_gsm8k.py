"""The preparation script, on made rows, up to the reward of what it writes."""

import importlib.util
import json
from pathlib import Path

import pytest

from pl_grouprl.data.encoding import EncodingOptions, encode_rows
from pl_grouprl.data.rows import read_source
from pl_grouprl.rewards import NumericAnswer, apply_rewards
from pl_grouprl.types import Rollout, RolloutGroup

ROWS = [
    {"question": "Two apples and three?", "answer": "2+3=<<2+3=5>>5\n#### 5"},
    {"question": "A thousand pairs?", "answer": "#### 2,000"},
]


@pytest.fixture(scope="module")
def script():
    path = Path(__file__).parents[2] / "examples" / "prepare_gsm8k.py"
    spec = importlib.util.spec_from_file_location("prepare_gsm8k", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_rows_have_the_shape_of_verl(script):
    first, second = script.convert_rows(ROWS, "train", instruction="Think.")
    assert first == {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "Two apples and three?\n\nThink."}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "5"},
        "extra_info": {"split": "train", "index": 0, **ROWS[0]},
    }
    assert second["reward_model"]["ground_truth"] == "2000"


def test_bad_rows_are_named(script):
    with pytest.raises(ValueError, match=r"test, row 0: no column \['answer'\]"):
        script.convert_rows([{"question": "?"}], "test")
    with pytest.raises(ValueError, match="test, row 1: the answer does not end in"):
        script.convert_rows([ROWS[0], {"question": "?", "answer": "five"}], "test")


def test_files_serve_the_data_module_and_the_reward(script, tmp_path, capsys):
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS))
    script.main(["--input", str(tmp_path), "--output", str(tmp_path / "out")])
    assert "train.parquet: 2 rows" in capsys.readouterr().out

    class Tokenizer:
        chat_template = "any"

        def apply_chat_template(self, messages, **kwargs):
            return messages[0]["content"]

        def __call__(self, texts, add_special_tokens):
            return {"input_ids": [[len(text)] for text in texts]}

    rows = read_source(str(tmp_path / "out" / "train.parquet"), "train")
    prompts = encode_rows(rows, Tokenizer(), EncodingOptions())
    groups = [
        RolloutGroup(p.token_ids, [Rollout([1], text=t) for t in texts], columns=p.columns, prompt=p.prompt)
        for p, texts in zip(prompts, [("#### 5", "5"), ("#### 2,000", "#### 200")], strict=True)
    ]
    apply_rewards(groups, NumericAnswer())
    assert [rollout.reward for group in groups for rollout in group.rollouts] == [1.0, 0.0, 1.0, 0.0]


def test_files_that_are_there_are_untouched(script, tmp_path):
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps(ROWS[0]))
    (tmp_path / "test.parquet").write_text("mine")
    with pytest.raises(SystemExit, match=r"--output: .*test\.parquet exists and is left untouched; move it away"):
        script.main(["--input", str(tmp_path), "--output", str(tmp_path)])
    assert (tmp_path / "test.parquet").read_text() == "mine"
    assert not (tmp_path / "train.parquet").exists()
