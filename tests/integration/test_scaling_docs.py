"""What docs/scaling.md says: its commands parse, its fragments exist, and a sharded checkpoint becomes a policy."""

import os
import re
import shlex
from pathlib import Path

import pytest
import torch
from helpers.cli_runs import print_config

import pl_grouprl

ROOT = Path(pl_grouprl.__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")


def commands():
    """Arguments behind `cli.py` of each command of the page, those under torchrun and srun too."""
    text = "\n".join(re.findall(r"^```bash\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)).replace("\\\n", " ")
    return [shlex.split(line.partition("cli.py ")[2]) for line in text.splitlines() if "cli.py " in line]


def test_the_page_has_commands_for_one_node_and_several():
    assert len(commands()) == 8
    assert sum("--trainer.num_nodes" in command for command in commands()) == 3


@pytest.mark.parametrize("command", commands(), ids=lambda command: " ".join(command[2:])[:60])
def test_commands_parse_and_their_numbers_agree(command, capsys):
    trainer = print_config(capsys, *command)[0]["trainer"]
    if isinstance(trainer["strategy"], dict):
        size = trainer["strategy"]["init_args"]["data_parallel_size"]
        assert size == int(trainer["devices"]) * trainer["num_nodes"]


def test_tasks_of_slurm_are_the_processes():
    nodes, tasks = (int(re.search(rf"#SBATCH --{name}=(\d+)", PAGE)[1]) for name in ("nodes", "ntasks-per-node"))
    command = commands()[-2]  # the last one is about sequence parallelism
    assert f"srun python cli.py {' '.join(command[:5])}" in PAGE
    options = dict(zip(command[1::2], command[2::2], strict=True))
    assert (options["--trainer.num_nodes"], options["--trainer.devices"]) == (str(nodes), str(tasks))


def test_every_fragment_has_a_line():
    fragments = {path.name for path in (ROOT / "configs" / "strategy").glob("*.yaml")}
    assert set(re.findall(r"^\| `strategy/(\S+)` \|", PAGE, re.MULTILINE)) == fragments


@pytest.mark.parametrize("key", ["state_dict", "model"])
def test_a_sharded_checkpoint_becomes_a_policy(key, tmp_path, monkeypatch):
    from torch.distributed import checkpoint
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    trained = LlamaForCausalLM(config)
    monkeypatch.chdir(tmp_path)
    weights = {f"policy.{name}": value for name, value in trained.state_dict().items()}
    checkpoint.save(
        {key: weights | {"critic.head": torch.ones(2)}}, checkpoint_id="checkpoints/last.ckpt", no_dist=True
    )
    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert "Qwen/Qwen3-0.6B" in code
    exec(code.replace("Qwen/Qwen3-0.6B", os.fspath(tmp_path / "base")), {"__name__": "scaling"})
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported").state_dict()
    assert exported.keys() == trained.state_dict().keys()
    assert all(torch.equal(value, exported[name]) for name, value in trained.state_dict().items())
