"""Episodes of a real model that fork between turns, with calls by chance."""

from collections import Counter

import pytest
from helpers.chance_episodes import STOPS, ChancePolicy, Tally, chance_rows, double, register_chance_calls
from helpers.rollouts import WithoutCaches, check_tree, num_turns, plain_leaves, worst_logprob_error

from pl_grouprl.algorithms import GRPO
from pl_grouprl.data.encoding import EncodingOptions, encode_rows
from pl_grouprl.data.rows import SourceRow
from pl_grouprl.rollout import Branching, HFRolloutEngine
from pl_grouprl.training.metrics import count_sampled
from pl_grouprl.training.run import PlainRun
from pl_grouprl.training.sampler import EpisodeOptions, Sampler, Tooling
from pl_grouprl.types import SamplingConfig

SAMPLING = SamplingConfig(max_new_tokens=40, stop_token_ids=STOPS)
BRANCHING = {"points": "turn", "width": 2, "depth": 2}


@pytest.fixture(autouse=True)
def chance_calls(monkeypatch):
    monkeypatch.setattr("pl_grouprl.chat.parsing._PARSERS", [])
    register_chance_calls()


def sample(options, engine=None, rows=3, **limits):
    """The policy, and trees of 2 roots each."""
    chance = ChancePolicy()
    run = PlainRun(chance.load(), chance.load_tokenizer())
    tooling = Tooling(run, [double], None, EpisodeOptions(**{"max_turn_tokens": 12, **limits}))
    sampler = Sampler(run, engine or HFRolloutEngine(), tooling=tooling)
    tooling.set_up({})
    prompts = encode_rows(
        [SourceRow(f"row {n}", row) for n, row in enumerate(chance_rows(rows))],
        run.tokenizer,
        EncodingOptions(),
        chat=tooling.chat_options,
    )
    try:
        branching = None if options is None else Branching(**options)
        return run, sampler.generate(prompts, SAMPLING, 2, seed=("test",), branching=branching)
    finally:
        tooling.close()


def check_episodes(group):
    for rollout in group.rollouts:
        mask = rollout.loss_mask or [1] * len(rollout.token_ids)
        # After a tool's result, before the model's next turn.
        assert {(mask[point - 1], mask[point]) for point in rollout.branch_points} <= {(0, 1)}
    return check_tree(group)


def test_episodes_fork_between_turns():
    run, groups = sample(BRANCHING)
    _, unbranched = sample(None)
    assert worst_logprob_error(run.policy, groups) < 1e-5
    forks = Counter(len(rollout.branch_points) for group in groups for rollout in group.rollouts)
    assert forks.keys() == {0, 1, 2}
    for group, other in zip(groups, unbranched, strict=True):
        found = check_episodes(group)
        for root in range(2):  # the first turn is that of a run without branching
            first = other.rollouts[root].token_ids
            assert found[root,][: len(first)] == first[: len(found[root,])]
        for rollout in group.rollouts:
            assert num_turns(rollout) == rollout.num_turns > len(rollout.branch_points)
            assert rollout.num_sampled_tokens <= 40
            assert rollout.tool_counts.get("calls", 0) >= len(rollout.branch_points)
    assert plain_leaves(groups) == plain_leaves(sample(BRANCHING, WithoutCaches())[1])
    with_budget = sample({**BRANCHING, "budget": 100})[1]
    assert max(count_sampled(group.rollouts) for group in with_budget) <= 100
    assert with_budget != groups


def test_forks_are_independent_copies():
    _, groups = sample(BRANCHING)
    leaves = [rollout for group in groups for rollout in group.rollouts]
    for name in ("messages", "token_ids", "logprobs", "tool_counts"):
        assert len({id(getattr(rollout, name)) for rollout in leaves}) == len(leaves)
    assert len({id(message) for rollout in leaves for message in rollout.messages}) == sum(
        len(rollout.messages) for rollout in leaves
    )


def test_episodes_without_room_for_another_turn_do_not_fork():
    _, groups = sample(BRANCHING, max_tokens=30)
    for group in groups:
        check_episodes(group)


@pytest.mark.parametrize(
    ("options", "branching", "words"),
    [
        ({}, BRANCHING, "points='turn', without tools"),
        ({"tools": [double]}, {"points": "entropy"}, "points='entropy', with tools"),
        ({"tools": [double], "history": "new_row"}, BRANCHING, "episodes.rewritten_history='new_row'"),
        ({"environment_factory": Tally}, BRANCHING, "with environment_factory"),
    ],
)
def test_refused(options, branching, words):
    episodes = {"branching": branching, "rewritten_history": options.pop("history", "refuse")}
    with pytest.raises(ValueError, match=words):
        GRPO(ChancePolicy(), lambda completions, **columns: [0.0], episodes=episodes, **options)
