"""A step that leaves NaN or infinity in a weight ends the run there, on every rank, with the parameter's name."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.scripts import run_script


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_all_ranks_end_where_one_ranks_part_is_broken(tmp_path, strategy):
    run_script(Path(__file__).with_name("broken_weight_ranks.py"), strategy, tmp_path, timeout=300)
    told = [(tmp_path / f"error-{rank}.txt").read_text() for rank in range(2)]
    for text in told:
        assert "NaN or infinity in 1 parameters after optimizer step 1: policy.model.norm.weight" in text
