"""What a run refuses about its Trainer and data."""

import pytest
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.utils.data import DataLoader

from pl_grouprl.callbacks import SafeCheckpoint
from pl_grouprl.training import checks

ROWS = [{"prompt": "1 2", "answer": "1"}] * 4


@pytest.fixture
def fit(make_module, make_data, make_trainer):
    def run(*callbacks, data=None):
        trainer = make_trainer(max_steps=1, callbacks=list(callbacks), enable_checkpointing=bool(callbacks))
        trainer.fit(make_module(), make_data() if data is None else data)

    return run


@pytest.mark.parametrize("data", [DataLoader(ROWS), ROWS])
def test_rows_are_refused(data, fit):
    with pytest.raises(TypeError, match="PromptBatch"):
        fit(data=data)


def test_a_process_group_unknown_to_the_trainer_is_refused(monkeypatch, fit):
    monkeypatch.setattr(checks, "num_ranks", lambda: 2)
    with pytest.raises(ValueError, match="process group of 2 ranks"):
        fit()


@pytest.mark.parametrize(
    ("kind", "monitor"),
    [(EarlyStopping, "val/reward"), (ModelCheckpoint, "rewards/length/mean"), (SafeCheckpoint, "val/gsm8k/pass@4")],
)
def test_the_lowest_reward_is_never_the_best(kind, monitor, fit):
    with pytest.raises(ValueError, match="mode='min'"):
        fit(kind(monitor=monitor))
    fit(ModelCheckpoint(monitor="reward", mode="max"))
    fit(ModelCheckpoint(monitor="reward_std", mode="min"))
