"""Rows of one episode count as one rollout: statistics, losses, metrics and micro-batches, without a Trainer."""

from dataclasses import replace

import pytest
import torch
from helpers.episode_rows import cut_into_rows, random_groups

from pl_grouprl.functional.importance import IMPORTANCE_KINDS, ImportanceSampling
from pl_grouprl.functional.logprobs import TokenScores
from pl_grouprl.functional.losses import LOSS_AGG_MODES
from pl_grouprl.functional.policy_loss import POLICY_LOSSES
from pl_grouprl.rewards.calls import apply_rewards
from pl_grouprl.training.buffer import RolloutBuffer, outcomes_or_steps_differ
from pl_grouprl.training.evaluation import Evaluator, evaluation_metrics
from pl_grouprl.training.metrics import rollout_metrics, summarize
from pl_grouprl.training.micro_batches import MicroBatch, RowOptions, lay_out, plan_micro_batches
from pl_grouprl.training.objective import KLPenalty, PolicyObjective
from pl_grouprl.training.rewarder import gather_rewards, rewards_per_token, subtract_kl_penalties
from pl_grouprl.training.run import PlainRun
from pl_grouprl.types import EpisodeRows, Rollout, RolloutGroup

CPU = torch.device("cpu")


def pair(seed, **options):
    """The same episodes, as one rollout each and as rows."""
    groups = random_groups(seed, **options)
    rows = cut_into_rows(groups, seed)
    assert sum(len(group.rollouts) for group in rows) > sum(len(group.rollouts) for group in groups)
    return groups, rows


def test_a_group_knows_its_episodes():
    group = RolloutGroup([1], [Rollout([2], episode=7), Rollout([3]), Rollout([4]), Rollout([5, 6], episode="a"),
                               Rollout([7], episode="a")])  # fmt: skip
    assert [[row.token_ids for row in episode.rows] for episode in group.episodes] == [
        [[2]], [[3]], [[4]], [[5, 6], [7]],
    ]  # fmt: skip
    assert group.episodes[-1].num_tokens == 3
    with pytest.raises(ValueError, match=r"Rollout.episode is \[0, None, 0\].*pass the rows of an episode one after"):
        RolloutGroup([1], [Rollout([2], episode=0), Rollout([3]), Rollout([4], episode=0)])


def test_rows_with_different_rewards_are_refused():
    rows = EpisodeRows((Rollout([1], reward=1.0, episode=3), Rollout([2], reward=0.5, episode=3)))
    with pytest.raises(ValueError, match=r"reward is \[1.0, 0.5\] in the rows of episode 3"):
        _ = rows.reward
    nothing = EpisodeRows((Rollout([1], reward=float("nan")), Rollout([2], reward=None)))
    assert nothing.reward is None


def test_rewards_of_tokens_belong_to_the_episode():
    first = Rollout([1, 2, 3], reward=5.0, token_rewards=[None, 1.0, None], loss_mask=[1, 1, 0], episode=0)
    second = Rollout([4, 5], reward=5.0, token_rewards=[0.5, None], loss_mask=[0, 1], episode=0)
    group = RolloutGroup([9], [first, second])
    (episode,) = group.episodes
    assert (episode.step_rewards, episode.outcome_reward) == ({1: 1.0, 3: 0.5}, 3.5)
    # The reward of the masked token goes to the trained one before it, in the first row; the outcome to the last.
    assert rewards_per_token(RolloutBuffer([group])).tolist() == [0, 1.5, 0, 0, 3.5]


@pytest.mark.parametrize("seed", range(4))
def test_rewards_and_masks_are_those_of_one_sequence(seed):
    run = PlainRun(torch.nn.Linear(1, 1))
    groups, rows = pair(seed, token_rewards=True)
    whole, cut = gather_rewards(groups, run), gather_rewards(rows, run)
    for name in ("outcomes", "step_rewards_N"):
        torch.testing.assert_close(getattr(cut, name), getattr(whole, name), equal_nan=True, rtol=0, atol=1e-6)
    for name in ("group_ids_E", "lengths_E", "sampled_E"):
        assert torch.equal(getattr(cut, name), getattr(whole, name))
    assert len(cut.of_own_rollouts(cut.outcomes)) == sum(len(group.rollouts) for group in rows)
    buffers = [RolloutBuffer(own, mask_truncated=True) for own in (groups, rows)]
    assert torch.equal(buffers[0].joined("loss_mask"), buffers[1].joined("loss_mask"))
    assert torch.equal(buffers[0].trained_episodes(), buffers[1].trained_episodes())
    torch.testing.assert_close(rewards_per_token(buffers[1]), rewards_per_token(buffers[0]))
    penalty_N = torch.rand(len(buffers[0].joined("loss_mask")))
    for buffer in buffers:
        buffer.put("kl_penalty", penalty_N)
    less = [[e.reward for group in subtract_kl_penalties(buffer) for e in group.episodes] for buffer in buffers]
    assert less[1] == pytest.approx(less[0])


