"""Times the parts of PPO and GROUP PPO on given rollouts, without a Trainer.

The modules are the package's own; `Measured` times them, and replaces the random models' values and score norms by
simulated ones. All modules train the same models with a learning rate of 0: each step does all its work but leaves the
weights unchanged, so every round and every method starts from the same ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from benchmarks.cases import Case
from benchmarks.measure import now
from benchmarks.rollout_data import RolloutData, compression_of
from pl_grouprl.algorithms import PPO, GroupPPO, OptimizerConfig
from pl_grouprl.attention import shared_prefix
from pl_grouprl.functional.logprobs import TokenScores
from pl_grouprl.models import Critic, PolicyCopyCritic
from pl_grouprl.training.buffer import RolloutBuffer
from pl_grouprl.training.metrics import StepTimer
from pl_grouprl.training.micro_batches import MicroBatch
from pl_grouprl.training.optimizer import build_optimizer


class Measured(PPO):
    """A mixin for PPO modules; comes first among the bases.

    Attributes:
        data: Simulated values and score norms, which replace the random models'.
        watch: Takes the times; None prepares the rollouts without running the models.
    """

    data: RolloutData
    watch: StepTimer | None = None

    def score_rollouts(self, model: Any, buffer: RolloutBuffer, **kwargs: Any) -> TokenScores:
        """Score, then insert the simulated norms."""
        norms_N = self.data.flat(self.data.score_norms)
        if self.watch is None:
            return TokenScores(torch.zeros_like(norms_N), score_norm_N=norms_N)
        with self.watch.part("old scores" if model is self.policy else "reference scores"):
            scores = super().score_rollouts(model, buffer, **kwargs)
        return scores if scores.score_norm_N is None else scores._replace(score_norm_N=norms_N)

    def value_rollouts(self, buffer: RolloutBuffer) -> tuple[Tensor, Tensor]:
        """Run the critic, then return the simulated values."""
        if self.watch is not None:
            with self.watch.part("values"):
                super().value_rollouts(buffer)
        return self.data.flat(self.data.values), torch.zeros(len(self.data.mask))

    def compute_targets(self, buffer: RolloutBuffer, scores: TokenScores | None) -> None:
        """Time the rest: token groups, advantages, whitening."""
        with contextlib.nullcontext() if self.watch is None else self.watch.part("groups, advantages"):
            super().compute_targets(buffer, scores)


class MeasuredPPO(Measured):
    """PPO, measured."""


class MeasuredGroupPPO(Measured, GroupPPO):
    """GROUP PPO, measured."""


@dataclass(frozen=True)
class Models:
    """The models that all modules train.

    Attributes:
        policy: The policy, with random weights.
        critic: A copy of the policy's decoder with a head.
        optimizers: AdamW for each, with a learning rate of 0.
        trainer: Provides precision and ranks; nothing is fitted.
        data: The rollouts.
        clock: One of `measure.CLOCKS`.
    """

    policy: Any
    critic: Critic
    optimizers: dict[str, torch.optim.Optimizer]
    trainer: Trainer
    data: RolloutData
    clock: str

    @classmethod
    def of(cls, case: Case, data: RolloutData, clock: str) -> Models:
        """Build them on the case's device."""
        policy = case.make_model()
        critic = PolicyCopyCritic().load(policy).to(case.device)
        still = OptimizerConfig(learning_rate=0.0)
        optimizers = {
            name: build_optimizer({name: (model, still)}, lambda: 1)["optimizer"]
            for name, model in (("policy", policy), ("critic", critic))
        }
        trainer = Trainer(
            accelerator=case.device, devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False,
        )  # fmt: skip
        return cls(policy, critic, optimizers, trainer, data, clock)

    def module(self, cls: type[Measured], **options: Any) -> Measured:
        """Create a module that trains these models on these rollouts."""
        module = cls(_Source(self.policy), _no_reward, critic=_Source(self.critic), **options)
        module.data = self.data
        module.trainer = self.trainer
        module.configure_model()
        return module.to(self.policy.device)

    def descend(self, name: str, loss: tuple[Tensor, Tensor]) -> float:
        """Take an optimizer step of policy or critic, and return its loss."""
        mean = loss[0] / loss[1]
        mean.backward()
        self.optimizers[name].step()
        self.optimizers[name].zero_grad(set_to_none=True)
        return float(mean.detach())


