"""A prepared TensorBoardLogger shows the same numbers as Lightning's."""

import pickle

import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from pl_grouprl.utilities.loggers import prepare_loggers

STEPS = [
    {"reward": 0.5, "lengths/max": 7, "beyond_float32": 1e300},
    {"reward": float("nan"), "lengths/max": 8, "loss": -1 / 3},
]


def written(logger, steps):
    for step, metrics in enumerate(steps):
        logger.log_metrics(metrics, step=step)
    logger.log_metrics({"without_step": 1.0})
    logger.save()
    logger.finalize("success")
    return logger.log_dir


def shown(folder):
    events = EventAccumulator(folder).Reload()
    names = events.Tags()["scalars"]
    return {name: [(event.step, str(event.value)) for event in events.Scalars(name)] for name in names}


def prepared(*args, kind=TensorBoardLogger, **options):
    logger = kind(*args, default_hp_metric=False, **options)
    prepare_loggers([logger])
    return logger


@pytest.mark.parametrize("options", [{}, {"prefix": "run"}])
@pytest.mark.parametrize("steps", [STEPS, [{}, {"loss": torch.tensor(0.25), "flag": True, "reward": 1.0}]])
def test_the_same_numbers_as_lightnings_logger(tmp_path, steps, options):
    folder = written(prepared(tmp_path / "ours", **options), steps)
    reference = written(TensorBoardLogger(tmp_path / "lightning", default_hp_metric=False, **options), steps)
    assert shown(folder) == shown(reference) != {}


class Doubling(TensorBoardLogger):
    def log_metrics(self, metrics, step=None):
        super().log_metrics({name: 2 * value for name, value in metrics.items()}, step)


def test_a_subclass_logs_in_its_own_way(tmp_path):
    folder = written(prepared(tmp_path, kind=Doubling), [{"reward": 0.5}])
    assert shown(folder)["reward"] == [(0, "1.0")]


class Renaming(TensorBoardLogger):
    @property
    def experiment(self):
        writer = super().experiment
        writer.add_scalar = lambda name, value, step: SummaryWriter.add_scalar(writer, f"own/{name}", value, step)
        return writer


def test_a_subclass_writes_in_its_own_way(tmp_path):
    folder = written(prepared(tmp_path, kind=Renaming), [{"reward": 0.5}])
    assert shown(folder)["own/reward"] == [(0, "0.5")]


def test_a_prepared_logger_is_pickled_as_it_was(tmp_path):
    assert type(pickle.loads(pickle.dumps(prepared(tmp_path)))) is TensorBoardLogger
    assert type(pickle.loads(pickle.dumps(prepared(tmp_path, kind=Doubling)))) is Doubling
