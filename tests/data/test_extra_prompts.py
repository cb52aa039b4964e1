"""draw_extra: which prompts replace those that teach nothing."""

from types import SimpleNamespace

import pytest

from pl_grouprl.data import PromptDataModule, TrainPromptLoader
from pl_grouprl.demo import MostFrequentDigit
from pl_grouprl.types import Prompt


def make_loaders(prompts, batch_size, ranks=1, **options):
    data = [Prompt([number + 1], prompt=str(number)) for number in range(prompts)]
    return [
        TrainPromptLoader(data, batch_size=batch_size, num_replicas=ranks, rank=rank, **options)
        for rank in range(ranks)
    ]


def numbers(prompts):
    return [int(prompt.prompt) for prompt in prompts]


def draw(loader, count, rollout_number=0, attempt=0):
    return numbers(loader.draw_extra(count, rollout_number=rollout_number, attempt=attempt))


def regular(loaders, rollout_number):
    """The prompts of a rollout, on all ranks."""
    return [number for loader in loaders for number in numbers(loader.peek(rollout_number))]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("rollout_number", [0, 3, 7])  # 4 rollouts in an epoch: 7 is in the second one
def test_ranks_attempts_and_the_regular_batch_are_disjoint(ranks, rollout_number):
    # 24 prompts, 6 of them regular: 18 are left, for three attempts of 6 over all ranks.
    loaders = make_loaders(24, 6, ranks, seed=5)
    drawn = [draw(loader, 6, rollout_number, attempt) for loader in loaders for attempt in range(3)]
    everything = [number for own in drawn for number in own] + regular(loaders, rollout_number)
    assert sorted(everything) == list(range(24))


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("count", [1, 4, 9, 24])
def test_any_number_of_ranks_draws_the_same_prompts(ranks, count):
    (alone,) = make_loaders(24, 6)
    for attempt in range(3):
        expected = draw(alone, count, 1, attempt)
        shares = [draw(loader, count, 1, attempt) for loader in make_loaders(24, 6, ranks)]
        assert shares == [expected[rank::ranks] for rank in range(ranks)]


def test_order_of_preference_where_the_data_ends():
    (loader,) = make_loaders(11, 4)
    whole = draw(loader, 11)
    assert sorted(whole) == list(range(11))
    assert set(whole[7:]) == set(regular([loader], 0))


def test_more_than_there_are_and_none():
    (loader,) = make_loaders(5, 2)
    assert sorted(draw(loader, 99)) == list(range(5))
    assert draw(loader, 0) == []


def test_data_that_is_one_batch():
    loaders = make_loaders(4, 4, 2)
    assert sorted(draw(loaders[0], 4) + draw(loaders[1], 4)) == list(range(4))
    assert sorted(draw(loaders[0], 9, 3, 2) + draw(loaders[1], 9, 3, 2)) == list(range(4))
    (small,) = make_loaders(1, 4, drop_last=False)
    assert draw(small, 2, 5, 5) == [0]


@pytest.mark.parametrize("attempt", range(6))
def test_no_prompt_comes_twice_in_a_call_after_going_round(attempt):
    loaders = make_loaders(10, 3, 2)
    for count in range(11):
        drawn = [number for loader in loaders for number in draw(loader, count, 1, attempt)]
        assert len(set(drawn)) == len(drawn) == count


def test_draws_depend_on_seed_rollout_and_attempt_and_on_nothing_else():
    def first(seed=0, rollout_number=0, attempt=0):
        return tuple(draw(make_loaders(100, 10, seed=seed)[0], 10, rollout_number, attempt))

    assert first() == first()
    assert len({first(), first(seed=1), first(rollout_number=1), first(rollout_number=11), first(attempt=1)}) == 5
    (loader,) = make_loaders(100, 10)
    before = loader.state_dict()
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    assert tuple(draw(loader, 10)) == first()
    assert loader.state_dict() == state != before
    resumed = make_loaders(100, 10)[0]
    resumed.load_state_dict(state)
    assert tuple(draw(resumed, 10)) == first()
    assert numbers(next(iterator).prompts) == regular([loader], 1)


def test_draws_are_not_the_order_of_an_epoch():
    (loader,) = make_loaders(50, 1)
    orders = [numbers(prompt for batch in loader for prompt in batch.prompts) for _ in range(3)]
    for rollout_number in range(3):
        drawn = draw(loader, 49, rollout_number)
        assert all([number for number in order if number in drawn] != drawn for order in orders)


def test_a_loader_that_does_not_shuffle_draws_beside_its_batch():
    (loader,) = make_loaders(6, 2, shuffle=False)
    assert sorted(draw(loader, 4, 1)) == [0, 1, 4, 5]
    assert sorted(draw(loader, 4, 4)) == [0, 1, 4, 5]  # the same batch in the next epoch


def test_data_module_draws_for_the_rank_of_its_trainer():
    rows = [{"prompt": str(number)} for number in range(8)]
    drawn = []
    for rank in range(2):
        data = PromptDataModule(rows, batch_size=2, seed=3, tokenizer=MostFrequentDigit().tokenizer())
        data.trainer = SimpleNamespace(
            distributed_sampler_kwargs={"num_replicas": 2, "rank": rank},
            lightning_module=SimpleNamespace(updates_per_rollout=2),
            overfit_batches=0.0,
        )
        data.setup("fit")
        batch = next(batch for batch in data.train_dataloader() if batch.rollout_number == 2)
        drawn += numbers(data.draw_extra(6, rollout_number=2)) + numbers(batch.prompts)
    assert sorted(drawn) == list(range(8))
