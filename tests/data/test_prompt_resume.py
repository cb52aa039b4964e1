"""Under Lightning: order over epochs, resume at every step, batches handed over untouched."""

import pytest
import torch
from helpers.recorder import QUIET, Recorder, SaveEverywhere
from helpers.recorder import fit as fit_module
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback

from pl_grouprl.data import PromptDataModule
from pl_grouprl.demo import MostFrequentDigit

ROLLOUTS, UPDATES, EPOCHS = 3, 2, 3
STEPS = ROLLOUTS * UPDATES * EPOCHS


def make_data(**options):
    options = {"batch_size": 2, "val_batch_size": 2} | options
    train = [{"prompt": f"{number}5", "answer": "five"} for number in range(7)]
    return PromptDataModule(train=train, val=train[:3], **options)


def fit(data, *, updates=UPDATES, **options):
    module = Recorder(updates)
    return fit_module(module, data, **options), module


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    _, module = fit(make_data(), max_epochs=EPOCHS, callbacks=[SaveEverywhere(folder)])
    return folder, module.seen


def test_order_of_a_whole_run(whole_run):
    _, seen = whole_run
    assert [entry[:3] for entry in seen] == [
        (rollout, update, UPDATES) for rollout in range(ROLLOUTS * EPOCHS) for update in range(UPDATES)
    ]
    for first, second in zip(seen[::2], seen[1::2], strict=True):
        assert first[3] == second[3]
    epochs = [[prompt for entry in seen[6 * epoch : 6 * epoch + 6 : 2] for prompt in entry[3]] for epoch in range(3)]
    assert all(len(set(epoch)) == 6 for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_the_order_is_that_of_the_loader_alone(whole_run):
    data = make_data()
    data.tokenizer = MostFrequentDigit().tokenizer()
    data.setup("fit")
    loader = data.train_dataloader()
    alone = [[prompt.prompt for prompt in batch.prompts] for _ in range(EPOCHS) for batch in loader]
    assert alone == [entry[3] for entry in whole_run[1][::2]]


@pytest.mark.parametrize(
    ("name", "limit"),
    [
        *((f"step{step}", {"max_epochs": EPOCHS}) for step in range(1, STEPS)),
        *((name, {"max_steps": STEPS}) for name in ("step1", "step5", "step6", "step12", "epoch0")),
        *((f"epoch{epoch}", {"max_epochs": EPOCHS}) for epoch in (0, 1)),
    ],
    ids=str,
)
def test_resume_continues_exactly(whole_run, name, limit):
    folder, seen = whole_run
    done = int(name[4:]) if name.startswith("step") else (int(name[5:]) + 1) * ROLLOUTS * UPDATES
    trainer, module = fit(make_data(), checkpoint=folder / f"{name}.ckpt", **limit)
    assert module.seen == seen[done:]
    assert trainer.global_step == STEPS


@pytest.mark.parametrize("step", range(1, 12))
def test_resume_with_epochs_cut_short_and_validation_within(tmp_path, step):
    options = {"max_epochs": 3, "limit_train_batches": 4, "val_check_interval": 2}
    _, whole = fit(make_data(), callbacks=[SaveEverywhere(tmp_path)], **options)
    assert [entry[0] for entry in whole.seen] == [0, 0, 1, 1, 3, 3, 4, 4, 6, 6, 7, 7]
    _, module = fit(make_data(), checkpoint=tmp_path / f"step{step}.ckpt", **options)
    assert module.seen == whole.seen[step:]


def test_resume_with_other_data_is_refused(whole_run):
    message = "batch_size was 2 and is 3"
    with pytest.raises(ValueError, match=message):
        fit(make_data(batch_size=3), checkpoint=whole_run[0] / "step4.ckpt", max_epochs=EPOCHS)
    with pytest.raises(ValueError, match="updates_per_rollout was 2 and is 1"):
        fit(make_data(), updates=1, checkpoint=whole_run[0] / "step4.ckpt", max_epochs=EPOCHS)


def test_reloading_the_loader_every_epoch_changes_nothing(whole_run):
    _, module = fit(make_data(), max_epochs=EPOCHS, reload_dataloaders_every_n_epochs=1)
    assert module.seen == whole_run[1]


def test_lightning_hands_the_batch_over_untouched(whole_run):
    handed = []

    class Catch(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            handed.append((batch, [prompt.columns for prompt in batch.prompts]))

    data = PromptDataModule([{"prompt": "12", "scale": torch.ones(1)}], batch_size=1)
    fit(data, max_steps=1, precision="bf16-true", callbacks=[Catch()])
    ((batch, columns),) = handed
    assert batch.prompts[0] is not data.prompts["train"][0]  # a copy, but for what is no container
    assert batch.prompts[0].columns["scale"] is data.prompts["train"][0].columns["scale"]
    assert columns[0]["scale"].dtype == torch.float32


def test_fit_without_validation_data_and_fast_dev_run():
    _, module = fit(PromptDataModule([{"prompt": "1"}], batch_size=1), max_steps=2)
    assert (len(module.seen), module.validated) == (2, [])
    _, module = fit(make_data(), fast_dev_run=True)
    assert len(module.seen) == 1


def test_overfit_batches_repeats_the_same_prompts():
    _, module = fit(make_data(), overfit_batches=2, max_epochs=2)
    assert [entry[3] for entry in module.seen] == [["05", "15"]] * 4


def test_validation_sees_every_prompt_once():
    module = Recorder()
    trainer = Trainer(**QUIET)
    trainer.validate(module, datamodule=make_data(), verbose=False)
    assert module.validated == [["05", "15"], ["25"]]


def test_errors_come_before_the_first_step():
    with pytest.raises(ValueError, match=r"`train`\) is None, and this stage needs it"):
        fit(PromptDataModule(), max_steps=1)
    with pytest.raises(ValueError, match=r"1 prompts, fewer than batch_size=8"):
        fit(PromptDataModule([{"prompt": "1"}]), max_steps=1)
