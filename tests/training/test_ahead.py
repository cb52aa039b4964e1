"""Rollouts ahead of training: each prompt once, none too old, from the weights that they say, the same when resumed."""

from __future__ import annotations

import random
import threading

import pytest
import torch
from helpers.copied_engine import CopiedPolicyEngine
from helpers.in_flight_engine import InFlightEngine
from helpers.rollouts import assert_same
from helpers.sweeps import sweep
from helpers.tiny_runs import AHEAD, ScriptedEngine, TinyPolicy, same
from lightning.pytorch.callbacks import Callback

from pl_grouprl.algorithms import GRPO, PPO, OptimizerConfig
from pl_grouprl.distributed.checksum import WeightsMismatchError
from pl_grouprl.rollout import HFRolloutEngine
from pl_grouprl.rollout.engine import SamplerLostError, SyncedRolloutEngine
from pl_grouprl.training.ahead import MAX_ATTEMPTS, NAME, RolloutQueue, SamplingThreads, Staleness, staleness_metrics
from pl_grouprl.types import NOT_SAMPLED, Prompt, Rollout, RolloutGroup
from pl_grouprl.utilities.distributed import derive_seed

# The queue, without a run.


def prompts(number, count=2):
    return [Prompt([10 * number + place]) for place in range(count)]


def group_of(entry, versions=None, mask=None):
    return RolloutGroup(entry.prompt.token_ids, [Rollout([7, 8], loss_mask=mask, weight_versions=versions)])


def sample(queue, versions=None, whole_batch=False):
    """Sample what is next; returns it."""
    entries = queue.start(whole_batch)
    queue.finish(entries, [group_of(entry, versions) for entry in entries])
    return entries


def taken(queue, number, count=2):
    queue.wait(count)
    groups = queue.take(number, count)
    return [group.prompt_ids[0] for group in groups], queue.measure(groups)


def submitted(k, *numbers, **options):
    queue = RolloutQueue(k, **options)
    for number in numbers:
        queue.submit(number, prompts(number))
    return queue


def test_groups_come_in_the_order_of_their_prompts_and_age_by_batches():
    queue = RolloutQueue(1)
    for number in range(4):
        queue.expect(number)
        queue.set_version(number)
        for at in range(0 if number == 0 else number + 1, number + 2):
            queue.submit(at, prompts(at))
        for _ in range(4 if number == 0 else 2):
            sample(queue)
        # Two tokens of each of the two groups, sampled one batch ago but in the first.
        age = min(number, 1)
        assert taken(queue, number) == ([10 * number, 10 * number + 1], Staleness(4, 4 * age, age, 0))


def test_a_whole_batch_is_started_together():
    queue = submitted(1, 0, 1)
    assert [entry.prompt.token_ids for entry in queue.start(True)] == [[0], [1]]
    assert [entry.prompt.token_ids for entry in queue.start(True)] == [[10], [11]]


def waiting_for(queue, count):
    """A thread that waits, as it still does after a moment."""
    waiting = threading.Thread(target=queue.wait, args=(count,), daemon=True)
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    return waiting


def finish(queue, *started):
    for entries in started:
        queue.finish(entries, [group_of(entry) for entry in entries])


def test_fast_groups_overtake_a_slow_one_until_it_would_be_too_old():
    queue = submitted(2, 0, 1, 2)
    slow = queue.start(False)
    for _ in range(5):
        sample(queue)
    assert taken(queue, 0)[0] == [1, 10]
    queue.set_version(1)
    queue.submit(3, prompts(3))
    assert taken(queue, 1)[0] == [11, 20]
    queue.set_version(2)
    for _ in range(2):
        sample(queue)
    waiting = waiting_for(queue, 2)  # enough are finished, but at the next batch the slow one would be three old
    finish(queue, slow)
    waiting.join(60)
    assert [group.prompt_ids[0] for group in queue.take(2, 2)] == [0, 21]


