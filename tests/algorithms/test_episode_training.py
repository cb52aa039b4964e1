"""GRPO, PPO and GROUP PPO train on episodes of a random policy, whose turns are parsed into calls by chance."""

import math

import pytest
import torch
from helpers.chance_episodes import STOPS, TEMPLATE, ChancePolicy, chance_rows, double, register_chance_calls
from helpers.in_flight_engine import InFlightCopy
from helpers.sweeps import sweep
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from pl_grouprl.algorithms import GRPO, PPO, GroupPPO, OptimizerConfig
from pl_grouprl.data import PromptDataModule
from pl_grouprl.training.ahead import sampled_versions
from pl_grouprl.types import NOT_SAMPLED, SamplingConfig

SAMPLING = SamplingConfig(max_new_tokens=40, stop_token_ids=STOPS)
LIMITS = {"max_tool_calling_iterations": 3, "max_turn_tokens": 20, "max_tokens": 120}


REWRITING = {
    "episodes": {
        "rewritten_history": "new_row",
        "chat_template": TEMPLATE.replace(
            "{{ message.content }}", "{{ message.content[: 3 if message.role == 'assistant' else 99] }}"
        ),
        "max_tokens": 600,
    },
    "loss_agg_mode": "seq-mean-token-mean",
}
"""Earlier turns of the model are cut, so a further row begins after every result."""


class Counter:
    """An environment that counts, and rewards itself."""

    def reset(self, **columns):
        self.total = 0
        self.columns = columns
        return f" Start at {len(columns['prompt'][0]['content'])}."

    def double(self, number: int) -> int:
        """Double a number.

        Args:
            number: Refused if negative.

        Returns:
            The sum of all doubles.
        """
        if number < 0:
            raise ValueError("negative")
        self.total += 2 * number
        return self.total

    def get_reward(self):
        return float(self.total)


def share_of_letters(completions, **columns):
    texts = ["".join(message["content"] for message in own if message["role"] == "assistant") for own in completions]
    return [sum(c.isalpha() for c in text) / max(len(text), 1) for text in texts]


@pytest.fixture(autouse=True)
def chance_calls(monkeypatch):
    monkeypatch.setattr("pl_grouprl.chat.parsing._PARSERS", [])
    register_chance_calls()


def make(cls=GRPO, rewards=share_of_letters, **options):
    defaults = {
        "num_generations": 4,
        "sampling": SAMPLING,
        "optimizer": OptimizerConfig(learning_rate=1e-2),
        "sharing": {"verify": False},
        "tools": None if "environment_factory" in options else [double],
    }
    episodes = LIMITS | options.pop("episodes", {})
    return cls(ChancePolicy(), rewards, **{**defaults, **options}, episodes=episodes)


class Recorder(Callback):
    """The metrics of each step, and the groups that were trained."""

    def __init__(self):
        self.steps, self.groups = [], []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.steps.append({name: float(value) for name, value in trainer.callback_metrics.items()})
        self.groups.append(module.last_rollouts.groups)


