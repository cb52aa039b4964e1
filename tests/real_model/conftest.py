"""SmolLM2-135M-Instruct, loaded once. Tests that train it load their own."""

import pytest
from helpers.smollm2 import smollm2

from pl_grouprl.callbacks.export_policy import export


def pytest_collection_modifyitems(items):
    for item in items:
        if "real_model" in item.path.parts:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def policy():
    return smollm2()


@pytest.fixture(scope="session")
def tokenizer(policy):
    return policy.load_tokenizer()


@pytest.fixture(scope="session")
def model(policy):
    """In float32 and eval mode; tests leave its weights alone."""
    return policy.load().eval()


@pytest.fixture(scope="session")
def converted(model, tokenizer, tmp_path_factory):
    """A folder with the same model, which loads sooner."""
    folder = tmp_path_factory.mktemp("smollm2") / "policy"
    export(model, tokenizer, folder)
    return folder
