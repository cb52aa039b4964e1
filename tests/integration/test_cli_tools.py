"""Tools and environments in YAML: by import path, with arguments, by a function, several by name."""

from pathlib import Path

import pytest
import yaml

from pl_grouprl.cli import main
from pl_grouprl.training.sampler import Tooling

TOOLS = '''
def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: First.
        b: Second.

    Returns:
        The sum.
    """
    return a + b


class Game:
    def __init__(self, level: int = 3):
        self.level = level

    def reset(self, **row):
        return None

    def get_reward(self):
        return 1.0


def hard_game():
    return Game(7)
'''


class Stop(BaseException):
    """Ends a run once its module has tools."""


@pytest.fixture
def built(tmp_path, monkeypatch):
    """Build the module of a configuration; returns its `Tooling`."""
    (tmp_path / "yaml_tools.py").write_text(TOOLS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    found = []
    with_rewards = Tooling.with_rewards

    def stop(self, rewards):
        found.append((self, with_rewards(self, rewards)))
        raise Stop

    monkeypatch.setattr(Tooling, "with_rewards", stop)

    def build(**options):
        init_args = {"policy": "none", "episodes": {"chat_template": "qwen3"}, **options}
        config = {"model": {"class_path": "pl_grouprl.GRPO", "init_args": init_args}, "data": DATA}
        Path("run.yaml").write_text(yaml.safe_dump(config))
        with pytest.raises(Stop):
            main(["fit", "--config", "run.yaml"])
        return found[-1]

    return build


DATA = {"class_path": "pl_grouprl.PromptDataModule"}


@pytest.mark.parametrize(
    ("factory", "level"),
    [
        ("yaml_tools.Game", 3),
        ({"class_path": "yaml_tools.Game", "init_args": {"level": 5}}, 5),
        ("yaml_tools.hard_game", 7),
    ],
)
def test_an_environment_by_name(built, factory, level):
    episodes, rewards = built(environment_factory=factory)
    (session,) = episodes.runner.begin([{}])
    assert session.environment.level == level
    assert [reward.name for reward in rewards] == ["Game"]
    episodes.close()


def test_tools_and_environments_by_name(built):
    hard = {"class_path": "yaml_tools.Game", "init_args": {"level": 7}}
    factories = {"easy": "yaml_tools.Game", "hard": hard}
    episodes, _ = built(tools=["yaml_tools.add"], environment_factory=factories)
    sessions = episodes.runner.begin([{"environment": "hard"}, {"environment": "easy"}])
    assert [session.environment.level for session in sessions] == [7, 3]
    assert [schema["function"]["name"] for schema in episodes.runner.schemas("easy")] == ["add"]
    episodes.close()
