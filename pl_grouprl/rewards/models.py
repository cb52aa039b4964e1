"""Reward models: frozen classifiers that score rollouts or their steps, encoding shared prefixes once."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Literal

import torch
from torch import Tensor, nn

from pl_grouprl.attention import find_decoder, shared_prefix
from pl_grouprl.attention.backends.choice import get_backend
from pl_grouprl.attention.support import is_classifier, score_head
from pl_grouprl.chat.format import ControlTokens, tokens_around
from pl_grouprl.checks.model_introspection import check_causal, check_score_head
from pl_grouprl.models.adapters import check_adapters
from pl_grouprl.models.policy import Dtype, PretrainedPolicy
from pl_grouprl.models.score import hidden_states
from pl_grouprl.packing import ScoringBatch, Sharing, pack
from pl_grouprl.rewards.base import RewardConfigurationError, step_ends
from pl_grouprl.types import Messages, Rollout, RolloutGroup
from pl_grouprl.utilities.describe import identity, is_plain
from pl_grouprl.utilities.modes import naming_memory
from pl_grouprl.utilities.options import checked_arguments

# A frozen classifier that scores rollouts, run over groups with shared prefixes.

log = logging.getLogger(__name__)

Kind = Literal["SequenceClassification", "TokenClassification"]

_CLASSIFIES = {"SequenceClassification": "sequence", "TokenClassification": "token"}


class FrozenModel:
    """A sequence or token classifier, by name or already loaded, with the options of `ModelReward`.

    Args:
        owner: Name of the reward's class, for errors.
        kind: Kind of transformers classifier that it must be.
        model: Name, folder, or transformers model.
        max_tokens_per_pass: Limit on the tokens of a forward pass. A larger group gets a pass to itself.
        sharing: `shared` encodes prompts once, `repeated` once per rollout.
        attention_backend: As in `pl_grouprl.attention.shared_prefix`.
        device: Where it runs. `auto` is this process's GPU; a model that was passed stays where it is.
        dtype: As in `PretrainedPolicy`, as are all options below.
        attn_implementation: As in transformers.
        revision: Branch, tag or commit on the hub.
        trust_remote_code: Run model code that comes with the checkpoint.
        allow_mismatched_weights: Weights that may be missing, unexpected or of another shape.

    Raises:
        FileNotFoundError: If `model` is a path and not a folder.
        TypeError: If it is neither a name nor a model.
        ValueError: If an option is out of range.
    """

    def __init__(
        self,
        owner: str,
        kind: Kind,
        model: Any,
        *,
        max_tokens_per_pass: int,
        sharing: Sharing,
        attention_backend: str,
        device: str,
        dtype: Dtype,
        attn_implementation: str | None,
        revision: str | None,
        trust_remote_code: bool,
        allow_mismatched_weights: Sequence[str],
    ) -> None:
        if sharing not in ("shared", "repeated"):
            raise ValueError(f"{owner}.sharing is {sharing!r}; pass 'shared' or 'repeated'.")
        if max_tokens_per_pass < 1:
            raise ValueError(f"{owner}.max_tokens_per_pass is {max_tokens_per_pass}; it must be at least 1.")
        _check_type(model, owner)
        get_backend(attention_backend, "attention_backend")  # refuses an unknown name before the first reward
        self.owner = owner
        self.kind = kind
        self.model = model
        self.max_tokens_per_pass = max_tokens_per_pass
        self.sharing: Sharing = sharing
        self.attention_backend = attention_backend
        self.device = device
        self.checkpoint: PretrainedPolicy | None = None
        if isinstance(model, str):
            self.checkpoint = PretrainedPolicy(
                model,
                dtype,
                attn_implementation,
                revision=revision,
                trust_remote_code=trust_remote_code,
                allow_mismatched_weights=tuple(allow_mismatched_weights),
            )

    def __repr__(self) -> str:
        return f"{self.owner}({self.model!r})" if self.checkpoint else f"{self.owner}({type(self.model).__name__})"

    def load(self) -> Any:
        """Load the model, put it in evaluation mode, and check that its head reads the states of a causal decoder.

        Raises:
            OSError, ValueError: If it cannot be loaded or used.
        """
        model = self._load_or_move().eval()
        check_adapters(model, repr(self))
        head = score_head(model, self.kind)
        if self.sharing == "shared":
            with shared_prefix(model, self.attention_backend):  # refuses a model that cannot share prefixes
                pass
        check_score_head(model, head, repr(self), self.kind)
        if self.sharing == "shared":
            check_causal(find_decoder(model), repr(self))
        log.info("%r: %s on %s, sharing=%r.", self, type(model).__name__, model.device, self.sharing)
        return model

    def label(self, model: Any, label: int | None) -> int:
        """The index of the label that is the reward; 0 if None was passed and the model has a single label.

        Raises:
            ValueError: If None was passed and the model has several labels, or the index is out of range.
        """
        labels = model.config.num_labels
        chosen = 0 if label is None and labels == 1 else label
        if chosen is None or not 0 <= chosen < labels:
            raise ValueError(
                f"{self.owner}.label is {label}, and {type(model).__name__} has {labels} labels; pass a label from "
                f"0 to {labels - 1}."
            )
        return chosen

    def states(self, model: Any, groups: list[RolloutGroup]) -> Iterator[tuple[ScoringBatch, Tensor]]:
        """Run the model over groups, pass by pass; yields each pass's batch and its hidden states, shape [T, D].

        Iterate under `torch.no_grad()`. The body of the caller's loop runs inside the context of the pass: prefixes are
        shared, and autocast is off.

        Raises:
            RewardConfigurationError: If a token id is beyond the model's embeddings.
        """
        least = get_backend(self.attention_backend).min_saved_tokens
        for groups_of_pass in _passes(groups, self.sharing, self.max_tokens_per_pass):
            batch = pack(groups_of_pass, self.sharing, min_saved_tokens=least, device=model.device)
            self._check_tokens(model, batch)
            context = nullcontext() if self.sharing == "repeated" else shared_prefix(model, self.attention_backend)
            memory = naming_memory(
                f"a pass of {self.owner} with max_tokens_per_pass={self.max_tokens_per_pass}",
                "lower it, or put the reward model on another device (device)",
            )
            with memory, torch.autocast(model.device.type, enabled=False), context:
                yield batch, hidden_states(model, batch)

    def configuration_error(self, error: Exception) -> RewardConfigurationError:
        """Turn an error into one that ends the run and names this model."""
        text = str(error)
        return RewardConfigurationError(text if repr(self) in text else f"{self!r}: {text}")

    def _check_tokens(self, model: Any, batch: ScoringBatch) -> None:
        largest, known = int(batch.model_inputs["input_ids"].max()), model.get_input_embeddings().num_embeddings
        if largest >= known:
            raise RewardConfigurationError(
                f"{self!r} has embeddings for {known} tokens and was given token {largest}; its vocabulary is not the "
                f"policy's, so pass its own tokenizer: {self.owner}(..., tokenizer=...)."
            )

    def _load_or_move(self) -> Any:
        if self.checkpoint is None:
            return self.model if self.device == "auto" else self.model.to(self.device)
        if not is_classifier(self.checkpoint.load_config(), self.kind):
            raise ValueError(
                f"{self!r} is not a {_CLASSIFIES[self.kind]} classifier, so it has no head that scores; pass a "
                f"checkpoint of a ...For{self.kind} model."
            )
        available = "cuda" if torch.cuda.is_available() else "cpu"  # "cuda" is this rank's GPU
        device = available if self.device == "auto" else self.device
        return self.checkpoint.load_as(f"AutoModelFor{self.kind}").to(device)


def load_tokenizer(tokenizer: Any) -> Any:
    """Load a tokenizer by name or folder; return any other object unchanged."""
    return PretrainedPolicy(tokenizer).load_tokenizer() if isinstance(tokenizer, str) else tokenizer


def check_label(label: int | None, owner: str) -> None:
    """Refuse anything but None or a non-negative integer.

    Raises:
        ValueError: If it is anything else.
    """
    if label is not None and (isinstance(label, bool) or not isinstance(label, int) or label < 0):
        raise ValueError(f"{owner}.label is {label!r}; pass the index of a label, counted from 0.")


def check_tokenizer(tokenizer: Any, owner: str, otherwise: str) -> None:
    """Refuse anything but None, a name or a tokenizer.

    Args:
        tokenizer: The option.
        owner: Name of the reward's class.
        otherwise: What None means, for the error.

    Raises:
        TypeError: If it is anything else.
    """
    if tokenizer is not None and not isinstance(tokenizer, str) and not callable(tokenizer):
        raise TypeError(
            f"{owner}.tokenizer is {tokenizer!r:.80} of type {type(tokenizer).__name__}; pass a name, a folder as "
            f"a string, a tokenizer, or None for {otherwise}."
        )


def _check_type(model: Any, owner: str) -> None:
    if not isinstance(model, str) and not (isinstance(model, nn.Module) and hasattr(model, "config")):
        raise TypeError(
            f"{owner}.model is {model!r:.80} of type {type(model).__name__}; pass a name on the hub, a folder as a "
            "string, or a transformers model."
        )


def _passes(groups: list[RolloutGroup], sharing: Sharing, max_tokens: int) -> Iterator[list[RolloutGroup]]:
    """Split groups, in order, into passes of at most `max_tokens` tokens, or of a single group."""
    current: list[RolloutGroup] = []
    for group in groups:
        if current and _num_tokens([*current, group], sharing) > max_tokens:
            yield current
            current = []
        current.append(group)
    if current:
        yield current


def _num_tokens(groups: list[RolloutGroup], sharing: Sharing) -> int:
    """Number of tokens in a pass; with repeated prefixes, rows are padded to the longest."""
    if sharing == "shared":
        return sum(len(group.prompt_ids) + sum(len(r.token_ids) for r in group.rollouts) for group in groups)
    lengths = [len(group.prompt_ids) + len(rollout.token_ids) for group in groups for rollout in group.rollouts]
    return len(lengths) * max(lengths)


# A reward model: a sequence classifier that scores whole groups, encoding shared prefixes once.

_NEEDS_TOOLS = (
    "pass a tokenizer whose chat template renders tool calls and messages of the role `tool`, or a reward model that "
    "reads the policy's tokens (tokenizer=None)"
)


@checked_arguments
class ModelReward:
    """The score of prompt and completion by a `...ForSequenceClassification` model.

    The score is the model's logit at the last token that is not the padding token, as in transformers. (If the padding
    token also ends completions, that is the token before the end token.) This suits decoders; a model that reads its
    score elsewhere, as encoders do, is detected by a short forward pass and refused. The model is loaded at setup or at
    the first call, stays in evaluation mode and is never trained.

    Args:
        model: Name on the hub or a local folder; or a transformers model, which is put in evaluation mode.
        label: Index of the label that is the reward. May be left out if the model has a single label.
        tokenizer: Name, folder or tokenizer, for a reward model whose vocabulary is not the policy's. Messages and
            completion are then rendered by its chat template; a string prompt and its completion are encoded as one
            text. The template must be able to render the tool calls of an episode. None: the reward model reads the
            policy's token ids.
        max_tokens_per_pass: Limit on the tokens of a forward pass. A larger group gets a pass to itself.
        sharing: `shared` encodes what the sequences of a group have in common once, `repeated` once per rollout.
        attention_backend: Attention over shared prefixes; see `pl_grouprl.attention.shared_prefix`.
        dtype: Dtype of the weights as loaded from a folder or name; `auto` is the checkpoint's. Autocast is off.
        device: Where the model runs. `auto`: this process's GPU if there is one, otherwise the CPU; a model that was
            passed stays where it is.
        attn_implementation: As in transformers.
        revision: Branch, tag or commit on the hub.
        trust_remote_code: Run model code that comes with the checkpoint. It can do anything on this machine.
        allow_mismatched_weights: As in `PretrainedPolicy`: weights that may be missing from the folder, unexpected or
            of another shape.

    Raises:
        FileNotFoundError: If `model` is a path and not a folder.
        TypeError: If `model` is neither a name nor a model, or `tokenizer` neither a name nor a tokenizer.
        ValueError: If an option is out of range.
    """

    stays_in_process = True
    """Its model is loaded once per rank; workers would each load their own."""

    def __init__(
        self,
        model: Any,
        *,
        label: int | None = None,
        tokenizer: Any = None,
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
        check_label(label, "ModelReward")
        check_tokenizer(tokenizer, "ModelReward", "the policy's token ids")
        self.model = model
        self.label = label
        self.tokenizer = tokenizer
        self._network = FrozenModel(
            "ModelReward",
            "SequenceClassification",
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
        self._loaded: tuple[Any, Any, int] | None = None

    def __repr__(self) -> str:
        return repr(self._network)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what the first call loads again."""
        return vars(self) | {"_loaded": None}

    def __call__(self, groups: Sequence[RolloutGroup]) -> list[list[float | None]]:
        """Same as `score_groups`."""
        return self.score_groups(groups)

    def set_up(self) -> None:
        """Load the model now rather than at the first call.

        Raises:
            RewardConfigurationError: If it cannot be loaded, is not a sequence classifier that reads its score at the
                last token, cannot share prefixes, or needs a label.
        """
        self._load()

    @torch.no_grad()
    def score_groups(self, groups: Sequence[RolloutGroup]) -> list[list[float | None]]:
        """Score every rollout.

        Args:
            groups: Prompts with their rollouts; not modified.

        Returns:
            For each group, one number per rollout.

        Raises:
            RewardConfigurationError: As for `set_up`; also if a token is outside the model's vocabulary, or its chat
                template omits tool calls.
            ValueError: If it has its own tokenizer and a text is missing, prompt and completion have no token, or the
                chat template refuses an episode.
        """
        model, tokenizer, label = self._load()
        pad = model.config.get_text_config().pad_token_id
        sequences = [
            _without_padding(sequence, pad) for group in groups for sequence in _encode_group(group, tokenizer, self)
        ]
        forest = _regroup(sequences, [len(group.rollouts) for group in groups])
        scores: list[float | None] = []
        for batch, states_TD in self._network.states(model, forest):
            scores += score_head(model)(states_TD.index_select(0, batch.final_index_B))[:, label].float().tolist()
        remaining = iter(scores)
        return [[next(remaining) for _ in group.rollouts] for group in groups]

    def run_options(self) -> dict[str, Any]:
        """The options that its rewards depend on; the others only change their cost."""
        parts = {"model": self.model, "label": self.label, "tokenizer": self.tokenizer}
        return {name: part if is_plain(part) else identity(type(part)) for name, part in parts.items()}

    def _load(self) -> tuple[Any, Any, int]:
        """Load model and tokenizer at the first call; return them and the label."""
        if self._loaded is None:
            try:
                model = self._network.load()
                self._loaded = model, load_tokenizer(self.tokenizer), self._network.label(model, self.label)
            except (OSError, ValueError) as error:
                raise self._network.configuration_error(error) from error
        return self._loaded


