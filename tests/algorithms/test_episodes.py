"""Episodes of several turns and branching rollouts through the algorithms, resumed, sampled ahead, and in rows."""

from __future__ import annotations

import functools
import json
import math
from functools import partial

import pytest
import torch
from helpers import tiny_runs
from helpers.branching_engine import BranchingEngine
from helpers.chance_episodes import STOPS, TEMPLATE, ChancePolicy, chance_rows, double, register_chance_calls
from helpers.in_flight_engine import InFlightCopy
from helpers.rank_cases import ROW_CASES, RowsEngine, gradients_of, step_of_rows
from helpers.sweeps import sweep, sweep_pairs
from helpers.tiny_runs import AHEAD, ScriptedEngine, TinyPolicy, compare_gradients, merged, same
from lightning.pytorch import Callback

from pl_grouprl.algorithms import GRPO, PPO, GroupPPO
from pl_grouprl.callbacks import CompletionsTable
from pl_grouprl.data import PromptDataModule
from pl_grouprl.functional.advantages import BranchPaths, leaf_weights
from pl_grouprl.functional.masked import to_rows
from pl_grouprl.models import PolicyCopyCritic
from pl_grouprl.training.ahead import sampled_versions
from pl_grouprl.training.metrics import FAILURES
from pl_grouprl.training.rewarder import episode_leaf_weights
from pl_grouprl.types import NOT_SAMPLED, Rollout, RolloutGroup, SamplingConfig

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


def letters_of_turns(completions, **columns):
    texts = ["".join(message["content"] for message in own if message["role"] == "assistant") for own in completions]
    return [sum(c.isalpha() for c in text) / max(len(text), 1) for text in texts]