def fake_scores(num_tokens, seed):
    generator = torch.Generator().manual_seed(seed)

    def draw():
        return 0.4 * torch.randn(num_tokens, generator=generator, dtype=torch.float64) - 2

    tokens = {name: draw() for name in ("old_logprobs", "rollout_logprobs", "ref_logprobs")}
    tokens["advantages"] = torch.randn(num_tokens, generator=generator, dtype=torch.float64)
    return TokenScores(draw().requires_grad_(), draw().requires_grad_()), tokens


def losses(groups, objective, seed):
    """The policy's loss of one micro-batch with its denominator, the metrics, the extremes, and the gradient."""
    mask_N = RolloutBuffer(groups).joined("loss_mask")
    scores, tokens = fake_scores(len(mask_N), seed)
    options = RowOptions("shared", None, CPU)
    batch = MicroBatch(lay_out(groups, options), tokens | {"loss_mask": mask_N}, groups, options=options)
    sums = objective.loss(batch, scores)
    (gradient_N,) = torch.autograd.grad(sums.losses["policy"][0], scores.logprobs_N)
    assert torch.equal(objective.denominators(batch.tokens, batch.rollouts)["policy"], sums.losses["policy"][1])
    return *sums, gradient_N


KINDS = [("none", None, 3.0), *((kind, 0.3, 3.0) for kind in IMPORTANCE_KINDS[1:])]
CASES = [(mode, name, KINDS[0]) for mode in LOSS_AGG_MODES for name in POLICY_LOSSES]
CASES += [(mode, "ppo", kind) for mode in LOSS_AGG_MODES for kind in KINDS[1:]]


@pytest.mark.parametrize(("mode", "name", "importance"), CASES)
def test_losses_are_those_of_one_sequence(mode, name, importance):
    objective = PolicyObjective(
        name, {}, loss_agg_mode=mode, kl=KLPenalty(0.1), max_new_tokens=9, entropy_coef=0.05,
        importance_sampling=ImportanceSampling(*importance),
    )  # fmt: skip
    seed = CASES.index((mode, name, importance))
    groups, rows = pair(seed)
    expected, found = losses(groups, objective, seed), losses(rows, objective, seed)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_a_mean_of_sequences_by_hand():
    """Losses 1, 2 | 6 of one episode and 4 of another: (mean(1, 2, 6) + 4) / 2, not ((1.5) + 6 + 4) / 3."""
    rows = [Rollout([1, 2], reward=0.0, episode=0), Rollout([3], reward=0.0, episode=0), Rollout([4], reward=0.0)]
    groups, options = [RolloutGroup([5], rows)], RowOptions("shared", None, CPU)
    objective = PolicyObjective("gpg", {}, loss_agg_mode="seq-mean-token-mean", kl=KLPenalty(), max_new_tokens=3)
    tokens = {
        "loss_mask": torch.ones(4, dtype=torch.bool),
        "advantages": torch.tensor([1.0, 2.0, 6.0, 4.0]),
        "old_logprobs": torch.full((4,), -1.0),
    }
    batch = MicroBatch(lay_out(groups, options), tokens, groups, options=options)
    sums = objective.loss(batch, TokenScores(torch.full((4,), -1.0), torch.zeros(4)))
    total, count = sums.losses["policy"]
    assert (float(total), float(count)) == (3 + 4, 2)


def test_metrics_count_episodes():
    groups, rows = pair(5)
    for own in (groups, rows):
        for episode in (e for group in own for e in group.episodes):
            for row in episode.rows:
                row.rewards = {"letters": episode.reward}
            episode.last.messages = [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}]
            episode.last.tool_counts = {"calls": 2.0, "seconds": 0.5}
            episode.last.text = str(episode.num_tokens % 2)
    whole, cut = (rollout_metrics(summarize(own)) for own in (groups, rows))
    changed = {name for name, value in whole.items() if cut[name] != pytest.approx(value, nan_ok=True)}
    assert changed == {"episode/token_ratio"}  # turns that were cut in the middle
    evaluated = []
    for own in (groups, rows):
        evaluator = Evaluator()
        evaluator.groups = own
        answers = evaluator.record()
        assert [len(of_group) for of_group in answers] == [len(group.episodes) for group in groups]
        evaluated.append(evaluator.metrics("val", CPU))
    assert {name for name in evaluated[0] if evaluated[0][name] != pytest.approx(evaluated[1][name])} == {
        "val/episode/token_ratio"
    }
    assert evaluation_metrics([], "val").keys() == {"val/reward"}


def test_groups_are_informative_by_their_episodes():
    steps = [Rollout([1], reward=1.0, token_rewards=[1.0], episode=0), Rollout([2], reward=1.0, episode=0)]
    other = Rollout([3], reward=1.0, token_rewards=[1.0])
    assert not outcomes_or_steps_differ(RolloutGroup([1], [*steps, other]))  # both outcomes are 0
    assert outcomes_or_steps_differ(RolloutGroup([1], [*steps, Rollout([3], reward=1.0)]))


