"""The script of docs/coming_from_trl.md: in Python and in YAML it trains the same policy, also after a resume."""

import json
import sys
from pathlib import Path

import pytest
from helpers.documents import DOCS, blocks
from lightning.pytorch import Callback
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from pl_grouprl.cli import main
from pl_grouprl.demo.tasks import digit_tokenizer

PAGE = "coming_from_trl.md"
MODEL = "Qwen/Qwen3-0.6B"


def block(language: str, containing: str) -> str:
    """The block of the page with some text, made small: 4 steps of short rollouts, each validated and saved."""
    (code,) = [code for _, code in blocks(PAGE, language) if containing in code]
    for large, small in (("500", "4"), ("=100", "=1"), (" 100\n", " 1\n"), ("256", "4")):
        code = code.replace(large, small)
    return code


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with the rewards, the data, and a small model in the place of the large one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)
    Path("my_rewards.py").write_text(block("py", "# my_rewards.py"))
    for name, number in (("train", 16), ("val", 2)):
        rows = [{"prompt": f"{row:08}", "answer": str(row % 10)} for row in range(number)]
        Path(f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    tokenizer = digit_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=512, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(MODEL)
    tokenizer.save_pretrained(MODEL)
    return tmp_path


class StopAfterTwo(Callback):
    def on_train_batch_end(self, trainer, *_):
        trainer.should_stop = trainer.global_step == 2


def test_python_and_yaml_train_the_same_adapter(folder):
    script = block("python", "GRPO(")
    stopped = script.replace("callbacks=[", "callbacks=[StopAfterTwo(), ")
    exec(stopped, {"StopAfterTwo": StopAfterTwo})
    ended = {}
    exec(script.replace("fit(module, data)", 'fit(module, data, ckpt_path="last")'), ended)
    assert ended["trainer"].global_step == 4
    assert "val/reward" in ended["trainer"].callback_metrics

    Path("my_run.yaml").write_text(block("yaml", "my_rewards"))
    (command,) = [line for line in (DOCS / PAGE).read_text().splitlines() if line.startswith("    python cli.py fit")]
    main(command.split("#")[0].split()[2:])

    runs = [Path("runs/grpo") / f"version_{number}" for number in range(3)]
    first, python, yaml = [load_file(run / "adapter" / "adapter_model.safetensors") for run in runs]
    assert all(python[name].equal(yaml[name]) for name in python.keys() | yaml.keys())
    assert any(not first[name].equal(python[name]) for name in python)
    alone = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(MODEL), runs[1] / "adapter"
    ).merge_and_unload()
    merged = AutoModelForCausalLM.from_pretrained(runs[1] / "policy").state_dict()
    for name, weight in alone.state_dict().items():
        assert weight.allclose(merged[name], atol=1e-6), name


def test_the_script_of_trl(folder):
    pytest.importorskip("trl")
    code = block("py", "GRPOTrainer(")
    exec(code.replace('output_dir="runs"', 'output_dir="runs", use_cpu=True, bf16=False, report_to="none"'), {})
    assert (folder / "runs" / "adapter" / "adapter_model.safetensors").is_file()
