"""Conversations with tools and environments are token for token those of TRL's `GRPOTrainer`.

The same scripted model, tools and environments; TRL's template of Qwen3 and parser there, the built-in ones here.
`trl_tools.json` has what TRL made of them (see `record_trl_tools.py`); where TRL is installed, it runs again.
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
from helpers.qwen_tokenizer import qwen_tokenizer
from helpers.sampled_episodes import mask_of, open_episodes, prompt_of
from helpers.scripted_engine import ScriptedEngine
from helpers.tiny_models import tiny_model
from helpers.tool_cases import ToolCase, seen_by_reward, tool_cases

from pl_grouprl.rewards import apply_rewards
from pl_grouprl.rewards.base import EnvironmentReward
from pl_grouprl.types import Messages, SamplingConfig

RECORDED = json.loads(Path(__file__).with_name("trl_tools.json").read_text(encoding="utf-8"))

DIFFERENT = {
    "list as a result": "TRL passes a list on as blocks of content, of which Qwen3's template renders nothing; the "
    "model is to read what its tool returned.",
    "call cut before its end token": "TRL makes the calls of a turn that was cut, and drops their results, which "
    "cannot fit any more; here a turn that was cut ends the episode.",
}
"""Cases in which the conversation is not TRL's on purpose, and why."""


def run_ours(case: ToolCase) -> dict[str, Any]:
    """What `helpers.trl_tools.run_trl` returns, by this package."""
    tokenizer = qwen_tokenizer()
    answers = [[tokenizer.encode(answer, add_special_tokens=False) for answer in turns] for turns in case.answers]
    engine = ScriptedEngine(lambda prompt_ids, index, turn: answers[index][turn])
    policy = tiny_model("qwen3", vocab_size=len(tokenizer), max_position_embeddings=1 << 16)
    with open_episodes(
        policy,
        tokenizer,
        engine,
        tools=case.tools,
        environment_factory=case.environment_factory,
        chat_template="qwen3",
        template_kwargs=case.template_kwargs,
        split_special_tokens=False,  # TRL encodes control tokens in text as such
        max_tool_calling_iterations=case.max_tool_calling_iterations,
        max_tokens=case.max_completion_length,
    ) as sample:
        groups = sample(case.rows, SamplingConfig(max_new_tokens=case.max_completion_length), case.num_generations)
    seen: dict[str, Any] = {}

    def observe(**arguments: Any) -> list[float]:
        seen.update(arguments)
        return [0.0] * len(arguments["prompts"])

    pairs = [(group, rollout) for group in groups for rollout in group.rollouts]
    names = dict.fromkeys(rollout.environment_name for _, rollout in pairs if rollout.environment_name is not None)
    apply_rewards(groups, [observe, *map(EnvironmentReward, names)])
    counts = [rollout.tool_counts for _, rollout in pairs]
    return {
        "rollouts": [
            {
                "prompt": tokenizer.decode(prompt_of(group, rollout)),
                "completion_ids": rollout.completion_ids,
                "mask": mask_of(rollout),
                **seen_by_reward(seen, number),
                "reward": {name: rollout.rewards[name] for name in names if rollout.rewards[name] is not None},
            }
            for number, (group, rollout) in enumerate(pairs)
        ],
        "calls": sum(count.get("calls", 0) for count in counts),
        "failures": sum(n for count in counts for kind, n in count.items() if kind not in ("calls", "seconds")),
    }


def recorded(name: str) -> dict[str, Any]:
    """What TRL made of a case."""
    case = RECORDED["cases"][name]
    rollouts = [
        {**rollout, "prompt": RECORDED["prompts"][rollout["prompt"]], "mask": [int(bit) for bit in rollout["mask"]]}
        for rollout in case["rollouts"]
    ]
    return {**case, "rollouts": rollouts}


def check_same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Same prompts, tokens, masks, messages, rewards of environments, and counts."""
    for number, (mine, other) in enumerate(zip(ours["rollouts"], theirs["rollouts"], strict=True)):
        assert mine == {**other, **_comparable(mine, other)}, f"rollout {number}"
    assert (ours["calls"], ours["failures"]) == (theirs["calls"], theirs["failures"])


def _comparable(mine: dict[str, Any], other: dict[str, Any]) -> dict[str, Messages]:
    """Messages that are equal as text: NaN, as an argument, equals itself."""
    return {"messages": mine["messages"]} if _text(mine["messages"]) == _text(other["messages"]) else {}


def _text(messages: Messages) -> str:
    return json.dumps(messages, sort_keys=True)


def test_the_tokenizer_is_the_one_of_the_recording() -> None:
    tokenizer = qwen_tokenizer()
    assert len(tokenizer) == RECORDED["vocabulary"]
    assert all(tokenizer.decode(tokenizer.encode(p, add_special_tokens=False)) == p for p in RECORDED["prompts"])


def test_every_case_is_recorded() -> None:
    assert list(RECORDED["cases"]) == list(tool_cases())


@pytest.mark.parametrize("name", [name for name in tool_cases() if name not in DIFFERENT])
def test_conversations_are_those_of_trl(name: str) -> None:
    check_same(run_ours(tool_cases()[name]), recorded(name))


def test_a_list_is_read_as_text() -> None:
    (mine,) = run_ours(tool_cases()["list as a result"])["rollouts"]
    (other,) = recorded("list as a result")["rollouts"]
    assert other["messages"][1]["content"] == [1, "x"]
    assert mine["messages"][1]["content"] == "[1, 'x']"
    assert [mine["messages"][place] for place in (0, 2)] == [other["messages"][place] for place in (0, 2)]


def test_calls_of_a_turn_that_was_cut_are_not_made() -> None:
    ours, theirs = run_ours(tool_cases()["call cut before its end token"]), recorded("call cut before its end token")
    assert (ours["calls"], theirs["calls"]) == (0, 1)
    for mine, other in zip(ours["rollouts"], theirs["rollouts"], strict=True):
        assert mine == {**other, "reward": mine["reward"]}
    rewards = [[rollout["reward"]["RewardingCounter"] for rollout in run["rollouts"]] for run in (ours, theirs)]
    assert rewards == [[0.0, 0.0], [1.0, 0.0]]


def trl_casts_arguments() -> bool:
    from trl.chat_template_utils import parse_response

    return "tools" in inspect.signature(parse_response).parameters


@pytest.mark.parametrize("name", tool_cases())
def test_conversations_are_those_of_the_installed_trl(name: str) -> None:
    pytest.importorskip("trl")
    from helpers.trl_tools import run_trl

    if name in DIFFERENT:
        pytest.skip(DIFFERENT[name])
    if name == "arguments as text" and not trl_casts_arguments():
        pytest.skip("This version of TRL does not cast arguments to the types of the tool's schema.")
    theirs = run_trl(tool_cases()[name])
    check_same(run_ours(tool_cases()[name]), theirs)
