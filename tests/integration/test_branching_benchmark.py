"""The comparison of branched with independent episodes: its noise by hand, and the command in the small."""

import json

import pytest
import torch
from helpers.small_lookup import SMALL_LOOKUP


@pytest.fixture
def branching(load):
    return load("branching")


def test_noise_by_hand(branching):
    # Mean (1, 1), covariance diag(0, 2): trace 2; squared norm of the mean 2, less 2 / 2 that is noise.
    gradients_KD = torch.tensor([[1.0, 0.0], [1.0, 2.0]])
    assert branching.noise(gradients_KD @ gradients_KD.T) == pytest.approx(2.0)


def test_noise_of_many_draws_and_its_error(branching):
    generator = torch.Generator().manual_seed(0)
    gradients_KD = 1 + 2 * torch.randn(400, 50, generator=generator, dtype=torch.float64)  # trace 200, norm 50
    noise, error = branching.noise_with_error(gradients_KD @ gradients_KD.T)
    assert abs(noise - 4) < 4 * error < 1


def test_a_curve_s_mean_over_tokens(branching):
    curve = [{"tokens": 0, "reward": 0.0}, {"tokens": 10, "reward": 1.0}, {"tokens": 40, "reward": 1.0}]
    assert branching.area(curve, 40) == pytest.approx((5 + 30) / 40)
    assert branching.area(curve, 20) == pytest.approx((5 + 10) / 20)


@pytest.mark.slow
def test_the_command_in_the_small(branching, tmp_path):
    (tmp_path / "small.yaml").write_text(SMALL_LOOKUP.format(folder=tmp_path))
    (tmp_path / "entropy.yaml").write_text("model: {init_args: {entropy_coef: 0.01}}")  # a gradient without a reward
    told = ["--seeds", "0", "--steps", "2", "--every", "1", "--gradients", "3", "--output", str(tmp_path / "out")]
    told += ["--config", str(tmp_path / "small.yaml"), str(tmp_path / "entropy.yaml")]
    content = branching.main(told)
    assert [(row["part"], row["arm"]) for row in content["rows"]] == [
        ("gradients", "tree"), ("gradients", "grpo"), ("training", "tree"), ("training", "grpo"),
    ]  # fmt: skip
    tree, grpo = (run["curve"] for run in content["runs"] if run["part"] == "training")
    assert tree[0] == grpo[0]  # the same policy, validated with the same random numbers
    assert [at["step"] for at in tree] == [0, 1, 2]
    assert tree[1]["tokens"] < tree[2]["tokens"]
    assert content["rows"][1]["at equal tokens"] == 1
    assert json.loads((tmp_path / "out.json").read_text())["rows"] == content["rows"]
    assert (tmp_path / "out.png").is_file()
    assert branching.main(told)["runs"] == content["runs"]  # read, not run again
    assert all(run["conditions"]["started"] for run in content["runs"])
    with pytest.raises(SystemExit, match="from a run with other options"):
        branching.main([*told, "--gradients", "4"])
