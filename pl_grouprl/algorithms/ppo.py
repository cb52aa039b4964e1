"""PPO with a critic that reads the same packed shared-prefix rows as the policy.

Legend: B rollouts, E episodes (the rows of one counted once), T length of the longest row, N response tokens of all
rollouts, concatenated, K those of them where the critic is trained.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from pl_grouprl.algorithms.module import RLModule
from pl_grouprl.checks import ParityReport
from pl_grouprl.functional.advantages import generalized_advantages, length_adaptive_lam, turn_advantages
from pl_grouprl.functional.logprobs import TokenScores
from pl_grouprl.functional.losses import clipped_value_loss, explained_variance
from pl_grouprl.functional.masked import from_rows, masked_whiten, to_rows
from pl_grouprl.models import Critic, CriticSource, PolicyCopyCritic, PretrainedCritic, check_critic_parity
from pl_grouprl.models.adapters import check_adapters
from pl_grouprl.models.critic import TiedCritic
from pl_grouprl.models.policy import PolicySource
from pl_grouprl.models.score import hidden_states
from pl_grouprl.packing import ScoringBatch, truncate_rollouts
from pl_grouprl.rewards import RewardFunction, Weighted
from pl_grouprl.training.buffer import RolloutBuffer
from pl_grouprl.training.checkpoint import note_options
from pl_grouprl.training.checks import accumulation_schedule, checked_tensor
from pl_grouprl.training.micro_batches import MicroBatch
from pl_grouprl.training.objective import LossSums
from pl_grouprl.training.optimizer import OptimizerConfig
from pl_grouprl.training.rewarder import episode_leaf_weights, turn_rows
from pl_grouprl.utilities.distributed import reduce_over_ranks
from pl_grouprl.utilities.options import check_options


class CriticRows(NamedTuple):
    """Inputs of advantage estimation, one row per rollout. The rows of an episode are joined into one.

    Attributes:
        rewards: Reward of each token, with the KL penalty if it is part of the reward, shape [E, T].
        values: V_t, the critic's value before token t is sampled, shape [E, T].
        mask: Trained tokens, bool, shape [E, T].
        bootstrap_value: Value after the last token, shape [E]; 0 if the response ended by itself.
        lam: lambda of the advantages, one number, or one per episode, shape [E].
    """

    rewards: Tensor
    values: Tensor
    mask: Tensor
    bootstrap_value: Tensor
    lam: float | Tensor


class Estimate(NamedTuple):
    """Advantages and what the critic learns, each of shape [E, T] or [N].

    Attributes:
        advantages: Not yet whitened.
        returns: The critic's target.
        value_mask: Tokens at which the critic is trained, bool.
        advantage_mask: Tokens that have an advantage, bool; the others stay at 0 when advantages are whitened. None for
            all trained tokens.
    """

    advantages: Tensor
    returns: Tensor
    value_mask: Tensor
    advantage_mask: Tensor | None = None


class PPO(RLModule):
    """Proximal policy optimization (arXiv:1707.06347) with generalized advantage estimation (arXiv:1506.02438).

    To change advantages or targets, override `estimate`. Groups may have any size, even one rollout.

    Args:
        policy: Path or hub name of a Hugging Face model, or another source of the initial policy.
        rewards: One reward function or several, with TRL's signature or verl's; see `pl_grouprl.rewards`.
        critic: Path or hub name of a Hugging Face model (a reward model's head becomes the value head), or another
            source: `PolicyCopyCritic`, `SharedTrunkCritic`, `LoRACritic`. Defaults to a copy of the policy.
        critic_optimizer: Options of the critic; defaults to the policy's. With `SharedTrunkCritic` it trains the head.
        advantage_level: What a step is: a `token`, or a `turn` (Turn-PPO, arXiv:2512.17008), whose tokens all get one
            advantage; the critic is then trained where turns begin.
        gamma: Discount per step.
        lam: lambda of the advantages, per step.
        critic_lam: lambda of the critic's targets; defaults to `lam`.
        lam_alpha: Makes the advantages' lambda depend on the length l of the rollout, 1 - 1 / (lam_alpha l) (VAPO,
            arXiv:2504.05118); None keeps `lam`.
        whiten_advantages: Give the advantages of all trained tokens, over all ranks, mean 0 and variance 1.
        cliprange_value: How far a value may move from its old value; not clipped if None.
        vf_coef: Weight of the value loss. With AdamW it matters only if policy and critic share weights, or if
            gradients are clipped.
        critic_warmup_steps: Initial optimizer steps that train only the critic. The policy's learning rate schedule
            continues during them.
        bootstrap_truncated: Bootstrap rollouts that were truncated at `max_new_tokens` with the critic's value after
            the last token, instead of 0.
        **kwargs: Options of `RLModule`.

    Attributes:
        critic: The critic, once `configure_model` has run.

    Raises:
        ValueError: If an option is out of range, unknown, or incompatible with another.
    """

    def __init__(
        self,
        policy: str | PolicySource,
        rewards: None | list[Weighted | RewardFunction] | RewardFunction = None,  # noqa: RUF036 (the callable last)
        *,
        critic: str | CriticSource | None = None,
        critic_optimizer: OptimizerConfig | None = None,
        advantage_level: Literal["token", "turn"] = "token",
        gamma: float = 1.0,
        lam: float = 0.95,
        critic_lam: float | None = None,
        lam_alpha: float | None = None,
        whiten_advantages: bool = True,
        cliprange_value: float | None = 0.2,
        vf_coef: float = 1.0,
        critic_warmup_steps: int = 0,
        bootstrap_truncated: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(policy, rewards, **kwargs)
        check_options(
            {
                "advantage_level": (advantage_level, advantage_level in ("token", "turn"), "token or turn"),
                "gamma": (gamma, 0 <= gamma <= 1, "in [0, 1]"),
                "lam": (lam, 0 <= lam <= 1, "in [0, 1]"),
                "critic_lam": (critic_lam, critic_lam is None or 0 <= critic_lam <= 1, "in [0, 1], or None"),
                "lam_alpha": (lam_alpha, lam_alpha is None or lam_alpha > 0, "larger than 0, or None"),
                "cliprange_value": (
                    cliprange_value,
                    cliprange_value is None or cliprange_value > 0,
                    "larger than 0, or None for no clipping",
                ),
                "vf_coef": (vf_coef, 0 < vf_coef < math.inf, "a finite number larger than 0"),
                "critic_warmup_steps": (critic_warmup_steps, critic_warmup_steps >= 0, "0 or larger"),
            }
        )
        if bootstrap_truncated and self.mask_truncated_completions:
            raise ValueError(
                "bootstrap_truncated=True applies to rollouts that mask_truncated_completions=True does not train; set "
                "only one."
            )
        if advantage_level == "turn" and lam_alpha is not None:
            raise ValueError(f"lam_alpha is {lam_alpha}, for lengths in tokens, with advantage_level='turn'; set lam.")
        if isinstance(critic, str):
            critic = PretrainedCritic(critic)
        self.critic_source: CriticSource = PolicyCopyCritic() if critic is None else critic
        self.critic_optimizer = critic_optimizer or self.optimizer_config
        note_options(self, {"critic_optimizer": self.critic_optimizer})  # a checkpoint holds its options, not None
        self.advantage_level = advantage_level
        self.gamma = gamma
        self.lam = lam
        self.critic_lam = critic_lam
        self.lam_alpha = lam_alpha
        self.whiten_advantages = whiten_advantages
        self.cliprange_value = cliprange_value
        self.vf_coef = vf_coef
        self.critic_warmup_steps = critic_warmup_steps
        self.bootstrap_truncated = bootstrap_truncated
        self.critic: Critic | None = None
        self._bootstrap_E: Tensor | None = None  # between scoring and targets

    # Models and optimizer.

    def load_models(self) -> None:
        """Load policy and critic."""
        super().load_models()
        self.critic = self.critic_source.load(self.policy)
        check_adapters(self.critic, "critic")

    def __deepcopy__(self, memo: dict[int, Any]) -> PPO:
        """As in `RLModule`; a critic with the policy's weights has those of the copied policy."""
        copied = super().__deepcopy__(memo)
        if isinstance(copied.critic, TiedCritic):
            copied.critic.retie(copied.policy)
        return copied

    def scored_models(self) -> dict[str, Any]:
        """Add the critic's trunk, where it is not the policy's."""
        critic = self._critic
        return super().scored_models() | ({} if critic.shares_trunk else {"critic": critic.trunk})

    def parity_reports(self) -> list[ParityReport]:
        """Add the critic, where its trunk is not the policy's."""
        reports, critic, backend = super().parity_reports(), self._critic, self.sharing.backend
        if critic.shares_trunk:
            return reports
        with self.support.whole_weights(critic):
            return [*reports, check_critic_parity(critic, backend=backend)]

    def on_fit_start(self) -> None:
        """Tie a critic that shares the policy's weights to their current storage.

        Raises:
            ValueError: If gradient accumulation cannot be exact with this critic.
        """
        critic = self._critic
        if isinstance(critic, TiedCritic):
            critic.retie(self.policy)
        accumulated = max(accumulation_schedule(self.trainer).values())
        if critic.shares_trunk and not critic.detach_trunk and accumulated > 1:
            raise ValueError(
                f"accumulate_grad_batches is {accumulated} with a critic that sends gradients "
                "into the policy's trunk: the two losses have separate denominators, known only after the last "
                "micro-batch. Use SharedTrunkCritic(detach=True), a critic with separate weights, or "
                "accumulate_grad_batches=1."
            )
        if 0 <= self.trainer.max_steps <= self.critic_warmup_steps:
            rank_zero_warn(
                f"critic_warmup_steps is {self.critic_warmup_steps} and the run has {self.trainer.max_steps} steps: "
                "the policy will not be trained."
            )
        super().on_fit_start()

    def optimized_parts(self) -> dict[str, tuple[nn.Module, OptimizerConfig]]:
        """Policy and critic, each with its own options."""
        return super().optimized_parts() | {"critic": (self._critic, self.critic_optimizer)}

    # After a rollout.

    def estimate(self, rows: CriticRows, buffer: RolloutBuffer, scores: TokenScores | None) -> Estimate:
        """Estimate advantages and the critic's targets.

        Args:
            rows: Rewards and values.
            buffer: The rollouts that they belong to.
            scores: The policy's scores, shape [N], if `needs_old_scores`.
        """
        options: dict[str, Any] = {"gamma": self.gamma, "lam": rows.lam, "critic_lam": self.target_lam}
        options["bootstrap_value"] = rows.bootstrap_value
        if self.advantage_level == "turn":
            turns, _ = turn_rows(buffer)
            return Estimate(*turn_advantages(rows.rewards, rows.values, rows.mask, turns, **options))
        return Estimate(*generalized_advantages(rows.rewards, rows.values, rows.mask, **options), rows.mask)

    @property
    def target_lam(self) -> float:
        """Lambda of the critic's targets."""
        return self.lam if self.critic_lam is None else self.critic_lam

    def score_rollouts_before_update(self, buffer: RolloutBuffer) -> TokenScores | None:
        """Add the critic's values."""
        scores = super().score_rollouts_before_update(buffer)
        self.throughput.count("scoring", buffer.groups, "critic")  # the policy's trunk if the critic has none
        with self.timer.part("values"):
            values_N, self._bootstrap_E = self.value_rollouts(buffer)
        buffer.put("values", values_N)
        return scores

    def compute_targets(self, buffer: RolloutBuffer, scores: TokenScores | None) -> None:
        """Put advantages, returns, and where the critic is trained into the buffer."""
        lengths_E = buffer.episode_lengths
        values_N, bootstrap_E = buffer.joined("values"), self._bootstrap_E
        assert bootstrap_E is not None
        self._bootstrap_E = None
        mask_ET = to_rows(buffer.joined("loss_mask"), lengths_E)
        lam = self.lam if self.lam_alpha is None else length_adaptive_lam(mask_ET.sum(1), self.lam_alpha)
        rewards_ET = to_rows(buffer.joined("token_rewards"), lengths_E)
        rows = CriticRows(rewards_ET, to_rows(values_N, lengths_E), mask_ET, bootstrap_E, lam)
        estimate = self.estimate(rows, buffer, scores)

        def checked(name: str, *, boolean: bool = False) -> Tensor:  # of a subclass's `estimate`; in rows [E, T]
            where = f"{type(self).__name__}.estimate: {name}"
            shapes = mask_ET.shape, (int(lengths_E.sum()),)
            value = checked_tensor(getattr(estimate, name), where, *shapes, boolean=boolean)
            return value if value.dim() == 2 else to_rows(value, lengths_E)

        reduce = partial(reduce_over_ranks, device=self.device)
        buffer.put("returns", from_rows(checked("returns"), lengths_E))
        buffer.put("value_mask", from_rows(checked("value_mask", boolean=True), lengths_E))
        advantages_ET = checked("advantages")
        if self.whiten_advantages:
            has_mask = estimate.advantage_mask is not None
            whitened_ET = checked("advantage_mask", boolean=True) if has_mask else mask_ET
            advantages_ET = masked_whiten(advantages_ET, whitened_ET, reduce=reduce)
        weights_E = episode_leaf_weights(buffer.groups, mask_ET, self.device)
        buffer.put("advantages", from_rows(advantages_ET * weights_E[:, None], lengths_E))
        explained = explained_variance(
            values_N, buffer.joined("returns"), mask_N=buffer.joined("value_mask"), reduce=reduce
        )
        buffer.metrics["value/explained_variance"] = float(explained)

    def value_rollouts(self, buffer: RolloutBuffer) -> tuple[Tensor, Tensor]:
        """Value of each state of the rollouts, without gradient, on the CPU.

        Returns:
            V before each token, shape [N], and V after the last token of truncated episodes, shape [E]; 0 for the
            others, and without `bootstrap_truncated`.
        """
        critic = self._critic

        def values(batch: ScoringBatch) -> tuple[Tensor, Tensor]:
            states = hidden_states(critic.trunk if not critic.shares_trunk else self.policy, batch)
            return critic.values(batch, states=states), critic.values(batch, batch.final_index_B, states=states)

        model = self.policy if critic.shares_trunk else critic
        values_N, last_B = self.scorer.map(model, buffer, values, per_rollout=(1,))
        last_rows = buffer.rows_per_episode.cumsum(0) - 1
        truncated = [episode.last.finish_reason == "length" for episode in buffer.episodes]
        bootstrapped_E = torch.tensor(truncated) & self.bootstrap_truncated
        return values_N, last_B[last_rows].masked_fill(~bootstrapped_E, 0)

    # Updates.

    @property
    def warming_up(self) -> bool:
        """Whether only the critic is trained at this step."""
        return self.global_step < self.critic_warmup_steps

    def compute_loss(self, batch: MicroBatch) -> LossSums:
        """Compute the policy loss and the value loss, one for each part of the optimizer."""
        critic = self._critic
        with self.objective.recorded_routers(self.policy) as routers:
            states = hidden_states(self.policy, batch.scoring) if critic.shares_trunk else None
            if not self.warming_up:
                scores = self.score(self.policy, batch.scoring, states=states, **self.objective.score_options)
        if self.warming_up:
            # Each rank's reducer expects a gradient of every parameter; a denominator of 0 keeps the policy in place.
            untouched = self.support.zero_loss_over(self.policy.parameters())
            sums = LossSums({"policy": (untouched, batch.mask_N.new_zeros((), dtype=torch.float32))}, {})
        else:
            sums = self.objective.loss(batch, scores, self.policy, routers)
        sums.losses["critic"], metrics = self._value_loss(batch, states)
        sums.metrics.update(metrics)
        return sums

    def loss_denominators(self, tokens: dict[str, Tensor], rollouts: dict[str, Any]) -> dict[str, Tensor]:
        """Those of the policy (0 while the critic warms up), and the number of tokens that train the critic."""
        policy = super().loss_denominators(tokens, rollouts)
        if self.warming_up:
            policy = {name: torch.zeros_like(count) for name, count in policy.items()}
        return policy | {"critic": (tokens["value_mask"] & tokens["loss_mask"]).sum()}

    def _value_loss(
        self, batch: MicroBatch, states: Tensor | None
    ) -> tuple[tuple[Tensor, Tensor], dict[str, tuple[Tensor, Tensor]]]:
        """Clipped value loss at the K tokens of `value_mask`; the head runs only on those."""
        # A rank without groups in this update runs a dummy, whose loss mask is empty.
        critic, scoring, chosen_N = self._critic, batch.scoring, batch.tokens["value_mask"] & batch.mask_N
        if states is not None:
            values_K = critic.values(scoring, scoring.predict_index_N[chosen_N], states=states)
        else:  # its own trunk ends at the last of these tokens
            rows_BT = to_rows(chosen_N.cpu(), torch.tensor(scoring.rollout_lengths))
            places_T = torch.arange(1, rows_BT.shape[1] + 1)
            ends_B = (rows_BT * places_T).amax(dim=1) if len(places_T) else rows_BT.sum(1)
            short = truncate_rollouts(batch.groups, ends_B)
            scoring = batch.repack(short.groups)
            kept_M = chosen_N[short.kept_index_M.to(chosen_N.device)]
            values_K = critic.values(scoring, scoring.predict_index_N[kept_M])
        loss = clipped_value_loss(
            values_K,
            batch.tokens["values"][chosen_N],
            batch.tokens["returns"][chosen_N],
            mask_N=torch.ones_like(values_K, dtype=torch.bool),
            cliprange=self.cliprange_value,
        )
        numerator, count = loss.per_token_N.sum(), chosen_N.sum()
        metrics = {name: (total, loss.metric_count) for name, total in loss.metrics.items()}
        metrics["value/loss"] = (numerator.detach(), count)
        return (self.vf_coef * numerator, count), metrics

    @property
    def _critic(self) -> Critic:
        assert self.critic is not None
        return self.critic
