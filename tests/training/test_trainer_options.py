"""Trainers that a fit could not honour."""

from types import SimpleNamespace

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from pl_grouprl.callbacks import SafeCheckpoint
from pl_grouprl.training import checks as trainer_options


def test_a_process_group_unknown_to_the_trainer_is_refused(monkeypatch):
    monkeypatch.setattr(trainer_options, "num_ranks", lambda: 2)
    trainer_options.check_trainer(SimpleNamespace(world_size=1), "validate")
    with pytest.raises(ValueError, match="a process group of 2 ranks exists, but the Trainer has 1"):
        trainer_options.check_trainer(SimpleNamespace(world_size=1), "fit")


@pytest.mark.parametrize("kind", [EarlyStopping, ModelCheckpoint, SafeCheckpoint])
@pytest.mark.parametrize("monitor", ["val/reward", "reward", "rewards/length/mean", "val/gsm8k/pass@4"])
def test_the_lowest_reward_is_never_the_best(kind, monitor):
    def check(monitor, **mode):
        trainer_options.check_trainer(Trainer(logger=False, callbacks=[kind(monitor=monitor, **mode)]), "fit")

    with pytest.raises(ValueError, match=rf"{kind.__name__}\(monitor='{monitor}'\) has mode='min', .*; pass 'max'"):
        check(monitor)
    check(monitor, mode="max")
    for other in ("val/completions/mean_length", "reward_std", "loss", "rewards/length/cost"):
        check(other, mode="min")
