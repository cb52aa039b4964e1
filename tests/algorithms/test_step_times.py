"""Times of a step are the module's own; and the arithmetic of a step over the GPU's."""

from __future__ import annotations

import contextlib
import csv
import json

import pytest
from helpers.tiny_runs import ScriptedEngine, share_of_letters
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger
from transformers import LlamaConfig, LlamaForCausalLM

from pl_grouprl.algorithms import PPO
from pl_grouprl.callbacks import RunSummary, run_summary
from pl_grouprl.training import metrics as step_timer
from pl_grouprl.training.buffer import RolloutBuffer
from pl_grouprl.training.metrics import StepTimer, Throughput
from pl_grouprl.types import Rollout, RolloutGroup
from pl_grouprl.utilities.device_defaults import find_device


class Clock:
    """A clock that stands still but where somebody moves it."""

    now = 0.0

    def perf_counter(self):
        return self.now

    monotonic = perf_counter


class Slow(Callback):
    """Takes 100 seconds before and after each step, and 1 second of the update itself."""

    def __init__(self, clock):
        self.clock = clock

    def on_train_batch_start(self, *args):
        self.clock.now += 100

    def on_before_backward(self, *args):
        self.clock.now += 1

    def on_train_batch_end(self, *args):
        self.clock.now += 100


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(step_timer, "time", clock)
    return clock


@pytest.fixture
def times_of(monkeypatch):
    """Attach to a module; gives the times that it logs, a dictionary for each call of the training step."""

    def attach(module):
        logged, log_dict = [], module.log_dict

        def note(metrics, **kwargs):
            if "time/step" in metrics:
                logged.append(metrics)
            log_dict(metrics, **kwargs)

        monkeypatch.setattr(module, "log_dict", note)
        return logged

    return attach


def test_the_innermost_part_is_charged_and_the_rest_is_other(clock):
    step = StepTimer()
    clock.now += 1  # other
    with step.part("rollout"):
        clock.now += 2
        with step.part("reward"):
            clock.now += 4
        clock.now += 8
    clock.now += 16  # other
    with contextlib.suppress(KeyError), step.part("reward"):
        clock.now += 32
        raise KeyError
    step.enter("update")
    clock.now += 64
    step.mark()
    clock.now += 1000  # behind the last mark: in no part
    assert step.seconds == {"rollout": 10.0, "reward": 36.0, "update": 64.0, "other": 17.0, "step": 127.0}


def test_a_new_step_knows_the_parts_of_those_before(clock):
    step = StepTimer()
    step.enter("rollout")
    clock.now += 1
    step.mark()
    clock.now += 5
    step.start()
    clock.now += 2
    step.enter("update")
    clock.now += 3
    step.mark()
    assert step.seconds == {"rollout": 0.0, "other": 2.0, "update": 3.0, "step": 5.0}


def test_callbacks_do_not_count_as_the_update(fit, make_module, times_of, clock):
    module = make_module(engine=ScriptedEngine())
    times = times_of(module)
    trainer = {"accumulate_grad_batches": 2}
    fit(module=module, steps=2, data={"train_size": 16}, callbacks=[Slow(clock)], trainer=trainer)
    assert len(times) == 4
    for metrics in times:
        assert metrics["time/update"] == metrics["time/step"] == 1
        assert metrics["perf/tokens_per_second"] > 100  # some 360 tokens in 1 second, not in 201


def slow_letters(clock):
    def letters(completions, **columns):
        clock.now += 8
        return share_of_letters(completions)

    return letters


def sum_of_parts(metrics):
    return sum(value for name, value in metrics.items() if name.startswith("time/") and name != "time/step")


def test_parts_add_up_to_each_step(fit, make_module, times_of, clock):
    class SlowEngine(ScriptedEngine):
        def generate(self, *args, **kwargs):
            clock.now += 16
            return super().generate(*args, **kwargs)

    module = make_module(rewards=slow_letters(clock), engine=SlowEngine(), beta=0.1, num_iterations=2)
    times = times_of(module)
    fit(module=module, steps=4, callbacks=[Slow(clock)])
    assert [step["time/rollout"] for step in times] == [16.0, 0.0, 16.0, 0.0]
    assert [step["time/reward"] for step in times] == [8.0, 0.0, 8.0, 0.0]
    assert [step["time/update"] for step in times] == [1.0, 1.0, 1.0, 1.0]
    for step in times:
        assert {"time/old_logprobs", "time/ref_logprobs", "time/advantages", "time/other"} <= step.keys()
        assert sum_of_parts(step) == step["time/step"]


