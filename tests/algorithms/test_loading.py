"""A module takes verified checkpoints of its own algorithm, through a Trainer and without one, and predicts."""

from __future__ import annotations

import re

import pytest
import torch
from helpers.sweeps import sweep_pairs
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint

from pl_grouprl.algorithms import GRPO, PPO, GroupPPO
from pl_grouprl.callbacks import SafeCheckpoint
from pl_grouprl.data import PromptDataModule
from pl_grouprl.demo import MostFrequentDigit
from pl_grouprl.models import PolicyCopyCritic
from pl_grouprl.types import RolloutGroup
from pl_grouprl.utilities import checkpoint_files
from pl_grouprl.utilities.checkpoint_files import manifest_of


class MyGRPO(GRPO):
    """A user's variant."""


class Other(LightningModule):
    """A module of another package."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).sum()

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.ones(4, 2))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.fixture
def saved(make_module, make_data, make_trainer, tmp_path):
    """A checkpoint of a run of one step, with a manifest or without."""

    def save(cls=GRPO, manifest=True, **options):
        callback = SafeCheckpoint(dirpath=tmp_path / "saved", filename="own", every_n_train_steps=1)
        module, data = (Other(), None) if cls is Other else (make_module(cls, **options), make_data())
        make_trainer(max_steps=1, callbacks=[callback]).fit(module, data)
        path = tmp_path / "saved" / "own.ckpt"
        if not manifest:
            manifest_of(path).unlink()
        return path

    return save


def flip(path):
    """Change one byte in the middle of a file, where weights are."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x40
    path.write_bytes(content)


def load(stage, module, data, trainer, path):
    if stage == "fit":
        trainer.fit(module, data, ckpt_path=path)
    else:
        getattr(trainer, stage)(module, datamodule=data, ckpt_path=path)


# Damage.


@pytest.mark.parametrize("stage", ["fit", "validate", "test", "predict"])
@pytest.mark.parametrize("manifest", [True, False], ids=["manifest", "of Lightning alone"])
def test_a_flipped_byte_is_refused_from_python_in_every_stage(
    saved, make_module, make_data, make_trainer, stage, manifest
):
    path = saved(manifest=manifest)
    flip(path)
    data = make_data(val=True)
    data.sources["test"] = data.sources["val"]
    module = make_module()
    text = "are not what was saved" if manifest else "is torn"
    with pytest.raises(
        ValueError, match=rf"checkpoint {re.escape(str(path))} is damaged: .*{text}.* Nothing of it was"
    ):
        load(stage, module, data, make_trainer(max_steps=2), path)
    assert module.global_step == 0


@pytest.mark.parametrize("stage", ["validate", "fit"])
def test_a_whole_checkpoint_of_lightning_alone_is_accepted(saved, make_module, make_data, make_trainer, stage):
    path = saved(manifest=False)
    module = make_module()
    load(stage, module, make_data(val=True), make_trainer(max_steps=2), path)
    expected = torch.load(path, weights_only=True)["state_dict"]
    if stage == "validate":
        assert all(torch.equal(value, expected[name]) for name, value in module.state_dict().items())


def test_a_checkpoint_is_read_once_to_verify_it(saved, make_module, make_data, make_trainer, monkeypatch):
    path = saved()
    hashed = []
    describe = checkpoint_files._describe
    monkeypatch.setattr(checkpoint_files, "_describe", lambda file: hashed.append(file) or describe(file))
    callback = SafeCheckpoint(dirpath=path.parent, every_n_train_steps=100, save_top_k=0)
    make_trainer(max_steps=2, callbacks=[callback]).fit(make_module(), make_data(), ckpt_path="last")
    assert hashed == [path.resolve()]  # found by the search, verified for the load, by module and callback


@pytest.mark.parametrize("stage", ["fit", "validate", "test"])
def test_a_checkpoint_that_does_not_exist_is_refused_before_the_policy_is_loaded(
    stage, make_module, make_data, make_trainer, tmp_path
):
    module = make_module()
    with pytest.raises(FileNotFoundError, match=r"ckpt_path is '.*gone\.ckpt'"):
        getattr(make_trainer(), stage)(module, datamodule=make_data(), ckpt_path=tmp_path / "gone.ckpt")
    assert module.policy is None