def fit(module, tmp_path, rows=6, callbacks=(), ckpt_path=None, data=None, **trainer):
    recorder = Recorder()
    options = {"max_epochs": 1, "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    options |= {"accelerator": "cpu", "num_sanity_val_steps": 0, "default_root_dir": tmp_path, "log_every_n_steps": 1}
    if not callbacks:
        options["enable_checkpointing"] = False
    trainer = Trainer(callbacks=[recorder, *callbacks], **{**options, **trainer})
    data = data or PromptDataModule(chance_rows(rows), chance_rows(2), batch_size=2)
    trainer.fit(module, data, ckpt_path=ckpt_path)
    return recorder, trainer


@pytest.mark.parametrize("cls", sweep([GRPO, PPO, GroupPPO], quick=[GRPO, GroupPPO]))
def test_episodes_are_trained(cls, tmp_path):
    before = ChancePolicy().load()
    module = make(cls)
    recorder, trainer = fit(module, tmp_path)
    rollouts = [r for groups in recorder.groups for group in groups for r in group.rollouts]
    turns = [sum(m["role"] == "assistant" for m in r.messages) for r in rollouts]
    assert set(turns) >= {1, 2, 3}
    for rollout, count in zip(rollouts, turns, strict=True):
        assert sum(rollout.loss_mask or [1] * len(rollout.token_ids)) <= 40
        assert len(rollout.token_ids) <= 120
        assert (rollout.loss_mask is None) == (not any(m["role"] == "tool" for m in rollout.messages)) or count == 1
    metrics = recorder.steps[-1]
    last = [r for group in recorder.groups[-1] for r in group.rollouts]
    calls = sum(r.tool_counts.get("calls", 0) for r in last)
    assert metrics["tools/call_frequency"] == pytest.approx(calls / len(last))
    failed = sum(r.tool_counts.get("raised", 0) for r in last)
    assert metrics["tools/failure_frequency"] == pytest.approx(failed / max(calls, 1))
    lengths = [r.num_sampled_tokens for r in last]
    assert metrics["completions/mean_length"] == pytest.approx(sum(lengths) / len(lengths))
    assert math.isfinite(trainer.callback_metrics["val/reward"])
    changed = [not torch.equal(a, b) for a, b in zip(module.policy.parameters(), before.parameters(), strict=True)]
    assert all(changed)


def test_environments_reward_themselves(tmp_path):
    module = make(rewards=None, environment_factory=Counter)
    assert [reward.name for reward in module.rewarder.functions] == ["Counter"]
    recorder, _ = fit(module, tmp_path)
    rollouts = [r for groups in recorder.groups for group in groups for r in group.rollouts]
    for rollout in rollouts:
        results = [m["content"] for m in rollout.messages if m["role"] == "tool" and "error" not in m["content"]]
        question, _, start = rollout.prompt[-1]["content"].rpartition(" Start at ")
        assert start == f"{len(question)}."
        assert rollout.num_observation_tokens == 0  # the same in all of a group
        if rollout.finish_reason == "stop":
            assert rollout.reward == rollout.rewards["Counter"] == float(results[-1] if results else 0)
    assert len({rollout.reward for rollout in rollouts}) > 3
    assert recorder.steps[-1]["rewards/Counter/mean"] == recorder.steps[-1]["reward"]


def test_functions_read_environments(tmp_path):
    seen = []

    def total(completions, environments, prompts, **columns):
        seen.extend(zip(prompts, (environment.columns["prompt"] for environment in environments), strict=True))
        return [float(environment.total) for environment in environments]

    recorder, _ = fit(make(rewards=[total], environment_factory=Counter), tmp_path)
    rollouts = [r for groups in recorder.groups for group in groups for r in group.rollouts]
    assert all(rollout.reward == sum(rollout.rewards.values()) for rollout in rollouts)
    assert all(rollout.rewards["total"] == rollout.rewards["Counter"] for rollout in rollouts)
    for prompt, row in seen:
        assert prompt[0]["content"].startswith(row[0]["content"])
        assert prompt != row


class Quiz:
    """Writes its own prompts, which differ between the rollouts of a group."""

    asked = 0

    def reset(self):
        Quiz.asked += 1
        return f"Question {Quiz.asked % 5}"

    def double(self, number: int) -> int:
        """Double a number.

        Args:
            number: Any.

        Returns:
            Its double.
        """
        return 2 * number

    async def get_reward(self):
        return 1.0


def test_an_environment_writes_the_data(tmp_path):
    module = make(rewards=share_of_letters, environment_factory=Quiz)
    recorder, trainer = fit(module, tmp_path, data=PromptDataModule(batch_size=2), max_epochs=-1, max_steps=3)
    assert trainer.global_step == 3
    for group in (group for groups in recorder.groups for group in groups):
        prompts = {rollout.prompt[0]["content"] for rollout in group.rollouts}
        assert len(prompts) > 1
        for rollout in group.rollouts:
            own = rollout.num_observation_tokens
            assert not any(rollout.loss_mask[:own])
            text = module.tokenizer.decode(group.prompt_ids + rollout.token_ids[:own])
            assert text == f"<|im_start|>user\n{rollout.prompt[0]['content']}<|im_end|>\n<|im_start|>assistant\n"


def test_rewritten_histories_are_trained_as_they_were_sampled(tmp_path):
    module = make(**REWRITING)
    recorder, _ = fit(module, tmp_path, rows=4)
    episodes = [episode for groups in recorder.groups for group in groups for episode in group.episodes]
    assert {len(episode.rows) for episode in episodes} >= {1, 2, 3}
    for episode in episodes:
        assert len(episode.rows) <= episode.last.num_turns
        assert len({row.reward for row in episode.rows}) == 1
    for metrics in recorder.steps:
        assert metrics["sampling/sampling_logp_difference/max"] < 1e-3
    last = [episode for group in recorder.groups[-1] for episode in group.episodes]
    assert recorder.steps[-1]["episode/turns"] == pytest.approx(sum(e.last.num_turns for e in last) / len(last))
    assert len(last) == 8  # two prompts, four generations


AHEAD = {"max_staleness": 1, "importance_sampling": {"mode": "token_truncate"}}


@pytest.mark.parametrize("steps", [(2,), pytest.param((1, 4), marks=pytest.mark.slow)])
@pytest.mark.parametrize("options", [{}, AHEAD, pytest.param({**AHEAD, **REWRITING}, marks=pytest.mark.slow)])
def test_resume_is_exact(options, steps, tmp_path):
    options = {"environment_factory": Counter, "num_iterations": 2, **options}
    saving = ModelCheckpoint(tmp_path / "all", "{step}", save_top_k=-1, every_n_train_steps=1)
    whole = make(**options)
    fit(whole, tmp_path, callbacks=[saving])
    for step in steps:
        resumed = make(**options)
        fit(
            resumed,
            tmp_path,
            callbacks=[ModelCheckpoint(tmp_path / f"{step}")],
            ckpt_path=tmp_path / f"all/step={step}.ckpt",
        )
        for name, weight in whole.policy.state_dict().items():
            assert torch.equal(weight, resumed.policy.state_dict()[name]), f"{name} after step {step}"


@pytest.mark.parametrize(
    "options",
    [
        {"environment_factory": Counter, "rewards": None},
        {**REWRITING, "environment_factory": Counter},
        {"episodes": {"branching": {"points": "turn", "width": 2, "depth": 1}}},
    ],
    ids=["environment", "rows", "branching"],
)
def test_episodes_advance_each_by_itself(options, tmp_path):
    recorder, _ = fit(make(engine=InFlightCopy(), **AHEAD, **options), tmp_path)
    for number, (groups, step) in enumerate(zip(recorder.groups, recorder.steps, strict=True)):
        for rollout in (rollout for group in groups for rollout in group.rollouts):
            mask = rollout.loss_mask or [1] * len(rollout.token_ids)
            assert [version == NOT_SAMPLED for version in rollout.weight_versions] == [not bit for bit in mask]
            assert {number - version for version in sampled_versions(rollout)} <= {0, min(number, 1)}
        assert step["rollout/staleness/max"] <= 1


def test_prompts_without_an_equal_reward_are_replaced(tmp_path):
    recorder, _ = fit(make(dynamic_sampling=True, environment_factory=Counter, rewards=None), tmp_path)
    for groups in recorder.groups:
        for group in groups:
            assert len({rollout.reward for rollout in group.rollouts}) > 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tools": None, "episodes": {**dict.fromkeys(LIMITS), "tool_timeout": 3.0}}, "episodes.tool_timeout is 3.0"),
        ({"tools": None, "episodes": {**dict.fromkeys(LIMITS), "max_turn_tokens": 3}}, "max_turn_tokens is 3"),
        ({"episodes": {"max_turn_tokens": 0}}, r"episodes.max_turn_tokens is 0; it must be at least 1"),
        (
            {"episodes": {"max_tool_calling_iterations": -1}},
            r"episodes.max_tool_calling_iterations is -1; it must be at least 0",
        ),
        ({"episodes": {"tool_workers": -1}}, r"episodes.tool_workers is -1; it must be at least 1, or 0"),
        ({"rewards": None}, "rewards is None; pass a reward function"),
    ],
)
def test_options_that_cannot_work_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_prompts_must_be_messages(tmp_path):
    with pytest.raises(ValueError, match=r"train, row 0: column 'prompt' is a string, and tools and environments need"):
        fit(make(), tmp_path, data=PromptDataModule([{"prompt": "1 + 1"}] * 2, batch_size=2))


class Verbose(Counter):
    """Writes more than the model can read."""

    def reset(self, **columns):
        return super().reset(**columns) + " word" * 2000


def test_a_prompt_of_an_environment_must_leave_room(tmp_path):
    with pytest.raises(
        ValueError, match=r"a prompt has \d+ tokens including what its environment's reset returned.* 2048 "
    ):
        fit(make(rewards=None, environment_factory=Verbose), tmp_path)


def test_a_budget_needs_to_know_the_longest_episode(tmp_path):
    with pytest.raises(ValueError, match=r"tool results may have any number of tokens; set episodes.max_tokens"):
        fit(make(max_tokens_per_micro_batch=300, episodes={"max_tokens": None}), tmp_path)


def test_functions_cannot_read_environments_sampled_ahead(tmp_path):
    def total(completions, environments, **columns):
        return [float(environment.total) for environment in environments]

    ahead = {"max_staleness": 1, "importance_sampling": {"mode": "token_truncate"}}
    with pytest.raises(ValueError, match=r"'total' requires \['environments'\]"):
        fit(make(rewards=[total], environment_factory=Counter, **ahead), tmp_path)