def test_reward_functions_are_called_once_per_episode_with_the_last_row():
    seen = []

    def length(completions, completion_ids, **columns):
        seen.append((completions, completion_ids))
        return [[float(token) for token in ids] if len(ids) > 1 else float(len(ids)) for ids in completion_ids]

    def whole_groups(groups):
        return [[1.0 for _ in group.rollouts] for group in groups]

    rows = [Rollout([1], text="a", episode=0), Rollout([2, 3], text="b", episode=0), Rollout([4], text="c")]
    group = RolloutGroup([9], rows, prompt="p")
    metrics = apply_rewards([group], [length, whole_groups])
    assert seen == [(["b", "c"], [[2, 3], [4]])]
    assert [row.reward for row in rows] == [6.0, 6.0, 2.0]
    assert [row.rewards for row in rows] == [{"length": 5.0, "whole_groups": 1.0}] * 2 + [
        {"length": 1.0, "whole_groups": 1.0}
    ]
    assert [row.token_rewards for row in rows] == [None, [2.0, 3.0], [1.0]]
    assert metrics["rewards/length/mean"] == 3.0


def parts_of(plan):
    """For each micro-batch, its rollouts as (group, rollout)."""
    rows = [[(group, rollout) for group, rollouts in row for rollout in rollouts] for row in plan.rows]

    def slices(split, group):
        found = [[(group, rollout) for rollout in own] for own in split.slices]
        return found + [own for branch in split.branches for own in slices(branch, group)]

    return rows + [own for split in plan.splits for own in slices(split, split.group)]


@pytest.mark.parametrize("sharing", ["shared", "repeated"])
@pytest.mark.parametrize("budget", [20, 40])
def test_micro_batches_keep_episodes_whole(sharing, budget):
    num_cut = 0
    for seed in range(30):
        _, groups = pair(seed, num_groups=4)
        names = {}
        for number, group in enumerate(groups):
            rollouts = [(number, place) for place in range(len(group.rollouts))]
            for place, episode in enumerate(group.episodes):
                names |= {rollouts.pop(0): (number, place) for _ in episode.rows}
        try:
            plan = plan_micro_batches(groups, range(4), RowOptions(sharing, budget, CPU, whole_episodes=True))
        except ValueError as error:
            assert (sharing, "max_tokens_per_micro_batch allows" in str(error)) == ("repeated", True)  # noqa: PT017
            continue
        parts = parts_of(plan)
        assert sorted(rollout for part in parts for rollout in part) == sorted(names)
        owners = [{names[rollout] for rollout in part} for part in parts]
        assert sum(map(len, owners)) == len(set(names.values())), seed
        num_cut += len(parts) > 1
        whole = plan_micro_batches(groups, range(4), RowOptions(sharing, None, CPU, whole_episodes=True))
        assert len(parts_of(whole)) == 1
    assert num_cut >= 10


@pytest.mark.parametrize("sharing", ["shared", "repeated"])
def test_an_episode_larger_than_the_budget_is_refused_where_the_loss_needs_it_whole(sharing):
    rows = [Rollout(list(range(first, first + 8)), episode="long") for first in (0, 8, 16)]
    group = RolloutGroup([1], [*rows, Rollout([30])], 5)
    with pytest.raises(ValueError, match=r"allows 16 tokens, but the 3 rows of episode 'long' of group 5 have 2[47], .*"
                       "use loss_agg_mode='token-mean'"):  # fmt: skip
        plan_micro_batches([group], [0], RowOptions(sharing, 16, CPU, whole_episodes=True))
    plan = plan_micro_batches([group], [0], RowOptions(sharing, 16, CPU))
    assert sorted(rollout for part in parts_of(plan) for rollout in part) == [(0, place) for place in range(4)]


@pytest.mark.parametrize(
    ("mode", "name", "kind", "whole"),
    [
        ("token-mean", "ppo", "none", False),
        ("token-mean", "ppo", "token_mask", False),
        ("seq-mean-token-sum", "ppo", "none", True),
        ("token-mean", "gspo", "none", True),
        ("token-mean", "ppo", "sequence_mask", True),
    ],
)
def test_which_losses_need_whole_episodes(mode, name, kind, whole):
    objective = PolicyObjective(
        name, {}, loss_agg_mode=mode, kl=KLPenalty(), max_new_tokens=9, importance_sampling=ImportanceSampling(kind)
    )
    assert objective.compares_tokens_of_rollouts is whole


def test_a_saved_buffer_has_the_rows():
    _, rows = pair(2)
    restored = RolloutBuffer.from_state_dict(RolloutBuffer(rows).state_dict())
    assert [[row.episode for row in group.rollouts] for group in restored.groups] == [
        [row.episode for row in group.rollouts] for group in rows
    ]
    assert replace(restored.groups[0], columns=rows[0].columns) == rows[0]