@pytest.fixture(scope="module", autouse=True)
def chance_calls():
    """Turns of a random policy are parsed into calls by chance."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pl_grouprl.chat.parsing._PARSERS", [])
        register_chance_calls()
        yield


def make(cls=GRPO, rewards=letters_of_turns, **options):
    tools = None if "environment_factory" in options else [double]
    options = merged({"sampling": SAMPLING, "tools": tools, "episodes": LIMITS}, options)
    return tiny_runs.make_module(cls, ChancePolicy(), rewards, **options)


def fit_episodes(folder, cls=GRPO, rows=6, data=None, trainer=None, callbacks=(), save=False, resume=None, **options):
    data = data or PromptDataModule(chance_rows(rows), batch_size=2)
    trainer = {"max_epochs": 1, "max_steps": -1, "num_sanity_val_steps": 0, **(trainer or {})}
    module, own = make(cls, **options), {"callbacks": callbacks, "save": save, "resume": resume}
    return tiny_runs.fit(folder, module=module, data=data, trainer=trainer, **own)


@pytest.fixture
def fit(tmp_path):
    return partial(fit_episodes, tmp_path)


def rollouts_of(run):
    return [rollout for groups in run.groups for group in groups for rollout in group.rollouts]


@pytest.mark.parametrize("cls", sweep([GRPO, PPO], quick=[GRPO]))
def test_episodes_are_trained(cls, fit):
    run = fit(cls, data=PromptDataModule(chance_rows(6), chance_rows(2), batch_size=2))
    turns = [sum(m["role"] == "assistant" for m in r.messages) for r in rollouts_of(run)]
    assert set(turns) >= {1, 2, 3}
    for rollout, count in zip(rollouts_of(run), turns, strict=True):
        assert sum(rollout.loss_mask or [1] * len(rollout.token_ids)) <= 40
        assert len(rollout.token_ids) <= 120
        assert (rollout.loss_mask is None) == (not any(m["role"] == "tool" for m in rollout.messages)) or count == 1
    assert math.isfinite(run.trainer.callback_metrics["val/reward"])
    pairs = zip(run.module.policy.parameters(), ChancePolicy().load().parameters(), strict=True)
    assert all(not torch.equal(a, b) for a, b in pairs)


NAMES = {
    "tools/call_frequency", "tools/failure_frequency", "episode/turns", "episode/tool_seconds",
    "episode/context_tokens", *(f"tools/failures/{kind}" for kind in FAILURES),
}  # fmt: skip


def words(completions, **columns):
    return [float(len(completion[-1]["content"])) for completion in completions]


def test_metrics_masks_and_the_file_of_completions(fit, tmp_path):
    """A step of GROUP PPO on episodes, of which those that were cut are left out, and a validation."""
    run = fit(
        GroupPPO, rewards=words, mask_truncated_completions=True, episodes={"max_turn_tokens": None},
        data=PromptDataModule(chance_rows(4), chance_rows(2), batch_size=4), trainer={"max_steps": 1},
        callbacks=[CompletionsTable(console=False)],
    )  # fmt: skip
    metrics, rollouts, buffer = tiny_runs.metrics_of(run.trainer), run.rollouts, run.buffer
    assert metrics.keys() >= NAMES | {f"val/{name}" for name in NAMES}
    assert {rollout.finish_reason for rollout in rollouts} == {"stop", "length"}
    written = [len(rollout.token_ids) if rollout.loss_mask is None else sum(rollout.loss_mask) for rollout in rollouts]
    assert min(written) > 0  # those that are left out have their lengths, too
    assert metrics["completions/mean_length"] == pytest.approx(sum(written) / len(written))
    context = [len(rollout.token_ids) - own for rollout, own in zip(rollouts, written, strict=True)]
    assert metrics["episode/context_tokens"] == pytest.approx(sum(context) / len(context))
    assert metrics["num_tokens"] == sum(len(g.prompt_ids) + len(r.token_ids) for g in buffer.groups for r in g.rollouts)
    assert metrics["tools/failures/raised"] > 0
    failures = sum(metrics[f"tools/failures/{kind}"] for kind in FAILURES)
    calls = sum(rollout.tool_counts.get("calls", 0) for rollout in rollouts)
    assert metrics["tools/call_frequency"] == pytest.approx(calls / len(rollouts))
    assert metrics["tools/failure_frequency"] == pytest.approx(failures / calls)
    # Truncated episodes are not trained, and groups end at turns.
    mask_BT, starts_BT = (
        to_rows(buffer.joined(name), buffer.rollout_lengths) for name in ("loss_mask", "group_starts")
    )
    for rollout, mask, starts in zip(rollouts, mask_BT.tolist(), starts_BT.tolist(), strict=True):
        whole = rollout.loss_mask or [1] * len(rollout.token_ids)
        expected = [0] * len(whole) if rollout.finish_reason == "length" else whole
        assert mask[: len(whole)] == [bool(bit) for bit in expected]
        assert all(starts[t] for t in range(1, len(mask)) if mask[t] and not mask[t - 1])
    assert any(not all(rollout.loss_mask or [1]) for rollout in rollouts if rollout.finish_reason == "stop")
    (path,) = tmp_path.rglob("completions.jsonl")
    shown = [json.loads(line) for line in path.read_text().splitlines()]
    first = [rollout for group in buffer.groups[:2] for rollout in group.rollouts]
    assert [row["messages"] for row in shown] == [rollout.messages for rollout in first]
    assert [row["turns"] for row in shown] == [rollout.num_turns for rollout in first]
    assert max(row["turns"] for row in shown) > 1


def test_environments_reward_themselves(fit):
    run = fit(rewards=None, environment_factory=Counter, dynamic_sampling=True)
    assert [reward.name for reward in run.module.rewarder.functions] == ["Counter"]
    for rollout in rollouts_of(run):
        results = [m["content"] for m in rollout.messages if m["role"] == "tool" and "error" not in m["content"]]
        question, _, start = rollout.prompt[-1]["content"].rpartition(" Start at ")
        assert start == f"{len(question)}."
        assert rollout.num_observation_tokens == 0  # the same in all of a group
        if rollout.finish_reason == "stop":
            assert rollout.reward == rollout.rewards["Counter"] == float(results[-1] if results else 0)
    assert len({rollout.reward for rollout in rollouts_of(run)}) > 3
    for group in (group for groups in run.groups for group in groups):  # prompts with equal rewards were replaced
        assert len({rollout.reward for rollout in group.rollouts}) > 1
    assert run.steps[-1]["rewards/Counter/mean"] == run.steps[-1]["reward"]


class Stepper(Counter):
    """Rewards each call by its number, and the episode by the sum."""

    def double(self, number: int) -> int:
        """Double a number.

        Args:
            number: Refused if negative.

        Returns:
            The sum of all doubles.
        """
        self.reward = float(number)
        return super().double(number)

    def get_step_reward(self):
        reward, self.reward = getattr(self, "reward", None), None
        return reward


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (GRPO, {"advantage_estimator": "grpo"}),
        (GRPO, {"advantage_estimator": "gagpo", "advantage_options": {"gamma": 0.9}}),
        (PPO, {"advantage_level": "turn", "gamma": 0.9, "critic": PolicyCopyCritic(head_std=0.3)}),
        (GroupPPO, {"group_rule": "improbable", "critic": PolicyCopyCritic(head_std=0.3)}),
    ],
)
@pytest.mark.parametrize("rewriting", [False, True])
def test_step_rewards_are_trained(fit, cls, options, rewriting):
    options |= REWRITING if rewriting else {}
    options |= {} if cls is GRPO else {"whiten_advantages": False}
    run = fit(cls, rewards=None, environment_factory=Stepper, rows=4, **options)
    assert [reward.name for reward in run.module.rewarder.functions] == ["Stepper", "Stepper_steps"]
    rewarded = 0
    for groups in run.groups:
        for episode in (episode for group in groups for episode in group.episodes):
            last = episode.last
            given = {
                end - 1: reward for (_, end), reward in zip(episode.turns, last.environment_step_rewards, strict=True)
            }
            given = {place: reward for place, reward in given.items() if reward is not None}
            assert episode.step_rewards == given
            assert last.reward == pytest.approx(last.environment_reward + sum(given.values()))
            rewarded += len(given)
    assert rewarded > 3
    assert run.steps[-1]["reward"] == pytest.approx(
        run.steps[-1]["rewards/Stepper/mean"] + run.steps[-1]["rewards/Stepper_steps/mean"]
    )
    buffer = run.module.last_rollouts
    advantages, rewards = (
        to_rows(buffer.joined(name), buffer.episode_lengths) for name in ("advantages", "token_rewards")
    )
    level = options.get("advantage_level") == "turn" or options.get("advantage_estimator") == "gagpo"
    for row, episode in enumerate(buffer.episodes):
        assert rewards[row].sum().item() == pytest.approx(episode.reward, abs=1e-5)
        for first, end in episode.turns if level else ():
            assert len(set(advantages[row, first:end].tolist())) == 1
    if cls is PPO:  # the critic is trained where turns begin, towards A + V
        mask, values, returns = (
            to_rows(buffer.joined(name), buffer.episode_lengths) for name in ("value_mask", "values", "returns")
        )
        for row, episode in enumerate(buffer.episodes):
            firsts = [first for first, _ in episode.turns]
            assert mask[row].nonzero().flatten().tolist() == firsts
            torch.testing.assert_close(returns[row, firsts], advantages[row, firsts] + values[row, firsts])


def total(completions, environments, **columns):
    return [float(environment.total) for environment in environments]


def test_functions_read_environments(fit):
    seen = []

    def total_and_prompts(completions, environments, prompts, **columns):
        seen.extend(zip(prompts, (environment.columns["prompt"] for environment in environments), strict=True))
        return total(completions, environments)

    run = fit(rewards=[total_and_prompts], environment_factory=Counter)
    for rollout in rollouts_of(run):
        assert rollout.reward == sum(rollout.rewards.values())
        assert rollout.rewards["total_and_prompts"] == rollout.rewards["Counter"]
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


def test_an_environment_writes_the_data(fit):
    trainer = {"max_epochs": -1, "max_steps": 2}
    run = fit(environment_factory=Quiz, data=PromptDataModule(batch_size=2), trainer=trainer)
    assert run.trainer.global_step == 2
    for group in (group for groups in run.groups for group in groups):
        assert len({rollout.prompt[0]["content"] for rollout in group.rollouts}) > 1
        for rollout in group.rollouts:
            own = rollout.num_observation_tokens
            assert not any(rollout.loss_mask[:own])
            text = run.module.tokenizer.decode(group.prompt_ids + rollout.token_ids[:own])
            assert text == f"<|im_start|>user\n{rollout.prompt[0]['content']}<|im_end|>\n<|im_start|>assistant\n"


def test_rewritten_histories_are_trained_as_they_were_sampled(fit):
    run = fit(rows=4, **REWRITING)
    episodes = [episode for groups in run.groups for group in groups for episode in group.episodes]
    assert {len(episode.rows) for episode in episodes} >= {1, 2, 3}
    for episode in episodes:
        assert len(episode.rows) <= episode.last.num_turns
        assert len({row.reward for row in episode.rows}) == 1
    for metrics in run.steps:
        assert metrics["sampling/sampling_logp_difference/max"] < 1e-3
    last = [episode for group in run.groups[-1] for episode in group.episodes]
    assert run.steps[-1]["episode/turns"] == pytest.approx(sum(e.last.num_turns for e in last) / len(last))
    assert len(last) == 8  # two prompts, four generations


@pytest.mark.parametrize("steps", [(2,), pytest.param((1, 3), marks=pytest.mark.slow)])
@pytest.mark.parametrize("options", [{}, AHEAD, pytest.param({**AHEAD, **REWRITING}, marks=pytest.mark.slow)])
def test_resume_is_exact(options, steps, fit):
    options = {"environment_factory": Counter, "num_iterations": 2, "rows": 4, **options}
    whole = fit(save=True, **options)
    for step in steps:
        assert same(whole.weights[-1], fit(resume=step, **options).weights[-1]), step


@pytest.mark.parametrize(
    "options",
    [
        {"environment_factory": Counter, "rewards": None},
        {**REWRITING, "environment_factory": Counter},
        {"episodes": {"branching": {"points": "turn", "width": 2, "depth": 1}}},
    ],
    ids=["environment", "rows", "branching"],
)
def test_episodes_advance_each_by_itself(options, fit):
    run = fit(engine=InFlightCopy(), **AHEAD, **options)
    for number, (groups, step) in enumerate(zip(run.groups, run.steps, strict=True)):
        for rollout in (rollout for group in groups for rollout in group.rollouts):
            mask = rollout.loss_mask or [1] * len(rollout.token_ids)
            assert [version == NOT_SAMPLED for version in rollout.weight_versions] == [not bit for bit in mask]
            assert {number - version for version in sampled_versions(rollout)} <= {0, min(number, 1)}
        assert step["rollout/staleness/max"] <= 1


class Verbose(Counter):
    """Writes more than the model can read."""

    def reset(self, **columns):
        return super().reset(**columns) + " word" * 2000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data": PromptDataModule([{"prompt": "1 + 1"}] * 2, batch_size=2)}, "train, row 0: column 'prompt' is a str"),
        ({"rewards": None, "environment_factory": Verbose}, r"a prompt has \d+ tokens including .* reset returned"),
        ({"max_tokens_per_micro_batch": 300, "episodes": {"max_tokens": None}}, "set episodes.max_tokens"),
        ({"rewards": [total], "environment_factory": Counter, **AHEAD}, r"'total' requires \['environments'\]"),
    ],
)
def test_runs_that_cannot_work_are_refused(fit, options, message):
    with pytest.raises(ValueError, match=message):
        fit(**options)


# Rows: episodes of two rows train exactly as the same tokens in one rollout.


SAME_METRICS = (
    "loss", "reward", "reward_std", "frac_reward_zero_std", "completions/mean_length", "completions/min_length",
    "completions/max_length", "completions/clipped_ratio", "grad_norm", "rewards/rewards/mean", "rewards/rewards/std",
    "entropy", "kl", "kl_coef", "value/loss", "value/explained_variance",
)  # fmt: skip


QUICK = ("grpo process supervision", "ppo seq-mean-token-mean")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The step in which every episode is one rollout."""
    return functools.cache(lambda case: step_of_rows(case, tmp_path_factory.mktemp("whole"), rows=False))


