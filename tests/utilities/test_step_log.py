"""`log_numbers` leaves in loggers, callbacks and the progress bar what Lightning's `log_dict` leaves."""

import csv

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger

from pl_grouprl.utilities.loggers import log_numbers


class Counting(LightningModule):
    """Logs numbers that change with each step, some of them not in every step."""

    def __init__(self, log):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.log_in_my_way = log
        self.steps = 0

    def training_step(self, batch, batch_idx):
        self.steps += 1
        loss = self.layer(batch).sum()
        metrics = {"loss": loss, "square": 1000.0 + self.steps**2, "exact": torch.tensor([1 / 3 + self.steps]).double()}
        self.log_in_my_way(self, metrics)
        if self.steps % 3 == 0:
            self.log_in_my_way(self, {"seldom": 0.1 * self.steps})
        self.log_in_my_way(self, {"shown": 2 * self.steps}, prog_bar=True)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.log_in_my_way(self, {"square": -1.0})

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Seen(Callback):
    """Keeps what callbacks and the progress bar are shown at the start of each batch."""

    def __init__(self):
        self.metrics = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        shown = ({**trainer.callback_metrics}, {**trainer.logged_metrics}, {**trainer.progress_bar_metrics})
        self.metrics.append([{name: float(value) for name, value in own.items()} for own in shown])


def with_lightning(module, metrics, prog_bar=False):
    module.log_dict(metrics, prog_bar=prog_bar, batch_size=1)


def fit(tmp_path, log, **options):
    torch.manual_seed(0)
    seen, logger = Seen(), CSVLogger(tmp_path, name="", version=log.__name__)
    trainer = Trainer(
        accelerator="cpu", max_epochs=3, callbacks=[seen], logger=logger, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, **options,
    )  # fmt: skip
    trainer.fit(Counting(log), torch.utils.data.DataLoader(torch.arange(10.0)[:, None], batch_size=2))
    with open(f"{logger.log_dir}/metrics.csv") as file:
        return seen.metrics, list(csv.DictReader(file)), {k: float(v) for k, v in trainer.callback_metrics.items()}


@pytest.mark.parametrize(
    "options",
    [
        {"log_every_n_steps": 1},
        {"log_every_n_steps": 2, "accumulate_grad_batches": 2},
        {"log_every_n_steps": 1, "precision": "bf16-true"},
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning")
def test_loggers_callbacks_and_progress_bar_see_the_same(tmp_path, options):
    expected = fit(tmp_path, with_lightning, **options)
    found = fit(tmp_path, log_numbers, **options)
    assert found == expected
    rows = found[1]
    assert rows[0]["square"] == "-1.0"
    assert len(rows) >= 4


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_name_keeps_its_place_in_the_progress_bar(tmp_path):
    def log(module, metrics, prog_bar=False):
        log_numbers(module, metrics, prog_bar=prog_bar and module.steps < 2)

    with pytest.raises(Exception, match="twice in `training_step` with different arguments"):
        fit(tmp_path, log, log_every_n_steps=1)