def _encode_group(group: RolloutGroup, tokenizer: Any, reward: ModelReward) -> Iterator[list[int]]:
    """Token ids of prompt and completion of each rollout, as the reward model reads them."""
    if tokenizer is None:
        yield from (group.prompt_ids + rollout.token_ids for rollout in group.rollouts)
        return
    control, (before, after) = ControlTokens(tokenizer), tokens_around(tokenizer)
    for rollout in group.rollouts:
        if rollout.text is None:
            raise ValueError(f"{reward!r} has its own tokenizer, and Rollout.text is None; decode it first.")
        prompt = group.prompt if rollout.prompt is None else rollout.prompt
        if isinstance(prompt, str):
            (ids,) = control.encode([prompt + control.mark_text(rollout.text)])
            ids = ids + after if ids[: len(before)] == before else before + ids + after
        elif rollout.messages is None:
            conversation = control.mark([*prompt, {"role": "assistant", "content": rollout.text}])
            (ids,) = control.encode([tokenizer.apply_chat_template(conversation, tokenize=False)])
        else:
            ids = _encode_episode([*prompt, *rollout.messages], tokenizer, control, reward)
        if not ids:
            raise ValueError(f"{reward!r}: prompt and completion have no token in its tokenizer; leave such rows out.")
        yield ids


