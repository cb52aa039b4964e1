import math
from types import SimpleNamespace

import pytest

from pl_grouprl.harnesses.traces import FinishedEpisode, make_group, read_episode
from pl_grouprl.types import Prompt, RolloutGroup
from tests.helpers.fake_verifiers import branch, episode, node, reply, trace


def read(*traces, was_sampled=lambda ids: True, ran_out=lambda name: False, **options):
    return read_episode(episode(*traces, **options), was_sampled, ran_out)


def test_a_branch_is_a_row_whose_turns_are_trained():
    first, second = reply([9], [1, 2]), reply([9], [3])
    played = read(trace(branch(node([5, 6]), first, node([7, 8]), second), metrics={"words": 3.0, "later": None}))
    (row,) = played.rows
    assert row.token_ids == [5, 6, 9, 1, 2, 7, 8, 9, 3]
    assert row.loss_mask == [0, 0, 0, 1, 1, 0, 0, 0, 1]
    assert row.logprobs == [0, 0, 0, -0.5, -0.5, 0, 0, 0, -0.5]
    assert row.prompt_length == 3
    assert [message["role"] for message in row.prompt] == ["user"]
    assert [message["role"] for message in row.messages] == ["assistant", "user", "assistant"]
    assert (played.reward, played.failure, played.finish_reason) == (1.0, None, "stop")
    assert played.numbers == {"right": 1.0, "words": 3.0}
    assert played.tool_counts == {"calls": 0.0, "seconds": 0.25}


def test_what_two_branches_share_is_trained_once():
    opening, first = node([5]), reply([9], [1, 2])
    rewritten = node([5, 9, 4])  # the first turn, in other tokens
    played = read(
        trace(
            branch(opening, first, reply([9], [3])),
            branch(opening, first, reply([8], [4])),
            branch(rewritten, reply([9], [6, 7])),
            branch(opening, first, trainable=False),
        )
    )
    assert [row.loss_mask for row in played.rows] == [[0, 0, 1, 1, 0, 1], [0, 0, 0, 0, 0, 1], [0, 0, 0, 0, 1, 1]]


def test_a_turn_that_the_server_did_not_write_is_refused():
    seen = []

    def was_sampled(ids):
        seen.append(list(ids))
        return len(seen) < 2

    with pytest.raises(RuntimeError, match=r"reports 5 tokens of an episode.*the last 1 as .*but no server"):
        read(trace(branch(node([5]), reply([9], [1, 2]), reply([], [3]))), was_sampled=was_sampled)
    assert seen == [[5, 9, 1, 2], [5, 9, 1, 2, 3]]


def failed_call(message="no answer"):
    return [SimpleNamespace(error=SimpleNamespace(message=message))]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"ok": False, "errors": [SimpleNamespace(type="HarnessError", message="exited 1")]}, "HarnessError: exited 1"),
        ({"rewards": {"right": 1.0, "judge": None}}, "scoring did not finish"),
        ({"calls": failed_call()}, "the last model call failed: no answer"),
    ],
)
def test_failed_episodes_have_no_reward(options, reason):
    played = read(trace(branch(node([5]), reply([9], [1])), **options))
    assert played.failure == reason
    assert math.isnan(played.reward)
    assert len(played.rows) == 1


def test_an_episode_without_a_turn_has_failed():
    assert read(trace(branch(node([5])))).failure == "the model wrote nothing"
    assert read(trace(trainable=False)).failure == "no agent ran that is trained"


def test_an_episode_that_ran_out_of_tokens_is_scored():
    out_of_room = {"calls": failed_call("no room"), "branches": [branch(node([5]), reply([9], [1]))]}
    played = read(trace(**out_of_room), ran_out=lambda name: name == "t")
    assert (played.reward, played.finish_reason, played.failure) == (1.0, "length", None)
    timed_out = read(trace(branch(node([5]), reply([9], [1])), is_timeout=True))
    assert (timed_out.finish_reason, timed_out.failure) == ("length", None)


def test_only_one_agent_is_trained():
    with pytest.raises(ValueError, match=r"episode of 'letters' trains 2 agent runs \(solver, critic\)"):
        read(trace(name="solver"), trace(name="critic"))
    played = read(trace(branch(node([5]), reply([9], [1])), name="solver"), trace(name="judge", trainable=False))
    assert played.failure is None


@pytest.mark.parametrize("media", ["parts", "tokens"])
def test_media_are_refused(media):
    asked = node([5], content=[SimpleNamespace(type="image_url")] if media == "parts" else "text")
    with pytest.raises(ValueError, match="images or other media"):
        read(trace(branch(asked, reply([9], [1]), media=[1] if media == "tokens" else None)))


def group_of(*episodes):
    prompt, rollouts = make_group(Prompt([1], "ab"), episodes, "letters")
    return RolloutGroup(prompt.token_ids, rollouts)


def test_a_group_shares_what_all_rows_begin_with():
    one = read(trace(branch(node([5, 6]), reply([9], [1])), branch(node([5, 7]), reply([9], [2]))))
    other = read(trace(branch(node([5, 6]), reply([9], [3, 4])), rewards={"right": 0.5}))
    group = group_of(one, other)
    assert group.prompt_ids == [5]
    assert [rollout.token_ids for rollout in group.rollouts] == [[6, 9, 1], [7, 9, 2], [6, 9, 3, 4]]
    assert [rollout.loss_mask for rollout in group.rollouts] == [[0, 0, 1], [0, 0, 1], [0, 0, 1, 1]]
    assert [rollout.completion_ids for rollout in group.rollouts] == [[1], [2], [3, 4]]
    assert [len(rows.rows) for rows in group.episodes] == [2, 1]
    assert [rows.last.environment_reward for rows in group.episodes] == [1.0, 0.5]
    assert group.rollouts[0].environment_reward is None


def test_plain_rollouts_have_no_mask():
    group = group_of(*(read(trace(branch(node([5]), reply([9], [token])))) for token in (1, 2)))
    assert group.prompt_ids == [5, 9]
    assert [(r.token_ids, r.loss_mask, r.episode) for r in group.rollouts] == [([1], None, None), ([2], None, None)]


def test_failed_episodes_stay_in_their_group():
    group = group_of(FinishedEpisode(failure="no sandbox"), read(trace(branch(node([5]), reply([9], [1])))))
    assert [rollout.token_ids for rollout in group.rollouts] == [[], [1]]
    assert math.isnan(group.rollouts[0].environment_reward)


def test_contexts_without_a_common_token_are_refused():
    rows = trace(branch(node([5]), reply([9], [1])), branch(node([6]), reply([9], [2])))
    with pytest.raises(ValueError, match="begin with different tokens"):
        group_of(read(rows))