def test_a_batch_overtakes_only_as_long_as_the_slow_ones_can_be_taken_in_time():
    queue = submitted(2, 0, 1, 2)
    for _ in range(2):
        sample(queue)
    slow = [queue.start(False) for _ in range(4)]
    assert taken(queue, 0)[0] == [0, 1]
    queue.set_version(1)
    queue.submit(3, prompts(3))
    for _ in range(2):
        sample(queue)
    waiting = waiting_for(queue, 2)  # four would be left for the next batch, the last one they are not too old for
    finish(queue, *slow[:2])
    waiting.join(60)
    assert [group.prompt_ids[0] for group in queue.take(1, 2)] == [10, 11]
    queue.set_version(2)
    finish(queue, *slow[2:])
    assert taken(queue, 2) == ([20, 21], Staleness(4, 8, 2, dropped=0))


def is_ready(queue, count):
    with queue._changed:
        return queue._is_ready(count)


def step(queue, running, rng):
    """Start what may start, or finish one of the groups that run, often the latest."""
    if queue._may_start() and rng.random() < 0.5:
        running.append(queue.start(False))
    elif running:
        entries = running.pop(rng.randrange(len(running)) if rng.random() < 0.3 else -1)
        queue.finish(entries, [group_of(entry) for entry in entries])


@pytest.mark.parametrize("seed", range(50))
def test_at_any_speed_each_prompt_is_trained_once_and_none_too_old(seed):
    rng = random.Random(seed)
    k, count, last = rng.randint(1, 4), rng.randint(1, 3), 12
    queue, running, trained = RolloutQueue(k), [], []
    for number in range(last):
        queue.expect(number)
        queue.set_version(number)
        for later in range(number, number + k + 1):
            if not queue.has(later):
                queue.submit(later, prompts(later, count))
        for _ in range(rng.randrange(12)):
            step(queue, running, rng)
        while not is_ready(queue, count):
            step(queue, running, rng)
        groups = queue.take(number, count)
        staleness = queue.measure(groups)
        assert staleness.dropped == 0
        assert staleness.largest <= k
        trained += [group.prompt_ids[0] for group in groups]
    assert len(set(trained)) == len(trained) == count * last


def test_groups_that_are_too_old_are_sampled_again():
    queue, attempts = submitted(1, 0), []
    sample(queue)
    queue.set_version(2)  # as after a resume with a smaller max_staleness

    def again(entries):
        attempts.append([(entry.place, entry.attempt) for entry in entries])
        return [group_of(entry) for entry in entries]

    threads = SamplingThreads(queue, again, whole_batches=False)
    threads.grow(1)
    assert taken(queue, 0) == ([0, 1], Staleness(4, 0, 0, dropped=1))
    assert sorted(attempts) == [[(0, 1)], [(1, 0)]]
    queue.close()
    assert threads.join(60)


def test_an_engine_that_never_takes_its_weights_ends_the_run():
    queue, calls = RolloutQueue(1, "Lagging"), []
    queue.submit(0, prompts(0, count=1))
    queue.set_version(2, engine_version=2)

    def stale(entries):
        calls.append(entries[0].attempt)
        return [group_of(entry, [0, 0]) for entry in entries]

    threads = SamplingThreads(queue, stale, whole_batches=False)
    threads.grow(1)
    queue._versions.insert(0, (0, 0))
    with pytest.raises(
        RuntimeError, match=r"^Lagging sampled a prompt 20 times .* from version 0, where version 2 had"
    ):
        queue.wait(1)
    assert calls == list(range(MAX_ATTEMPTS))
    queue.close()
    assert threads.join(60)


def test_versions_that_the_engine_was_never_given_end_the_run():
    queue = RolloutQueue(1, "Ahead")
    queue.submit(0, prompts(0, count=1))
    queue.set_version(0, engine_version=3)
    sample(queue, [3, 10**9])
    with pytest.raises(RuntimeError, match=r"^Ahead reports weight_versions up to 1000000000, .* given are 3"):
        queue.wait(1)


