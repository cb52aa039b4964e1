"""The fragments in configs/strategy: they parse, and make the strategies that they say."""

import pytest
import torch
import yaml
from helpers.cli_runs import ROOT, config_of, print_config
from helpers.sweeps import sweep
from jsonargparse import ArgumentParser
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.strategies import Strategy

from pl_grouprl.cli import main

FRAGMENTS = sorted(path.stem for path in (ROOT / "configs" / "strategy").glob("*.yaml"))
ON_GPU = [name for name in FRAGMENTS if name == "fsdp" or name.startswith("deepspeed")]


def trainer_options(name):
    return yaml.safe_load((ROOT / "configs" / "strategy" / f"{name}.yaml").read_text())["trainer"]


def make_strategy(name):
    if name.startswith("deepspeed"):
        pytest.importorskip("deepspeed")
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(Strategy, "strategy")
    return parser.instantiate_classes(parser.parse_object({"strategy": trainer_options(name)["strategy"]})).strategy


def test_there_is_a_fragment_for_each_strategy():
    assert FRAGMENTS == ["ddp", "deepspeed_z2", "deepspeed_z3", "deepspeed_z3_offload", "fsdp", "fsdp2"]


@pytest.mark.parametrize("name", sweep(FRAGMENTS, quick=["fsdp2", "deepspeed_z3_offload"]))
def test_a_fragment_adds_itself_to_a_run_and_the_printed_config_is_one(name, capsys, tmp_path):
    config, text = print_config(capsys, "fit", "--config", "grpo_pg.yaml", "--config", f"strategy/{name}.yaml")
    trainer, fragment = config["trainer"], trainer_options(name)
    assert trainer["devices"] == 2
    assert trainer["accelerator"] == ("gpu" if name in ON_GPU else "cpu")  # grpo_pg.yaml says cpu
    if isinstance(fragment["strategy"], str):
        assert trainer["strategy"] == fragment["strategy"]
    else:
        assert trainer["strategy"]["class_path"] == fragment["strategy"]["class_path"]
        assert trainer["strategy"]["init_args"].items() >= fragment["strategy"]["init_args"].items()
    (tmp_path / "whole.yaml").write_text(text)
    assert config_of(capsys, tmp_path / "whole.yaml") == config


def test_sizes_are_changed_on_the_command_line(capsys):
    more = ["--trainer.devices", "8", "--trainer.strategy.init_args.data_parallel_size", "32"]
    more += ["--trainer.num_nodes", "4"]
    files = ["--config", "grpo_pg.yaml", "--config", "strategy/fsdp2.yaml"]
    trainer = print_config(capsys, "fit", *files, *more)[0]["trainer"]
    assert trainer["strategy"]["init_args"]["data_parallel_size"] == 32
    assert (trainer["devices"], trainer["num_nodes"]) == ("8", 4)


def test_fsdp2_shards_over_all_processes_and_fsdp_writes_sharded_checkpoints():
    strategy = make_strategy("fsdp2")
    # Lightning's "auto" would be one data-parallel rank, and nothing sharded.
    assert strategy._data_parallel_size == trainer_options("fsdp2")["devices"] == 2
    assert strategy._tensor_parallel_size == 1
    assert strategy._save_distributed_checkpoint
    assert make_strategy("fsdp")._state_dict_type == "sharded"


@pytest.mark.parametrize(
    ("name", "stage", "offloads"),
    [("deepspeed_z2", 2, False), ("deepspeed_z3", 3, False), ("deepspeed_z3_offload", 3, True)],
)
def test_deepspeed_has_the_stage_of_its_name(name, stage, offloads):
    config = make_strategy(name).config
    assert config["zero_optimization"]["stage"] == stage
    assert config["zero_allow_untested_optimizer"]
    devices = [
        config["zero_optimization"].get(part, {}).get("device") for part in ("offload_optimizer", "offload_param")
    ]
    assert devices == (["cpu", "cpu"] if offloads else [None, None])


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize("name", sweep(ON_GPU, quick=["fsdp", "deepspeed_z3"]))
def test_without_a_gpu_lightning_says_so(name):
    if name.startswith("deepspeed"):
        pytest.importorskip("deepspeed")
    with pytest.raises(MisconfigurationException, match="gpu"):
        main(["fit", "--config", "grpo_pg.yaml", "--config", f"strategy/{name}.yaml"])
