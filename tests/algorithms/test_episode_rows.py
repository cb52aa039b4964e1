"""Episodes of two rows train exactly as the same tokens in one rollout: every algorithm, budget, and two ranks."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from helpers.scripts import run_script

from pl_grouprl.algorithms import GRPO
from pl_grouprl.callbacks import CompletionsTable

SCRIPT = Path(__file__).with_name("episode_rows_ranks.py")
sys.path.insert(0, str(SCRIPT.parent))

from episode_rows_ranks import ALL_CASES, RANK_CASES, RowsEngine, step  # noqa: E402

SAME_METRICS = (
    "loss", "reward", "reward_std", "frac_reward_zero_std", "completions/mean_length", "completions/min_length",
    "completions/max_length", "completions/clipped_ratio", "grad_norm", "rewards/rewards/mean", "rewards/rewards/std",
    "entropy", "kl", "kl_coef", "value/loss", "value/explained_variance",
)  # fmt: skip
QUICK = ("grpo process supervision", "ppo seq-mean-token-mean")
WHOLE: dict = {}


@pytest.fixture
def whole(tmp_path):
    """The step in which every episode is one rollout."""

    def compute(case):
        if case not in WHOLE:
            WHOLE[case] = step(case, rows=False, folder=tmp_path)[0]
        return WHOLE[case]

    return compute


def compare(found, expected, tolerance=1e-7):
    assert found.keys() == expected.keys()
    names = [name for name in expected if name != "metrics"]
    for part in {name.split(".")[0] for name in names}:
        scale = max(expected[name].abs().max().item() for name in names if name.startswith(part))
        assert scale > 1e-4, part
        worst = max((found[name] - expected[name]).abs().max().item() for name in names if name.startswith(part))
        assert worst <= tolerance * scale, (part, worst / scale)
    for name in SAME_METRICS:
        if name in expected["metrics"]:
            torch.testing.assert_close(found["metrics"][name], expected["metrics"][name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", [pytest.param(c, marks=() if c in QUICK else pytest.mark.slow) for c in ALL_CASES])
def test_rows_train_as_one_sequence(whole, case, tmp_path):
    found, module = step(case, rows=True, folder=tmp_path)
    groups = module.last_rollouts.groups
    assert sum(len(group.rollouts) for group in groups) > sum(len(group.episodes) for group in groups)
    compare(found, whole(case))


BUDGETS = [
    pytest.param(case, *cut, marks=() if (case, cut) == (QUICK[0], (30, "shared")) else pytest.mark.slow)
    for case in ALL_CASES
    for cut in [(70, "shared"), (30, "shared"), (70, "repeated")]
]


@pytest.mark.parametrize(("case", "budget", "sharing"), BUDGETS)
def test_a_token_budget_keeps_episodes_whole(whole, case, budget, sharing, tmp_path):
    cut = {"max_tokens_per_micro_batch": budget, "sharing": {"mode": sharing}}
    found, _ = step(case, rows=True, folder=tmp_path, **cut)
    compare(found, whole(case), 1e-6 if sharing == "shared" else 1e-5)


@pytest.mark.slow
def test_only_token_losses_train_episodes_larger_than_the_budget(whole, tmp_path):
    case, cut = "grpo token-mean", {"max_tokens_per_micro_batch": 40, "sharing": {"mode": "repeated"}}
    found, _ = step(case, rows=True, folder=tmp_path, **cut)
    compare(found, whole(case), 1e-5)
    with pytest.raises(ValueError, match=r"allows 40 tokens, but the 2 rows of episode .* use loss_agg_mode='token-me"):
        step("dr_grpo", rows=True, folder=tmp_path, **cut)


def test_token_groups_end_with_their_row(tmp_path):
    _, module = step("group_ppo", rows=True, folder=tmp_path, engine=RowsEngine(rows=True), boundary_at_turn_ends=False)
    buffer = module.last_rollouts
    lengths = buffer.rollout_lengths.tolist()
    rows = zip(*(buffer.joined(name).split(lengths) for name in ("loss_mask", "group_starts")), strict=True)
    firsts = [bool(starts[mask.nonzero()[0]]) for mask, starts in rows if mask.any()]
    assert len(firsts) > len(buffer.episode_lengths)
    assert all(firsts)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    run_script(SCRIPT, folder, ranks=2, cwd=folder, timeout=300)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("case", RANK_CASES)
def test_two_ranks(whole, two_ranks, case):
    for found in two_ranks:
        compare(found[case], whole(case), 1e-6)


def test_a_run_with_an_engine_that_returns_rows(make_module, make_data, make_trainer, tmp_path):
    """Losses, validation and the file of completions; rows of an episode name it."""
    module = make_module(
        GRPO, engine=RowsEngine(rows=True), loss_type="grpo", num_mini_batches=2, evaluation={"num_generations": 4},
        dynamic_sampling=True,
    )  # fmt: skip
    trainer = make_trainer(max_steps=4, callbacks=[CompletionsTable(every_n_steps=1, console=False, num_groups=99)])
    trainer.fit(module, make_data(val=True))
    groups = module.last_rollouts.groups
    (path,) = tmp_path.rglob("completions.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    last = [row for row in rows if row["step"] == trainer.global_step]
    assert [row.get("episode") for row in last] == [row.episode for group in groups for row in group.rollouts]
    assert all(row.reward == episode.reward for group in groups for episode in group.episodes for row in episode.rows)
    trainer.validate(module, make_data(val=True))
    (evaluated,) = tmp_path.rglob("val_completions.jsonl")
    answers = [json.loads(line) for line in evaluated.read_text().splitlines()]
    assert any("episode" in row for row in answers)
    assert all("answer" in row for row in answers)


def test_a_name_that_is_neither_number_nor_string_is_refused(make_module, make_data, make_trainer):
    engine = RowsEngine(rows=True)
    sampled = engine.generate

    def with_tuples(*args, **options):
        groups = sampled(*args, **options)
        for rollout in (rollout for group in groups for rollout in group):
            rollout.episode = ("turn", 0)
        return groups

    engine.generate = with_tuples
    with pytest.raises(TypeError, match="tuple"):
        make_trainer(max_steps=1).fit(make_module(GRPO, engine=engine), make_data())
