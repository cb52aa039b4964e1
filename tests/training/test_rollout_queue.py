"""Groups wait, are sampled and taken: each once, none too old, whatever the threads do."""

from __future__ import annotations

import random
import threading

import pytest

from pl_grouprl.rollout.engine import SamplerLostError
from pl_grouprl.training.ahead import MAX_ATTEMPTS, RolloutQueue, SamplingThreads, Staleness, staleness_metrics
from pl_grouprl.types import NOT_SAMPLED, Prompt, Rollout, RolloutGroup


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
    queue = RolloutQueue(1)
    queue.submit(0, prompts(0))
    queue.submit(1, prompts(1))
    assert [entry.prompt.token_ids for entry in queue.start(True)] == [[0], [1]]
    assert [entry.prompt.token_ids for entry in queue.start(True)] == [[10], [11]]


def test_fast_groups_overtake_a_slow_one_until_it_would_be_too_old():
    queue = RolloutQueue(2)
    for number in range(3):
        queue.submit(number, prompts(number))
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
    waiting = threading.Thread(target=queue.wait, args=(2,), daemon=True)
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()  # enough are finished, but at the next batch the slow one would be three old
    queue.finish(slow, [group_of(entry) for entry in slow])
    waiting.join(60)
    assert [group.prompt_ids[0] for group in queue.take(2, 2)] == [0, 21]


def test_a_batch_overtakes_only_as_long_as_the_slow_ones_can_be_taken_in_time():
    queue = RolloutQueue(2)
    for number in range(3):
        queue.submit(number, prompts(number))
    for _ in range(2):
        sample(queue)
    slow = [queue.start(False) for _ in range(4)]
    assert taken(queue, 0)[0] == [0, 1]
    queue.set_version(1)
    queue.submit(3, prompts(3))
    for _ in range(2):
        sample(queue)
    waiting = threading.Thread(target=queue.wait, args=(2,), daemon=True)
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()  # four would be left for the next batch, the last one that they are not too old for
    for entries in slow[:2]:
        queue.finish(entries, [group_of(entry) for entry in entries])
    waiting.join(60)
    assert [group.prompt_ids[0] for group in queue.take(1, 2)] == [10, 11]
    queue.set_version(2)
    for entries in slow[2:]:
        queue.finish(entries, [group_of(entry) for entry in entries])
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
    queue, attempts = RolloutQueue(1), []
    queue.submit(0, prompts(0))
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
    queue = RolloutQueue(2)
    for number in range(3):
        queue.submit(number, prompts(number))
    for _ in range(3):
        sample(queue)
    in_flight = queue.start(False)  # the second of batch 1
    assert taken(queue, 0)[0] == [0, 1]
    queue.expect(2)
    assert len(queue) == 2
    queue.finish(in_flight, [group_of(in_flight[0])])
    sample(queue)
    sample(queue)
    assert taken(queue, 2)[0] == [20, 21]
    assert not any(map(queue.has, range(3)))


def test_batches_of_an_earlier_fit_are_discarded():
    queue = RolloutQueue(1)
    queue.submit(7, prompts(7))
    queue.expect(0)  # the data start over
    assert len(queue) == 0


def test_overtaken_groups_replace_discarded_ones():
    queue = RolloutQueue(2)
    for number in range(3):
        queue.submit(number, prompts(number))
    slow = queue.start(False)
    for _ in range(5):
        sample(queue)
    assert taken(queue, 0)[0] == [1, 10]
    queue.expect(2)  # of batch 1, one group was trained already; its other one and the slow one are too many
    assert len(queue) == 2
    queue.finish(slow, [group_of(slow[0])])
    assert sorted(taken(queue, 2)[0]) == [20, 21]


def test_a_lost_sampler_is_told_once_for_each_sync():
    queue = RolloutQueue(1)
    queue.submit(0, prompts(0))
    lost = [queue.start(False), queue.start(False)]
    error = SamplerLostError("restarted")
    queue.fail(lost[0], error)
    with pytest.raises(SamplerLostError, match="restarted"):
        queue.wait(2)
    queue.set_version(0)
    queue.fail(lost[1], error)  # it began before the weights were sent again
    sample(queue)
    sample(queue)
    assert taken(queue, 0)[0] == [0, 1]


def test_an_error_ends_the_wait_and_what_follows():
    queue = RolloutQueue(1)
    queue.submit(0, prompts(0))
    queue.fail(queue.start(False), FloatingPointError("not finite"))
    for _ in range(2):
        with pytest.raises(FloatingPointError, match="not finite"):
            queue.wait(1)


def test_more_than_was_submitted_is_refused():
    queue = RolloutQueue(1)
    queue.submit(0, prompts(0))
    with pytest.raises(RuntimeError, match="3 groups are to be taken from a queue of 2"):
        queue.wait(3)


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
