from types import SimpleNamespace

import pytest

from pl_grouprl.rollout.engine import StopStrings, end_token_ids
from pl_grouprl.types import SamplingConfig


def test_end_tokens_come_from_model_tokenizer_and_request():
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=[5, 3]), config=None)
    tokenizer = SimpleNamespace(eos_token_id=9)
    assert end_token_ids(model, tokenizer, SamplingConfig(stop_token_ids=(1, 3))) == [1, 3, 5, 9]
    assert end_token_ids(model, None, SamplingConfig()) == [3, 5]


def test_end_token_of_a_model_without_generation_config():
    model = SimpleNamespace(config=SimpleNamespace(eos_token_id=4))
    assert end_token_ids(model, SimpleNamespace(eos_token_id=None), SamplingConfig()) == [4]
    assert end_token_ids(SimpleNamespace(config=SimpleNamespace()), None, SamplingConfig()) == []


def test_stop_strings_are_found_in_the_tail(letters):
    stop = StopStrings(letters(eos_token_id=25), ("abc", "<end>"))
    assert stop
    assert stop.window == len("<end>") + StopStrings.MARGIN
    assert stop.found([[9, 0, 1, 2], [0, 1, 9, 2], [25], []]) == [True, False, True, False]


def test_window_counts_bytes(letters):
    assert StopStrings(letters(), ("é",)).window == 2 + StopStrings.MARGIN
    assert not StopStrings(None, ())


def test_refusals(letters):
    with pytest.raises(ValueError, match=r"SamplingConfig.stop is \('x',\) but the engine has no tokenizer"):
        StopStrings(None, ("x",))
    with pytest.raises(ValueError, match="has an empty string"):
        StopStrings(letters(), ("a", ""))
