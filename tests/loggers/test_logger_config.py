import pytest
import yaml

from pl_grouprl.cli import main


def test_wandb_is_added_to_the_loggers_of_a_configuration(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["fit", "--config", "grpo_pg.yaml", "--config", "logger/wandb_offline.yaml", "--print_config"])
    output = capsys.readouterr()
    assert ended.value.code in (0, None), output.err
    loggers = yaml.safe_load(output.out)["trainer"]["logger"]
    names = [logger["class_path"].rpartition(".")[2] for logger in loggers]
    assert names == ["CSVLogger", "TensorBoardLogger", "WandbLogger"]
    assert loggers[-1]["init_args"]["offline"] is True
