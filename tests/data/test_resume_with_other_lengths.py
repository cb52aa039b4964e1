"""A length limit that changes within a run: no prompt twice in an epoch, batches as large as before."""

import pytest
from helpers.recorder import Recorder, SaveEverywhere
from helpers.recorder import fit as fit_module

from pl_grouprl.data import PromptDataModule, TrainPromptLoader
from pl_grouprl.training.checkpoint import fix_loop_counters, restore_loaders
from pl_grouprl.types import Prompt

PROMPTS = [Prompt([number + 1], prompt=str(number)) for number in range(20)]


def loader(dropped=(), **options):
    rows = [number for number in range(20) if number not in dropped]
    options = {"batch_size": 3, "seed": 4} | options
    return TrainPromptLoader([PROMPTS[row] for row in rows], rows=rows, num_rows=20, **options)


def numbers(batch):
    return [int(prompt.prompt) for prompt in batch.prompts]


def take(own, count):
    iterator = iter(own)
    return [next(iterator) for _ in range(count)]


def test_dropped_rows_leave_the_order_of_the_others():
    """By hand: the order of all rows, without those that are dropped, cut into threes."""
    whole = [number for batch in loader(batch_size=20) for number in numbers(batch)]
    dropped = {2, 3, 5, 7, 11, 13, 17}
    left = [number for number in whole if number not in dropped]
    assert [numbers(batch) for batch in loader(dropped)] == [left[start : start + 3] for start in range(0, 12, 3)]


@pytest.mark.parametrize("updates", [1, 2])
@pytest.mark.parametrize(("before", "after"), [((), (4, 8, 15)), ((4, 8, 15), ()), ((4, 8), (8, 15, 16))])
def test_what_was_trained_in_the_epoch_does_not_come_again(before, after, updates):
    for done in range(1, 4 * updates + 1):
        first = loader(before, updates_per_rollout=updates)
        came = take(first, done)
        second = loader(after, updates_per_rollout=updates)
        second.load_state_dict(first.state_dict())
        rest = list(second)
        assert len(rest) == len(second) - done
        begun = {batch.rollout_number: numbers(batch) for batch in came}
        for batch in rest:
            if batch.rollout_number in begun:  # its updates are finished, whatever is dropped now
                kept = [number for number in begun[batch.rollout_number] if number not in after]
                assert numbers(batch) == kept
            else:
                assert len(batch) == 3
                assert not set(numbers(batch)) & set(after)
        places = [(batch.rollout_number, batch.update_index) for batch in came + rest]
        assert places == [divmod(place, updates) for place in range(len(places))]
        seen = [number for batch in came + rest if batch.update_index == 0 for number in numbers(batch)]
        assert len(set(seen)) == len(seen)


def test_the_next_epoch_is_that_of_the_new_rows():
    first = loader()
    take(first, 4)
    second = loader((1, 2, 3))
    second.load_state_dict(first.state_dict())
    list(second)
    third = loader((1, 2, 3))
    third.load_state_dict(second.state_dict())
    following = list(third)
    fresh = loader((1, 2, 3))
    fresh.set_epoch(1)
    assert [numbers(batch) for batch in following] == [numbers(batch) for batch in fresh]
    assert [batch.rollout_number for batch in following] == list(range(5, 10))
    assert [numbers(batch) for batch in following] == [[int(p.prompt) for p in second.peek(n)] for n in range(5, 10)]


def test_an_epoch_that_has_had_more_batches_than_it_has_now_is_over():
    first = loader()
    take(first, 5)
    second = loader(range(10))  # 10 rows: 3 batches
    second.load_state_dict(first.state_dict())
    batches = list(second)
    assert [batch.rollout_number for batch in batches] == [5, 6, 7]
    assert {number for batch in batches for number in numbers(batch)} <= set(range(10, 20))
    assert [numbers(batch) for batch in batches] == [[int(p.prompt) for p in second.peek(n)] for n in (5, 6, 7)]


def test_updates_of_an_epoch_that_would_be_over_are_not_lost():
    first = loader(updates_per_rollout=2)
    take(first, 9)
    with pytest.raises(ValueError, match=r"updates of batch 5 of an epoch that has 3 batches .*10 of 20 "):
        loader(range(10), updates_per_rollout=2).load_state_dict(first.state_dict())


def test_another_number_of_rows_is_refused():
    small = TrainPromptLoader(PROMPTS[:19], batch_size=3, seed=4)
    with pytest.raises(ValueError, match="num_prompts was 20 and is 19"):
        small.load_state_dict(loader().state_dict())


def test_extra_prompts_are_of_those_that_are_used():
    ranks = [loader((4, 8, 15), num_replicas=2, rank=rank) for rank in range(2)]
    drawn = [int(prompt.prompt) for own in ranks for prompt in own.draw_extra(17, rollout_number=2)]
    assert sorted(drawn) == [number for number in range(20) if number not in (4, 8, 15)]
    regular = {int(prompt.prompt) for own in ranks for prompt in own.peek(2)}
    first = {int(prompt.prompt) for own in ranks for prompt in own.draw_extra(14, rollout_number=2)}
    assert not first & regular  # the others come first


class Restoring(Recorder):
    begins_epoch = False

    def on_load_checkpoint(self, checkpoint):
        self.begins_epoch = fix_loop_counters(checkpoint, self.trainer.datamodule.num_train_batches)

    def on_train_start(self):
        restore_loaders(self.trainer, begins_epoch=self.begins_epoch)


def fit(limit, **options):
    """Numbers of the rollouts, and their prompts."""
    rows = [{"prompt": "5" * (1 + number % 5) + f"{number}"} for number in range(10, 30)]  # 3 to 7 tokens
    module = Restoring()
    fit_module(module, PromptDataModule(rows, batch_size=2, max_prompt_length=limit), **options)
    return [(number, prompts) for number, _, _, prompts in module.seen]


@pytest.mark.parametrize(
    ("step", "limit", "left"), [(3, 6, 5), (9, 6, 0), (9, 3, 0)], ids=["within", "over", "far over"]
)
def test_a_run_goes_on_with_a_limit_that_is_added(tmp_path, step, limit, left):
    """20 rows of which 16 (or 4) are left: 8 batches of an epoch (or 2) in place of 10."""
    before = fit(None, callbacks=[SaveEverywhere(tmp_path)], max_epochs=1)
    after = fit(limit, checkpoint=tmp_path / f"step{step}.ckpt", max_epochs=2)
    assert all(len(prompt) <= limit for _, prompts in after for prompt in prompts)
    of_epoch = [prompt for _, prompts in before[:step] + after[:left] for prompt in prompts]
    assert len(set(of_epoch)) == len(of_epoch) == 2 * (step + left)
    following = [prompt for _, prompts in after[left:] for prompt in prompts]
    assert len(set(following)) == len(following) == {6: 16, 3: 4}[limit]
    assert [number for number, _ in after] == list(range(step, step + len(after)))
