"""A checkpoint of shards that is damaged, or of another algorithm, ends all ranks with its path and the cause."""

import json
from pathlib import Path

import pytest
from helpers.scripts import run_script

SCRIPT = Path(__file__).with_name("damaged_folder.py")


@pytest.mark.slow
def test_all_ranks_say_what_is_wrong_with_a_folder(record_property):
    done = run_script(SCRIPT, timeout=600)
    results = json.loads(done.stdout)
    whole = results.pop("whole")
    assert whole["codes"] == [0, 0], whole["log"]
    for case, result in results.items():
        assert result["codes"] == [1, 1], (case, result["log"])
        assert result["told"] == 2, (case, result["log"])
    record_property("figure", f"{len(results)} of {len(results)} damaged or foreign folders refused on both ranks")
