"""What is logged and shown of a run whose rollouts are episodes."""

import json

import pytest
from helpers.chance_episodes import STOPS, ChancePolicy, chance_rows, double, register_chance_calls
from lightning.pytorch import Trainer

from pl_grouprl.algorithms import GroupPPO
from pl_grouprl.callbacks import CompletionsTable
from pl_grouprl.data import PromptDataModule
from pl_grouprl.functional.masked import to_rows
from pl_grouprl.training.metrics import FAILURES
from pl_grouprl.types import SamplingConfig

NAMES = {
    "tools/call_frequency", "tools/failure_frequency", "episode/turns", "episode/tool_seconds",
    "episode/context_tokens", *(f"tools/failures/{kind}" for kind in FAILURES),
}  # fmt: skip


def words(completions, **columns):
    return [float(len(completion[-1]["content"])) for completion in completions]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A step of GROUP PPO on episodes, of which those that were cut are left out, and a validation."""
    folder = tmp_path_factory.mktemp("episodes")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pl_grouprl.chat.parsing._PARSERS", [])
        register_chance_calls()
        module = GroupPPO(
            ChancePolicy(),
            words,
            tools=[double],
            sampling=SamplingConfig(max_new_tokens=40, stop_token_ids=STOPS),
            num_generations=4,
            episodes={"max_tool_calling_iterations": 3, "max_tokens": 120},
            mask_truncated_completions=True,
            sharing={"verify": False},
        )
        trainer = Trainer(
            max_steps=1,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            default_root_dir=folder,
            callbacks=[CompletionsTable(console=False)],
        )
        trainer.fit(module, PromptDataModule(chance_rows(4), chance_rows(2), batch_size=4))
    return module, {name: float(value) for name, value in trainer.callback_metrics.items()}, folder


def test_training_and_validation_log_the_same_names(run):
    _, metrics, _ = run
    assert metrics.keys() >= NAMES | {f"val/{name}" for name in NAMES}


def test_figures_are_those_of_the_rollouts(run):
    module, metrics, _ = run
    rollouts = [rollout for group in module.last_rollouts.groups for rollout in group.rollouts]
    assert {rollout.finish_reason for rollout in rollouts} == {"stop", "length"}
    written = [len(rollout.token_ids) if rollout.loss_mask is None else sum(rollout.loss_mask) for rollout in rollouts]
    assert min(written) > 0  # those that are left out have their lengths, too
    assert metrics["completions/mean_length"] == pytest.approx(sum(written) / len(written))
    context = [len(rollout.token_ids) - own for rollout, own in zip(rollouts, written, strict=True)]
    assert metrics["episode/context_tokens"] == pytest.approx(sum(context) / len(context))
    everything = [
        len(group.prompt_ids) + len(r.token_ids) for group in module.last_rollouts.groups for r in group.rollouts
    ]
    assert metrics["num_tokens"] == sum(everything)
    assert metrics["tools/failures/raised"] > 0
    failures = sum(metrics[f"tools/failures/{kind}"] for kind in FAILURES)
    calls = metrics["tools/call_frequency"] * len(rollouts)
    assert metrics["tools/failure_frequency"] == pytest.approx(failures / calls)


def test_truncated_episodes_are_not_trained_and_groups_end_at_turns(run):
    module, _, _ = run
    buffer = module.last_rollouts
    mask_BT, starts_BT = (
        to_rows(buffer.joined(name), buffer.rollout_lengths) for name in ("loss_mask", "group_starts")
    )
    rollouts = [rollout for group in buffer.groups for rollout in group.rollouts]
    for rollout, mask, starts in zip(rollouts, mask_BT.tolist(), starts_BT.tolist(), strict=True):
        whole = rollout.loss_mask or [1] * len(rollout.token_ids)
        expected = [0] * len(whole) if rollout.finish_reason == "length" else whole
        assert mask[: len(whole)] == [bool(bit) for bit in expected]
        assert all(starts[t] for t in range(1, len(mask)) if mask[t] and not mask[t - 1])
    assert any(not all(rollout.loss_mask or [1]) for rollout in rollouts if rollout.finish_reason == "stop")


def test_the_file_of_completions_has_the_turns(run):
    module, _, folder = run
    (path,) = folder.rglob("completions.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rollouts = [rollout for group in module.last_rollouts.groups[:2] for rollout in group.rollouts]
    assert [row["messages"] for row in rows] == [rollout.messages for rollout in rollouts]
    assert [row["turns"] for row in rows] == [rollout.num_turns for rollout in rollouts]
    assert max(row["turns"] for row in rows) > 1
