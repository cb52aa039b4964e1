"""`Verifiers` without the library: in its place an environment that asks for turns as the library's client does."""

import json
import math

import lightning.pytorch as pl
import pytest

pytest.importorskip("aiohttp")

from pl_grouprl import GRPO, PromptDataModule, SamplingConfig
from pl_grouprl.distributed.checksum import WeightsMismatchError
from pl_grouprl.harnesses import Verifiers, verifiers
from pl_grouprl.harnesses import verifiers as library
from pl_grouprl.rollout.branching import Branching
from pl_grouprl.utilities.optional import VERIFIERS_AVAILABLE
from tests.helpers import fake_verifiers
from tests.helpers.fake_vllm import FakeVLLM, ServedPolicy
from tests.helpers.tiny_models import tiny_model
from tests.helpers.tiny_tokenizers import LETTERS, letters_tokenizer


@pytest.fixture
def tasks(monkeypatch):
    """The taskset; the library is replaced."""
    found = [fake_verifiers.task(place) for place in range(6)]
    monkeypatch.setattr(verifiers, "VERIFIERS_AVAILABLE", True)
    monkeypatch.setattr(library, "read_config", lambda taskset, config: None)
    monkeypatch.setattr(library, "renderer_config", lambda tokenizer, options: None)
    monkeypatch.setattr(library, "load_tasks", lambda config, seed, limit: found[:limit])
    monkeypatch.setattr(library, "Environment", fake_verifiers.FakeEnvironment)
    return found


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("letters")
    tiny_model("llama", vocab_size=LETTERS, eos_token_id=5, max_position_embeddings=64).save_pretrained(folder)
    letters_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def server():
    server = FakeVLLM()
    yield server
    server.close()


def module_of(policy, engine, episodes=None, **options):
    options = {
        "sampling": SamplingConfig(max_new_tokens=8),
        "episodes": {"harness": Verifiers("letters"), "max_turn_tokens": 5, **(episodes or {})},
        "num_generations": 4,
        **options,
    }
    return GRPO(policy, engine=engine, optimizer={"learning_rate": 3e-2}, **options)


class Kept(pl.Callback):
    def __init__(self):
        self.metrics, self.groups = [], []

    def on_train_batch_end(self, trainer, module, *args):
        self.metrics.append({name: float(value) for name, value in trainer.callback_metrics.items()})
        self.groups.append(module.last_rollouts.groups)


def fit(module, steps=2, **data):
    kept = Kept()
    options = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(max_steps=steps, callbacks=[kept], enable_model_summary=False, **options)
    trainer.fit(module, datamodule=PromptDataModule(train=module.episodes.harness, batch_size=2, **data))
    return kept


def test_episodes_are_trained(tasks, policy, server):
    module = module_of(policy, ServedPolicy(server))
    kept = fit(module, steps=3)
    assert module.episodes.harness._stage is None  # closed
    group = kept.groups[0][0]
    asked = [body["token_ids"] for body, _ in server.asked]
    for rollout in group.rollouts:
        ids = group.prompt_ids + rollout.token_ids
        assert any(ids[: len(one)] == one for one in asked)
        assert rollout.reward == pytest.approx(rollout.rewards["letters"])
        assert rollout.num_sampled_tokens <= 8
    first = kept.metrics[0]
    assert first["rewards/letters/mean"] == pytest.approx(first["reward"])
    assert first["rewards/letters/low"] == pytest.approx(first["reward"])
    assert 1 <= first["rewards/letters/turns"] == first["episode/turns"] <= 2
    assert {body["sampling_params"]["temperature"] for body, _ in server.asked} == {1.0}
    again = fit(module_of(policy, ServedPolicy(server)), steps=3)
    assert [step["reward"] for step in again.metrics] == [step["reward"] for step in kept.metrics]
    assert kept.metrics[0]["reward"] != kept.metrics[1]["reward"]