def test_versions_of_the_engine_become_batches():
    queue = RolloutQueue(3)
    queue.submit(0, prompts(0, count=3))
    queue.set_version(5, engine_version=11)
    sample(queue, [9, 11])  # before the first known sync: as old as that
    late = queue.start(False)
    queue.set_version(6, engine_version=14)  # 12 and 13 went for validations amid batch 5
    queue.finish(late, [group_of(late[0], [13, 14])])
    sample(queue, [NOT_SAMPLED, 14])
    queue.wait(3)
    groups = queue.take(0, 3)
    assert [group.rollouts[0].weight_versions for group in groups] == [[5, 5], [5, 6], [NOT_SAMPLED, 6]]
    assert queue.measure(groups) == Staleness(tokens=5, total=3, largest=1)


def test_context_has_no_staleness():
    queue = RolloutQueue(1)
    queue.submit(0, prompts(0, count=1))
    entries = queue.start(False)
    queue.finish(entries, [group_of(entries[0], mask=[0, 1])])
    queue.set_version(1)
    assert taken(queue, 0, 1)[1] == Staleness(1, 1, 1)


def test_batches_that_do_not_come_are_discarded():
    queue = submitted(2, 0, 1, 2)
    for _ in range(3):
        sample(queue)
    in_flight = queue.start(False)  # the second of batch 1
    assert taken(queue, 0)[0] == [0, 1]
    queue.expect(2)
    assert len(queue) == 2
    finish(queue, in_flight)
    for _ in range(2):
        sample(queue)
    assert taken(queue, 2)[0] == [20, 21]
    assert not any(map(queue.has, range(3)))
    queue = submitted(1, 7)
    queue.expect(0)  # the data start over, as in another fit
    assert len(queue) == 0


def test_overtaken_groups_replace_discarded_ones():
    queue = submitted(2, 0, 1, 2)
    slow = queue.start(False)
    for _ in range(5):
        sample(queue)
    assert taken(queue, 0)[0] == [1, 10]
    queue.expect(2)  # of batch 1, one group was trained already; its other one and the slow one are too many
    assert len(queue) == 2
    finish(queue, slow)
    assert sorted(taken(queue, 2)[0]) == [20, 21]


def test_a_lost_sampler_is_told_once_for_each_sync():
    queue = submitted(1, 0)
    lost = [queue.start(False), queue.start(False)]
    error = SamplerLostError("restarted")
    queue.fail(lost[0], error)
    with pytest.raises(SamplerLostError, match="restarted"):
        queue.wait(2)
    queue.set_version(0)
    queue.fail(lost[1], error)  # it began before the weights were sent again
    for _ in range(2):
        sample(queue)
    assert taken(queue, 0)[0] == [0, 1]


def test_errors_of_the_queue():
    queue = submitted(1, 0)
    with pytest.raises(RuntimeError, match="3 groups are to be taken from a queue of 2"):
        queue.wait(3)
    queue.fail(queue.start(False), FloatingPointError("not finite"))
    for _ in range(2):  # it ends the wait and what follows
        with pytest.raises(FloatingPointError, match="not finite"):
            queue.wait(1)


def test_a_pause_waits_for_what_is_sampled_and_lets_nothing_start():
    queue, inside, leave = RolloutQueue(1), threading.Event(), threading.Event()
    queue.submit(0, prompts(0))
    running = queue.start(False)

    def pause():
        with queue.paused():
            inside.set()
            assert leave.wait(60)

    pausing = threading.Thread(target=pause, daemon=True)
    pausing.start()
    assert not inside.wait(0.05)
    queue.finish(running, [group_of(running[0])])
    assert inside.wait(60)
    started: list = []
    starting = threading.Thread(target=lambda: started.extend(queue.start(False)), daemon=True)
    starting.start()
    starting.join(0.05)
    assert not started
    leave.set()
    starting.join(60)
    assert [entry.place for entry in started] == [1]


