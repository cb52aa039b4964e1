"""A reward model: a sequence classifier that scores whole groups and encodes their shared prefixes once."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import takewhile
from typing import Any

import torch
from torch import nn

from pl_grouprl.attention import find_decoder, shared_prefix
from pl_grouprl.attention.backends.choice import get_backend
from pl_grouprl.checks.model_introspection import check_causal, check_score_head
from pl_grouprl.models.loading import check_patterns
from pl_grouprl.models.policy import Dtype, PretrainedPolicy
from pl_grouprl.models.score import hidden_states
from pl_grouprl.models.sequence_classifier import is_sequence_classifier, score_head
from pl_grouprl.packing import Sharing, pack
from pl_grouprl.rewards.base import RewardConfigurationError
from pl_grouprl.types import Messages, Rollout, RolloutGroup
from pl_grouprl.utilities.arguments import checked_arguments
from pl_grouprl.utilities.describe import identity, is_plain
from pl_grouprl.utilities.memory import naming_memory

log = logging.getLogger(__name__)

_NEEDS_TOOLS = (
    "pass a tokenizer whose chat template renders tool calls and messages of the role `tool`, or a reward model that "
    "reads the policy's tokens (tokenizer=None)"
)


@checked_arguments
class ModelReward:
    """The score that a `...ForSequenceClassification` model gives to prompt and completion.

    Scores are the model's logits, read as transformers does, at the last token that is not the padding token. (Of
    a model whose padding token ends completions, that is the one before the end token.) That suits decoders; a model
    that reads its scores elsewhere, as encoders do, is found out by a short forward pass, and refused. The model is
    loaded when the run is set up, or at the first call, stays in evaluation mode and is never trained.

    Args:
        model: Name on the model hub or a local folder; or a transformers model, which is put into evaluation mode.
        label: Which of several labels is the reward. May be left out where the model has one.
        tokenizer: Name, folder or tokenizer of a reward model whose tokens are not the policy's. Messages and
            completion then go through its chat template, a string and its completion are encoded as one text. The
            template must be able to render the tool calls of an episode. None: the reward model reads the policy's own
            token ids.
        max_tokens_per_pass: Groups are put into one forward pass up to so many tokens, one group at least.
        sharing: `shared` encodes what the sequences of a group have in common once, `repeated` once per rollout.
        attention_backend: Attention over shared prefixes; see `pl_grouprl.attention.shared_prefix`.
        dtype: Of the weights as loaded from a folder or name; `auto` is the checkpoint's own. Autocast is off.
        device: Where the model runs. `auto`: this process's GPU where there is one, otherwise the CPU; a model that was
            passed stays where it is.
        attn_implementation: As in transformers.
        revision: Branch, tag or commit on the hub.
        trust_remote_code: Run model code that comes with the checkpoint. It can do anything on this machine.
        allow_mismatched_weights: As in `PretrainedPolicy`: weights that may be missing from the folder, unexpected or
            of another shape.

    Raises:
        FileNotFoundError: If `model` is a path that is no folder.
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
        if sharing not in ("shared", "repeated"):
            raise ValueError(f"ModelReward.sharing is {sharing!r}; pass 'shared' or 'repeated'.")
        if max_tokens_per_pass < 1:
            raise ValueError(f"ModelReward.max_tokens_per_pass is {max_tokens_per_pass}; it must be at least 1.")
        if label is not None and (isinstance(label, bool) or not isinstance(label, int) or label < 0):
            raise ValueError(f"ModelReward.label is {label!r}; pass the number of a label, counted from 0.")
        check_patterns(allow_mismatched_weights, "ModelReward")
        _check_types(model, tokenizer)
        get_backend(attention_backend, "attention_backend")  # an unknown name is an error here, not at the first reward
        self.model = model
        self.label = label
        self.tokenizer = tokenizer
        self.max_tokens_per_pass = max_tokens_per_pass
        self.sharing: Sharing = sharing
        self.attention_backend = attention_backend
        self.device = device
        self._checkpoint: PretrainedPolicy | None = None
        if isinstance(model, str):
            self._checkpoint = PretrainedPolicy(
                model,
                dtype,
                attn_implementation,
                revision=revision,
                trust_remote_code=trust_remote_code,
                allow_mismatched_weights=tuple(allow_mismatched_weights),
            )
        self._loaded: tuple[Any, Any, int] | None = None

    def __repr__(self) -> str:
        return f"ModelReward({self.model!r})" if self._checkpoint else f"ModelReward({type(self.model).__name__})"

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is loaded again at the first call."""
        return vars(self) | {"_loaded": None}

    def __call__(self, groups: Sequence[RolloutGroup]) -> list[list[float | None]]:
        """Same as `score_groups`."""
        return self.score_groups(groups)

    def set_up(self) -> None:
        """Load the model now rather than at the first call.

        Raises:
            RewardConfigurationError: If it cannot be loaded, is no sequence classifier whose score is read at the last
                token, cannot share prefixes, or its label is not settled.
        """
        self._load()

    @torch.no_grad()
    def score_groups(self, groups: Sequence[RolloutGroup]) -> list[list[float | None]]:
        """Score every rollout.

        Args:
            groups: Prompts with their rollouts; they are left as they are.

        Returns:
            For each group one number per rollout.

        Raises:
            RewardConfigurationError: As `set_up` does; also if the model does not know a token, or its chat template
                leaves tool calls out.
            ValueError: If it has another tokenizer than the policy, and a text is missing, prompt and completion have
                no token, or its chat template refuses an episode.
        """
        model, tokenizer, label = self._load()
        pad = model.config.get_text_config().pad_token_id
        sequences = [
            _without_padding(sequence, pad) for group in groups for sequence in _encode_group(group, tokenizer, self)
        ]
        forest = _regroup(sequences, [len(group.rollouts) for group in groups])
        scores: list[float | None] = []
        for part in _passes(forest, self.sharing, self.max_tokens_per_pass):
            scores += self._score_pass(model, label, part)
        remaining = iter(scores)
        return [[next(remaining) for _ in group.rollouts] for group in groups]

    def run_options(self) -> dict[str, Any]:
        """What decides its rewards; the other options only change their cost."""
        parts = {"model": self.model, "label": self.label, "tokenizer": self.tokenizer}
        return {name: part if is_plain(part) else identity(type(part)) for name, part in parts.items()}

    def _score_pass(self, model: Any, label: int, groups: list[RolloutGroup]) -> list[float]:
        batch = pack(groups, self.sharing, device=model.device)
        largest, known = int(batch.model_inputs["input_ids"].max()), model.get_input_embeddings().num_embeddings
        if largest >= known:
            raise RewardConfigurationError(
                f"{self!r} has embeddings for {known} tokens and was given token {largest}; its tokens are not the "
                "policy's, so pass its own tokenizer: ModelReward(..., tokenizer=...)."
            )
        context = nullcontext() if self.sharing == "repeated" else shared_prefix(model, self.attention_backend)
        memory = naming_memory(
            f"a pass of ModelReward with max_tokens_per_pass={self.max_tokens_per_pass}",
            "lower it, or put the reward model on another device (device)",
        )
        with memory, torch.autocast(model.device.type, enabled=False), context:
            states_BD = hidden_states(model, batch).index_select(0, batch.final_index_B)
            return score_head(model)(states_BD)[:, label].float().tolist()

    def _load(self) -> tuple[Any, Any, int]:
        """Load model and tokenizer at the first call; return them and the label."""
        if self._loaded is None:
            try:
                model = self._load_model().eval()
                head = score_head(model)
                label = self._settle_label(model)
                self._check_model(model, head)
                self._loaded = model, self._load_tokenizer(), label
            except (OSError, ValueError) as error:
                text = str(error)
                raise RewardConfigurationError(text if repr(self) in text else f"{self!r}: {text}") from error
            log.info("%r: %s on %s, sharing=%r.", self, type(model).__name__, model.device, self.sharing)
        return self._loaded

    def _check_model(self, model: Any, head: nn.Linear) -> None:
        if self.sharing == "shared":
            with shared_prefix(model, self.attention_backend):  # looks at the model, once
                pass
        check_score_head(model, head, repr(self))
        if self.sharing == "shared":
            check_causal(find_decoder(model), repr(self))

    def _load_model(self) -> Any:
        if self._checkpoint is None:
            return self.model if self.device == "auto" else self.model.to(self.device)
        if not is_sequence_classifier(self._checkpoint.load_config()):
            raise ValueError(
                f"{self!r} is not a sequence classifier, so it has no head that scores; pass a checkpoint of a "
                "...ForSequenceClassification model."
            )
        cuda = torch.cuda.is_available()
        device = ("cuda" if cuda else "cpu") if self.device == "auto" else self.device  # "cuda": this rank's
        return self._checkpoint.load_as("AutoModelForSequenceClassification").to(device)

    def _settle_label(self, model: Any) -> int:
        labels = model.config.num_labels
        label = 0 if self.label is None and labels == 1 else self.label
        if label is None or not 0 <= label < labels:
            raise ValueError(
                f"ModelReward.label is {self.label}, and {type(model).__name__} has {labels} labels; pass a label from "
                f"0 to {labels - 1}."
            )
        return label

    def _load_tokenizer(self) -> Any:
        if not isinstance(self.tokenizer, str):
            return self.tokenizer
        return PretrainedPolicy(self.tokenizer).load_tokenizer()


def _check_types(model: Any, tokenizer: Any) -> None:
    if not isinstance(model, str) and not (isinstance(model, nn.Module) and hasattr(model, "config")):
        raise TypeError(
            f"ModelReward.model is {model!r:.80} of type {type(model).__name__}; pass a name on the hub, a folder as a "
            "string, or a transformers model."
        )
    if tokenizer is not None and not isinstance(tokenizer, str) and not callable(tokenizer):
        raise TypeError(
            f"ModelReward.tokenizer is {tokenizer!r:.80} of type {type(tokenizer).__name__}; pass a name, a folder as "
            "a string, a tokenizer, or None for the policy's token ids."
        )


def _encode_group(group: RolloutGroup, tokenizer: Any, reward: ModelReward) -> Iterator[list[int]]:
    """Token ids of prompt and completion of each rollout, as the reward model reads them."""
    for rollout in group.rollouts:
        if tokenizer is None:
            yield group.prompt_ids + rollout.token_ids
            continue
        if rollout.text is None:
            raise ValueError(f"{reward!r} has a tokenizer of its own and Rollout.text is None; decode it first.")
        prompt = group.prompt if rollout.prompt is None else rollout.prompt
        if isinstance(prompt, str):
            ids = tokenizer(prompt + rollout.text)["input_ids"]
        elif rollout.messages is None:
            conversation = [*prompt, {"role": "assistant", "content": rollout.text}]
            ids = tokenizer.apply_chat_template(conversation, tokenize=True, return_dict=False)
        else:
            ids = _encode_episode([*prompt, *rollout.messages], tokenizer, reward)
        if not ids:
            raise ValueError(f"{reward!r}: prompt and completion have no token in its tokenizer; leave such rows out.")
        yield list(ids)


def _encode_episode(messages: Messages, tokenizer: Any, reward: ModelReward) -> list[int]:
    """Render an episode with a chat template.

    Raises:
        RewardConfigurationError: If the template leaves out calls or results of tools.
        ValueError: If it refuses this episode.
    """
    messages = [message | {"content": message.get("content") or ""} for message in messages]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False)
    except Exception as error:  # a template raises what it likes
        raise ValueError(f"{reward!r}: its chat template refuses an episode ({error}); {_NEEDS_TOOLS}.") from error
    called = [call.get("function", call)["name"] for message in messages for call in message.get("tool_calls") or ()]
    lost = [name for name in called if name not in text]
    lost += [message["content"] for message in messages if message["role"] == "tool" and not _shows(text, message)]
    if lost:
        raise RewardConfigurationError(
            f"{reward!r}: its chat template leaves {lost[0]!r:.80} out of an episode; {_NEEDS_TOOLS}."
        )
    return list(tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False))


def _shows(text: str, message: dict[str, Any]) -> bool:
    """Whether a rendering has a message's content, as it is or as JSON."""
    content = message["content"].strip()
    return content in text or json.dumps(content, ensure_ascii=False)[1:-1] in text or json.dumps(content)[1:-1] in text