def _encode_episode(messages: Messages, tokenizer: Any, control: ControlTokens, reward: ModelReward) -> list[int]:
    """Render an episode with a chat template.

    Raises:
        RewardConfigurationError: If the template omits calls or results of tools.
        ValueError: If it refuses this episode.
    """
    messages = [message | {"content": message.get("content") or ""} for message in messages]
    try:
        rendered = tokenizer.apply_chat_template(control.mark(messages), tokenize=False)
    except Exception as error:  # a template may raise anything
        raise ValueError(f"{reward!r}: its chat template refuses an episode ({error}); {_NEEDS_TOOLS}.") from error
    text = control.without_marks(rendered)
    called = [call.get("function", call)["name"] for message in messages for call in message.get("tool_calls") or ()]
    lost = [name for name in called if name not in text]
    lost += [message["content"] for message in messages if message["role"] == "tool" and not _shows(text, message)]
    if lost:
        raise RewardConfigurationError(
            f"{reward!r}: its chat template omits {lost[0]!r:.80} from an episode; {_NEEDS_TOOLS}."
        )
    return control.encode([rendered])[0]


def _shows(text: str, message: dict[str, Any]) -> bool:
    """Whether a rendering contains a message's content, verbatim or as JSON."""
    content = message["content"].strip()
    return content in text or json.dumps(content, ensure_ascii=False)[1:-1] in text or json.dumps(content)[1:-1] in text


def _without_padding(sequence: list[int], pad: int | None) -> list[int]:
    """Strip padding tokens from the end. If there is nothing else, keep the first, at which transformers reads then."""
    stop = len(sequence)
    while stop > 1 and sequence[stop - 1] == pad:
        stop -= 1
    return sequence[:stop]


def _regroup(sequences: list[list[int]], sizes: list[int]) -> list[RolloutGroup]:
    """Group the sequences again, in order, with each group's common prefix as its prompt."""
    groups: list[RolloutGroup] = []
    start = 0
    for size in sizes:
        group = sequences[start : start + size]
        start += size
        if not group:
            continue
        shared = _common_length(group)
        if shared:
            groups.append(RolloutGroup(group[0][:shared], [Rollout(sequence[shared:]) for sequence in group]))
        else:
            groups += [RolloutGroup(sequence[:1], [Rollout(sequence[1:])]) for sequence in group]
    return groups


def _common_length(sequences: list[list[int]]) -> int:
    """Length of the common prefix of all sequences, which is that of the first and last in lexicographic order."""
    first, last = min(sequences), max(sequences)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False)))


# A process reward model: a token classifier that scores each step of a completion, encoding shared prefixes once.
#
# Legend: S steps of a pass, D hidden size, C labels.


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