def test_the_state_has_what_was_sampled_and_names_the_rest():
    queue = RolloutQueue(1)
    queue.set_version(4, engine_version=2)
    queue.submit(0, prompts(0))
    queue.submit(1, prompts(1))
    sample(queue, [2, 2])
    queue.start(False)
    restored = RolloutQueue(1)

    def join(prompt, prompt_ids, rollouts):
        return RolloutGroup(prompt_ids, rollouts, columns={"answer": 1})

    restored.load_state_dict(queue.state_dict(), prompts, join)
    assert restored.state_dict() == queue.state_dict()
    assert (restored.version, restored.has(1), restored.has(2), len(restored)) == (4, True, False, 4)
    assert [entry.prompt.token_ids for entry in restored.start(True)] == [[1]]
    assert [entry.prompt.token_ids for entry in restored.start(True)] == [[10], [11]]
    restored.wait(1)
    (group,) = restored.take(0, 1)
    assert (group.prompt_ids, group.columns) == ([0], {"answer": 1})
    assert group.rollouts == [Rollout([7, 8], weight_versions=[4, 4])]


def test_a_lower_limit_trains_each_prompt_once():
    queue, restored = RolloutQueue(3), RolloutQueue(1)
    for number in range(4):
        queue.submit(number, prompts(number))
    slow = queue.start(False)  # the first prompt: overtaken by one of the second batch
    for _ in range(7):
        sample(queue)
    trained = taken(queue, 0)[0]
    queue.finish(slow, [group_of(slow[0])])
    restored.load_state_dict(queue.state_dict(), prompts, lambda _, ids, rollouts: RolloutGroup(ids, rollouts))
    for number in range(1, 4):
        restored.expect(number)
        restored.set_version(number)
        for later in (number, number + 1):
            if not restored.has(later):
                restored.submit(later, prompts(later))
        while not is_ready(restored, 2):
            sample(restored)
        groups = restored.take(number, 2)
        assert restored.measure(groups).largest <= 1
        trained += [group.prompt_ids[0] for group in groups]
    assert sorted(trained) == [10 * number + place for number in range(4) for place in range(2)]


def test_versions_that_are_not_known_yet_stay_open():
    """As after a validation, which sends weights before the next batch gives their version a number."""
    queue = RolloutQueue(1)
    queue.set_version(0, engine_version=1)
    queue.submit(0, prompts(0))
    sample(queue, [1, 1])
    sample(queue, [1, 2])
    first, second = queue.state_dict()["entries"]
    assert [saved["rollouts"][0]["weight_versions"] for saved in (first, second)] == [[0, 0], [0, 0]]
    queue.set_version(1, engine_version=2)
    queue.wait(2)
    groups = queue.take(0, 2)
    assert [group.rollouts[0].weight_versions for group in groups] == [[0, 0], [0, 1]]
    assert queue.measure(groups) == Staleness(4, 3, 1)


def test_groups_of_other_prompts_are_sampled_again():
    queue, restored = RolloutQueue(1), RolloutQueue(1)
    queue.submit(0, prompts(0))
    sample(queue)
    state = queue.state_dict()
    assert restored.load_state_dict(state, lambda number: prompts(5, count=1), lambda *_: pytest.fail("joined")) == 1
    assert [entry.prompt.token_ids for entry in restored.start(True)] == [[50]]


def test_a_batch_may_have_fewer_prompts_after_a_resume():
    queue = RolloutQueue(2)
    for number in (1, 2):
        queue.submit(number, prompts(number))
        sample(queue)
        sample(queue)
    restored = RolloutQueue(2)
    restored.load_state_dict(
        queue.state_dict(),
        lambda number: prompts(number, count=3 - number),
        lambda prompt, ids, own: RolloutGroup(ids, own),
    )
    restored.expect(1)
    restored.set_version(1)
    for number in (1, 2):
        restored.wait(3 - number)
        assert len(restored.take(number, 3 - number)) == 3 - number
    assert len(restored) == 0


