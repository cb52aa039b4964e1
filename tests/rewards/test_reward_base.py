"""Names, weights and file paths of reward functions, and their form in YAML."""

import functools
import pickle

import pytest
from jsonargparse import ArgumentParser

from pl_grouprl.rewards import ExactMatch, FunctionFromFile, RewardFunction, Weighted, apply_rewards, prepare_rewards
from pl_grouprl.rewards.base import as_weighted, reward_name
from pl_grouprl.types import Rollout, RolloutGroup


@pytest.fixture
def reward_file(tmp_path):
    file = tmp_path / "my_reward.py"
    file.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return len(solution_str) / 2\n"
        "constant = 3\n"
    )
    return file


def test_names():
    assert reward_name(reward_name) == "reward_name"
    assert reward_name(functools.partial(reward_name, 1)) == "reward_name"
    assert reward_name(ExactMatch()) == "ExactMatch"
    assert [item.name for item in as_weighted([ExactMatch(), Weighted(ExactMatch(), name="again")])] == [
        "ExactMatch",
        "again",
    ]


def test_what_is_no_reward_function():
    with pytest.raises(ValueError, match="rewards has weight 0"):
        prepare_rewards([])
    with pytest.raises(ValueError, match="'ExactMatch' has the signature"):
        prepare_rewards(ExactMatch)
    with pytest.raises(TypeError, match="callable"):
        prepare_rewards([3])


def test_equal_names_are_refused():
    with pytest.raises(ValueError, match="functions named 'ExactMatch'"):
        as_weighted([ExactMatch(), ExactMatch()])


def test_function_from_file(reward_file):
    function = FunctionFromFile(str(reward_file))
    groups = [RolloutGroup([1], [Rollout([5], text="abc")], columns={"answer": "x"})]
    metrics = apply_rewards(groups, function)
    assert groups[0].rollouts[0].reward == 1.5
    assert metrics["rewards/compute_score/mean"] == 1.5
    copied = pickle.loads(pickle.dumps(function))
    assert copied("", "ab", "") == 1.0


def test_options_of_a_function_from_a_file(tmp_path):
    file = tmp_path / "scored.py"
    file.write_text(
        "def score(data_source, solution_str, ground_truth, penalty=0): return 1 - penalty\nclass A: pass\n"
    )
    function = FunctionFromFile(str(file), "score", {"penalty": 0.5})
    groups = [RolloutGroup([1], [Rollout([5], text="abc")], columns={"answer": "x"})]
    metrics = apply_rewards(groups, function)
    assert metrics["rewards/score/mean"] == 0.5
    assert pickle.loads(pickle.dumps(function))("", "ab", "") == 0.5
    assert function.run_options()["kwargs"] == {"penalty": 0.5}
    for name, kwargs in (("A", {"penalty": 0.5}), ("score", {"penalt": 0.5})):
        with pytest.raises(ValueError, match=r"signature|arguments"):
            prepare_rewards(FunctionFromFile(str(file), name, kwargs))


def test_function_from_file_errors(reward_file, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nothing\.py"):
        FunctionFromFile(str(tmp_path / "nothing.py"))
    with pytest.raises(AttributeError, match="absent"):
        FunctionFromFile(str(reward_file), "absent")
    with pytest.raises(TypeError, match="callable"):
        prepare_rewards(FunctionFromFile(str(reward_file), "constant"))


class Trainer:
    def __init__(self, rewards: list[Weighted | RewardFunction] | RewardFunction):
        self.rewards = rewards


PARTS = "pl_grouprl.rewards."


@pytest.mark.parametrize(
    "rewards",
    [
        "pl_grouprl.rewards.answers.extract_number",
        {"class_path": PARTS + "ExactMatch", "init_args": {"ignore_case": True}},
        [{"class_path": PARTS + "ExactMatch"}, {"class_path": PARTS + "LeadingCorrectCharacters"}],
        [{"function": {"class_path": PARTS + "NumericAnswer"}, "weight": 0.5, "name": "numeric"}],
        ["pl_grouprl.rewards.answers.extract_number", {"class_path": PARTS + "ExactMatch"}],
    ],
)
def test_yaml_round_trip(rewards):
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(Trainer, "model")
    dumped = parser.dump(parser.parse_object({"model": {"rewards": rewards}}))
    again = parser.parse_string(dumped)
    assert parser.dump(again) == dumped
    made = parser.instantiate(again).model.rewards
    assert as_weighted(made)


def test_yaml_function_from_file(reward_file):
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(Trainer, "model")
    entry = {"class_path": PARTS + "FunctionFromFile", "init_args": {"path": str(reward_file)}}
    config = parser.parse_object({"model": {"rewards": [{"function": entry, "weight": 2.0}]}})
    made = parser.instantiate(parser.parse_string(parser.dump(config))).model.rewards
    assert (made[0].weight, made[0].function.path) == (2.0, str(reward_file))