def compare(found, expected, tolerance=1e-7):
    compare_gradients(gradients_of(found), gradients_of(expected), tolerance)
    for name in SAME_METRICS:
        if name in expected.steps[-1]:
            assert found.steps[-1][name] == pytest.approx(expected.steps[-1][name], rel=1e-5, abs=1e-6)


CUTS = [(case, cut) for case in ROW_CASES for cut in [None, (70, "shared"), (30, "shared"), (70, "repeated")]]
QUICK_CUTS = [*((case, None) for case in QUICK), (QUICK[0], (30, "shared"))]


@pytest.mark.parametrize(("case", "cut"), sweep_pairs(CUTS, QUICK_CUTS))
def test_rows_train_as_one_sequence(whole, case, cut, tmp_path):
    options = {"max_tokens_per_micro_batch": cut[0], "sharing": {"mode": cut[1]}} if cut else {}
    found = step_of_rows(case, tmp_path, rows=True, **options)
    groups = found.buffer.groups
    assert sum(len(group.rollouts) for group in groups) > sum(len(group.episodes) for group in groups)
    compare(found, whole(case), 1e-7 if cut is None else 1e-6 if "shared" in cut else 1e-5)


@pytest.mark.slow
def test_only_token_losses_train_episodes_larger_than_the_budget(whole, tmp_path):
    case, cut = "grpo token-mean", {"max_tokens_per_micro_batch": 40, "sharing": {"mode": "repeated"}}
    compare(step_of_rows(case, tmp_path, rows=True, **cut), whole(case), 1e-5)
    with pytest.raises(ValueError, match="allows 40 tokens, but the 2 rows of episode"):
        step_of_rows("dr_grpo", tmp_path, rows=True, **cut)


