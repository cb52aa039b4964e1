"""Rewards by models: frozen classifiers that score rollouts or their steps, encoding shared prefixes once.

Legend: T tokens of a pass, D hidden size, S steps of a pass, C labels.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import KW_ONLY, dataclass
from itertools import takewhile
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from pl_grouprl.attention import find_decoder, shared_prefix
from pl_grouprl.attention.backends.choice import get_backend
from pl_grouprl.attention.support import is_classifier, score_head
from pl_grouprl.chat.format import ControlTokens, tokens_around
from pl_grouprl.checks.model_introspection import check_causal, check_score_head
from pl_grouprl.models.adapters import check_adapters
from pl_grouprl.models.kernels import fuse_if_exact
from pl_grouprl.models.policy import Dtype, PretrainedPolicy
from pl_grouprl.models.score import hidden_states
from pl_grouprl.packing import ScoringBatch, Sharing, pack
from pl_grouprl.rewards.base import RewardConfigurationError, content_text
from pl_grouprl.types import Messages, Rollout, RolloutGroup
from pl_grouprl.utilities.describe import identity, is_plain
from pl_grouprl.utilities.modes import naming_memory
from pl_grouprl.utilities.options import check_options

log = logging.getLogger(__name__)


@dataclass(eq=False, repr=False)
class FrozenModelReward:
    """Base of rewards by a transformers classifier, which is loaded once per rank and never trained.

    The model is loaded at setup or at the first call, and stays in evaluation mode.

    Attributes:
        model: Name on the hub or a local folder; or a transformers model, which is put in evaluation mode.
        max_tokens_per_pass: Limit on the tokens of a forward pass. A larger group gets a pass to itself.
        sharing: `shared` encodes common prefixes of a group's sequences once, `repeated` once per rollout.
        attention_backend: Attention over shared prefixes; see `pl_grouprl.attention.shared_prefix`.
        dtype: Dtype of the weights as loaded from a folder or name; `auto` is the checkpoint's. Autocast is off.
        device: Where the model runs. `auto`: this process's GPU if there is one, otherwise the CPU; a model that was
            passed stays where it is.
        attn_implementation: As in transformers.
        revision: Branch, tag or commit on the hub.
        trust_remote_code: Run model code that comes with the checkpoint. It can do anything on this machine.
        allow_mismatched_weights: As in `PretrainedPolicy`: weights that may be missing from the folder, unexpected or
            of another shape.
        label: Index of the label that is the reward. May be omitted if the model has a single label.
        tokenizer: Name, folder or tokenizer; the subclass says what for.

    Raises:
        FileNotFoundError: If `model` is a path and not a folder.
        ValueError: If an option is out of range.
    """

    model: Any
    _: KW_ONLY
    max_tokens_per_pass: int = 16384
    sharing: Sharing = "shared"
    attention_backend: str = "auto"
    dtype: Dtype = "auto"
    device: str = "auto"
    attn_implementation: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False
    allow_mismatched_weights: Sequence[str] = ()
    label: int | None = None
    tokenizer: Any = None

    stays_in_process = True
    """Its model is loaded once per rank; workers would each load their own."""

    kind: ClassVar[Literal["SequenceClassification", "TokenClassification"]]
    _options: ClassVar[tuple[str, ...]] = ("model", "label", "tokenizer")  # those that rewards depend on

    def __post_init__(self) -> None:
        name = f"{type(self).__name__}.max_tokens_per_pass"
        check_options({name: (self.max_tokens_per_pass, self.max_tokens_per_pass >= 1, "at least 1")})
        self._checkpoint: PretrainedPolicy | None = None
        if isinstance(self.model, str):
            self._checkpoint = PretrainedPolicy(
                self.model,
                self.dtype,
                self.attn_implementation,
                revision=self.revision,
                trust_remote_code=self.trust_remote_code,
                allow_mismatched_weights=tuple(self.allow_mismatched_weights),
            )
        self._loaded: tuple[Any, Any, int] | None = None

    def score_groups(self, groups: list[RolloutGroup]) -> list[list[Any]]:
        """Score the rollouts of each group; a subclass says how."""
        raise NotImplementedError

    def __call__(self, groups: list[RolloutGroup]) -> list[list[Any]]:
        """Same as `score_groups`."""
        return self.score_groups(groups)

    def __repr__(self) -> str:
        shown = type(self.model).__name__ if self._checkpoint is None else repr(self.model)
        return f"{type(self).__name__}({shown})"

    def __getstate__(self) -> dict[str, Any]:
        """Omit what the first call loads again."""
        return vars(self) | {"_loaded": None}

    def run_options(self) -> dict[str, Any]:
        """The options that its rewards depend on; the others only change their cost."""
        parts = {name: getattr(self, name) for name in self._options}
        return {name: part if is_plain(part) else identity(type(part)) for name, part in parts.items()}

    def set_up(self) -> None:
        """Load model and tokenizer now rather than at the first call.

        Raises:
            RewardConfigurationError: If one cannot be loaded, or the model is not a classifier whose head reads the
                states of a causal decoder, cannot share prefixes, or does not have the label.
        """
        self._load()

    def _load(self) -> tuple[Any, Any, int]:
        """Load model and tokenizer at the first call; return them and the index of the label."""
        if self._loaded is not None:
            return self._loaded
        try:
            if self._checkpoint is None:
                model = self.model if self.device == "auto" else self.model.to(self.device)
            else:
                if not is_classifier(self._checkpoint.load_config(), self.kind):
                    raise ValueError(
                        f"{self!r}.model is not a checkpoint of a ...For{self.kind}, so it has no head that scores; "
                        "pass one."
                    )
                available = "cuda" if torch.cuda.is_available() else "cpu"  # "cuda" is this rank's GPU
                device = available if self.device == "auto" else self.device
                model = self._checkpoint.load_as(f"AutoModelFor{self.kind}").to(device).requires_grad_(False)
            model.eval()
            if model.device.type == "cuda" and self._checkpoint is not None:
                reason = fuse_if_exact(find_decoder(model))
                how = "with liger-kernel's layers" if reason is None else f"without liger-kernel: {reason}"
                log.info("%r runs %s.", self, how)
            check_adapters(model, repr(self))
            head = score_head(model, self.kind)
            if self.sharing == "shared":
                with shared_prefix(model, self.attention_backend):  # raises for a model that cannot share prefixes
                    pass
            check_score_head(model, head, repr(self), self.kind)
            if self.sharing == "shared":
                check_causal(find_decoder(model), repr(self))
            tokenizer = self.tokenizer
            if isinstance(tokenizer, str):
                tokenizer = PretrainedPolicy(tokenizer).load_tokenizer()
            labels = model.config.num_labels
            label = 0 if self.label is None and labels == 1 else self.label
            if label is None or not 0 <= label < labels:
                raise ValueError(
                    f"{type(self).__name__}.label is {self.label}, and {type(model).__name__} has {labels} labels; "
                    f"pass a label from 0 to {labels - 1}."
                )
        except (OSError, ValueError) as error:
            text = str(error)
            raise RewardConfigurationError(text if repr(self) in text else f"{self!r}: {text}") from error
        log.info("%r: %s on %s, sharing=%r.", self, type(model).__name__, model.device, self.sharing)
        self._loaded = model, tokenizer, label
        return self._loaded

    def _states(self, model: Any, groups: list[RolloutGroup]) -> Iterator[tuple[ScoringBatch, Tensor]]:
        """Run the model over groups, pass by pass; yields each pass's batch and its hidden states, shape [T, D].

        Iterate under `torch.no_grad()`. The body of the caller's loop runs inside the context of the pass: prefixes are
        shared, and autocast is off.
        """
        min_saved = get_backend(self.attention_backend).min_saved_tokens
        known = model.get_input_embeddings().num_embeddings

        def num_tokens(groups: list[RolloutGroup]) -> int:
            if self.sharing == "shared":
                return sum(len(group.prompt_ids) + sum(len(r.token_ids) for r in group.rollouts) for group in groups)
            lengths = [len(group.prompt_ids) + len(rollout.token_ids) for group in groups for rollout in group.rollouts]
            return len(lengths) * max(lengths)  # rows are padded to the longest

        passes: list[list[RolloutGroup]] = []
        for group in groups:
            if passes and num_tokens([*passes[-1], group]) <= self.max_tokens_per_pass:
                passes[-1].append(group)
            else:
                passes.append([group])
        for groups_of_pass in passes:
            batch = pack(groups_of_pass, self.sharing, min_saved_tokens=min_saved, device=model.device)
            largest = int(batch.model_inputs["input_ids"].max())
            if largest >= known:
                raise RewardConfigurationError(
                    f"{self!r} has embeddings for {known} tokens and was given token {largest}; its vocabulary is not "
                    f"the policy's, so pass its own tokenizer: {type(self).__name__}(..., tokenizer=...)."
                )
            context = nullcontext() if self.sharing == "repeated" else shared_prefix(model, self.attention_backend)
            memory = naming_memory(
                f"a pass of {type(self).__name__} with max_tokens_per_pass={self.max_tokens_per_pass}",
                "lower it, or put the reward model on another device (device)",
            )
            with memory, torch.autocast(model.device.type, enabled=False), context:
                yield batch, hidden_states(model, batch)


@dataclass(eq=False, repr=False)
class ModelReward(FrozenModelReward):
    """The score of prompt and completion by a `...ForSequenceClassification` model.

    The score is the model's logit at the last token that is not the padding token, as in transformers. (If the padding
    token also ends completions, that is the token before the end token.) This suits decoders; a model that reads its
    score elsewhere, as encoders do, is detected by a short forward pass, and raises an error.

    Takes the options of `FrozenModelReward`, too.

    Attributes:
        tokenizer: Name, folder or tokenizer, for a reward model whose vocabulary is not the policy's. Messages and
            completion are then rendered by its chat template; a string prompt and its completion are encoded as one
            text. The template must be able to render the tool calls of an episode. By default, the reward model reads
            the policy's token ids.

    Raises:
        FileNotFoundError: If `model` is a path and not a folder.
        ValueError: If an option is out of range.
    """

    kind = "SequenceClassification"

    @torch.no_grad()
    def score_groups(self, groups: Sequence[RolloutGroup]) -> list[list[float | None]]:
        """Score every rollout.

        Args:
            groups: Prompts with their rollouts; not modified.

        Returns:
            For each group, one number per rollout.

        Raises:
            RewardConfigurationError: As for `set_up`; also if a token is outside the model's vocabulary, or its chat
                template cannot render tool calls.
            ValueError: If it has its own tokenizer and a text is missing, or prompt and completion have no token.
        """
        model, tokenizer, label = self._load()
        pad = model.config.get_text_config().pad_token_id
        forest: list[RolloutGroup] = []
        for group in groups:
            sequences = []
            for ids in _encode_group(group, tokenizer, self):
                stop = len(ids)
                while stop > 1 and ids[stop - 1] == pad:  # of padding alone, transformers reads the first token
                    stop -= 1
                sequences.append(ids[:stop])
            if not sequences:
                continue
            first, last = min(sequences), max(sequences)  # what these two have in common, all have
            shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False)))
            if shared:
                forest.append(RolloutGroup(first[:shared], [Rollout(sequence[shared:]) for sequence in sequences]))
            else:
                forest += [RolloutGroup(sequence[:1], [Rollout(sequence[1:])]) for sequence in sequences]
        scores: list[float | None] = []
        for batch, states_TD in self._states(model, forest):
            scores += score_head(model)(states_TD.index_select(0, batch.final_index_B))[:, label].float().tolist()
        remaining = iter(scores)
        return [[next(remaining) for _ in group.rollouts] for group in groups]


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
            raise ValueError(f"{reward!r}: prompt and completion have no token in its tokenizer; omit such rows.")
        yield ids


def _encode_episode(messages: Messages, tokenizer: Any, control: ControlTokens, reward: ModelReward) -> list[int]:
    """Render an episode with a chat template; raises an error if the template omits calls or results of tools."""
    remedy = (
        "pass a tokenizer whose chat template renders tool calls and messages of the role `tool`, or a reward model "
        "that reads the policy's tokens (tokenizer=None)"
    )
    messages = [
        message | {"content": content_text(message) if message["role"] == "tool" else message.get("content") or ""}
        for message in messages
    ]
    try:
        rendered = tokenizer.apply_chat_template(control.mark(messages), tokenize=False)
    except Exception as error:  # a template may raise anything
        raise RewardConfigurationError(f"{reward!r}: its chat template raised {error!r}; {remedy}.") from error
    text = control.without_marks(rendered)
    lost = [
        name
        for message in messages
        for name in [call.get("function", call)["name"] for call in message.get("tool_calls") or ()]
        if name not in text
    ]
    for message in messages:
        if message["role"] == "tool":
            content = message["content"].strip()
            forms = (content, json.dumps(content, ensure_ascii=False)[1:-1], json.dumps(content)[1:-1])
            if not any(form in text for form in forms):
                lost.append(message["content"])
    if lost:
        raise RewardConfigurationError(
            f"{reward!r}: its chat template omits {lost[0]!r:.80} from an episode; {remedy}."
        )
    return control.encode([rendered])[0]


@dataclass(eq=False, repr=False, kw_only=True)
class ProcessRewardModel(FrozenModelReward):
    """The probability that each step of a completion is right, by a `...ForTokenClassification` model.

    Returns a reward per token: the probability of `label` (softmax over labels) at the last token of each step, None at
    all others. A step ends with `separator`, or with the completion; the end token belongs to no step. By default,
    scores are read at the last token of a step, where TRL's former `PRMTrainer` trained them. With `step_token`, that
    token is inserted after each step and the score is read there, as with `<extra_0>` of Qwen2.5-Math-PRM.

    The model reads the policy's token ids, prompt included, so it must have the policy's tokenizer. It does not score
    completions of several turns (tools, environments).

    Takes the options of `FrozenModelReward`, too.

    Attributes:
        separator: Text that ends a step.
        label: Index of the label whose probability is the reward; 1 is "right" in TRL's data. If None, the model has a
            single label, whose logit is the reward.
        tokenizer: Decodes completions to find where steps end: the policy's tokenizer, or its name or folder. Defaults
            to the tokenizer in the folder `model`.
        step_token: Text of the token to insert after each step.

    Raises:
        FileNotFoundError: If `model` is a path and not a folder.
        ValueError: If an option is out of range, or there is no tokenizer.
    """

    kind = "TokenClassification"
    _options: ClassVar = ("model", "separator", "label", "tokenizer", "step_token")

    separator: str = "\n\n"
    label: int | None = 1
    step_token: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tokenizer is None and not isinstance(self.model, str):
            raise ValueError(
                "ProcessRewardModel.tokenizer is None and model is not a name or folder; pass the policy's tokenizer."
            )
        self.tokenizer = self.model if self.tokenizer is None else self.tokenizer

    def set_up(self) -> None:
        """Set up as in `FrozenModelReward`, and check that `step_token` is a single token."""
        super().set_up()
        self._step_ids()

    def _step_ids(self) -> list[int]:
        """The step token in a list; an empty list without one."""
        if self.step_token is None:
            return []
        _, tokenizer, _ = self._load()
        ids: list[int] = tokenizer.encode(self.step_token, add_special_tokens=False)
        if len(ids) != 1:
            raise RewardConfigurationError(
                f"{self!r}: step_token {self.step_token!r} is {len(ids)} tokens of its tokenizer; pass the text of one."
            )
        return ids

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
        model, tokenizer, label = self._load()
        step_ids = self._step_ids()
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        ends: list[list[int]] = []
        for rollout in rollouts:
            if rollout.messages is not None:
                raise RewardConfigurationError(
                    f"{self!r} scores completions of one turn, and this one has several; write a reward function of "
                    "groups for episodes with tools or environments."
                )
            text = tokenizer.decode(rollout.token_ids, skip_special_tokens=True)
            if rollout.text is not None and text != rollout.text:
                raise RewardConfigurationError(
                    f"{self!r}: its tokenizer decodes a completion as {text!r:.80}, and the policy's as "
                    f"{rollout.text!r:.80}; a process reward model must have the policy's vocabulary."
                )
            ends.append(step_ends(rollout.token_ids, tokenizer, self.separator))
        rows: list[Rollout] = []  # with step tokens
        read_at: list[list[int]] = []  # indices in rows
        for rollout, ends_of_rollout in zip(rollouts, ends, strict=True):
            ids, places, start = list[int](), list[int](), 0
            for end in ends_of_rollout:
                ids += [*rollout.token_ids[start : end + 1], *step_ids]
                places.append(len(ids) - 1)
                start = end + 1
            rows.append(Rollout([*ids, *rollout.token_ids[start:]]))
            read_at.append(places)
        remaining = iter(rows)
        marked = [
            RolloutGroup(group.prompt_ids, [next(remaining) for _ in group.rollouts])
            for group in groups
            if group.rollouts
        ]
        scores: list[float] = []
        places_of = iter(read_at)
        for batch, states_TD in self._states(model, marked):
            predicting, final, index, start = batch.predict_index_N.tolist(), batch.final_index_B.tolist(), [], 0
            for length, last in zip(batch.rollout_lengths, final, strict=True):
                positions = [*predicting[start + 1 : start + length], last]  # a token's position predicts its successor
                index += [positions[token] for token in next(places_of)]
                start += length
            index_S = torch.tensor(index, dtype=torch.long, device=batch.final_index_B.device)
            logits_SC = score_head(model, self.kind)(states_TD.index_select(0, index_S)).float()
            probabilities_SC = logits_SC.softmax(dim=1) if logits_SC.shape[1] > 1 else logits_SC
            scores += probabilities_SC[:, label].tolist()
        score = iter(scores)
        rewards: list[list[float | None]] = [[None] * len(rollout.token_ids) for rollout in rollouts]
        for of_rollout, ends_of_rollout in zip(rewards, ends, strict=True):
            for end in ends_of_rollout:
                of_rollout[end] = next(score)
        of_rollouts = iter(rewards)
        return [[next(of_rollouts) for _ in group.rollouts] for group in groups]


def step_ends(token_ids: Sequence[int], tokenizer: Any, separator: str) -> list[int]:
    """Return the index of the last token of each step.

    A step ends at the token that completes `separator`, whatever else that token contains. The last step ends with the
    completion, before its final special tokens. White space and separators alone are not a step: they belong to the
    next one or, at the end of the completion, to none.

    Args:
        token_ids: The completion.
        tokenizer: Decodes the token ids.
        separator: Text that ends a step; not empty.
    """

    def decode(tokens: Sequence[int]) -> str:
        text: str = tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text

    @functools.cache
    def may_complete(token: int) -> bool:  # it has the separator's last character, or part of a multi-byte character
        text = decode([token])
        return separator[-1] in text or "\ufffd" in text

    def has_content(tokens: Sequence[int]) -> bool:
        return bool(decode(tokens).replace(separator, "").strip())

    special, length = set(tokenizer.all_special_ids), len(token_ids)
    while length and token_ids[length - 1] in special:
        length -= 1
    window = 4 * len(separator)  # a character has up to four bytes, and a token at least one
    ends: list[int] = []
    start = blank = 0  # the tokens from `start` to `blank` have no content
    for index in range(length):
        if not may_complete(token_ids[index]):
            continue
        tail = token_ids[max(start, index + 1 - window) : index + 1]
        if decode(tail).count(separator) > decode(tail[:-1]).count(separator):
            if has_content(token_ids[blank : index + 1]):
                ends.append(index)
                start = index + 1
            blank = index + 1
    if has_content(token_ids[blank:length]):
        ends.append(length - 1)
    return ends
