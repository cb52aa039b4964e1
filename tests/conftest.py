"""What all tests share: one thread, no model hub, and a process that each test leaves as it found it."""

import functools
import gc
import os
import sys
from inspect import isclass
from pathlib import Path
from unittest.mock import patch

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # as the command line has it
if str(Path(__file__).parent) not in sys.path:
    sys.path.insert(0, str(Path(__file__).parent))

import pytest

# The process that hands the tests out to workers reads this file too: what takes seconds to import, functions import.


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """All that test modules import stays: garbage collection would go through it again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Fixtures of any scope draw the same random numbers, whichever test is the first to ask for them."""
    from helpers.process_state import seed_all

    seed_all(0)


def pytest_collection_modifyitems(items):
    import torch
    from helpers.versions import skip_refused_models

    torch.set_num_threads(1)
    skip_refused_models(items)


@pytest.fixture(autouse=True, scope="session")
def _classes_are_compared_with_protocols_once():
    """To compare one, jsonargparse reads its source: 350 times in a command, half of the time that parsing takes."""
    try:
        from jsonargparse import _typehints
    except ImportError:  # a machine that only runs the tests for a GPU
        yield
        return
    compare = getattr(_typehints, "implements_protocol", None)
    if compare is None:  # this private name has changed; the tests take longer then
        yield
        return
    once = functools.cache(compare)
    with patch.object(_typehints, "implements_protocol", lambda *pair: (once if isclass(pair[0]) else compare)(*pair)):
        yield


@pytest.fixture
def layers_checked_once(monkeypatch):
    """`shared_prefix` checks equal models once, for tests of something else that enter it very often."""
    from helpers.quick_fits import RememberingPrefix

    from pl_grouprl.attention.patch import SharedPrefix

    monkeypatch.setattr(SharedPrefix, "_run_layer_check", RememberingPrefix._run_layer_check)


@pytest.fixture(autouse=True, scope="module")
def _a_module_leaves_the_process_as_it_was():
    from helpers.process_state import left_changed
    from helpers.quick_fits import quick_fits

    # What is loaded is left out of garbage collection from here on; otherwise every fit goes through it when it starts.
    gc.collect()
    gc.freeze()
    with quick_fits(), left_changed() as changes:
        yield
    assert not changes, f"The fixtures of this module have left {'; '.join(changes)}."


@pytest.fixture(autouse=True)
def _a_test_leaves_the_process_as_it_was(_a_module_leaves_the_process_as_it_was):
    from helpers.process_state import left_changed, seed_all

    seed_all(1)
    with left_changed() as changes:
        yield
    assert not changes, f"This test has left {'; '.join(changes)}. Restore it, for instance with monkeypatch."