@pytest.mark.parametrize("callbacks", [(), (ModelCheckpoint,)], ids=["none", "Lightning's"])
def test_last_is_found_or_refused_whatever_saves(make_module, make_data, make_trainer, tmp_path, callbacks):
    """Lightning alone starts anew, with a warning."""

    def train(steps, ckpt_path=None):
        own = [callback(every_n_train_steps=1) for callback in callbacks]
        trainer = make_trainer(max_steps=steps, callbacks=own)
        trainer.fit(make_module(), make_data(), ckpt_path=ckpt_path)
        return trainer

    with pytest.raises(ValueError, match=rf"ckpt_path is 'last' and there is no complete checkpoint below {tmp_path}"):
        train(2, "last")
    saving = train(2)
    if callbacks:
        assert train(4, "last").ckpt_path == saving.checkpoint_callback.best_model_path
    else:
        saving.save_checkpoint(tmp_path / "checkpoints" / "own.ckpt")
        assert train(4, "last").ckpt_path == str(tmp_path / "checkpoints" / "own.ckpt")


@pytest.mark.parametrize(
    ("content", "cause"),
    [(None, "there is no such file"), (b"", "it is empty"), (b"not a checkpoint", "it cannot be read: cut short")],
    ids=["absent", "empty", "text"],
)
def test_torn_files_say_path_and_cause(make_module, make_data, make_trainer, tmp_path, content, cause):
    path = tmp_path / "torn.ckpt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises((ValueError, FileNotFoundError), match=rf"{re.escape(str(path))}.*: {cause}"):
        make_trainer(max_steps=1).fit(make_module(), make_data(), ckpt_path=path)
    with pytest.raises((ValueError, FileNotFoundError), match=rf"{re.escape(str(path))}.*: {cause}"):
        GRPO.load_from_checkpoint(path, policy="x", rewards=refuses)


def test_a_folder_is_no_checkpoint_of_one_process(make_module, make_data, make_trainer, tmp_path):
    (tmp_path / "shards.ckpt").mkdir()
    (tmp_path / "shards.ckpt" / "__0_0.distcp").write_bytes(b"shard")
    unfinished = checkpoint_files.unfinished_path(tmp_path / "shards.ckpt")
    (tmp_path / "shards.ckpt").rename(unfinished)
    checkpoint_files.commit(unfinished, tmp_path / "shards.ckpt", {})
    with pytest.raises(ValueError, match=r"is a folder, as FSDP and DeepSpeed write: SingleDeviceStrategy reads"):
        make_trainer(max_steps=1).fit(make_module(), make_data(), ckpt_path=tmp_path / "shards.ckpt")
    with pytest.raises(ValueError, match=r"is a folder, as FSDP and DeepSpeed write"):
        GRPO.load_from_checkpoint(tmp_path / "shards.ckpt")


def test_weights_alone_are_no_checkpoint(make_module, make_data, make_trainer, tmp_path):
    torch.save({"weight": torch.ones(2)}, tmp_path / "weights.ckpt")
    with pytest.raises(ValueError, match=r"weights.ckpt was not written by Lightning: it has no 'state_dict'"):
        make_trainer(max_steps=1).fit(make_module(), make_data(), ckpt_path=tmp_path / "weights.ckpt")


# Other algorithms and models.


OTHERS = [(GRPO, PPO), (GRPO, GroupPPO), (PPO, GRPO), (PPO, GroupPPO)]


@pytest.mark.parametrize(
    ("wrote", "reads", "stage", "manifest"),
    sweep_pairs(
        [(*pair, stage, manifest) for pair in OTHERS for stage in ("fit", "validate") for manifest in (True, False)],
        quick=[
            *((*pair, "fit", True) for pair in OTHERS),
            (GRPO, PPO, "fit", False),
            (PPO, GRPO, "validate", True),
            (PPO, GroupPPO, "validate", False),
        ],
    ),
)
def test_another_algorithm_is_refused_by_name(
    saved, make_module, make_data, make_trainer, wrote, reads, stage, manifest
):
    path = saved(wrote, manifest)
    what = re.escape(f"checkpoint {path}" if manifest else "the checkpoint")
    writer, reader = wrote.__name__, reads.__name__
    text = rf"^{what} was written by {writer}, and the module is {reader}; .*Load it with {writer}"
    with pytest.raises(ValueError, match=text):
        load(stage, make_module(reads), make_data(val=True), make_trainer(max_steps=2), path)


def test_a_subclass_and_its_algorithm_load_each_others_checkpoints(saved, make_module, make_data, make_trainer):
    path = saved(MyGRPO)
    trainer = make_trainer(max_steps=2)
    with pytest.warns(UserWarning, match=r"model +'MyGRPO' +'GRPO'"):
        trainer.fit(make_module(GRPO), make_data(), ckpt_path=path)
    assert trainer.global_step == 2
    with pytest.raises(ValueError, match=r"was written by MyGRPO \(GRPO\), and the module is PPO"):
        make_trainer(max_steps=2).fit(make_module(PPO), make_data(), ckpt_path=path)


