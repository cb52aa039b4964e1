"""A process reward model: a token classifier that scores each step of a completion, encoding shared prefixes once.

Legend: S steps of a pass, D hidden size, C labels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pl_grouprl.models.policy import Dtype
from pl_grouprl.models.sequence_classifier import score_head
from pl_grouprl.packing import ScoringBatch, Sharing
from pl_grouprl.rewards.base import RewardConfigurationError
from pl_grouprl.rewards.frozen_model import FrozenModel, check_label, check_tokenizer, load_tokenizer
from pl_grouprl.rewards.steps import step_ends
from pl_grouprl.types import Rollout, RolloutGroup
from pl_grouprl.utilities.arguments import checked_arguments
from pl_grouprl.utilities.describe import identity, is_plain


@checked_arguments
class ProcessRewardModel:
    """The probability that each step of a completion is right, by a `...ForTokenClassification` model.

    Returns a reward per token: the probability of `label` (softmax over labels) at the last token of each step, None at
    all others. A step ends with `separator`, or with the completion; the end token belongs to no step. By default,
    scores are read at the last token of a step, where TRL's former `PRMTrainer` trained them. With `step_token`, that
    token is inserted after each step and the score is read there, as with `<extra_0>` of Qwen2.5-Math-PRM.

    The model reads the policy's token ids, prompt included, so it must have the policy's tokenizer. It is loaded at
    setup or at the first call, stays in evaluation mode and is never trained. Completions of several turns (tools,
    environments) are refused.

    Args:
        model: Name on the hub or a local folder; or a transformers model, which is put in evaluation mode.
        separator: Text that ends a step.
        label: Index of the label whose probability is the reward; 1 is "right" in TRL's data. None: the model has a
            single label, whose logit is the reward.
        tokenizer: Decodes completions to find where steps end: the policy's tokenizer, or its name or folder. None:
            that of the folder `model`.
        step_token: Text of the token to insert after each step.
        max_tokens_per_pass: As in `ModelReward`, as are all options below.
        sharing: `shared` encodes prompts once, `repeated` once per rollout.
        attention_backend: Attention over shared prefixes.
        dtype: Dtype of the weights as loaded.
        device: Where the model runs.
        attn_implementation: As in transformers.
        revision: Branch, tag or commit on the hub.
        trust_remote_code: Run model code that comes with the checkpoint. It can do anything on this machine.
        allow_mismatched_weights: Weights that may be missing, unexpected or of another shape.

    Raises:
        FileNotFoundError: If `model` is a path and not a folder.
        TypeError: If `model` is neither a name nor a model, or `tokenizer` neither a name nor a tokenizer.
        ValueError: If an option is out of range, or there is no tokenizer.
    """

    stays_in_process = True
    """Its model is loaded once per rank; workers would each load their own."""

    def __init__(
        self,
        model: Any,
        *,
        separator: str = "\n\n",
        label: int | None = 1,
        tokenizer: Any = None,
        step_token: str | None = None,
        max_tokens_per_pass: int = 16384,
        sharing: Sharing = "shared",
        attention_backend: str = "auto",
        dtype: Dtype = "auto",
        device: str = "auto",
        attn_implementation: str | None = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
        allow_mismatched_weights: Sequence[str] = (),
    ) -> None:
        check_label(label, "ProcessRewardModel")
        check_tokenizer(tokenizer, "ProcessRewardModel", "that of the folder `model`")
        if not separator:
            raise ValueError("ProcessRewardModel.separator is empty; pass the text that ends a step.")
        if tokenizer is None and not isinstance(model, str):
            raise ValueError(
                "ProcessRewardModel.tokenizer is None and model is not a name or folder; pass the policy's tokenizer."
            )
        self.model = model
        self.separator = separator
        self.label = label
        self.tokenizer = model if tokenizer is None else tokenizer
        self.step_token = step_token
        self._network = FrozenModel(
            "ProcessRewardModel",
            "TokenClassification",
            model,
            max_tokens_per_pass=max_tokens_per_pass,
            sharing=sharing,
            attention_backend=attention_backend,
            device=device,
            dtype=dtype,
            attn_implementation=attn_implementation,
            revision=revision,
            trust_remote_code=trust_remote_code,
            allow_mismatched_weights=allow_mismatched_weights,
        )
        self._loaded: _Loaded | None = None

    def __repr__(self) -> str:
        return repr(self._network)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what the first call loads again."""
        return vars(self) | {"_loaded": None}

    def __call__(self, groups: Sequence[RolloutGroup]) -> list[list[list[float | None]]]:
        """Same as `score_groups`."""
        return self.score_groups(groups)

    def set_up(self) -> None:
        """Load model and tokenizer now rather than at the first call.

        Raises:
            RewardConfigurationError: If one cannot be loaded, the model is not a token classifier or cannot share
                prefixes, `label` does not fit it, or `step_token` is not a single token.
        """
        self._load()

    @torch.no_grad()
    def score_groups(self, groups: Sequence[RolloutGroup]) -> list[list[list[float | None]]]:
        """Score every step of every rollout.

        Args:
            groups: Prompts with their rollouts; not modified.

        Returns:
            For each group and each of its rollouts, one number or None per token of the completion.

        Raises:
            RewardConfigurationError: As for `set_up`; also if the model's vocabulary is not the policy's, or a
                completion has several turns.
        """
        loaded = self._load()
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        for rollout in rollouts:
            self._check_rollout(loaded.tokenizer, rollout)
        ends = [step_ends(rollout.token_ids, loaded.tokenizer, self.separator) for rollout in rollouts]
        scores = iter(self._score_steps(loaded, groups, ends))
        lengths = [len(rollout.token_ids) for rollout in rollouts]
        rewards = iter([_token_rewards(scores, *steps) for steps in zip(ends, lengths, strict=True)])
        return [[next(rewards) for _ in group.rollouts] for group in groups]

    def _score_steps(self, loaded: _Loaded, groups: Sequence[RolloutGroup], ends: list[list[int]]) -> list[float]:
        """The scores of all steps, in the order of the rollouts; `ends` has the last token of each step."""
        next_ends = iter(ends)
        marked = [
            RolloutGroup(group.prompt_ids, [loaded.with_step_tokens(r, next(next_ends)) for r in group.rollouts])
            for group in groups
            if group.rollouts
        ]
        read_at = iter([loaded.read_at(ends_of_rollout) for ends_of_rollout in ends])
        head = score_head(loaded.model, "TokenClassification")
        scores: list[float] = []
        for batch, states_TD in self._network.states(loaded.model, marked):
            index_S = _batch_positions(batch, [next(read_at) for _ in batch.rollout_lengths])
            logits_SC = head(states_TD.index_select(0, index_S)).float()
            probabilities_SC = logits_SC.softmax(dim=1) if logits_SC.shape[1] > 1 else logits_SC
            scores += probabilities_SC[:, loaded.label].tolist()
        return scores

    def run_options(self) -> dict[str, Any]:
        """The options that its rewards depend on; the others only change their cost."""
        parts = {name: getattr(self, name) for name in ("model", "separator", "label", "tokenizer", "step_token")}
        return {name: part if is_plain(part) else identity(type(part)) for name, part in parts.items()}

    def _check_rollout(self, tokenizer: Any, rollout: Rollout) -> None:
        """Refuse completions of several turns, and a vocabulary that is not the model's."""
        if rollout.messages is not None:
            raise RewardConfigurationError(
                f"{self!r} scores completions of one turn, and this one has several; write a reward function of groups "
                "for episodes with tools or environments."
            )
        text = tokenizer.decode(rollout.token_ids, skip_special_tokens=True)
        if rollout.text is not None and text != rollout.text:
            raise RewardConfigurationError(
                f"{self!r}: its tokenizer decodes a completion as {text!r:.80}, and the policy's as "
                f"{rollout.text!r:.80}; a process reward model must have the policy's vocabulary."
            )

    def _load(self) -> _Loaded:
        if self._loaded is None:
            try:
                model = self._network.load()
                tokenizer, label = load_tokenizer(self.tokenizer), self._network.label(model, self.label)
                self._loaded = _Loaded(model, tokenizer, label, self._step_id(tokenizer))
            except (OSError, ValueError) as error:
                raise self._network.configuration_error(error) from error
        return self._loaded

    def _step_id(self, tokenizer: Any) -> int | None:
        if self.step_token is None:
            return None
        ids = tokenizer.encode(self.step_token, add_special_tokens=False)
        if len(ids) != 1:
            raise ValueError(
                f"{self!r}: step_token {self.step_token!r} is {len(ids)} tokens of its tokenizer; pass the text of one."
            )
        return int(ids[0])


