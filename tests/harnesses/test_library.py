"""`Verifiers` with the library itself, on a server without vLLM. Skipped where verifiers is not installed."""

import json

import pytest

pytest.importorskip("verifiers")

from pl_grouprl.episodes.loop import EpisodeLimits
from pl_grouprl.harnesses import Verifiers
from pl_grouprl.harnesses import verifiers as library
from pl_grouprl.harnesses.gateway import Stage
from pl_grouprl.types import Prompt, SamplingConfig
from tests.helpers.fake_vllm import FakeVLLM, ServedPolicy

LOCAL = {"agent": {"runtime": {"type": "subprocess"}}}


@pytest.fixture
def server():
    server = FakeVLLM()
    yield server
    server.close()


def test_the_example_trains(example, model, server):
    rewards = example.train(model, ServedPolicy(server), steps=2)
    assert len(rewards) == 2
    assert all(0 <= reward <= 1 for reward in rewards)
    assert len(server.asked) == 2 * 2 * 8 * 2


@pytest.fixture
def play(example, model, server):
    """Plays two tasks twice; returns prompts and rollouts."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    policy, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    engine = ServedPolicy(server)
    engine.bind(policy, tokenizer)
    engine.update_weights(None, version=1)
    opened = []

    def play(environment, seed=3, max_new_tokens=12):
        opened.append(environment)
        rows = environment.rows("train")[:2]
        prompts = [Prompt([1], row["prompt"], {"extra_info": row["extra_info"]}) for row in rows]
        options = {"seed": seed, "prompt_indices": [0, 1], "limits": EpisodeLimits(max_turn_tokens=6)}
        sampling = SamplingConfig(max_new_tokens=max_new_tokens)
        return environment.play(engine, policy, tokenizer, prompts, sampling, 2, **options)

    yield play
    for environment in opened:
        environment.close()


def test_rollouts_are_what_the_server_wrote(play, server):
    prompts, groups = play(Verifiers("verifiers_environment", LOCAL))
    written = [body["token_ids"] + answered for body, answered in server.answered]
    for prompt, rollouts in zip(prompts, groups, strict=True):
        for rollout in rollouts:
            assert prompt.token_ids + rollout.token_ids in written
            assert len(rollout.logprobs) == len(rollout.token_ids)


def test_the_same_seed_gives_the_same_rollouts(play):
    environment = Verifiers("verifiers_environment", LOCAL)

    def tokens(seed):
        _, groups = play(environment, seed)
        return [(rollout.token_ids, rollout.logprobs) for group in groups for rollout in group]

    first = tokens(3)
    assert first == tokens(3)
    assert first != tokens(4)


def test_limits_of_the_library_hold(play):
    config = {"agent": {"runtime": {"type": "subprocess"}, "max_turns": 1}}
    _, groups = play(Verifiers("verifiers_environment", config))
    rollouts = [rollout for group in groups for rollout in group]
    assert {len(rollout.messages) for rollout in rollouts} == {1}
    assert {rollout.finish_reason for rollout in rollouts} == {"length"}


def test_tokens_of_an_episode_are_limited(play):
    _, groups = play(Verifiers("verifiers_environment", LOCAL), max_new_tokens=4)
    for rollouts in groups:
        assert [rollout.num_sampled_tokens for rollout in rollouts] == [4, 4]
        assert all(rollout.environment_reward is not None for rollout in rollouts)  # scored all the same


def test_rows_hold_the_tasks(example):
    rows = Verifiers("verifiers_environment", LOCAL, val_size=6).rows("train")
    assert len(rows) == 20
    task = json.loads(rows[0]["extra_info"]["task"])
    assert rows[0]["prompt"] == [{"role": "user", "content": task["prompt"]}]
    assert rows[0]["data_source"] == "verifiers_environment"


def test_an_unknown_taskset_is_refused():
    with pytest.raises(ValueError, match=r"Verifiers\('gsm9k'\) is rejected"):
        Verifiers("gsm9k")


def test_a_config_that_the_library_refuses(example):
    with pytest.raises(ValueError, match=r"is rejected by the library verifiers: (.|\n)*max_turnz"):
        Verifiers("verifiers_environment", {"agent": {"max_turnz": 3}})
    with pytest.raises(ValueError, match="sets the sampling of agent 'agent', which the policy plays"):
        Verifiers("verifiers_environment", {"agent": {"sampling": {"temperature": 0.1}}})


def test_a_renderer_by_name():
    tokenizer = type("Tokenizer", (), {"name_or_path": "Qwen/Qwen3-0.6B"})()
    assert library.renderer_config(tokenizer, None).name == "qwen3"
    tokenizer.name_or_path = "/my/model"
    assert library.renderer_config(tokenizer, None).name == "default"
    assert library.renderer_config(tokenizer, {"name": "qwen3", "enable_thinking": False}).name == "qwen3"
    with pytest.raises(ValueError, match=r"Verifiers.renderer is {'name': 'qwen33'}, which the library rejects"):
        library.renderer_config(tokenizer, {"name": "qwen33"})


def test_a_stage_that_cannot_start_ends_its_thread(example, model):
    from transformers import AutoTokenizer

    def make(url, folder):
        raise RuntimeError("no environment")

    with pytest.raises(RuntimeError, match="no environment"):
        Stage(["http://127.0.0.1:9"], None, AutoTokenizer.from_pretrained(model), make)