@pytest.mark.parametrize("manifest", [True, False], ids=["manifest", "no manifest"])
def test_a_module_of_another_package_is_refused(saved, make_module, make_data, make_trainer, manifest):
    path = saved(Other, manifest)
    text = "was written by Other, and the module is GRPO" if manifest else "by a module that is not one of pl_grouprl's"
    with pytest.raises(ValueError, match=text):
        make_trainer(max_steps=2).fit(make_module(), make_data(), ckpt_path=path)


def test_another_model_is_named_before_torchs_list(saved, make_module, make_data, make_trainer, tiny_policy):
    class Deeper(tiny_policy):
        def load(self):
            model = super().load()
            model.model.layers.append(model.model.layers[0])
            return model

    path = saved()
    with pytest.raises(
        ValueError, match=r"^the weights of the checkpoint do not fit\. It was written by GRPO, (?s:.*)Missing key"
    ):
        make_trainer(max_steps=2).fit(make_module(policy=Deeper()), make_data(), ckpt_path=path)


# Without a Trainer.


def test_load_from_checkpoint_builds_the_module(saved, make_module, tiny_policy):
    path = saved(PPO, critic=PolicyCopyCritic(head_std=0.1))
    module = PPO.load_from_checkpoint(path, policy=tiny_policy(seed=5), rewards=refuses, critic=PolicyCopyCritic())
    expected = torch.load(path, weights_only=True)["state_dict"]
    assert module.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in module.state_dict().items())


def test_load_from_checkpoint_says_what_to_pass(saved, tiny_policy):
    path = saved()
    with pytest.raises(TypeError, match="policy"):
        GRPO.load_from_checkpoint(path)
    with pytest.raises(ValueError, match="rewards is None; pass a reward function"):
        GRPO.load_from_checkpoint(path, policy=tiny_policy())
    with pytest.raises(ValueError, match="weights_only is False, which would let the checkpoint run code"):
        GRPO.load_from_checkpoint(path, policy=tiny_policy(), rewards=refuses, weights_only=False)
    with pytest.raises(ValueError, match="the checkpoint was written by GRPO, and the module is PPO"):
        PPO.load_from_checkpoint(path, policy=tiny_policy(), rewards=refuses)
    flip(path)
    with pytest.raises(ValueError, match=r"own\.ckpt is damaged: the contents of own\.ckpt are not what was saved"):
        GRPO.load_from_checkpoint(path, policy=tiny_policy(), rewards=refuses)


# `last`, and predictions.


def test_last_finds_the_run_from_python_or_refuses(make_module, make_data, make_trainer, tmp_path):
    def fit(steps, folder=None, **options):
        callback = SafeCheckpoint(dirpath=folder, every_n_train_steps=1)
        trainer = make_trainer(max_steps=steps, callbacks=[callback])
        trainer.fit(make_module(**options), make_data(), ckpt_path="last" if steps > 1 else None)
        return trainer

    with pytest.raises(ValueError, match=r"ckpt_path is 'last' and there is no complete checkpoint below .*"):
        fit(2)
    fit(1)
    trainer = fit(2)
    assert trainer.ckpt_path.endswith("step=1.ckpt")
    assert trainer.global_step == 2
    with pytest.raises(ValueError, match=r"ckpt_path is 'last', and .* is from a run with other options: seed is 3"):
        fit(3, seed=3)
    fit(1, tmp_path / "elsewhere")
    assert fit(2, tmp_path / "elsewhere").ckpt_path.startswith(str(tmp_path / "elsewhere"))


@pytest.mark.parametrize("split", ["test", "val"])
def test_predictions_are_the_sampled_groups(make_module, make_trainer, split, saved):
    path = saved()
    task = MostFrequentDigit(prompt_length=20, val_size=4, test_size=4)
    data = PromptDataModule(val=task, test=task if split == "test" else None)
    module = make_module(evaluation={"num_generations": 3}, rewards=refuses, reward_calls={"workers": 1})
    (groups,) = make_trainer().predict(module, data, ckpt_path=path)
    assert len(groups) == 4
    assert all(isinstance(group, RolloutGroup) for group in groups)
    assert [group.prompt_ids for group in groups] == [prompt.token_ids for prompt in data.prompts[split]]
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    assert len(rollouts) == 12
    assert all(rollout.reward is None and isinstance(rollout.text, str) for rollout in rollouts)
    (again,) = make_trainer().predict(module, data, ckpt_path=path)
    assert [r.token_ids for g in again for r in g.rollouts] == [r.token_ids for r in rollouts]


def refuses(completions, **columns):
    raise AssertionError("predictions need no rewards")


def test_predictions_need_prompts(make_module, make_data, make_trainer):
    with pytest.raises(ValueError, match=r"PromptDataModule\(`val`\) is None, and this stage needs it"):
        make_trainer().predict(make_module(), make_data())
