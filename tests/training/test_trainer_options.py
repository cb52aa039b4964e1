"""Trainers that a fit could not honour."""

from types import SimpleNamespace

import pytest

from pl_grouprl.training import trainer_options


def test_a_process_group_unknown_to_the_trainer_is_refused(monkeypatch):
    monkeypatch.setattr(trainer_options, "num_ranks", lambda: 2)
    trainer_options.check_trainer(SimpleNamespace(world_size=1), "validate")
    with pytest.raises(ValueError, match="a process group of 2 ranks exists, but the Trainer has 1"):
        trainer_options.check_trainer(SimpleNamespace(world_size=1), "fit")