@dataclass(frozen=True)
class _Source:
    """A source that returns a given model, as policy or as critic."""

    model: Any

    def load(self, policy: Any = None) -> Any:
        return self.model

    def load_tokenizer(self) -> Any:
        return None


def _no_reward(completions: Sequence[str], **columns: Any) -> list[float]:
    raise AssertionError("the rollouts already have their rewards")


class CriticUpdate:
    """The critic's update on the first mini-batch: packing, forward, value head, loss, backward, AdamW.

    Args:
        models: The models.
        module: PPO or GROUP PPO.

    Attributes:
        positions: Tokens that the critic is trained at.
        compression: 1 - positions / tokens of the mini-batch.
        loss: Loss of the last run.
    """

    def __init__(self, models: Models, module: Measured) -> None:
        self.models, self.module = models, module
        module.watch = None
        buffer = prepared(module)
        self.batch = mini_batch(module, buffer, 0)
        chosen_N = self.batch.tokens["value_mask"]
        self.positions = int(chosen_N.sum())
        self.compression = compression_of(chosen_N, self.batch.mask_N)
        self.loss = float("nan")

    def run(self) -> None:
        """Update once. The policy's batch already exists, as in a training step."""
        with sharing(self.module):
            loss, _ = self.module._value_loss(self.batch, None)
            self.loss = self.models.descend("critic", loss)

    def count_tokens(self) -> int:
        """Run again, and return the number of tokens that went through the critic's backbone, padding included."""
        self.run()  # the first run includes a few extra tokens that inspect the model
        counts: list[int] = []

        def count(trunk: Any, args: Any, kwargs: dict[str, Any]) -> None:
            counts.append(kwargs["input_ids"].numel())

        handle = self.models.critic.trunk.register_forward_pre_hook(count, with_kwargs=True)
        self.run()
        handle.remove()
        return sum(counts)


class WholeStep:
    """Everything between sampling and the next sampling, without rewards.

    Policy and critic have separate backward passes and AdamW steps, one after the other; a Trainer does both at once,
    with the same operations. Gradient norms and logging are left out.

    Args:
        models: The models.
        module: PPO or GROUP PPO.

    Attributes:
        parts: For each run, the seconds of each part.
        compression: 1 - advantage positions / tokens, in the last run.
    """

    def __init__(self, models: Models, module: Measured) -> None:
        self.models, self.module = models, module
        self.parts: list[dict[str, float]] = []
        self.compression = 0.0

    def run(self) -> None:
        """Prepare the rollouts and do all updates."""
        module = self.module
        module.micro_batcher.cache.clear()  # the rollouts are the same in each round
        watch = module.watch = StepTimer(partial(now, self.models.clock))
        with sharing(module):
            buffer = prepared(module)
            for index in range(module.updates_per_rollout):
                with watch.part("policy update"):
                    batch = mini_batch(module, buffer, index)
                    scores = module.score(module.policy, batch.scoring, entropy=True)
                    self.models.descend("policy", module.objective.loss(batch, scores).losses["policy"])
                del scores
                with watch.part("critic update"):
                    self.models.descend("critic", module._value_loss(batch, None)[0])
        watch.mark()
        self.parts.append(watch.seconds)
        starts_N = buffer.joined("group_starts" if "group_starts" in buffer.values else "loss_mask")
        self.compression = compression_of(starts_N, buffer.joined("loss_mask"))


@contextlib.contextmanager
def sharing(module: Measured) -> Iterator[None]:
    """Share prefixes in all models of a module, if it does so."""
    with contextlib.ExitStack() as stack:
        for model in module.scored_models().values() if module.sharing.mode == "shared" else ():
            stack.enter_context(shared_prefix(model, module.sharing.backend))
        yield


def prepared(module: Measured) -> RolloutBuffer:
    """The module's rollouts with everything that its updates need."""
    buffer = RolloutBuffer(module.data.groups, 0, module.num_mini_batches, module.seed)
    scores = module.score_rollouts_before_update(buffer)
    module.prepare_updates(buffer, scores)
    return buffer


def mini_batch(module: Measured, buffer: RolloutBuffer, index: int) -> MicroBatch:
    """A training step's batch: without a token budget, a single micro-batch."""
    (batch,) = module.micro_batcher.for_update(buffer, buffer.members(index))
    return batch