def test_failed_episodes_are_not_trained(tasks, policy, server):
    tasks[:] = [fake_verifiers.task(place, "ha") for place in range(6)]
    with pytest.warns(UserWarning, match="4 of 8 episodes failed, most often with: EnvError: no sandbox"):
        kept = fit(module_of(policy, ServedPolicy(server)), steps=1)
    rewards = [rollout.reward for group in kept.groups[0] for rollout in group.rollouts]
    assert sum(reward is None or math.isnan(reward) for reward in rewards) == 4
    assert kept.metrics[0]["rewards/letters/invalid"] == 4
    tasks[:] = [fake_verifiers.task(place, "fa") for place in range(6)]
    module = module_of(policy, ServedPolicy(server))
    with pytest.raises(RuntimeError, match="8 of 8 episodes failed"):
        fit(module)
    assert module.episodes.harness._stage is None


def test_other_weights_end_the_run(tasks, policy, server):
    def spoil(answer):
        if "choices" in answer:
            answer["choices"][0]["weight_versions"][0]["version"] = "another:1"

    server.spoil = spoil
    with pytest.raises(WeightsMismatchError, match="weights 'another:1', but 'test:1' is expected"):
        fit(module_of(policy, ServedPolicy(server)))


def test_a_restarted_server_gets_the_weights_again(tasks, policy, server):
    def spoil(answer):
        if len(server.asked) >= 3 and server.version == "test:1" and "choices" in answer:
            server.version = "default"
            raise RuntimeError

    server.spoil = spoil
    with pytest.warns(UserWarning, match=r"the sampler was lost \(1 of at most 3"):
        kept = fit(module_of(policy, ServedPolicy(server)), steps=1)
    assert kept.metrics[0]["sync/restarts"] == 1
    assert server.version == "test:2"


def test_splits_share_no_task(tasks):
    source = Verifiers("letters", val_size=1, test_size=2, size=2)
    places = {
        split: [json.loads(row["extra_info"]["task"])["idx"] for row in source.rows(split)]
        for split in ("train", "val", "test")
    }
    assert places == {"val": [0], "test": [1, 2], "train": [3, 4]}
    (row,) = source.rows("val")
    assert (row["prompt"], row["data_source"]) == ([{"role": "user", "content": "ab"}], "letters")
    with pytest.raises(ValueError, match="val_size and test_size are 6 together, but taskset 'letters' has only 6"):
        Verifiers("letters", val_size=6).rows("train")
    with pytest.raises(ValueError, match="has no split 'dev'"):
        source.rows("dev")


@pytest.mark.parametrize("prompt", [None, [fake_verifiers.Message(role="user", content=[])]])
def test_tasks_that_are_no_text_are_refused(tasks, prompt):
    tasks[0].prompt = prompt
    with pytest.raises(ValueError, match="without a prompt of text"):
        Verifiers("letters").rows("train")


def test_prompts_of_another_source_are_refused(tasks, policy, server):
    module = module_of(policy, ServedPolicy(server))
    rows = [{"prompt": [{"role": "user", "content": "ab"}], "extra_info": {"taskset": "digits"}}]
    with pytest.raises(ValueError, match=r"harness is Verifiers\('letters'\), but `extra_info` .*'digits'"):
        pl.Trainer(max_steps=1, accelerator="cpu", logger=False, enable_checkpointing=False).fit(
            module, datamodule=PromptDataModule(train=rows, batch_size=1)
        )


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"engine": None}, "engine is HFRolloutEngine"),
        ({"sampling": SamplingConfig(stop=("x",))}, "SamplingConfig.stop is"),
        ({"evaluation": {"sampling": SamplingConfig(temperature=5.0)}}, "SamplingConfig.temperature is 5.0"),
        ({"max_staleness": 1}, "max_staleness is 1"),
        ({"tools": [print]}, "tools is .* with harness"),
        ({"episodes": {"max_tool_calling_iterations": 2}}, "episodes.max_tool_calling_iterations is 2"),
        ({"episodes": {"chat_template": "qwen3"}}, "chat_template"),
        ({"episodes": {"branching": Branching(points="turn")}}, "branching is set, .* with harness"),
    ],
)
def test_what_does_not_go_with_a_harness_is_refused(tasks, policy, server, options, reason):
    with pytest.raises(ValueError, match=reason):
        module_of(policy, **{"engine": ServedPolicy(server), **options})


@pytest.mark.skipif(VERIFIERS_AVAILABLE, reason="verifiers is installed")
def test_the_missing_library_is_named():
    with pytest.raises(ModuleNotFoundError, match=r"Verifiers needs an optional package.*pl-grouprl\[verifiers\]"):
        Verifiers("letters")
