"""A reward model: a sequence classifier that scores whole groups, encoding shared prefixes once."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Any

import torch

from pl_grouprl.chat.control_tokens import ControlTokens, tokens_around
from pl_grouprl.models.policy import Dtype
from pl_grouprl.models.sequence_classifier import score_head
from pl_grouprl.packing import Sharing
from pl_grouprl.rewards.base import RewardConfigurationError
from pl_grouprl.rewards.frozen_model import FrozenModel, check_label, check_tokenizer, load_tokenizer
from pl_grouprl.types import Messages, Rollout, RolloutGroup
from pl_grouprl.utilities.arguments import checked_arguments
from pl_grouprl.utilities.describe import identity, is_plain

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