@dataclass(frozen=True)
class _Loaded:
    """The loaded model and what depends on it; `step_id` is the id of the step token, or None."""

    model: Any
    tokenizer: Any
    label: int
    step_id: int | None

    def with_step_tokens(self, rollout: Rollout, ends: list[int]) -> Rollout:
        """The rollout with a step token after each step."""
        if self.step_id is None:
            return Rollout(rollout.token_ids)
        last_of_steps = set(ends)
        token_ids: list[int] = []
        for index, token in enumerate(rollout.token_ids):
            token_ids.append(token)
            if index in last_of_steps:
                token_ids.append(self.step_id)
        return Rollout(token_ids)

    def read_at(self, ends: list[int]) -> list[int]:
        """Indices in the completion, step tokens included, at which scores are read."""
        return ends if self.step_id is None else [end + number + 1 for number, end in enumerate(ends)]


def _token_rewards(scores: Iterator[float], ends: list[int], length: int) -> list[float | None]:
    """A completion's reward per token; consumes the scores of its steps."""
    rewards: list[float | None] = [None] * length
    for end in ends:
        rewards[end] = next(scores)
    return rewards


def _batch_positions(batch: ScoringBatch, tokens: list[list[int]]) -> Tensor:
    """Convert token indices in each rollout's response to positions in the batch."""
    predicting, final = batch.predict_index_N.tolist(), batch.final_index_B.tolist()
    index, start = [], 0
    for length, last, tokens_of_rollout in zip(batch.rollout_lengths, final, tokens, strict=True):
        positions = [
            *predicting[start + 1 : start + length],
            last,
        ]  # the successor of a token is predicted at its position
        index += [positions[token] for token in tokens_of_rollout]
        start += length
    return torch.tensor(index, dtype=torch.long, device=batch.final_index_B.device)