def test_token_groups_end_with_their_row(tmp_path):
    options = {"engine": RowsEngine(rows=True), "boundary_at_turn_ends": False}
    buffer = step_of_rows("group_ppo", tmp_path, rows=True, **options).buffer
    lengths = buffer.rollout_lengths.tolist()
    rows = zip(*(buffer.joined(name).split(lengths) for name in ("loss_mask", "group_starts")), strict=True)
    firsts = [bool(starts[mask.nonzero()[0]]) for mask, starts in rows if mask.any()]
    assert len(firsts) > len(buffer.episode_lengths)
    assert all(firsts)


def test_a_run_with_an_engine_that_returns_rows(tmp_path, make_data):
    """Losses, validation and the file of completions; rows of an episode name it."""
    table = CompletionsTable(every_n_steps=1, console=False, num_groups=99)
    run = tiny_runs.fit(
        tmp_path, steps=3, engine=RowsEngine(rows=True), loss_type="grpo", num_mini_batches=2, dynamic_sampling=True,
        evaluation={"num_generations": 4}, callbacks=[table], data={"val": True},
        sampling=SamplingConfig(max_new_tokens=14),
    )  # fmt: skip
    (path,) = tmp_path.rglob("completions.jsonl")
    shown = [json.loads(line) for line in path.read_text().splitlines()]
    last = [row for row in shown if row["step"] == run.trainer.global_step]
    assert [row.get("episode") for row in last] == [row.episode for row in run.rollouts]
    for episode in (episode for group in run.buffer.groups for episode in group.episodes):
        assert all(row.reward == episode.reward for row in episode.rows)
    run.trainer.validate(run.module, make_data(val=True))
    (evaluated,) = tmp_path.rglob("val_completions.jsonl")
    answers = [json.loads(line) for line in evaluated.read_text().splitlines()]
    assert any("episode" in row for row in answers)
    assert all("answer" in row for row in answers)