def test_metrics_are_those_of_all_ranks():
    assert staleness_metrics([]) == {}
    assert staleness_metrics([Staleness(6, 3, 1, 0), Staleness(2, 3, 2, 1)]) == {
        "rollout/staleness/mean": 0.75,
        "rollout/staleness/max": 2.0,
        "rollout/dropped_stale": 1.0,
    }


# Rollouts from a copy of the policy.


class Rollouts(Callback):
    """What was trained in each rollout, and the weights before and after its updates."""

    def __init__(self):
        self.groups, self.before, self.ages = [], [], []

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        # The module's hook, which samples, comes behind those of callbacks.
        if batch.update_index == 0:
            self.before.append({name: value.clone() for name, value in module.policy.state_dict().items()})

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch.update_index == 0:
            self.groups.append(module.last_rollouts.groups)
            metrics = module.last_rollouts.metrics
            assert metrics["rollout/staleness/mean"] == metrics["rollout/staleness/max"]
            assert metrics["rollout/dropped_stale"] == 0
            self.ages.append(metrics["rollout/staleness/mean"])


@pytest.mark.parametrize("updates", [1, 2])
def test_rollouts_are_those_of_the_policy_before_the_last_updates(fit, make_data, monkeypatch, updates):
    record, data, names, generate = Rollouts(), make_data(), [], HFRolloutEngine.generate

    def noted(self, *args, **kwargs):
        names.append(threading.current_thread().name)
        return generate(self, *args, **kwargs)

    monkeypatch.setattr(HFRolloutEngine, "generate", noted)
    run = fit(steps=4 * updates, data=data, callbacks=[record], num_iterations=updates, **AHEAD)
    assert names == ["MainThread", *["rollouts-ahead-0"] * 4]  # it samples during the update
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(NAME)]
    assert record.ages == [0.0, 1.0, 1.0, 1.0]
    model = TinyPolicy().load()
    for number, groups in enumerate(record.groups):
        model.load_state_dict(record.before[max(number - 1, 0)])
        prompts = data.peek(number)
        expected = generate(
            HFRolloutEngine(model, run.module.tokenizer), [prompt.token_ids for prompt in prompts], run.module.sampling,
            num_generations=4, seed=derive_seed("rollout", number, run.module.seed, 0),
        )  # fmt: skip
        assert [group.prompt_ids for group in groups] == [prompt.token_ids for prompt in prompts]
        assert_same([group.rollouts for group in groups], expected, atol=1e-6)
    # Without the lag the third rollout would be another one.
    assert not same(record.before[1], record.before[2])


@pytest.mark.parametrize("cls", sweep([GRPO, PPO], quick=[PPO]))
def test_resume_at_every_step_is_exact(fit, cls):
    options = {"cls": cls, "steps": 6, "data": {"train_size": 8}, "num_mini_batches": 2, **AHEAD}
    whole = fit(save=True, **options)
    for step in (1, 2, 4, 5):
        assert same(whole.weights[-1], fit(resume=step, **options).weights[-1]), f"resumed after step {step}"


def test_two_batches_ahead(fit, make_data):
    record, data = Rollouts(), make_data()
    fit(steps=6, data=data, callbacks=[record], **{**AHEAD, "max_staleness": 2})
    assert record.ages[0] == 0
    assert set(record.ages[1:]) <= {1.0, 2.0}  # depends on timing
    for number, groups in enumerate(record.groups):
        assert [group.prompt_ids for group in groups] == [prompt.token_ids for prompt in data.peek(number)]


