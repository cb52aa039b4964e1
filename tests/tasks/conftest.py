import pytest

from pl_grouprl.tasks import ReasoningGym, ReasoningGymScore

SUMS = {"chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}}


@pytest.fixture(scope="session")
def sums():
    """A small task with worked examples, and its rows by split."""
    source = ReasoningGym(
        SUMS, size=40, val_size=10, test_size=12, num_examples=3, system_prompt="Add.", answer_format="Answer: {answer}"
    )
    return source, {split: source.rows(split) for split in ("train", "val", "test")}


@pytest.fixture(scope="session")
def score():
    return ReasoningGymScore()
