"""A run that is resumed with other options names them in one table, or is refused where continuing would be wrong."""

from __future__ import annotations

from pathlib import Path

from helpers.scripts import run_script


def test_what_differs_on_another_rank_is_told(tmp_path):
    run_script(Path(__file__).with_name("other_reward_ranks.py"), tmp_path)
    assert "rewards.score.sha256" in (tmp_path / "warnings-0.txt").read_text()