def test_a_rollout_that_is_not_next_is_dropped(fit):
    """Three batches make an epoch, of which Lightning uses two: the third was sampled ahead and does not come."""
    record = Rollouts()
    fit(steps=4, trainer={"limit_train_batches": 2}, callbacks=[record], **AHEAD)
    assert record.ages == [0.0, 1.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("options", "trainer", "message"),
    [
        ({"max_staleness": 1}, {}, "importance_sampling"),
        ({**AHEAD, "engine": ScriptedEngine()}, {}, "engine is ScriptedEngine"),
        (AHEAD, {"precision": "bf16-true"}, "precision=bf16-true"),
        ({**AHEAD, "engine": type("Partial", (InFlightEngine,), {"takes_prompt_indices": False})()}, {}, "Partial"),
        ({**AHEAD, "engine": type("Partial", (InFlightEngine,), {"updates_in_flight": False})()}, {}, "Partial"),
        ({**AHEAD, "engine": CopiedPolicyEngine()}, {}, "engine is CopiedPolicyEngine, which cannot sample while"),
    ],
)
def test_what_cannot_sample_ahead_is_refused(fit, options, trainer, message):
    with pytest.raises(ValueError, match=rf"max_staleness is 1, but .*{message}"):
        fit(trainer=trainer, **options)


# Rollouts of an engine that takes weights while it samples.


@pytest.fixture
def fit_in_flight(fit, make_data):
    def run(engine, k=1, *, at_end=lambda module: None, **options):
        class AtEnd(Callback):
            def on_train_batch_end(self, trainer, module, *args):
                at_end(module)

        options = {"steps": 3, "data": make_data(train_size=16)} | AHEAD | options
        return fit(engine=engine, callbacks=[AtEnd()], **options | {"max_staleness": k})

    yield run
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(NAME)]


def prompts_of(run):
    return [tuple(group.prompt_ids) for groups in run.groups for group in groups]


def tokens_by_prompt(run):
    return {tuple(g.prompt_ids): [r.token_ids for r in g.rollouts] for groups in run.groups for g in groups}


def versions_of(groups):
    return [version for group in groups for rollout in group.rollouts for version in rollout.weight_versions]


@pytest.mark.parametrize("k", [1, 2])
def test_every_prompt_is_trained_once_and_no_token_is_too_old(fit_in_flight, make_data, k):
    engine, data = InFlightEngine(), make_data(train_size=16)
    assert isinstance(engine, SyncedRolloutEngine)
    run = fit_in_flight(engine, k, steps=4, data=data)
    ahead = [tuple(prompt.token_ids) for number in range(4 + k) for prompt in data.peek(number)]
    assert len(prompts_of(run)) == 16
    assert all(prompt in ahead for prompt in prompts_of(run))
    assert {name.startswith(NAME) for name in engine.names} == {True}
    for number, (groups, step) in enumerate(zip(run.groups, run.steps, strict=True)):
        ages = [number - version for version in versions_of(groups)]
        assert step["rollout/staleness/max"] == max(ages) <= min(k, number)
        assert step["rollout/staleness/mean"] == pytest.approx(sum(ages) / len(ages))
        assert step["rollout/dropped_stale"] == 0
        assert step["sync/count"] == 1
        assert [group.group_id for group in groups] == [0, 1, 2, 3]
    assert run.module.timer.seconds["wait_for_rollouts"] > 0


def test_tokens_do_not_depend_on_timing(fit_in_flight):
    """Once as fast as possible, once with the second batch held until the trainer waits for it."""

    def hold(engine, call, token):
        if 4 <= call < 8:
            engine.wait(lambda: (engine.version or 0) >= 2)

    fast, slow = (fit_in_flight(InFlightEngine(hook)) for hook in (None, hold))
    assert tokens_by_prompt(fast) == tokens_by_prompt(slow)


