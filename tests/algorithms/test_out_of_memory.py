"""Where memory ends, the error names the option that lowers the need: in each pass, in the step, in what samples."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch import LightningModule

from pl_grouprl.algorithms import GRPO
from pl_grouprl.types import Rollout, RolloutGroup, SamplingConfig
from pl_grouprl.utilities.modes import is_out_of_memory, naming_memory

PASS = r"max_tokens_per_micro_batch=\w+ tokens .*; lower it, .*or raise sharing.sequence_parallel_size\."


class Full(torch.autograd.Function):
    """A node of the graph that has no memory in its backward."""

    @staticmethod
    def forward(ctx, loss):
        return loss.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


class FullBackward(GRPO):
    """Every backward runs out of memory; the last pass's is Lightning's."""

    def compute_loss(self, batch):
        sums = super().compute_loss(batch)
        sums.losses["policy"] = Full.apply(sums.losses["policy"][0]), sums.losses["policy"][1]
        return sums


class FullForward(GRPO):
    def compute_loss(self, batch):
        raise torch.OutOfMemoryError("CUDA out of memory")


class FullScoring(GRPO):
    needs_old_scores = True

    def score(self, *args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")


def out_of_memory(*args, **kwargs):
    raise torch.OutOfMemoryError("CUDA out of memory")


def fit(make_module, make_data, make_trainer, cls=GRPO, trainer=None, **options):
    make_trainer(max_steps=2, **(trainer or {})).fit(make_module(cls, **options), make_data())


@pytest.mark.parametrize(
    ("cls", "options", "where"),
    [
        (FullBackward, {}, "the backward of a pass of "),
        (FullBackward, {"max_tokens_per_micro_batch": 32}, "the backward of a pass of "),
        (FullForward, {}, "a pass of "),
        (FullScoring, {}, "scoring, a pass of "),
    ],
    ids=["the last backward", "an earlier backward", "forward", "scoring"],
)
def test_a_pass_names_its_budget(make_module, make_data, make_trainer, cls, options, where):
    with pytest.raises(RuntimeError, match=f"out of memory in {where}{PASS}") as raised:
        fit(make_module, make_data, make_trainer, cls, **options)
    assert isinstance(raised.value.__cause__, torch.OutOfMemoryError)


def test_the_backward_of_a_batch_that_only_accumulates_too(make_module, make_data, make_trainer):
    with pytest.raises(RuntimeError, match=f"out of memory in the backward of a pass of {PASS}"):
        fit(make_module, make_data, make_trainer, FullBackward, {"accumulate_grad_batches": 2})


def test_a_backward_that_an_engine_runs_inside_the_step(make_module, make_data, make_trainer, monkeypatch):
    # As under DeepSpeed, whose engine differentiates without calling the module's `backward`.
    monkeypatch.setattr(GRPO, "backward", LightningModule.backward)
    with pytest.raises(RuntimeError, match=f"out of memory in a pass of {PASS}"):
        fit(make_module, make_data, make_trainer, FullBackward)


def test_the_optimizer_step_names_shards_and_adapters(make_module, make_data, make_trainer, monkeypatch):
    monkeypatch.setattr(torch.optim.AdamW, "_init_group", out_of_memory)
    with pytest.raises(RuntimeError, match=r"out of memory in the optimizer step, .*strategy.* or train an adapter"):
        fit(make_module, make_data, make_trainer)


def test_a_rollout_names_the_engines_limits(make_module, make_data, make_trainer, monkeypatch):
    from pl_grouprl.rollout.hf.engine import HFRolloutEngine

    monkeypatch.setattr("pl_grouprl.rollout.hf.engine.BatchedSampler._chunks", out_of_memory)
    message = (
        r"max_sequences=3 .* max_prefill_tokens=64 of HFRolloutEngine; lower max_sequences, which bounds the cache"
    )
    with pytest.raises(RuntimeError, match=message):
        fit(
            make_module, make_data, make_trainer,
            engine=HFRolloutEngine(max_sequences=3, max_prefill_tokens=64), sampling=SamplingConfig(max_new_tokens=5),
        )  # fmt: skip


def test_the_check_before_training_says_how_to_leave_it_out(make_module, make_data, make_trainer, monkeypatch):
    monkeypatch.setattr(GRPO, "parity_reports", out_of_memory)
    with pytest.raises(RuntimeError, match=r"before training; sharing.verify=False skips it"):
        fit(make_module, make_data, make_trainer, sharing={"verify": True})


def test_a_reward_model_names_its_budget(monkeypatch):
    from pl_grouprl.rewards import ModelReward
    from pl_grouprl.rewards import models as frozen_model

    monkeypatch.setattr(frozen_model, "hidden_states", out_of_memory)
    monkeypatch.setattr(frozen_model, "pack", lambda *args, **kwargs: Batch())
    own = ModelReward("name-on-the-hub", max_tokens_per_pass=99, sharing="repeated")
    with pytest.raises(
        RuntimeError, match="ModelReward with max_tokens_per_pass=99; lower it, or put the reward model"
    ):
        next(own._states(Model(), [RolloutGroup([1], [Rollout([2])])]))


class Batch:
    def __init__(self):
        self.model_inputs = {"input_ids": torch.zeros(1, dtype=torch.long)}


class Model:
    device = torch.device("cpu")

    def get_input_embeddings(self):
        return torch.nn.Embedding(4, 2)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 80 bytes."),
    ],
)
def test_the_cpus_errors_are_known(error):
    assert is_out_of_memory(error)
    with pytest.raises(RuntimeError, match=r"out of memory in here; do that\."), naming_memory("here", "do that"):
        raise error


def test_other_errors_pass_as_they_are():
    error = RuntimeError("the shapes differ")
    with pytest.raises(RuntimeError) as raised, naming_memory("here", "do that"):
        raise error
    assert raised.value is error