class NamedByTuples(RowsEngine):
    def generate(self, *args, **options):
        groups = super().generate(*args, **options)
        for rollout in (rollout for group in groups for rollout in group):
            rollout.episode = ("turn", 0)
        return groups


def test_a_name_that_is_neither_number_nor_string_is_refused(tmp_path):
    with pytest.raises(TypeError, match="tuple"):
        tiny_runs.fit(tmp_path, engine=NamedByTuples(rows=True))


# Branching: groups of different sizes.

EVERY_2 = {"points": "every_n", "width": 2, "depth": 2, "every_n": 2}


@pytest.fixture
def fit_branched(tmp_path):
    def run(cls=GRPO, branching=EVERY_2, **options):
        defaults = {"num_generations": 2, "num_mini_batches": 2, "sampling": SamplingConfig(max_new_tokens=6)}
        return tiny_runs.fit(tmp_path, cls, episodes={"branching": branching}, **(defaults | {"steps": 2} | options))

    return run


@pytest.mark.parametrize("cls", sweep([GRPO, PPO, GroupPPO], quick=[GRPO, PPO]))
def test_branching_rollouts_are_trained(fit_branched, cls):
    run = fit_branched(cls)
    metrics, sizes = run.steps[0], [len(group.rollouts) for group in run.groups[0]]
    assert len(set(sizes)) > 1
    assert metrics["branching/leaves"] == sum(sizes) / len(sizes)
    lengths = sum(len(rollout.token_ids) for group in run.groups[0] for rollout in group.rollouts)
    assert metrics["completions/mean_length"] == pytest.approx(lengths / sum(sizes))
    sampled = metrics["branching/sampled_tokens"] * len(sizes)
    assert metrics["branching/token_ratio"] == pytest.approx(lengths / sampled)
    assert lengths > sampled
    assert not same(list(run.module.policy.parameters()), list(TinyPolicy().load().parameters()))


