import importlib.util
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_drop_in_callback_changes_no_loss(capsys):
    result = load("drop_in_callback").main(prompt_tokens=48, rollouts=4, new_tokens=8, steps=3, hidden=32, layers=2)
    assert result["shared_losses"] == pytest.approx(result["plain_losses"], abs=1e-5)
    assert len(result["plain_losses"]) == len(result["shared_seconds"]) == 3
    source = (EXAMPLES / "drop_in_callback.py").read_text()  # the module knows nothing of this package
    assert "pl_grouprl" not in source[source.index("import statistics") : source.index("def main")]


def test_training_loop_has_the_same_losses_inside_the_context():
    repeated, shared = load("shared_prefix_in_a_training_loop").main(
        prompts=2, rollouts=3, prompt_tokens=40, new_tokens=6, steps=3, hidden=32
    )
    assert shared == pytest.approx(repeated, abs=1e-5)


def test_subclass_of_grpo_trains_and_learns(tmp_path):
    rewards = load("subclass_grpo").main(steps=15, prompt_tokens=20, num_generations=6, cache_dir=str(tmp_path))
    assert len(rewards) == 15
    assert sum(rewards[-3:]) > sum(rewards[:3])


def test_process_rewards_teach_to_count(tmp_path):
    shares = load("process_rewards").main(steps=25, cache_dir=str(tmp_path))
    assert len(shares) == 25
    assert sum(shares[:5]) / 5 < 0.1
    assert sum(shares[-5:]) / 5 > 0.3


def test_steps_of_counting_by_hand():
    example = load("process_rewards")
    ids = [next(token for token, own in example.DIGITS.items() if own == digit) for digit in (0, 1, 3, 4)]
    assert example.steps_right(["19", "18"], [[*ids, 1], [1, ids[1]]]) == [[1, 1, 0, 1, 0], [0, 0]]
    assert example.share_right(["19", "18"], [[*ids, 1], []]) == [0.6, 0]


def test_plain_loop_learns(tmp_path):
    rewards = load("grpo_loop").main(steps=10, num_generations=6, cache_dir=str(tmp_path))
    assert len(rewards) == 10
    assert sum(rewards[-3:]) > sum(rewards[:3])


def test_median_advantages_by_hand():
    from pl_grouprl import Rollout, RolloutGroup

    rewards = [[0.0, 1.0, 0.25], [None, 3.0, 1.0]]  # medians 0.25 and 2
    groups = [RolloutGroup([1], [Rollout([2], reward=reward) for reward in own]) for own in rewards]
    advantages = load("subclass_grpo").MedianGRPO.compute_advantages(None, groups)
    assert advantages.tolist() == [-0.25, 0.75, 0.0, 0.0, 1.0, -1.0]


def test_both_pictures_of_a_response_are_drawn(tmp_path):
    load("draw_a_response").main(tmp_path, steps=2, cache_dir=str(tmp_path / "cache"))
    for name in ("advantages.png", "token_groups.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_poor_graders_pay_as_they_are_said_to():
    graders = load("poor_graders")
    texts = [r"\boxed{two}", "two", "onetwothree", "three"]
    assert graders.boxed(completions=texts, answer=["two"] * 4) == [1.0, 0.0, 0.0, 0.0]
    assert graders.contains(completions=texts, answer=["two"] * 4) == [1.0, 1.0, 1.0, 0.0]
