"""Names and file paths of reward functions, and their form in YAML."""

import functools
import pickle

import pytest
from helpers.rewards import group_of
from jsonargparse import ArgumentParser

from pl_grouprl.rewards import ExactMatch, FunctionFromFile, RewardFunction, Weighted, apply_rewards, prepare_rewards
from pl_grouprl.rewards.base import as_weighted, reward_name

SOURCE = """
def score(data_source, solution_str, ground_truth, penalty=0):
    return len(solution_str) / 2 - penalty

class A: pass
constant = 3
"""


@pytest.fixture
def reward_file(tmp_path):
    (tmp_path / "my_reward.py").write_text(SOURCE)
    return str(tmp_path / "my_reward.py")


def test_names():
    assert reward_name(reward_name) == reward_name(functools.partial(reward_name, 1)) == "reward_name"
    named = as_weighted([ExactMatch(), Weighted(ExactMatch(), name="again"), lambda completions: []])
    assert [item.name for item in named] == ["ExactMatch", "again", "reward_3"]
    with pytest.raises(ValueError, match="functions named 'ExactMatch'"):
        as_weighted([ExactMatch(), ExactMatch()])


@pytest.mark.parametrize(
    ("options", "reward"), [({"name": "score"}, 1.5), ({"name": "score", "kwargs": {"penalty": 0.5}}, 1.0)]
)
def test_a_function_from_a_file(reward_file, options, reward):
    function = FunctionFromFile(reward_file, **options)
    assert apply_rewards([group_of("abc")], function)["rewards/score/mean"] == reward
    assert pickle.loads(pickle.dumps(function))("", "abc", "") == reward
    assert function.run_options().get("kwargs") == options.get("kwargs")


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"path": "nothing.py"}, FileNotFoundError),
        ({"name": "absent"}, ValueError),
        ({"name": "constant"}, TypeError),
        ({"name": "A", "kwargs": {"penalty": 0.5}}, TypeError),
        ({"kwargs": {"penalt": 0.5}}, TypeError),
    ],
)
def test_what_is_no_function_of_a_file(reward_file, options, error):
    with pytest.raises(error):
        prepare_rewards(FunctionFromFile(**{"path": reward_file, "name": "score"} | options))


def test_what_is_no_reward_function():
    with pytest.raises(ValueError, match="'ExactMatch' has the signature"):
        prepare_rewards(ExactMatch)
    with pytest.raises(TypeError, match="callable"):
        prepare_rewards([3])


class Trainer:
    def __init__(self, rewards: list[Weighted | RewardFunction] | RewardFunction):
        self.rewards = rewards


PARTS = "pl_grouprl.rewards."
FROM_FILE = {"class_path": PARTS + "FunctionFromFile", "init_args": {"path": "FILE", "name": "score"}}


@pytest.mark.parametrize(
    "rewards",
    [
        "pl_grouprl.rewards.answers.extract_number",
        {"class_path": PARTS + "ExactMatch", "init_args": {"ignore_case": True}},
        [{"class_path": PARTS + "ExactMatch"}, "pl_grouprl.rewards.answers.extract_number"],
        [{"function": {"class_path": PARTS + "NumericAnswer"}, "weight": 0.5, "name": "numeric"}],
        [{"function": FROM_FILE, "weight": 2.0}],
    ],
)
def test_yaml_round_trip(rewards, reward_file):
    FROM_FILE["init_args"]["path"] = reward_file
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(Trainer, "model")
    dumped = parser.dump(parser.parse_object({"model": {"rewards": rewards}}))
    again = parser.parse_string(dumped)
    assert parser.dump(again) == dumped
    made = as_weighted(parser.instantiate(again).model.rewards)
    if isinstance(rewards, list) and isinstance(rewards[0], dict):
        assert made[0].weight == rewards[0].get("weight", 1.0)
