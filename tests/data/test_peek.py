"""Looking at the prompts of a rollout that has not come."""

import pytest

from pl_grouprl import PromptDataModule
from pl_grouprl.data.loaders import TrainPromptLoader
from pl_grouprl.demo.tasks import digit_tokenizer
from pl_grouprl.types import Prompt

PROMPTS = [Prompt([number]) for number in range(11)]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("drop_last", [True, False])
def test_peek_shows_what_will_come_and_moves_nothing(rank, drop_last):
    loader = TrainPromptLoader(
        PROMPTS, batch_size=3, updates_per_rollout=2, seed=5, drop_last=drop_last, num_replicas=2, rank=rank
    )
    state = loader.state_dict()
    rollouts = 3 * loader.rollouts_per_epoch
    seen = [loader.peek(number) for number in range(rollouts)]
    assert loader.state_dict() == state
    came = {}
    for _ in range(3):
        for batch in loader:
            came[batch.rollout_number] = batch.prompts
    assert [came[number] for number in range(rollouts)] == seen
    assert seen[0] != seen[loader.rollouts_per_epoch]  # another order in the next epoch


def test_the_data_module_peeks_too():
    rows = [{"prompt": str(number)} for number in range(8)]
    data = PromptDataModule(train=rows, batch_size=2, tokenizer=digit_tokenizer())
    data.setup("fit")
    first = next(iter(data.train_dataloader()))
    assert data.peek(0) == first.prompts
