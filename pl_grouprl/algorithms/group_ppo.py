"""GROUP PPO: PPO with responses split into token groups, each with one advantage.

Legend: B rollouts, E episodes (the rows of one counted once), T length of the longest row, N response tokens of all
rollouts, concatenated, S sketch size.
"""

from __future__ import annotations

import inspect
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from pl_grouprl.algorithms.ppo import PPO, CriticRows, Estimate
from pl_grouprl.functional.advantages import generalized_advantages, td_errors
from pl_grouprl.functional.logprobs import TokenScores
from pl_grouprl.functional.masked import from_rows, to_rows
from pl_grouprl.functional.softmax import HeadSketch
from pl_grouprl.functional.token_groups import (
    ADVANTAGE_MODES,
    AdvantageMode,
    ThresholdController,
    TokenGroups,
    find_token_groups,
    improbable_token_groups,
    log_ratio_scores,
    signal_sums,
    token_group_advantages,
    token_group_counts,
)
from pl_grouprl.models.policy import PolicySource
from pl_grouprl.rewards import RewardFunction, Weighted
from pl_grouprl.training.buffer import RolloutBuffer
from pl_grouprl.training.checkpoint import Stateful, note_options
from pl_grouprl.utilities.distributed import reduce_over_ranks, sum_over_ranks
from pl_grouprl.utilities.options import check_choices, check_options

ScoreNorm = Literal["logit", "sketch", "log_ratio"]

_ROUNDING = 1e-4
"""Difference of log-probabilities, in nats, up to which sampler and trainer agree."""


