import pytest

from pl_grouprl.tasks import ReasoningGym, ReasoningGymScore


@pytest.fixture(scope="session")
def options():
    """Two tasks, one of them with few questions, the other with a generator that iterates over sets."""
    return {
        "tasks": {
            "chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1, "weight": 3},
            "isomorphic_strings": {"max_string_length": 6},
        },
        "size": 40,
        "val_size": 12,
        "test_size": 12,
        "num_examples": 2,
        "system_prompt": "Be brief.",
        "answer_format": "Answer: {answer}",
    }


@pytest.fixture(scope="session")
def rows(options):
    """The rows by split."""
    source = ReasoningGym(**options)
    return {split: source.rows(split) for split in ("train", "val", "test")}


@pytest.fixture(scope="session")
def score():
    return ReasoningGymScore()
