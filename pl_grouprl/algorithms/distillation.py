"""On-policy distillation: a student samples, a teacher scores every token.

Legend: E episodes, N response tokens of all rollouts, concatenated.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from pl_grouprl.algorithms.grpo import GRPO
from pl_grouprl.checks import ParityReport, check_parity
from pl_grouprl.functional.advantages import distillation_advantages
from pl_grouprl.functional.logprobs import TokenScores
from pl_grouprl.functional.masked import from_rows, to_rows
from pl_grouprl.models.adapters import check_adapters
from pl_grouprl.models.policy import (
    PolicySource,
    as_policy_source,
    check_pair,
    check_tokenizers,
    leave_out_of_checkpoints,
    unfrozen,
)
from pl_grouprl.rewards import RewardFunction, Weighted
from pl_grouprl.rewards.base import as_weighted
from pl_grouprl.training.buffer import RolloutBuffer
from pl_grouprl.training.checkpoint import FREE_OPTIONS, ConsistencyCheck, Stateful, compare_reference
from pl_grouprl.training.checks import check_lengths_of_teacher
from pl_grouprl.utilities.distributed import sum_over_ranks
from pl_grouprl.utilities.options import check_options


class Distillation(GRPO):
    """On-policy distillation: a student learns from a teacher's log-probabilities of the tokens it sampled.

    The advantage of token t of a rollout is

        A_t = A_task + distillation_coef * sum over s >= t of gamma^(s-t) (log pi_teacher(y_s) - log pi_old(y_s))

    over the trained tokens, where A_task is GRPO's advantage, or 0 without a task reward. The sum yields a policy
    gradient of the reverse KL from student to teacher; `distillation_advantages` has details and sources. The loss is
    GRPO's, whose ratios correct for updates since the rollout. All log-probabilities are at `sampling.temperature`. The
    teacher scores without gradient, on shared prefixes, in micro-batches.

    Args:
        policy: The student: path or hub name of a Hugging Face model, or another source of the initial policy.
        rewards: Task rewards, as in `GRPO`. Without any, or if all weights are 0 (logged, not trained on),
            the student learns from the teacher alone. Rollouts without a task reward (None) are not trained on.
        teacher: Path or hub name of the teacher, or another source. It may have any size, but must have the student's
            tokens. It is frozen, loaded at every start, and never saved in a checkpoint.
        distillation_coef: Weight of the teacher's advantages, which are in nats and, unlike GRPO's, never normalized.
        gamma: Discount per token. With 0, a token gets only its own difference; with 1, all later ones too.
        **kwargs: Options of `GRPO` and `RLModule`. `beta` is a penalty against the initial student, not the teacher.

    Attributes:
        teacher: The teacher, once `configure_model` has run.

    Raises:
        ValueError: If an option is out of range, unknown, or incompatible with another.
    """

    free_options = FREE_OPTIONS | {"teacher"}  # another path is allowed: weights are compared instead

    def __init__(
        self,
        policy: str | PolicySource,
        rewards: None | list[Weighted | RewardFunction] | RewardFunction = None,  # noqa: RUF036 (the callable last)
        *,
        teacher: str | PolicySource,
        distillation_coef: float = 1.0,
        gamma: float = 0.0,
        **kwargs: Any,
    ) -> None:
        check_options(
            {
                "distillation_coef": (distillation_coef, 0 < distillation_coef < math.inf, "finite and larger than 0"),
                "gamma": (gamma, 0 <= gamma <= 1, "in [0, 1]"),
            }
        )
        super().__init__(policy, _ensure_weighted(rewards), **kwargs)
        if self.dynamic_sampling:
            raise ValueError(
                "dynamic_sampling=True drops groups whose rewards are all equal, but the student can learn from the "
                "teacher on them too; omit it."
            )
        self.teacher_source: PolicySource = as_policy_source(teacher, "teacher")
        self.distillation_coef = distillation_coef
        self.gamma = gamma
        self.teacher: Any = None
        self._teacher_fingerprint: float | None = None
        leave_out_of_checkpoints(self, "teacher")

    # Models.

    def setup(self, stage: str) -> None:
        """Verify that the teacher has the student's tokens."""
        check_tokenizers(self.tokenizer, self.teacher_source.load_tokenizer())
        super().setup(stage)

    def load_models(self) -> None:
        """Load student and teacher."""
        super().load_models()
        # In training mode like the policy: scoring switches to evaluation mode when it has to.
        self.teacher = self.teacher_source.load().requires_grad_(False).train()
        check_adapters(self.teacher, "teacher")
        self._teacher_fingerprint = check_pair(self.policy, self.teacher)

    def configure_model(self) -> None:
        """Load student and teacher, and check that the teacher can read the longest rollouts."""
        super().configure_model()
        if self._trainer is not None and self._trainer.state.fn is not None:
            check_lengths_of_teacher(self)

    def scored_models(self) -> dict[str, Any]:
        """Add the teacher."""
        return super().scored_models() | {"teacher": self.teacher}

    def parity_reports(self) -> list[ParityReport]:
        """Add the teacher."""
        reports = super().parity_reports()
        with self.support.whole_weights(self.teacher), unfrozen(self.teacher):
            return [*reports, check_parity(self.teacher, backend=self.sharing.backend, padded_rows=False)]

    # After a rollout.

    @property
    def needs_old_scores(self) -> bool:
        """True: the advantages need them."""
        return True

    def score_rollouts_before_update(self, buffer: RolloutBuffer) -> TokenScores | None:
        """Add the teacher's log-probabilities."""
        scores = super().score_rollouts_before_update(buffer)
        self.throughput.count("scoring", buffer.groups, "teacher")
        with self.timer.part("teacher_logprobs"):
            buffer.put("teacher_logprobs", self.score_rollouts(self.teacher, buffer).logprobs_N)
        return scores

    def compute_targets(self, buffer: RolloutBuffer, scores: TokenScores | None) -> None:
        """Add the teacher's advantages to the task's."""
        super().compute_targets(buffer, scores)
        old_N, teacher_N, mask_N = (buffer.joined(name) for name in ("old_logprobs", "teacher_logprobs", "loss_mask"))
        lengths_E = buffer.episode_lengths
        rows = (to_rows(values_N, lengths_E) for values_N in (old_N, teacher_N, mask_N))
        teacher_advantages_N = from_rows(distillation_advantages(*rows, gamma=self.gamma), lengths_E)
        buffer.put("advantages", buffer.joined("advantages") + self.distillation_coef * teacher_advantages_N)
        sums = [(old_N - teacher_N)[mask_N].sum(), teacher_N[mask_N].sum(), mask_N.sum()]
        reverse_kl, teacher_logprob, tokens = sum_over_ranks(sums, self.device)
        buffer.metrics["distillation/reverse_kl"] = reverse_kl / max(tokens, 1.0)
        buffer.metrics["distillation/teacher_logprob"] = teacher_logprob / max(tokens, 1.0)

    # Checkpoints.

    def saved_state(self) -> dict[str, Stateful]:
        """Add a fingerprint of the teacher, which must stay the same."""
        compare = partial(compare_reference, source=self.teacher_source, option="teacher", role="teacher")
        check = ConsistencyCheck(lambda: self._teacher_fingerprint, compare)
        return super().saved_state() | {"teacher_fingerprint": check}


def no_task_reward(completions: list[Any], **columns: Any) -> list[float]:
    """0 for every rollout: all are trained on, and none is preferred."""
    return [0.0] * len(completions)


def _ensure_weighted(rewards: Any) -> list[Weighted | RewardFunction]:
    """Add `no_task_reward` if no function has a weight: rollouts without a reward are not trained on."""
    functions = [] if rewards is None else as_weighted(rewards)
    constant = [] if any(function.weight for function in functions) else [Weighted(no_task_reward)]
    return [*functions, *constant]