def test_weights_change_within_a_rollout(fit_in_flight):
    def hold(engine, call, token):
        if call == 4 and token == 2:  # a group of the second batch, while the first is trained
            engine.wait(lambda: (engine.version or 0) >= 2)

    run = fit_in_flight(InFlightEngine(hold, length=4), steps=2, num_generations=2)
    versions = [r.weight_versions for group in run.groups[1] for r in group.rollouts]
    # Its second rollout is sampled after the first; each has its own versions.
    assert sorted(versions)[:1] == [[0, 0, 0, 0]]
    assert [0, 0, 1, 1] in versions
    assert run.steps[1]["rollout/staleness/max"] == 1
    assert 0 < run.steps[1]["rollout/staleness/mean"] < 1


def test_an_engine_that_reports_no_versions_has_those_of_the_start(fit_in_flight):
    run = fit_in_flight(InFlightEngine(reports=False), steps=2)
    assert set(versions_of(run.groups[0])) == {0}
    assert run.steps[1]["rollout/staleness/max"] <= 1


@pytest.mark.parametrize("engine", ["copy", "in flight"])
def test_errors_of_a_thread_end_the_run(fit, fit_in_flight, monkeypatch, engine):
    def fail(engine, call, token):
        if call == 5:
            raise FloatingPointError("the logits are not finite")

    generate = HFRolloutEngine.generate

    def breaks(self, *args, **kwargs):
        if threading.current_thread() is not threading.main_thread():
            raise FloatingPointError("the logits are not finite")
        return generate(self, *args, **kwargs)

    monkeypatch.setattr(HFRolloutEngine, "generate", breaks)
    with pytest.raises(FloatingPointError, match="the logits are not finite"):
        fit_in_flight(InFlightEngine(fail)) if engine == "in flight" else fit(steps=3, **AHEAD)


def test_a_lost_sampler_gets_the_weights_again(fit_in_flight):
    lost = []

    def lose(engine, call, token):
        if call in (5, 6) and not lost:
            lost.append(call)
            engine.version = None
            raise SamplerLostError("it was restarted")

    with pytest.warns(UserWarning, match="the sampler was lost .* it was restarted"):
        run = fit_in_flight(InFlightEngine(lose), k=2)
    assert len(lost) == 1
    assert len(set(prompts_of(run))) == 12
    assert sum(step["sync/restarts"] for step in run.steps) <= 1


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_exception_ends_requests_in_flight(fit_in_flight, error):
    def hold(engine, call, token):
        if call >= 4:
            engine.wait(lambda: False)

    def fail(module):
        raise error

    engine = InFlightEngine(hold)
    with pytest.raises((SystemExit, OSError)):
        fit_in_flight(engine, at_end=fail)
    assert engine.closed


def test_a_resumed_run_has_what_was_sampled_and_samples_the_rest(fit_in_flight, tmp_path, caplog):
    def hold(engine, call, token):
        if call == 4:  # of the second batch: in flight when the first checkpoint is saved
            engine.wait(lambda: engine.version >= 2)

    def wait_for_others(module):
        if module.global_step == 1:
            module.collector.ahead._queue.wait(7)

    fit_in_flight(InFlightEngine(hold), k=2, save=True, at_end=wait_for_others)
    state = torch.load(tmp_path / "step=1.ckpt", weights_only=True)["pl_grouprl"]["rollout_queue"][0]
    sampled = [entry for entry in state["entries"] if "rollouts" in entry]
    assert (state["version"], len(state["entries"]), len(sampled)) == (0, 8, 7)
    with caplog.at_level("INFO"):
        after = fit_in_flight(InFlightEngine(), k=2, resume=1)
    assert "1 groups of rollouts were not finished when the checkpoint was saved: they start again" in caplog.text
    kept = {tuple(entry["prompt_ids"]): [r["token_ids"] for r in entry["rollouts"]] for entry in sampled}
    found = tokens_by_prompt(after)
    assert {prompt: found[prompt] for prompt in kept} == kept
    assert after.steps[0]["rollout/staleness/max"] == 1
    assert after.steps[1]["rollout/staleness/max"] == 2
    with caplog.at_level("INFO"):
        fit_in_flight(InFlightEngine(), k=0, resume=1, steps=2, guards={"allow_changed": ["max_staleness"]})
    assert "groups of rollouts that were sampled ahead. They are left out, because max_staleness is 0" in caplog.text


