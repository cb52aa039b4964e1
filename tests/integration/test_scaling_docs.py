"""What docs/scaling.md says: commands and scripts parse, fragments exist, a sharded checkpoint becomes a policy."""

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from helpers.cli_runs import print_config

import pl_grouprl
from pl_grouprl.rollout.vllm.__main__ import make_parser

ROOT = Path(pl_grouprl.__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```bash\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def commands():
    """Arguments behind `cli.py` of each command of the page, those under torchrun and srun too."""
    lines = [line for line in "\n".join(BLOCKS).replace("\\\n", " ").splitlines() if "cli.py " in line]
    return [shlex.split(line.partition("cli.py ")[2]) for line in lines if "$" not in line]


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


def run_block(block, tmp_path, **environment):
    """Run a block with stand-ins for what a cluster has; returns the arguments of each srun by its list of nodes."""
    stubs = {
        "srun": 'for a; do case $a in --nodelist=*) name=${a#*=};; esac; done; printf "%s\\0" "$@" > "$name"',
        "scontrol": "echo a; echo b; echo c",
        "openssl": "echo secret",
        "curl": "exit 0",
    }
    for name, body in stubs.items():
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    environment |= {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "[a-c]"}
    (tmp_path / "runs").mkdir()
    subprocess.run(["bash", "-euc", f"{block}\nwait"], env=environment, cwd=tmp_path / "runs", check=True)
    return {path.name: path.read_text().split("\0")[:-1] for path in (tmp_path / "runs").iterdir()}


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_the_script_with_servers(tmp_path, capsys):
    (block,) = (block for block in BLOCKS if "pl_grouprl.rollout.vllm" in block)
    steps = run_block(block, tmp_path, SLURM_CPUS_PER_TASK="8")
    assert steps.keys() == {"a,b", "c"}

    trainers = steps["a,b"][steps["a,b"].index("cli.py") + 1 :]
    config = print_config(capsys, *trainers)[0]
    assert config["model"]["init_args"]["engine"]["init_args"]["urls"] == [f"http://c:{8000 + i}" for i in range(8)]
    trainer = config["trainer"]
    assert (trainer["num_nodes"], int(trainer["devices"])) == (2, 8)
    assert trainer["strategy"]["init_args"]["data_parallel_size"] == 16
    assert {"--nodes=2", "--ntasks=16"} <= set(steps["a,b"])

    (tmp_path / "bin" / "python").write_text('#!/bin/bash\necho "$CUDA_VISIBLE_DEVICES" "$@"\n')
    (tmp_path / "bin" / "python").chmod(0o755)
    environment = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "SLURM_LOCALID": "3", "model": "m"}
    (*_, script) = steps["c"]
    said = subprocess.run(["bash", "-euc", script], env=environment, check=True, capture_output=True, text=True).stdout
    gpu, _, _, *options = said.split()
    parsed, further = make_parser().parse_known_args(options)
    assert (gpu, parsed.port, parsed.model, parsed.host) == ("3", 8003, "m", "0.0.0.0")
    assert (parsed.transfer, further) == ("nccl", ["--load-format", "dummy"])


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
    (code,) = re.findall(r"^```py\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert "Qwen/Qwen3-0.6B" in code
    exec(code.replace("Qwen/Qwen3-0.6B", os.fspath(tmp_path / "base")), {"__name__": "scaling"})
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported").state_dict()
    assert exported.keys() == trained.state_dict().keys()
    assert all(torch.equal(value, exported[name]) for name, value in trained.state_dict().items())