class Validated(Callback):
    def __init__(self):
        self.groups = []

    def on_validation_batch_end(self, trainer, module, outputs, *_):
        self.groups += outputs["groups"]


def test_options_that_change_the_number_of_rollouts(fit_branched):
    """One root, prompts replaced, sampling ahead, a token budget; and validation, which does not branch."""
    one_root = {"num_generations": 1, "dynamic_sampling": True, "max_tokens_per_micro_batch": 60, "num_mini_batches": 1}
    branching, seen = {"points": "entropy", "width": 3, "depth": 2}, Validated()
    own = {"data": {"val": True}, "steps": 3, "callbacks": [seen], "evaluation": {"num_generations": 2}}
    run = fit_branched(branching=branching, **one_root, **own, **AHEAD)
    assert run.module.max_rollouts == 5
    assert all(len(group.rollouts) > 1 for group in run.groups[0])  # the others have nothing to compare
    assert {len(group.rollouts) for group in seen.groups} == {2}
    assert all(rollout.branch_path == () for group in seen.groups for rollout in group.rollouts)


@pytest.mark.parametrize("options", [AHEAD, pytest.param({}, marks=pytest.mark.slow)], ids=["ahead", "plain"])
def test_a_branching_run_resumes_to_the_bit(fit_branched, options):
    whole = fit_branched(steps=4, save=True, **options)
    resumed = fit_branched(steps=4, resume=1, **options)  # between two updates of a batch
    assert same(whole.weights[-1], resumed.weights[-1])
    assert resumed.tokens == whole.tokens[1:]
    assert any(rollout.branch_points for rollout in rollouts_of(resumed))
    with pytest.warns(UserWarning, match="episodes.branching.width"):
        fit_branched(branching=EVERY_2 | {"width": 3}, resume=2, **options)


