"""A run without data, or with rows that hold no prompts, is refused before the models are loaded."""

import pytest
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from pl_grouprl import GRPO

ROWS = [{"prompt": "1 2", "answer": "1"}] * 4


class NeverLoaded:
    def load(self):
        raise AssertionError

    load_tokenizer = load


@pytest.fixture
def run(tmp_path):
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}

    def call(stage, *data):
        trainer = Trainer(accelerator="cpu", max_steps=1, default_root_dir=tmp_path, **quiet)
        getattr(trainer, stage)(GRPO(NeverLoaded(), lambda completions, **_: [0.0 for _ in completions]), *data)

    return call


@pytest.mark.parametrize(("stage", "split"), [("fit", "train"), ("validate", "val"), ("test", "test")])
def test_a_run_without_data_is_refused(stage, split, run):
    error = rf"trainer\.{stage} has no data: .* defines {split}_dataloader; pass datamodule=PromptDataModule\(\.\.\.\)"
    with pytest.raises(ValueError, match=error):
        run(stage)


@pytest.mark.parametrize("stage", ["fit", "validate"])
@pytest.mark.parametrize(
    ("data", "kind"),
    [(ROWS, "a list of rows"), (DataLoader(ROWS), "a DataLoader of rows"), ([DataLoader(ROWS)], "a list of rows")],
)
def test_rows_are_refused(data, kind, stage, run):
    with pytest.raises(TypeError, match=rf"trainer\.{stage} was given {kind}; .* into a PromptDataModule"):
        run(stage, data)
