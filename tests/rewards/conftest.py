import pytest

from pl_grouprl.rewards import RewardWorkers, prepare_rewards


@pytest.fixture
def make_workers():
    """Makes reward workers, which are closed after the test."""
    made = []

    def make(rewards, count=1, timeout=None, **options):
        made.append(RewardWorkers(prepare_rewards(rewards), count, timeout, **options))
        return made[-1]

    yield make
    for workers in made:
        workers.close()