def test_branching_at_turns(fit):
    run = fit(
        rewards=lambda completions, **columns: [float(len(own)) for own in completions],
        episodes={"branching": {"points": "turn", "width": 2}, "max_tool_calling_iterations": None, "max_tokens": 100},
        data=PromptDataModule(chance_rows(4), batch_size=4), trainer={"max_steps": 1},
    )  # fmt: skip
    assert {len(rollout.branch_points) for rollout in run.rollouts} == {0, 1}
    assert run.steps[0]["branching/token_ratio"] > 1
    assert run.steps[0]["episode/turns"] > 1


def test_branches_know_the_versions_of_their_tokens(fit_branched):
    run = fit_branched(engine=InFlightCopy(), num_mini_batches=1, steps=3, **AHEAD)
    for number, groups in enumerate(run.groups):
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        assert any(rollout.branch_points for rollout in rollouts)
        ages = [number - version for rollout in rollouts for version in rollout.weight_versions]
        assert min(ages) >= 0
        assert max(ages) == run.steps[number]["rollout/staleness/max"] <= 1


# Critics on branches: a value and an error for each shared token, and weights of leaves.


@pytest.fixture
def critic_buffer_of(tmp_path):
    def run(cls, tells, **options):
        engine, critic = BranchingEngine(ScriptedEngine(), tells=tells), PolicyCopyCritic(head_std=0.5)
        own = {"rewards": lambda completions, **columns: [float(len(set(text))) for text in completions]}
        return tiny_runs.fit(
            tmp_path, cls, engine=engine, critic=critic, whiten_advantages=False, **own, **options
        ).buffer

    return run


@pytest.mark.parametrize("cls", [PPO, GroupPPO])
def test_advantages_are_weighted(critic_buffer_of, cls):
    plain, branched = (critic_buffer_of(cls, tells) for tells in (False, True))
    rollouts = branched.rollouts
    branches = BranchPaths([r.branch_points for r in rollouts], [r.branch_path for r in rollouts])
    mask_BT = to_rows(branched.joined("loss_mask"), branched.rollout_lengths)
    weights_B = leaf_weights(torch.arange(len(rollouts)) // 4, mask_BT, branches).float()
    assert len(set(weights_B.tolist())) > 2  # some rollouts are empty
    weights_N = weights_B.repeat_interleave(plain.rollout_lengths)
    assert plain.joined("advantages").abs().max() > 0.1
    torch.testing.assert_close(branched.joined("advantages"), plain.joined("advantages") * weights_N)
    torch.testing.assert_close(branched.joined("returns"), plain.joined("returns"))


def test_shared_tokens(critic_buffer_of):
    """Values are equal on all rows; with lambda 0 advantages differ by nothing but the end of the shared tokens."""
    buffer = critic_buffer_of(PPO, True, gamma=1.0, lam=0.0)
    for number, group in enumerate(buffer.groups):
        lengths = [len(rollout.token_ids) for rollout in group.rollouts]
        for name in ("values", "advantages"):
            first, second, *_ = buffer.tokens[name][number].split(lengths)
            shared = 2 if min(lengths[:2]) > 2 else 1  # a continuation of no tokens ends with its reward
            torch.testing.assert_close(first[:shared], second[:shared], rtol=1e-4, atol=1e-5)


def test_paths_that_share_no_tokens_are_refused():
    rollouts = [Rollout([4, number, 5], branch_points=(2,), branch_path=(0, number)) for number in (0, 1)]
    with pytest.raises(ValueError, match=r"branch_path, \(0,\), but not the tokens from 0 to 2"):
        episode_leaf_weights(
            [RolloutGroup([1], rollouts)], torch.ones(2, 3, dtype=torch.bool), device=torch.device("cpu")
        )