def _without_padding(sequence: list[int], pad: int | None) -> list[int]:
    """Cut the padding tokens off the end; of nothing else the first remains, where transformers reads then."""
    stop = len(sequence)
    while stop > 1 and sequence[stop - 1] == pad:
        stop -= 1
    return sequence[:stop]


def _regroup(sequences: list[list[int]], sizes: list[int]) -> list[RolloutGroup]:
    """Groups of the same sequences in the same order, with all that they have in common as their prompt."""
    groups: list[RolloutGroup] = []
    start = 0
    for size in sizes:
        own = sequences[start : start + size]
        start += size
        if not own:
            continue
        shared = _common_length(own)
        if shared:
            groups.append(RolloutGroup(own[0][:shared], [Rollout(sequence[shared:]) for sequence in own]))
        else:
            groups += [RolloutGroup(sequence[:1], [Rollout(sequence[1:])]) for sequence in own]
    return groups


def _common_length(sequences: list[list[int]]) -> int:
    """Tokens from the start that all sequences have in common: those of the first and last in dictionary order."""
    first, last = min(sequences), max(sequences)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False)))


def _passes(groups: list[RolloutGroup], sharing: Sharing, budget: int) -> Iterator[list[RolloutGroup]]:
    """Divide groups, in order, into passes of at most `budget` tokens run, or of one group."""
    part: list[RolloutGroup] = []
    for group in groups:
        if part and _tokens_run([*part, group], sharing) > budget:
            yield part
            part = []
        part.append(group)
    if part:
        yield part


def _tokens_run(groups: list[RolloutGroup], sharing: Sharing) -> int:
    if sharing == "shared":
        return sum(len(group.prompt_ids) + sum(len(r.token_ids) for r in group.rollouts) for group in groups)
    lengths = [len(group.prompt_ids) + len(rollout.token_ids) for group in groups for rollout in group.rollouts]
    return len(lengths) * max(lengths)
