"""The configurations in configs/base, stacked under one with a policy, a reward and data."""

import pytest
import yaml
from helpers.cli_runs import ROOT, config_of

OWN = """
model:
  init_args:
    policy: path/to/a/model
    rewards: [{class_path: pl_grouprl.rewards.ExactMatch}]
data:
  init_args: {train: train.jsonl}
"""
NAMES = {"grpo": "pl_grouprl.GRPO", "ppo": "pl_grouprl.PPO", "group_ppo": "pl_grouprl.GroupPPO"}


@pytest.mark.parametrize(("name", "algorithm"), NAMES.items())
def test_a_model_a_reward_and_data_complete_a_base(name, algorithm, tmp_path, capsys):
    (tmp_path / "mine.yaml").write_text(OWN)
    config = config_of(capsys, f"base/{name}.yaml", tmp_path / "mine.yaml")
    assert config["model"]["class_path"] == algorithm
    assert config["model"]["init_args"]["policy"] == "path/to/a/model"
    assert config["model"]["init_args"]["num_generations"] == 8  # the class's own default
    assert config["data"]["init_args"]["train"] == "train.jsonl"
    text = (ROOT / "configs" / "base" / f"{name}.yaml").read_text()
    assert "demo" not in yaml.dump(yaml.safe_load(text))


def test_the_callbacks_are_those_of_python():
    from pl_grouprl import default_callbacks

    named = yaml.safe_load((ROOT / "configs" / "base" / "grpo.yaml").read_text())["trainer"]["callbacks"]
    assert [own["class_path"].rsplit(".")[-1] for own in named] == [type(own).__name__ for own in default_callbacks()]
