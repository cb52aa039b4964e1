"""The loaders by themselves: order, shares of ranks, state, refusals."""

import pytest

from pl_grouprl.data import EvalPromptLoader, PromptBatch, PromptDataModule, TrainPromptLoader
from pl_grouprl.demo.tasks import digit_tokenizer
from pl_grouprl.types import Prompt


def make_prompts(count):
    return [Prompt([number + 1], prompt=str(number)) for number in range(count)]


def numbers(batch):
    return [int(prompt.prompt) for prompt in batch.prompts]


def test_unshuffled_order_and_numbering():
    loader = TrainPromptLoader(make_prompts(5), batch_size=2, updates_per_rollout=3, shuffle=False)
    assert len(loader) == 6
    for epoch in range(2):
        batches = list(loader)
        assert [numbers(batch) for batch in batches] == [[0, 1]] * 3 + [[2, 3]] * 3
        assert [batch.rollout_number for batch in batches] == [2 * epoch] * 3 + [2 * epoch + 1] * 3
        assert [batch.update_index for batch in batches] == [0, 1, 2] * 2
        assert {batch.num_updates for batch in batches} == {3}


def test_drop_last():
    loader = TrainPromptLoader(make_prompts(5), batch_size=2, drop_last=False, shuffle=False)
    assert [numbers(batch) for batch in loader] == [[0, 1], [2, 3], [4]]
    small = TrainPromptLoader(make_prompts(1), batch_size=2, drop_last=False)
    assert [numbers(batch) for batch in small] == [[0]]


def test_order_depends_on_seed_and_epoch_only():
    def orders(seed):
        loader = TrainPromptLoader(make_prompts(20), batch_size=20, seed=seed)
        return [numbers(batch) for _ in range(2) for batch in loader]

    assert orders(1) == orders(1)
    assert len({tuple(order) for order in orders(1) + orders(2)}) == 4
    loader = TrainPromptLoader(make_prompts(20), batch_size=20, seed=1)
    loader.set_epoch(1)
    assert numbers(next(iter(loader))) == orders(1)[1]


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_share_each_batch(ranks):
    prompts = make_prompts(11)
    whole = list(TrainPromptLoader(prompts, batch_size=5, seed=3))
    shares = [list(TrainPromptLoader(prompts, batch_size=5, seed=3, num_replicas=ranks, rank=r)) for r in range(ranks)]
    for index, batch in enumerate(whole):
        parts = [share[index] for share in shares]
        assert sorted(number for part in parts for number in numbers(part)) == sorted(numbers(batch))
        assert {part.rollout_number for part in parts} == {batch.rollout_number}
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_state_holds_for_another_number_of_ranks():
    prompts = make_prompts(12)
    one = TrainPromptLoader(prompts, batch_size=4, updates_per_rollout=2)
    iterator = iter(one)
    for _ in range(3):
        next(iterator)
    state = one.state_dict()
    expected = [(batch.rollout_number, batch.update_index, sorted(numbers(batch))) for batch in iterator]
    assert [entry[:2] for entry in expected] == [(1, 1), (2, 0), (2, 1)]
    shares = []
    for rank in range(2):
        loader = TrainPromptLoader(prompts, batch_size=4, updates_per_rollout=2, num_replicas=2, rank=rank)
        loader.load_state_dict(state)
        shares.append(list(loader))
    joined = [(a.rollout_number, a.update_index, sorted(numbers(a) + numbers(b))) for a, b in zip(*shares, strict=True)]
    assert joined == expected


def test_state_of_a_finished_epoch_continues_with_the_next_one():
    loader = TrainPromptLoader(make_prompts(6), batch_size=3)
    list(loader)
    state = loader.state_dict()
    expected = [numbers(batch) for batch in loader]
    resumed = TrainPromptLoader(make_prompts(6), batch_size=3)
    resumed.load_state_dict(state)
    assert [numbers(batch) for batch in resumed] == expected
    assert [next(iter(resumed)).rollout_number for _ in range(2)] == [4, 6]  # one that was broken off is not continued


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("drop_last", [True, False])
def test_peek_shows_what_will_come_and_moves_nothing(rank, drop_last):
    options = {"batch_size": 3, "updates_per_rollout": 2, "seed": 5, "num_replicas": 2}
    loader = TrainPromptLoader(make_prompts(11), drop_last=drop_last, rank=rank, **options)
    state = loader.state_dict()
    rollouts = 3 * loader.rollouts_per_epoch
    seen = [loader.peek(number) for number in range(rollouts)]
    assert loader.state_dict() == state
    came = {batch.rollout_number: batch.prompts for _ in range(3) for batch in loader}
    assert [came[number] for number in range(rollouts)] == seen
    assert seen[0] != seen[loader.rollouts_per_epoch]  # another order in the next epoch


def test_the_data_module_peeks_too():
    rows = [{"prompt": str(number)} for number in range(8)]
    data = PromptDataModule(train=rows, batch_size=2, tokenizer=digit_tokenizer())
    data.setup("fit")
    assert data.peek(0) == next(iter(data.train_dataloader())).prompts


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 2, "num_replicas": 3}, "batch_size=2 leaves some of 3 ranks without a prompt"),
        ({"batch_size": 6}, "has 5 prompts, fewer than batch_size=6"),
        ({"batch_size": 4, "num_replicas": 2, "drop_last": False}, "the last batch of an epoch has 1 prompts for 2"),
    ],
)
def test_refusals(options, message):
    with pytest.raises(ValueError, match=message):
        TrainPromptLoader(make_prompts(5), **options)


@pytest.mark.parametrize(("count", "size", "ranks"), [(7, 3, 1), (7, 3, 2), (65, 64, 2), (1, 4, 2), (8, 4, 3)])
def test_evaluation_sees_every_prompt_once(count, size, ranks):
    loaders = [EvalPromptLoader(make_prompts(count), batch_size=size, num_replicas=ranks, rank=r) for r in range(ranks)]
    batches = [list(loader) for loader in loaders]
    assert {len(own) for own in batches} == {len(loaders[0])} == {-(-count // size)}
    assert sorted(number for own in batches for batch in own for number in numbers(batch)) == list(range(count))
    for parts in zip(*batches, strict=True):
        assert sum(map(len, parts)) <= size


def test_evaluation_batches_are_even_and_no_collections():
    assert [len(batch) for batch in EvalPromptLoader(make_prompts(65), batch_size=64)] == [33, 32]
    batch = PromptBatch(make_prompts(2), 3, 1, 4)
    assert not hasattr(batch, "__iter__")
    assert repr(batch) == "PromptBatch(2 prompts, rollout_number=3, update 2 of 4)"