@pytest.mark.parametrize("replaced", [0, 1])
def test_replacements_are_of_the_current_weights(fit_in_flight, replaced):
    """Those of the first batch, or of the second, all sampled ahead. The engine has numbers of its own, from 1."""
    calls = []

    def one_batch_is_equal(completions, **columns):
        calls.append(len(completions))
        equal = 16 * replaced < sum(calls) <= 16 * (replaced + 1)
        return [0.0 if equal else float(place) for place in range(len(completions))]

    run = fit_in_flight(InFlightEngine(), steps=2, dynamic_sampling=True, rewards=[one_batch_is_equal])
    assert run.steps[replaced]["dynamic_sampling/generation_batches"] == 2
    assert run.steps[replaced]["rollout/staleness/max"] == 0
    assert set(versions_of(run.groups[replaced])) == {replaced}


def test_a_module_can_be_fitted_twice_and_validates_beside_the_threads(fit_in_flight, fit, make_module):
    def hold(engine, call, token):
        if engine.version == 2:  # in flight at the end of the first fit
            engine.wait(lambda: engine.version != 2)

    engine = InFlightEngine(hold)
    still = OptimizerConfig(learning_rate=1e-6)  # else the made-up log-probabilities are not the policy's any more
    module = make_module(engine=engine, optimizer=still, **AHEAD)
    for options in ({}, {"data": {"val": True}, "trainer": {"val_check_interval": 1}}):
        assert len(prompts_of(fit(module=module, steps=2, **options))) == 8
        engine.hook = None
    assert "MainThread" in engine.names


class Wrong(InFlightEngine):
    """Reports other log-probabilities than the policy's; writes nothing in its first calls."""

    silent_calls = 0

    def generate(self, *args, **kwargs):
        groups = super().generate(*args, **kwargs)
        silent = len(self.calls) <= self.silent_calls
        for rollout in (rollout for group in groups for rollout in group):
            rollout.token_ids = [] if silent else rollout.token_ids
            rollout.logprobs = [-9.0] * len(rollout.token_ids)
            rollout.weight_versions = rollout.weight_versions[: len(rollout.token_ids)]
        return groups


def test_log_probabilities_are_compared_with_the_policy_once_there_are_tokens(fit_in_flight):
    for silent_calls in (0, 8):
        engine = Wrong()
        engine.silent_calls = silent_calls
        with pytest.raises(WeightsMismatchError, match="its log-probabilities differ from the policy's"):
            fit_in_flight(engine)
        assert len(engine.calls) > silent_calls


def test_groups_sampled_ahead_after_a_resume(fit_in_flight, caplog):
    """All groups of the second batch were sampled when the first step was saved."""
    queue_is_full = {"at_end": lambda module: module.collector.ahead._queue.wait(4)}
    fit_in_flight(InFlightEngine(), save=True, steps=1, **queue_is_full)
    with pytest.raises(WeightsMismatchError, match="its log-probabilities differ from the policy's"):
        fit_in_flight(Wrong(), resume=1)  # compared though they are of older weights
    with caplog.at_level("INFO"):
        run = fit_in_flight(
            InFlightEngine(), resume=1, num_generations=2, guards={"allow_changed": ["num_generations"]}
        )
    assert "4 groups of rollouts sampled ahead are sampled again, because num_generations changed" in caplog.text
    assert {len(group.rollouts) for groups in run.groups for group in groups} == {2}
    assert run.steps[0]["rollout/staleness/max"] == 0
