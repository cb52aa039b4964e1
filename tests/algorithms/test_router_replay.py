"""Runs that replay their sampler's experts: trajectories, the metric, resumed runs, and records of several rounds."""

from __future__ import annotations

import random
import zlib

import pytest
import torch
from helpers.chance_episodes import STOPS, ChancePolicy
from helpers.random_tools import TOOLS, write_call
from helpers.rollouts import WithoutCaches
from helpers.sampled_episodes import open_episodes
from helpers.tiny_models import tiny_model
from helpers.tiny_runs import RoutedEngine, ScriptedEngine, TinyPolicy, largest_difference

from pl_grouprl.chat import ToolParser, register_tool_parser
from pl_grouprl.models.router_replay import RouterReplay
from pl_grouprl.rollout import HFRolloutEngine
from pl_grouprl.rollout.branching import Branching
from pl_grouprl.training.run import PlainRun
from pl_grouprl.training.sampler import Sampler
from pl_grouprl.types import Prompt, RolloutGroup, SamplingConfig

METRIC = "sampling/routing_differs"


def policy() -> TinyPolicy:
    return TinyPolicy(num_experts=4, initializer_range=0.2)


def test_sharing_on_and_off_give_the_same_trajectory(fit):
    options = {"policy": policy(), "num_iterations": 2, "num_mini_batches": 2, "beta": 0.05}
    shared, repeated, plain = (
        fit(steps=4, engine=engine, sharing={"mode": mode}, **options)
        for engine, mode in (
            (RoutedEngine(4), "shared"),
            (RoutedEngine(4), "repeated"),
            (ScriptedEngine(), "shared"),
        )
    )
    losses = [[step["loss"] for step in run.steps] for run in (shared, repeated, plain)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    assert (
        largest_difference(shared.weights[-1], repeated.weights[-1])
        < 1e-4
        < largest_difference(shared.weights[-1], plain.weights[-1])
    )
    assert shared.steps[0][METRIC] > 0.5  # by chance one token of six gets its forced pair in a layer
    assert METRIC not in plain.steps[0]


def test_a_sampler_in_the_policys_dtype_routes_as_the_policy_does(fit):
    own = fit(steps=2, engine=HFRolloutEngine(router_replay=True), policy=policy())
    plain = fit(steps=2, engine=HFRolloutEngine(), policy=policy())
    assert [step[METRIC] for step in own.steps] == [0, 0]
    assert largest_difference(own.weights[-1], plain.weights[-1]) < 1e-6


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_resume_is_exact_amid_the_updates_of_a_batch(fit, max_staleness):
    importance = {"importance_sampling": {"mode": "token_truncate"}} if max_staleness else {}
    options = {"policy": policy(), "num_iterations": 2, "max_staleness": max_staleness, **importance}
    engine = HFRolloutEngine(router_replay=True, dtype="bfloat16")
    whole = fit(steps=4, engine=engine, save=True, **options)
    assert largest_difference(whole.weights[-1], fit(steps=4, engine=engine, resume=1, **options).weights[-1]) == 0


def test_a_rollout_without_a_record_and_a_policy_without_experts_are_refused(fit, monkeypatch):
    with pytest.raises(ValueError, match="Qwen3Model has no experts"):
        fit(engine=RoutedEngine(4))
    monkeypatch.setattr(RoutedEngine, "experts", lambda self, token_ids: None)
    with pytest.raises(ValueError, match="RoutedEngine returned a rollout without routed_experts"):
        fit(engine=RoutedEngine(4), policy=policy())


# Records of several rounds: what one pass over the whole sequence chooses.


def assert_recorded(model: torch.nn.Module, groups: list[RolloutGroup]) -> None:
    for group in groups:
        for rollout in group.rollouts:
            record = torch.cat([group.routed_experts, rollout.routed_experts])
            known = (record >= 0).all(-1).all(-1)
            with torch.no_grad(), RouterReplay(model) as routers, routers.recording() as recorded:
                model(input_ids=torch.tensor([[*group.prompt_ids, *rollout.token_ids]]))
            assert torch.equal(record.sort(-1).values[known], recorded().sort(-1).values[known])
            sampled = torch.tensor([1] * len(group.prompt_ids) + (rollout.loss_mask or [1] * len(rollout.token_ids)))
            # All tokens up to the last one that the model wrote, which it did not read.
            last = int(sampled.nonzero().max())
            assert known[:last].all()
            assert not known[last:].any()


@pytest.mark.parametrize("engine", [HFRolloutEngine, WithoutCaches])
@pytest.mark.parametrize("points", ["every_n", "entropy"])
def test_branching_rollouts(points, engine):
    model = tiny_model("qwen3_moe")
    branching = Branching(points, every_n=3 if points == "every_n" else None, width=2, depth=2)
    sampler = Sampler(PlainRun(model, None), engine(router_replay=True))
    sampling = SamplingConfig(max_new_tokens=10, stop_token_ids=(4, 9))
    groups = sampler.generate([Prompt([5, 6, 7]), Prompt([8] * 20)], sampling, 2, seed=("test",), branching=branching)
    assert max(len(group.rollouts) for group in groups) > 2
    assert_recorded(model, groups)


@pytest.mark.parametrize("engine", [HFRolloutEngine, WithoutCaches])
def test_episodes(engine, monkeypatch):
    monkeypatch.setattr("pl_grouprl.chat.parsing._PARSERS", [])

    def parse_by_chance(text, tools=()):
        rng = random.Random(zlib.crc32(text.encode("utf-8", "replace")))
        calls = [write_call(rng) for _ in range(rng.choice((0, 1, 1, 2)))]
        called = [{"type": "function", "function": {"name": name, "arguments": values}} for name, values in calls]
        return {"role": "assistant", "content": text, **({"tool_calls": called} if called else {})}

    register_tool_parser(ToolParser("chance", ("<chance>",), "<|im_start|>assistant\n", parse_by_chance))
    tokenizer = ChancePolicy(0).load_tokenizer()
    model = tiny_model("qwen3_moe", vocab_size=len(tokenizer), max_position_embeddings=4096)
    rows = [{"prompt": [{"role": "user", "content": "The prompt."}]}]
    options = {"tools": TOOLS, "max_tool_calling_iterations": 3}
    with open_episodes(model, tokenizer, engine(router_replay=True), **options) as sample:
        groups = sample(rows, SamplingConfig(max_new_tokens=40, stop_token_ids=STOPS), 4)
    assert max(rollout.num_turns for rollout in groups[0].rollouts) > 1
    assert_recorded(model, groups)