def test_parts_add_up_with_a_critic(fit, make_module, times_of):
    module = make_module(PPO, engine=ScriptedEngine(), num_iterations=2)
    times = times_of(module)
    fit(module=module, steps=2)
    assert len(times) == 2
    for step in times:
        assert "time/values" in step
        assert sum_of_parts(step) == pytest.approx(step["time/step"], rel=1e-9)


def test_summary_agrees_with_the_logged_rows(fit, tmp_path):
    summary, logger = RunSummary(), CSVLogger(tmp_path, name="", version=0)
    trainer = {"logger": logger, "log_every_n_steps": 1}
    fit(steps=5, engine=ScriptedEngine(), num_mini_batches=2, callbacks=[summary], trainer=trainer)
    with (tmp_path / "version_0" / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["time/step"]]  # the epoch's own row has none
    assert len(rows) == 5
    for name in ("time/step", "time/update", "loss", "grad_norm", "reward"):
        expected = [(step, pytest.approx(float(row[name]))) for step, row in enumerate(rows, start=1)]
        assert summary.history.points[name] == expected, name
    # With two updates to a rollout, the rate is known after every second one.
    assert [step for step, _ in summary.history.points["perf/tokens_per_second"]] == [2, 4]
    statistics = json.loads((tmp_path / "version_0" / "summary.json").read_text())["metrics"]
    assert statistics["time/step"]["last"] == pytest.approx(float(rows[-1]["time/step"]))


def test_a_run_says_what_limited_it(fit, clock, tmp_path, capsys):
    logger = CSVLogger(tmp_path, name="", version=0)
    options = {"rewards": slow_letters(clock), "engine": ScriptedEngine()}
    fit(steps=2, callbacks=[Slow(clock), RunSummary()], trainer={"logger": logger}, **options)
    sentence = "Waiting for rewards took 89% of a step; reward_calls.workers (now 0) would compute them during scoring."
    assert json.loads((tmp_path / "version_0" / "summary.json").read_text())["limited_by"] == sentence
    assert f"limited by          {sentence}" in capsys.readouterr().out


class SlowStart(Callback):
    """Takes 1000 seconds before the first step, 1 second of an update, and some after it."""

    def __init__(self, clock, after):
        self.clock, self.after = clock, after

    def on_train_start(self, *args):
        self.clock.now += 1000

    def on_before_backward(self, *args):
        self.clock.now += 1

    def on_train_batch_end(self, *args):
        self.clock.now += self.after


@pytest.mark.parametrize(("after", "share"), [(0, None), (1, "50%")])
def test_the_start_does_not_limit_a_run(after, share, fit, clock, tmp_path, monkeypatch):
    monkeypatch.setattr(run_summary, "time", clock)
    logger = CSVLogger(tmp_path, name="", version=0)
    options = {"data": {"train_size": 80}, "engine": ScriptedEngine(), "trainer": {"logger": logger}}
    fit(steps=10, callbacks=[SlowStart(clock, after), RunSummary()], **options)
    sentence = json.loads((tmp_path / "version_0" / "summary.json").read_text())["limited_by"]
    assert (sentence or "None").startswith(f"Validation, checkpoints and logging took {share}" if share else "None")


def test_a_run_too_short_to_be_recorded_has_a_summary(fit, tmp_path):
    logger = CSVLogger(tmp_path, name="", version=0)
    options = {"data": {"val": True}, "trainer": {"logger": logger, "val_check_interval": 1}}
    fit(steps=2, engine=ScriptedEngine(), callbacks=[RunSummary(every_n_steps=10)], **options)
    metrics = json.loads((tmp_path / "version_0" / "summary.json").read_text())["metrics"]
    assert metrics
    assert "time/step" not in metrics


# Model FLOPs utilization.

H100 = "NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize(
    ("name", "known"),
    [
        (H100, "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA GeForce GTX 1080", None),
    ],
)
def test_a_gpu_is_known_by_its_name(name, known):
    assert find_device(name) == known