class GroupPPO(PPO):
    """PPO with one advantage per *token group*, a run of tokens inside a response.

    Responses are split by Algorithm 2 (Group), as quoted in the GROUP PPO reference implementation on verl (2025): see
    `pl_grouprl.functional.token_groups` for the rule and the advantages. Groups are found once per rollout, before the
    updates. The metrics `token_group/...` are logged by the callback `TokenGroupMonitor`.

    Args:
        policy: Path or hub name of a Hugging Face model, or another source of the initial policy.
        rewards: One reward function or several, with TRL's signature or verl's; see `pl_grouprl.rewards`.
        group_variance_threshold: tau, the ratio of variances at which a group ends; if adaptive, its initial value,
            which must be within its bounds. Defaults to 1 if fixed, and to 1 / (1 - target_compression), at most
            max_threshold, if adaptive. Values below 1 act as 1.
        group_rule: What ends a group: its `variance`, Algorithm 2, or a token that the policy found `improbable`
            (segmental advantage estimation, arXiv:2601.07320); the other options of the variance rule then raise an
            error.
        group_probability: A token is improbable if its probability is below this.
        group_max_size: Maximum tokens of a group; defaults to 16 under the variance rule, otherwise to no maximum.
        group_epsilon: The variance rule ends a group only if it has this share of the batch's mean signal.
        adaptive_threshold: Move tau after each rollout towards `target_compression`.
        threshold_lr: Step size of log tau.
        min_threshold: Lower bound of an adaptive tau.
        max_threshold: Upper bound of an adaptive tau.
        target_compression: Target share of tokens that do not end a group: 0, or from 1/2 to 1 - 1 / group_max_size.
        score_norm: Stand-in for the gradient of a token's log-probability: its squared norm with respect to the logits
            (`logit`), a random sketch of it with respect to the language model head (`sketch`), or the log-ratio of
            trainer and sampler (`log_ratio`), as in the reference code; the last is an error if the two never differ.
        sketch_dim: Size of a token's sketch; defaults to 64.
        boundary_signal: The advantage that decides boundaries. `td` uses only the past and the present. `gae`, for
            comparison, looks ahead: boundaries depend on later actions, which biases the gradient if tau > 1 (by
            18-34% in an enumerated MDP).
        advantage_mode: Which tokens get the advantage of their group: all (`broadcast`), the last one (`endpoint`:
            biased, for comparison), or each token its own (`variable_lambda`).
        critic_positions: Where the critic is trained: at the first token of each group (`starts`), or at `all`.
        boundary_at_turn_ends: End a group before each gap in the loss mask, such as a tool result; otherwise groups may
            have tokens on both sides of a gap. Defaults to True in runs with tools.
        **kwargs: Options of `PPO` and `RLModule`.

    Raises:
        ValueError: If an option is out of range, unknown, or incompatible with another.
    """

    starts_over: ClassVar[dict[str, str]] = PPO.starts_over | {"threshold_controller": "group_variance_threshold"}

    def __init__(
        self,
        policy: str | PolicySource,
        rewards: None | list[Weighted | RewardFunction] | RewardFunction = None,  # noqa: RUF036 (the callable last)
        *,
        group_variance_threshold: float | None = None,
        group_rule: Literal["variance", "improbable"] = "variance",
        group_probability: float = 0.2,
        group_max_size: int | None = None,
        group_epsilon: float = 1e-6,
        adaptive_threshold: bool = True,
        threshold_lr: float = 0.01,
        min_threshold: float = 0.1,
        max_threshold: float = 10.0,
        target_compression: float = 0.75,
        score_norm: ScoreNorm = "logit",
        sketch_dim: int | None = None,
        boundary_signal: Literal["td", "gae"] = "td",
        advantage_mode: AdvantageMode = "broadcast",
        critic_positions: Literal["starts", "all"] = "starts",
        boundary_at_turn_ends: bool | None = None,
        **kwargs: Any,
    ) -> None:
        passed = locals().copy()
        super().__init__(policy, rewards, **kwargs)
        check_choices(
            group_rule=(group_rule, ("variance", "improbable")),
            score_norm=(score_norm, ("logit", "sketch", "log_ratio")),
            boundary_signal=(boundary_signal, ("td", "gae")),
            advantage_mode=(advantage_mode, ADVANTAGE_MODES),
            critic_positions=(critic_positions, ("starts", "all")),
        )
        check_options(
            {
                "group_epsilon": (group_epsilon, group_epsilon >= 0, "a finite number, 0 or larger"),
                "group_probability": (group_probability, 0 < group_probability <= 1, "in (0, 1]"),
                "advantage_level": (self.advantage_level, self.advantage_level == "token", "token: groups have tokens"),
            }
        )
        if group_rule == "improbable":
            unused = (
                *("group_variance_threshold", "group_epsilon", "adaptive_threshold", "threshold_lr", "min_threshold"),
                *("max_threshold", "target_compression", "score_norm", "boundary_signal"),
            )
            known = inspect.signature(GroupPPO).parameters
            if given := [name for name in unused if passed[name] != known[name].default]:
                raise ValueError(f"no effect with group_rule='improbable': {', '.join(given)}; omit these options.")
            adaptive_threshold = False
        else:
            group_max_size = 16 if group_max_size is None else group_max_size
            if group_probability != 0.2:
                raise ValueError(f"group_probability is {group_probability} with group_rule='variance'; omit it.")
        if sketch_dim is not None and score_norm != "sketch":
            raise ValueError(
                f"sketch_dim is {sketch_dim} and score_norm is {score_norm!r}, which makes no sketch; set score_norm "
                "to 'sketch', or omit sketch_dim."
            )
        self.threshold_controller = ThresholdController(
            group_variance_threshold,
            adaptive_threshold=adaptive_threshold,
            threshold_lr=threshold_lr,
            min_threshold=min_threshold,
            max_threshold=max_threshold,
            target_compression=target_compression,
            max_size=16 if group_max_size is None else group_max_size,
        )
        self.group_rule = group_rule
        self.group_probability = group_probability
        self.group_max_size = group_max_size
        self.group_epsilon = group_epsilon
        self.score_norm = score_norm
        self.sketch = HeadSketch(64 if sketch_dim is None else sketch_dim) if score_norm == "sketch" else None
        self.boundary_signal = boundary_signal
        self.advantage_mode = advantage_mode
        self.critic_positions = critic_positions
        self.boundary_at_turn_ends = self.tooling.is_used if boundary_at_turn_ends is None else boundary_at_turn_ends
        resolved = {"boundary_at_turn_ends": self.boundary_at_turn_ends, "group_max_size": group_max_size}
        note_options(self, resolved)  # a checkpoint holds what they were resolved to
        self._token_groups: tuple[RolloutBuffer, TokenGroups] | None = None

    @property
    def needs_old_scores(self) -> bool:
        """True: the pass for old log-probabilities also computes what ends a group."""
        return True

    def old_score_options(self) -> dict[str, Any]:
        """Request the score norm, if the rule reads it."""
        if self.group_rule == "improbable":
            return super().old_score_options()
        own = {"score_norm": self.score_norm == "logit"} if self.sketch is None else {"sketch": self.sketch}
        return super().old_score_options() | own

    def estimate(self, rows: CriticRows, buffer: RolloutBuffer, scores: TokenScores | None) -> Estimate:
        """Split each response into token groups, and estimate one advantage for each."""
        assert scores is not None
        if self.group_rule == "variance":
            groups, threshold = self._variance_groups(rows, buffer, scores), self.threshold_controller.threshold
        else:
            threshold = self.group_probability
            groups = improbable_token_groups(
                to_rows(buffer.joined("old_logprobs"), buffer.episode_lengths),
                rows.mask,
                probability=threshold,
                max_size=self.group_max_size,
                forced_ends=self._forced_ends(rows.mask, buffer),
            )
        assert groups.causes is not None
        for name, found in (("group_starts", groups.starts), ("group_causes", groups.causes)):
            buffer.put(name, from_rows(found, buffer.episode_lengths))
        buffer.metrics["token_group/threshold"] = threshold
        advantages, returns = token_group_advantages(
            rows.rewards,
            rows.values,
            groups,
            rows.mask,
            gamma=self.gamma,
            lam=rows.lam,
            critic_lam=self.target_lam,
            bootstrap_value=rows.bootstrap_value,
            mode=self.advantage_mode,
        )
        counts = token_group_counts(groups)
        tokens, positions = sum_over_ranks([counts["tokens"], counts["positions"]], self.device)
        self.threshold_controller.update(1 - positions / tokens if tokens else float("nan"))
        value_mask = groups.starts if self.critic_positions == "starts" else rows.mask
        return Estimate(advantages, returns, value_mask, groups.ends if self.advantage_mode == "endpoint" else None)

    def _variance_groups(self, rows: CriticRows, buffer: RolloutBuffer, scores: TokenScores) -> TokenGroups:
        """Split each response by Algorithm 2."""
        options: dict[str, Any] = {"gamma": self.gamma, "bootstrap_value": rows.bootstrap_value}
        if self.boundary_signal == "td":
            signal_ET = td_errors(rows.rewards, rows.values, rows.mask, **options)
        else:
            signal_ET, _ = generalized_advantages(rows.rewards, rows.values, rows.mask, lam=rows.lam, **options)
        norms = self._score_norms(buffer, scores)
        total, count = reduce_over_ranks(signal_sums(signal_ET, norms, rows.mask), self.device).tolist()
        assert self.group_max_size is not None
        return find_token_groups(
            signal_ET,
            norms,
            rows.mask,
            threshold=self.threshold_controller.threshold,
            max_size=self.group_max_size,
            epsilon=self.group_epsilon,
            forced_ends=self._forced_ends(rows.mask, buffer),
            mean_signal=total / max(count, 1),
        )

    def _forced_ends(self, mask_ET: Tensor, buffer: RolloutBuffer) -> Tensor | None:
        """Where a group must end: at turn ends if asked for, and at the end of each row of an episode."""
        ends_ET = None
        if self.boundary_at_turn_ends:  # the last trained token before each gap of the mask
            ends_ET = mask_ET & ~torch.nn.functional.pad(mask_ET[:, 1:], (0, 1))
        lengths, of_rows = buffer.episode_lengths, buffer.rollout_lengths
        if len(lengths) == len(of_rows):
            return ends_ET
        mask_BT = to_rows(buffer.joined("loss_mask"), of_rows)
        is_last_BT = mask_BT & (mask_BT.flip(1).cumsum(1).flip(1) == 1)
        row_ends_ET = to_rows(from_rows(is_last_BT, of_rows), lengths)
        return row_ends_ET if ends_ET is None else ends_ET | row_ends_ET

    def _score_norms(self, buffer: RolloutBuffer, scores: TokenScores) -> Tensor:
        """Squared norm [E, T] or sketch [E, T, S] of each token's score, on the CPU."""
        lengths_E = buffer.episode_lengths
        if self.score_norm == "logit":
            assert scores.score_norm_N is not None
            return to_rows(scores.score_norm_N.cpu(), lengths_E)
        if self.score_norm == "sketch":
            assert scores.sketch_NS is not None
            return to_rows(scores.sketch_NS.cpu(), lengths_E)
        if "rollout_logprobs" not in buffer.values:
            raise ValueError(
                f"score_norm is 'log_ratio', but {type(self.engine).__name__} reports no log-probabilities; use "
                "'logit' or 'sketch'."
            )
        policy, sampler = (to_rows(buffer.joined(name), lengths_E) for name in ("old_logprobs", "rollout_logprobs"))
        mask = to_rows(buffer.joined("loss_mask"), lengths_E)
        # A rounding difference is no change of the policy.
        policy = torch.where((policy - sampler).abs() < _ROUNDING, sampler, policy)
        differs = (policy != sampler) & mask
        (anywhere,) = sum_over_ranks([differs.sum()], self.device)
        # If only this rank sees no difference, raising here would leave the others waiting.
        if anywhere and not differs.any():
            return torch.zeros_like(policy)[:, :, None]
        return log_ratio_scores(policy, sampler, mask)

    # What is logged.

    @property
    def token_groups(self) -> TokenGroups | None:
        """The token groups of this rank's latest rollouts, the same object for all their updates.

        `TokenGroupMonitor` reads them.
        """
        buffer = self.last_rollouts
        if buffer is None or "group_starts" not in buffer.values:
            return None
        if self._token_groups is None or self._token_groups[0] is not buffer:
            names = ("group_starts", "group_causes", "loss_mask")
            starts, causes, mask = (to_rows(buffer.joined(name), buffer.episode_lengths) for name in names)
            index = (starts.cumsum(dim=1) - 1).masked_fill(~mask, -1)
            self._token_groups = (buffer, TokenGroups(starts, causes > 0, index, causes))
        return self._token_groups[1]

    @property
    def token_group_threshold(self) -> float:
        """The threshold with which these groups were found."""
        buffer = self.last_rollouts
        return self.threshold_controller.threshold if buffer is None else buffer.metrics["token_group/threshold"]

    # Checkpoints.

    def saved_state(self) -> dict[str, Stateful]:
        """Add the threshold."""
        return super().saved_state() | {"threshold_controller": self.threshold_controller}
