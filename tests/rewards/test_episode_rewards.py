"""What reward functions are told about episodes, and how what they return is laid on their tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
from helpers import worker_rewards
from helpers.episodes import CALL, QUESTION, make_episode, make_group, turns_of
from helpers.rewards import returning
from helpers.rewards import rewards_of as rewards_in

from pl_grouprl.rewards import (
    CodeTests,
    CosineLengthReward,
    EnvironmentReward,
    EnvironmentStepReward,
    ExactMatch,
    LeadingCorrectCharacters,
    NumericAnswer,
    OverlongPenalty,
    RepetitionPenalty,
    Weighted,
    apply_rewards,
    check_columns,
)
from pl_grouprl.rewards.base import completion_text, written_text
from pl_grouprl.training.rewarder import RewardCallOptions, Rewarder
from pl_grouprl.training.run import PlainRun
from pl_grouprl.types import EpisodeRows, Prompt, Rollout, RolloutGroup


@dataclass
class Room:
    """An environment that a copy would betray: a dataclass with a list."""

    score: float
    visited: list[str] = field(default_factory=list)


def has_environment(groups):
    return [[float(rollout.environment is not None) for rollout in group.rollouts] for group in groups]


def rewards_of(function, *rollouts, **fields):
    group = make_group(*rollouts, **fields)
    apply_rewards([group], function)
    return rewards_in(group)


def test_functions_of_trl_see_the_conversation():
    seen = {}

    def sees(prompts, completions, completion_ids, **columns):
        seen.update(prompts=prompts, completions=completions, completion_ids=completion_ids, **columns)
        completions[0][0]["tool_calls"].clear()  # the rollout keeps its own
        return [1.0, 2.0]

    episode, plain = make_episode(observation=2), Rollout([1, 2], text="hi")
    assert rewards_of(sees, episode, plain) == [1.0, 2.0]
    assert seen == {
        "prompts": [[{"role": "user", "content": "How much is a? It is dark."}], QUESTION],
        "completions": [
            [turns_of()[0] | {"tool_calls": []}, *turns_of()[1:]],
            [{"role": "assistant", "content": "hi"}],
        ],
        "completion_ids": [[1, 2, 3, 4, 5, 6], [1, 2]],
        "completion_mask": [[1, 1, 1, 0, 0, 1], [1, 1]],
        "answer": ["42", "42"],
    }
    assert episode.messages[0]["tool_calls"] == [CALL]


def test_plain_rollouts_bring_no_further_arguments():
    seen = []

    def sees(completions, **columns):
        seen.append(sorted(columns))
        return [1.0]

    rewards_of(sees, Rollout([1, 2], loss_mask=[1, 0], text="hi"))
    assert seen == [["answer", "completion_ids", "prompts"]]


def test_environments_are_passed_themselves():
    rooms = [Room(1.0), Room(2.0)]

    def visits(environments, completions, **columns):
        for room in environments:
            room.visited.append("kitchen")
        return [room.score for room in environments]

    async def visits_later(environments, completions):
        return visits(environments, completions)

    episodes = [make_episode(environment=room) for room in rooms]
    assert rewards_of(visits, *episodes) == [1.0, 2.0]
    assert rewards_of(visits_later, *episodes) == [1.0, 2.0]
    assert [room.visited for room in rooms] == [["kitchen"] * 2] * 2
    assert rewards_of(worker_rewards.knows_environments, *episodes) == [1.0, 1.0]
    assert rewards_of(worker_rewards.knows_environments, make_episode()) == [0.0]


def test_environments_are_refused_where_there_are_none(make_workers):
    score, knows = worker_rewards.score_of_environment, worker_rewards.knows_environments
    episode, workers = make_episode(environment=Room(1.0)), make_workers(knows)
    apply_rewards([make_group(episode)], knows, workers=workers)
    assert episode.reward == 0.0
    assert episode.environment.value == Room(1.0)  # stays here
    prompts = [Prompt([1], QUESTION)]
    check_columns(prompts, score, "train", environments=True)
    for refused in (
        lambda: rewards_of(score, make_episode()),
        lambda: apply_rewards([make_group(episode)], score, workers=workers),
        lambda: check_columns(prompts, score, "train"),
    ):
        with pytest.raises(ValueError, match=r"requires \['environments'\]"):
            refused()
    with pytest.raises(ValueError, match=r"\['score_of_environment'\] take `environments`"):
        Rewarder(score, run=None, calls=RewardCallOptions(workers=1), environments=True)
    Rewarder(knows, run=None, calls=RewardCallOptions(workers=1), environments=True)


class Decoder:
    def decode(self, token_ids, *, skip_special_tokens):
        return "".join(map(str, token_ids))


def test_functions_of_verl_see_the_whole_text_without_the_observation():
    def compute_score(solution_str, ground_truth):
        return float(solution_str == "call 41 #### 42")

    assert rewards_of(compute_score, make_episode()) == [1.0]
    episode = make_episode(observation=2, text=None)
    apply_rewards([make_group(episode)], returning(1.0), tokenizer=Decoder())
    assert episode.text == "123456"


@pytest.mark.parametrize(
    ("reward", "answer"),
    [
        (ExactMatch(), "42"),
        (LeadingCorrectCharacters(), "42"),
        (NumericAnswer("flexible"), "It is 42."),
        (NumericAnswer(), "#### 42"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_only_the_last_message_is_the_answer(reward, answer):
    right = make_episode(messages=turns_of("41", answer))
    copied = make_episode(messages=[*turns_of("#### 42", "")], text="42")
    no_answer = make_episode(messages=turns_of("42")[:2], text="42")  # ends with the result of a tool
    assert rewards_of(reward, right, copied, no_answer) == [1.0, 0.0, 0.0]


def test_the_text_of_messages():
    assert completion_text(turns_of(thought="Let me look.")) == "#### 42"
    assert completion_text(turns_of(thought="Let me look.")[:2]) == "Let me look."
    assert completion_text([{"role": "assistant", "content": None, "tool_calls": [CALL]}]) == completion_text([]) == ""
    assert written_text(turns_of(thought="Let me look.")) == "Let me look.\n#### 42"


def test_lengths_are_of_the_model():
    episode = make_episode(observation=2)  # 4 of the model, 2 of a tool, 2 observed
    # (3 - 4) / 2 = -0.5; all six tokens would be beyond 5, all eight too
    assert rewards_of(OverlongPenalty(max_length=5, overlong_buffer=2), episode) == [-0.5]
    correct = NumericAnswer()
    # correct at 4 of 8 tokens: halfway from 1.0 to 0.5; at 8 of 16 characters ("\n#### 42"): the same
    assert rewards_of(CosineLengthReward(correct, 8), episode) == [pytest.approx(0.75)]
    assert rewards_of(CosineLengthReward(correct, 16, unit="character"), episode) == [pytest.approx(0.75)]


def test_repetition_is_of_the_model():
    messages = turns_of("ha ha ha ha", "yes yes", thought="yes")
    episode = make_episode(token_ids=[1, 1, 1, 5, 5, 1], messages=messages)
    # words: "yes yes yes", of two bigrams one is new; tokens: 1 1 1 1, of three bigrams one is new
    assert rewards_of(RepetitionPenalty(2, -1.0), episode) == [-0.5]
    assert rewards_of(RepetitionPenalty(2, -1.0, unit="token"), episode) == [pytest.approx(-2 / 3)]


def test_cosine_reward_passes_on_what_its_function_takes():
    seen = []

    def correct(completions, environments, **columns):
        seen.append((completions, environments))
        return [1.0]

    room = Room(1.0)
    assert rewards_of(CosineLengthReward(correct, 8), make_episode(environment=room)) == [pytest.approx(0.75)]
    ((completions, (environment,)),) = seen
    assert completions == [turns_of()]
    assert environment is room


def test_programs_are_of_the_last_message(monkeypatch):
    monkeypatch.setattr("pl_grouprl.rewards.code_tests.StdinTest.passes", lambda own, sandbox, code: code == "right\n")
    block = "```python\n{}\n```\n".format
    episodes = [
        make_episode(messages=turns_of(block("wrong"), block("right"))),
        make_episode(messages=turns_of(block("right"), "done")),
    ]
    group = RolloutGroup([1], episodes, columns={"tests": [{"input": "", "output": ""}]}, prompt=QUESTION)
    apply_rewards([group], CodeTests())
    assert [episode.reward for episode in episodes] == [1.0, 0.0]


def test_rewards_of_tokens_begin_after_the_observation():
    def steps(completion_ids, completions):
        return [[0.0, 0.0, 1.0, None, None, 2.0], None, 5.0]

    episodes = [make_episode(observation=2) for _ in range(3)]
    assert rewards_of(steps, *episodes) == [3.0, None, 5.0]
    assert episodes[0].token_rewards == [None, None, 0.0, 0.0, 1.0, None, None, 2.0]
    assert episodes[0].step_rewards == {2: 0.0, 3: 0.0, 4: 1.0, 7: 2.0}
    assert episodes[2].token_rewards == [None] * 7 + [5.0]

    with pytest.raises(ValueError, match="8 rewards for a completion of 6 tokens"):
        rewards_of(returning([0.0] * 8), make_episode(observation=2))


def test_the_reward_of_an_environment():
    episodes = [
        make_episode(environment_reward=0.5, environment_name="Room", environment_numbers={"score": 3.0, "moves": 2.0}),
        make_episode(environment_reward=0.7, environment_name="Cave"),
        make_episode(environment_reward=math.nan, environment_name="Room"),
        make_episode(),
    ]
    group = make_group(*episodes)
    metrics = apply_rewards([group], [EnvironmentReward("Room"), EnvironmentReward("Cave")])
    assert [episode.reward for episode in episodes] == [0.5, 0.7, None, None]
    assert (metrics["rewards/Room/mean"], metrics["rewards/Cave/mean"]) == (0.5, 0.7)
    assert (metrics["rewards/Room/invalid"], metrics["rewards/Room/none"]) == (1, 2)
    assert (metrics["rewards/Room/score_"], metrics["rewards/Room/moves"]) == (3.0, 2.0)


@pytest.mark.parametrize("reads", [False, True])
def test_functions_see_environments_only_where_they_may(reads):
    group = make_group(make_episode(environment=Room(1.0)))
    rewarder = Rewarder([worker_rewards.knows_environments, has_environment], PlainRun(None), environments=reads)
    rewarder.start([group]).wait()
    assert group.rollouts[0].rewards == {"knows_environments": float(reads), "has_environment": float(reads)}


def test_a_reward_per_turn_is_at_the_turns_last_token():
    """Turns of make_episode: three tokens, two of a result, one token."""
    episodes = [make_episode(observation=2), make_episode(), make_episode(), make_episode()]
    given = returning({"turns": [0.5, 2.0], "calls": 1}, {"turns": (None, -1)}, 3.0, None)
    group = make_group(*episodes)
    metrics = apply_rewards([group], [Weighted(given, weight=2.0), lambda completions: [0.25] * 4])
    assert episodes[0].token_rewards == [None] * 4 + [1.0, None, None, 4.0]
    assert episodes[1].token_rewards == [None] * 5 + [-2.0]
    assert episodes[2].token_rewards == [None] * 5 + [6.0]  # a number, where others have turns
    assert [episode.reward for episode in episodes] == [5.25, -1.75, 6.25, 0.25]
    assert [episode.outcome_reward for episode in episodes] == [0.25] * 4
    assert [episode.rewards["given"] for episode in episodes] == [2.5, -1.0, 3.0, None]
    assert metrics["rewards/given/calls"] == 1.0
    assert metrics["rewards/given/mean"] == 1.5


def test_rewards_of_turns_go_to_their_rows():
    first = make_episode(episode="a")
    last = make_episode(episode="a", loss_mask=[0, 0, 0, 0, 1, 1], num_observation_tokens=2)
    whole = make_episode()
    apply_rewards([make_group(first, last, whole)], [returning({"turns": [1.0, None, 4.0]}, {"turns": [0.0, 3.0]})])
    assert first.token_rewards == [None, None, 1.0, None, None, None]
    assert last.token_rewards == [None] * 5 + [4.0]
    assert (first.reward, last.reward, whole.reward) == (5.0, 5.0, 3.0)
    assert EpisodeRows((first, last)).step_rewards == {2: 1.0, 11: 4.0}
    assert EpisodeRows((first, last)).turns == [(0, 3), (5, 6), (10, 12)]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"turns": [1.0]}, "'given' returned 1 rewards as 'turns' for a completion of 2 turns"),
        ({"turns": [1.0, 2.0], "score": 1.0}, r"a dictionary with the keys \['turns', 'score'\]"),
        ({"turns": 2}, r"a dictionary with the keys \['turns'\]"),
        ({"turns": [1.0, "two"]}, "'two' of type str as a reward"),
    ],
)
def test_rewards_of_turns_that_cannot_be_placed(value, message):
    with pytest.raises(ValueError, match=message):
        rewards_of(returning(value), make_episode())


def test_a_number_of_turns_is_only_logged():
    metrics = apply_rewards([make_group(make_episode())], [returning({"turns": 2, "score": 1.0})])
    assert metrics["rewards/given/turns"] == 2.0


def test_the_rewards_of_an_environments_steps():
    steps = [[0.5, None], [None, None], [math.nan, 1.0], [1.0, 1.0]]
    episodes = [make_episode(environment_name="Room", environment_step_rewards=own) for own in steps[:3]]
    episodes.append(make_episode(environment_name="Cave", environment_step_rewards=steps[3]))
    metrics = apply_rewards([make_group(*episodes)], [EnvironmentStepReward("Room"), EnvironmentStepReward("Cave")])
    assert [episode.reward for episode in episodes] == [0.5, 0.0, None, 2.0]
    assert episodes[0].token_rewards == [None, None, 0.5, None, None, None]
    assert episodes[2].failed_rewards == ["Room_steps"]
    assert (metrics["rewards/Room_steps/mean"], metrics["rewards/Cave_steps/mean"]) == (0.25, 2.0)