def throughput_of(frozen=(), device_name=H100):
    """Of a decoder of 1 layer: 2 heads of 4 that share keys, hidden size 8, inner size 16, and 10 words."""
    config = LlamaConfig(
        vocab_size=10, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=4, tie_word_embeddings=True,
    )  # fmt: skip
    policy = LlamaForCausalLM(config)
    for name, weight in policy.named_parameters():
        weight.requires_grad_(not any(part in name for part in frozen))
    throughput = Throughput()
    throughput.open({"policy": policy}, device_name, 1)
    return throughput


PER_TOKEN = 2 * (8 * 8 + 2 * 4 * 8 + 8 * 8 + 3 * 8 * 16)
PER_PAIR = 4 * 4 * 2
PER_PREDICTION = 2 * 10 * 8


def test_what_rollouts_share_counts_once():
    """By hand: a prompt of 3, then 1 token that both rollouts begin with, then 1 and 2: 7 tokens, 4 predicted."""
    group = RolloutGroup([1, 2, 3], [Rollout([4, 5]), Rollout([4, 6, 7])])
    buffer = RolloutBuffer([group])
    throughput = throughput_of()
    throughput.start()
    throughput.count("rollout", buffer.groups)
    throughput.count("scoring", buffer.groups, "reference")  # the policy without its adapter
    throughput.count("update", buffer.groups, None)
    buffer.num_tokens, buffer.updates_done = 11, 1
    seconds = {"rollout": 2.0, "old_logprobs": 0.5, "ref_logprobs": 0.5, "update": 4.0, "other": 1.0, "step": 8.0}
    found = throughput.after_step(seconds, buffer, 1)
    pairs = 1 + 2 + 3 + 4 + 5 + (5 + 6)
    forward = 7 * PER_TOKEN + pairs * PER_PAIR + 4 * PER_PREDICTION
    assert found == {
        "perf/tokens_per_second": 11 / 8,
        "perf/mfu": pytest.approx(5 * forward / 8 / 989e12),
        "perf/mfu/rollout": pytest.approx(forward / 2 / 989e12),
        "perf/mfu/scoring": pytest.approx(forward / 1 / 989e12),
        "perf/mfu/update": pytest.approx(3 * forward / 4 / 989e12),
    }


@pytest.mark.parametrize(("frozen", "passes"), [((), 3), (("mlp",), 2)])
def test_a_frozen_base_has_half_the_backward_pass(frozen, passes):
    group = RolloutGroup([1], [Rollout([2])])
    throughput, buffer = throughput_of(frozen), RolloutBuffer([group], updates_done=1)
    throughput.start()
    throughput.count("update", [group], None)
    forward = 2 * PER_TOKEN + 3 * PER_PAIR + PER_PREDICTION
    found = throughput.after_step({"update": 1.0, "step": 2.0}, buffer, 1)
    assert found["perf/mfu/update"] == pytest.approx(passes * forward / 989e12)
    assert "perf/mfu/rollout" not in found


def test_no_utilization_where_the_rate_is_unknown():
    throughput, buffer = throughput_of(device_name=None), RolloutBuffer([RolloutGroup([1], [])], updates_done=1)
    throughput.start()
    throughput.count("update", buffer.groups, None)
    assert throughput.after_step({"step": 1.0}, buffer, 1).keys() == {"perf/tokens_per_second"}


def test_a_run_counts_each_phase(fit, make_module, times_of, clock, monkeypatch):
    opened, count, counted = Throughput.open, Throughput.count, []
    monkeypatch.setattr(Throughput, "open", lambda own, models, name, least: opened(own, models, H100, least))

    def note(throughput, phase, groups, model="policy"):
        counted.append((phase, model, sum(len(group.rollouts) for group in groups)))
        count(throughput, phase, groups, model)

    monkeypatch.setattr(Throughput, "count", note)
    module = make_module(rewards=slow_letters(clock), engine=ScriptedEngine(), beta=0.1, num_iterations=2)
    times = times_of(module)
    fit(module=module, steps=2, callbacks=[Slow(clock)])
    assert [(phase, model) for phase, model, _ in counted] == [
        ("scoring", "policy"), ("scoring", "reference"), ("rollout", "policy"), ("update", None), ("update", None),
    ]  # fmt: skip
    assert len({number for phase, _, number in counted if phase != "update"}) == 1
    assert "perf/mfu" not in times[0]  # the first of two updates
    assert times[1]["perf/mfu/update"] > times[1]["perf/mfu"] > 0
