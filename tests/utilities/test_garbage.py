"""What is loaded is out of Python's garbage collection during a fit, and only then."""

import gc

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer

from pl_grouprl.utilities import modes as garbage
from pl_grouprl.utilities.modes import CheapGarbageCollection, anything_frozen


class Counting(LightningModule):
    """Keeps how many objects are frozen in each step, and the threshold; the third step may fail."""

    def __init__(self, fails=False):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.fails, self.frozen, self.thresholds = fails, [], []

    def training_step(self, batch, batch_idx):
        self.frozen.append(gc.get_freeze_count())
        self.thresholds.append(gc.get_threshold())
        if self.fails and batch_idx == 2:
            raise KeyError("third")
        return self.layer(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(module):
    trainer = Trainer(
        accelerator="cpu", max_epochs=1, callbacks=[CheapGarbageCollection()], logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(torch.ones(4, 1)))


@pytest.fixture(autouse=True)
def thresholds():
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


@pytest.fixture(autouse=True)
def nothing_frozen(monkeypatch):
    monkeypatch.setattr(garbage, "anything_frozen", anything_frozen)
    gc.unfreeze()
    yield
    gc.freeze()  # as it was: to go through all that is imported takes a second


def test_loaded_objects_are_frozen_during_a_fit_alone():
    module = Counting()
    fit(module)
    assert len(module.frozen) == 4
    assert min(module.frozen) > 1000
    assert gc.get_freeze_count() == 0


def test_a_failure_gives_them_back():
    gc.set_threshold(701, 9, 8)
    with pytest.raises(KeyError, match="third"):
        fit(Counting(fails=True))
    assert gc.get_freeze_count() == 0
    assert gc.get_threshold() == (701, 9, 8)


@pytest.mark.parametrize(("before", "during"), [(701, 10_000), (20_000, 20_000), (0, 0)])
def test_collections_are_rarer_during_a_fit(before, during):
    gc.set_threshold(before, 9, 8)
    module = Counting()
    fit(module)
    assert {first for first, *_ in module.thresholds} == {during}
    assert gc.get_threshold() == (before, 9, 8)


def test_what_others_froze_stays_theirs():
    gc.freeze()
    count = gc.get_freeze_count()
    module = Counting()
    fit(module)
    assert 0 < gc.get_freeze_count() <= count
