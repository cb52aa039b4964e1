"""Encodes prompts in batches of similar length, each once; prompts that extend kept sequences start where these ended.

Shapes: P prompts of a batch, S positions, V vocabulary.

Prompts come sorted by length. Prompts of similar length share a batch, padded on the left to end in the same column;
equal lengths need neither padding nor a mask. Models with stateful layers get prompts of one length only, as padding
would change the state. Prompts with images or videos are encoded one by one.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from pl_grouprl.attention.support import find_decoder, selects_tokens, takes_positions
from pl_grouprl.media.inputs import media_inputs, placeholder_ids
from pl_grouprl.models.router_replay import RouterReplay
from pl_grouprl.rollout.engine import SampleRequest
from pl_grouprl.rollout.hf.attention import PromptLayer, PromptWindow, keeps_more_than_keys, new_cache
from pl_grouprl.rollout.hf.kept import (
    EncodedPrompt,
    KeptSequence,
    filled,
    gather_layer,
    gather_rows,
    is_empty,
    with_prompt,
)
from pl_grouprl.utilities import internals

PAD = 0
"""Left padding. Masked, so any token works."""

MAX_PADDING = 1 / 8
"""Prompts of a batch may be longer than its shortest one by at most this fraction."""

MAX_REPEATED = 16
"""Cached tokens per sequence that may be rerun to share a forward pass: about the cost of a pass."""


class NextTokenLogits:
    """Calls a decoder with a cache for the next token's logits, omitting arguments that it does not take.

    Placeholders of images and videos get the logit -inf, because in a completion they would refer to missing images.

    Args:
        model: A transformers decoder with a language-model head.
        routers: An open context of the model, which records the experts of all tokens; None records nothing.

    Attributes:
        routed_experts: Experts of the latest call's tokens, int16, shape [B, S, mixtures, experts per token].
    """

    def __init__(self, model: Any, routers: RouterReplay | None = None) -> None:
        self.model, self.routers = model, routers
        self.routed_experts: Tensor | None = None
        self.device = next(model.parameters()).device
        parameters = inspect.signature(model.forward).parameters
        takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
        self._optional = {name for name in ("position_ids", "logits_to_keep") if takes_any or name in parameters}
        self._cache = cache_argument(model)
        self._never: Tensor | None = None

    def __call__(
        self,
        input_ids_BS: Tensor,
        cache: Cache,
        position_ids_BS: Tensor,
        mask_BS: Tensor | None,
        media: dict[str, Tensor] | None = None,
    ) -> Tensor:
        """Append tokens to the cache.

        Args:
            input_ids_BS: Tokens that are not in the cache yet.
            cache: Extended by these tokens.
            position_ids_BS: Position of each token in its sequence; [3, B, S] for models with three per token.
            mask_BS: 1 for real tokens and 0 for padding, over the cache and the new tokens; None without padding.
            media: Images and videos of the tokens' placeholders, by the model's keywords.

        Returns:
            Logits after the last token, shape [B, V], in the model's dtype.
        """
        optional = {"position_ids": position_ids_BS, "logits_to_keep": 1}
        with nullcontext() if self.routers is None else self.routers.recording() as recorded:
            output = self.model(
                input_ids=input_ids_BS,
                attention_mask=mask_BS,
                use_cache=True,
                **{self._cache: cache},
                **{name: value for name, value in optional.items() if name in self._optional},
                **(media or {}),
            )
        if recorded is not None:
            self.routed_experts = recorded().unflatten(0, input_ids_BS.shape)
        logits_BV = output.logits[:, -1]
        if self._never is None:  # created once, because copying to a device is slow
            known = [token for token in placeholder_ids(self.model).values() if token < logits_BV.shape[-1]]
            self._never = torch.tensor(known, dtype=torch.int64, device=logits_BV.device)
        return logits_BV.index_fill(-1, self._never, -math.inf) if len(self._never) else logits_BV


def cache_argument(model: Any) -> str:
    """The keyword of a model's cache.

    Raises:
        ValueError: If it takes none.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model  # PEFT passes on any argument
    name = internals.cache_argument(type(base).forward)
    if name is None:
        raise ValueError(f"HFRolloutEngine decodes with a cache, but {type(model).__name__} takes none.")
    return name


def allows_padding(model: Any, longest: int) -> bool:
    """Whether prompts of different lengths can be batched.

    They cannot if the model counts positions itself, or a layer counts columns: a layer that scales queries by them
    (`counts_padding`), or that keeps an index of the tokens and does not select by the attention mask (MiniMax M3's
    blocks). Models that bias scores by distance read it from the attention mask, and need no positions.

    Args:
        model: A transformers decoder.
        longest: Length of the longest prompt plus completion.
    """
    decoder = find_decoder(model)
    by_distance = model.config.model_type in ("bloom", "mpt") or bool(getattr(model.config, "alibi", False))
    heeds_mask = not keeps_more_than_keys(model) or selects_tokens(decoder)
    return heeds_mask and not counts_padding(model, longest) and (takes_positions(decoder) or by_distance)


def counts_padding(model: Any, longest: int) -> bool:
    """Whether a layer counts columns, padding included, so only prompts of equal length can be batched.

    Llama 4's layers without rotary embedding scale queries by their column, beyond some column.

    Args:
        model: A transformers decoder.
        longest: Length of the longest prompt plus completion.
    """
    config = model.config.get_text_config(decoder=True)
    tuned = bool(getattr(config, "attn_temperature_tuning", False)) and 0 in (config.no_rope_layers or ())
    return tuned and longest >= config.floor_scale


@dataclass
class Prefix:
    """Prompts that were encoded together.

    Attributes:
        cache: The model's cache, rows right-aligned. Layers with full attention have only the tokens after the shared
            prompts, if these are stored apart.
        logits_PV: Logits of the completions' first token.
        lengths: Tokens of each prompt.
        positions: First position of each prompt's completions: after the prompt's largest position, which is less than
            its length if patches of an image share positions.
        shared: The part of each prompt that sequences may share: all of it, unless it continues a kept sequence that
            shares one.
        routed_experts: The experts of each prompt's tokens, on the CPU; None if they are not recorded.
    """

    cache: Cache
    logits_PV: Tensor
    lengths: list[int]
    positions: list[int]
    shared: list[EncodedPrompt]
    routed_experts: list[Tensor] | None = None

    @property
    def width(self) -> int:
        """The length of the longest prompt."""
        return max(self.lengths)

    def prompt_states(self, index: int, row: int) -> tuple[Tensor, Tensor]:
        """Keys and values [T, K, H] of a row's shared prompt in a layer with full attention; views."""
        prompt, layer = self.shared[row], cast(Any, self.cache.layers[index])
        if prompt.states:
            return prompt.states[index]  # type: ignore[return-value]
        keys, values = (
            states[row, :, states.shape[2] - prompt.length :].transpose(0, 1) for states in (layer.keys, layer.values)
        )
        return keys, values

    def whole_rows(self, index: int, rows: Sequence[int]) -> list[tuple[Any, Tensor]]:
        """Layers and the rows to take from each for `rows`, prompts included."""
        layer: Any = self.cache.layers[index]
        device = self.logits_PV.device
        if type(layer) is not PromptLayer or not any(self.shared[row].states for row in rows):
            return [(layer, torch.tensor(rows, device=device))]
        zero = torch.zeros(1, dtype=torch.int64, device=device)
        return [(with_prompt(layer, row, self.lengths[row], self.prompt_states(index, row)), zero) for row in rows]


def left_padding_mask(lengths: Sequence[int], width: int, device: torch.device) -> Tensor | None:
    """Mask of real tokens, int64 [P, S] with S = width; None if every prompt fills the width."""
    if min(lengths) == width:
        return None
    columns = torch.arange(width, device=device)
    return (columns >= width - torch.tensor(lengths, device=device).unsqueeze(-1)).long()


def why_not_shared(cache: Cache) -> str | None:
    """Why rows of an encoded cache cannot be decoded by `StaticBatch`; None if they can."""
    layers: list[Any] = cache.layers
    for index, layer in enumerate(layers):
        name = type(layer).__name__
        if isinstance(layer, PromptLayer):
            if not layer.read_plainly:
                return f"layer {index} attends by more than a mask that is causal, a window or chunks"
        elif name != "LinearAttentionLayer" and not is_empty(layer):
            return f"layer {index} caches its state as {name}"
    return None if any(isinstance(layer, PromptLayer) for layer in layers) else "no layer caches keys"


def prefill(logits: NextTokenLogits, prompts: Sequence[SampleRequest]) -> Prefix:
    """Encode prompts in one forward pass; only the last position reaches the language-model head.

    Args:
        logits: The model.
        prompts: Prompts of any length; a single one if it has media.
    """
    lengths = [len(prompt.token_ids) for prompt in prompts]
    width, device = max(lengths), logits.device
    rows = [[PAD] * (width - len(prompt.token_ids)) + list(prompt.token_ids) for prompt in prompts]
    input_ids = torch.tensor(rows, device=device)
    mask = left_padding_mask(lengths, width, device)
    if mask is None:
        position_ids = torch.arange(width, device=device).expand(len(prompts), -1)
    else:
        position_ids = (mask.cumsum(dim=-1) - 1).clamp(min=0)
    cache, media, following = new_cache(logits.model), None, lengths
    if prompts[0].media:
        media, positions = media_inputs(logits.model, prompts[0].token_ids, prompts[0].media)
        if positions is not None:
            position_ids, following = positions.position_ids.to(device), positions.next_position_S.tolist()
    logits_PV = logits(input_ids, cache, position_ids, mask, media)
    shared = [EncodedPrompt(length) for length in lengths]
    return Prefix(cache, logits_PV, lengths, following, shared, _last_experts(logits, lengths))


def continue_sequences(
    logits: NextTokenLogits, prompts: Sequence[SampleRequest], kept: Sequence[KeptSequence]
) -> Prefix:
    """Encode prompts that extend kept sequences, in one forward pass over whole rows, shared prompts included.

    There is no padding between cached and new tokens, because windows and linear attention could not skip it. So each
    sequence runs as many tokens as the one with the most new ones; the others rerun some cached tokens.

    Args:
        logits: The model.
        prompts: Prompts without media; a batch of `plan_continuing`.
        kept: The sequence that each continues.
    """
    lengths, device = [len(prompt.token_ids) for prompt in prompts], logits.device
    new = max(length - sequence.num_tokens for length, sequence in zip(lengths, kept, strict=True))
    cached = [length - new for length in lengths]
    cut = [sequence.cut(count) for sequence, count in zip(kept, cached, strict=True)]
    rows = [sequence for sequence in cut if sequence is not None]
    width, zero = max(cached), torch.zeros(1, dtype=torch.int64, device=device)
    cache = new_cache(logits.model)
    layers: list[Any] = cache.layers
    for index, layer in enumerate(layers):
        parts = [(row.whole(index), zero) for row in rows]
        if isinstance(layer, PromptLayer):
            held = max(part.keys.shape[2] for part, _ in parts)
            states = [
                gather_rows([(getattr(part, name), row) for part, row in parts], held, held)
                for name in ("keys", "values")
            ]
            filled(layer, states, width if isinstance(layer, PromptWindow) else None)
        else:
            layers[index] = gather_layer(index, parts, width)
    del parts
    input_ids = torch.tensor([list(prompt.token_ids[-new:]) for prompt in prompts], device=device)
    position_ids = torch.tensor(cached, device=device).unsqueeze(-1) + torch.arange(new, device=device)
    logits_PV = logits(input_ids, cache, position_ids, left_padding_mask(lengths, width + new, device))
    shared = [row.prompt or EncodedPrompt(length) for row, length in zip(rows, lengths, strict=True)]
    if any(row.prompt is None for row in rows) or why_not_shared(cache) is not None:
        shared = [EncodedPrompt(length) for length in lengths]
    else:  # only what follows the shared prompts is needed
        most = max(length - prompt.length for length, prompt in zip(lengths, shared, strict=True))
        for layer in layers:
            if type(layer) is PromptLayer:
                layer.keys, layer.values = layer.keys[:, :, -most:].clone(), layer.values[:, :, -most:].clone()
    experts = _last_experts(logits, [new] * len(lengths))
    if experts is not None:
        before = [row.routed_experts for row in rows]
        experts = [torch.cat([old, own]) for old, own in zip(before, experts, strict=True) if old is not None]
    return Prefix(cache, logits_PV, lengths, lengths, shared, experts)


def _last_experts(logits: NextTokenLogits, lengths: Sequence[int]) -> list[Tensor] | None:
    """The experts of the last tokens of each row in the latest call; None if they are not recorded."""
    if logits.routed_experts is None:
        return None
    return [row[len(row) - length :] for row, length in zip(logits.routed_experts.cpu(), lengths, strict=True)]


def plan_prefill(prompts: Sequence[SampleRequest], max_tokens: int, *, max_padding: float = MAX_PADDING) -> list[range]:
    """Split prompts, sorted by length, into batches.

    Args:
        prompts: Prompts by ascending length. One with media gets a separate batch.
        max_tokens: Maximum number of tokens of a batch, including padding. A longer prompt gets a separate batch.
        max_padding: How much longer the longest prompt of a batch may be than its shortest, as a fraction.

    Returns:
        The consecutive indices of each batch.
    """

    def fits(first: int, last: int) -> bool:
        shortest, length = len(prompts[first].token_ids), len(prompts[last].token_ids)
        few = (last + 1 - first) * length <= max_tokens
        return few and length <= shortest * (1 + max_padding) and not (prompts[first].media or prompts[last].media)

    return _plan_batches(len(prompts), fits)


def plan_continuing(
    lengths: Sequence[int], kept: Sequence[KeptSequence], max_tokens: int, *, padding: bool = True
) -> list[range]:
    """Split prompts that continue kept sequences into batches.

    If a layer cannot drop cached tokens, all sequences of a batch have the same number of new tokens. Sequences that
    share a prompt share a batch with none that does not.

    Args:
        lengths: Tokens of each prompt, sorted by the number of new ones, then by length.
        kept: The sequence that each continues.
        max_tokens: Maximum number of tokens of a batch, cached ones included; a prompt with more gets a separate batch.
        padding: Whether prompts of different lengths may share a forward pass.

    Returns:
        The consecutive indices of each batch.
    """
    new = [length - sequence.num_tokens for length, sequence in zip(lengths, kept, strict=True)]

    def fits(first: int, last: int) -> bool:
        if (last + 1 - first) * max(lengths[first : last + 1]) > max_tokens or (kept[first].prompt is None) != (
            kept[last].prompt is None
        ):
            return False
        if not padding and lengths[first] != lengths[last]:
            return False
        max_repeated = max(MAX_REPEATED, MAX_PADDING * new[first]) if padding else 0
        return new[last] - new[first] <= max_repeated and all(
            new[last] - new[index] <= kept[index].num_removable for index in range(first, last)
        )

    return _plan_batches(len(lengths), fits)


def _plan_batches(count: int, fits: Callable[[int, int], bool]) -> list[range]:
    """Split `count` prompts into consecutive batches, each as long as its first and last prompt `fits` together."""
    batches, start = [], 0
    for index in range(1, count):
        if not fits(start, index):
            batches.append(range(start, index))
            start = index
    return [*batches, range(start, count)] if count else []


class PromptEncoder:
    """Encodes the prompts of a call on first use, and frees them after their last.

    Args:
        logits: The model.
        prompts: Distinct prompts: first the prompts that continue nothing, sorted by length, then the others, sorted by
            the number of tokens to run, then by length.
        max_tokens: Maximum number of tokens of a forward pass.
        kept: The sequence that each prompt continues, or None if it is encoded from the start.
        padding: Whether prompts of different lengths may share a forward pass.

    Attributes:
        batches: Consecutive indices of the prompts that are encoded together.
    """

    def __init__(
        self,
        logits: NextTokenLogits,
        prompts: Sequence[SampleRequest],
        max_tokens: int,
        *,
        kept: Sequence[KeptSequence | None] = (),
        padding: bool = True,
    ) -> None:
        self._logits, self._prompts = logits, prompts
        continued = [sequence for sequence in kept if sequence is not None]
        fresh = len(prompts) - len(continued)
        self._kept, self._ready = dict(enumerate(continued, start=fresh)), dict[int, Prefix]()
        has_states = any(type(layer).__name__.startswith("LinearAttention") for layer in new_cache(logits.model).layers)
        max_padding = MAX_PADDING if padding and not has_states else 0.0
        lengths = [len(prompt.token_ids) for prompt in prompts[fresh:]]
        continuing = plan_continuing(lengths, continued, max_tokens, padding=padding)
        self.batches = [
            *plan_prefill(prompts[:fresh], max_tokens, max_padding=max_padding),
            *(range(batch.start + fresh, batch.stop + fresh) for batch in continuing),
        ]

    def select(self, wanted: Sequence[int], needed_later: int) -> list[tuple[Prefix, list[int]]]:
        """Fetch prompts for a decode batch.

        Args:
            wanted: Prompt index of each sequence, ascending, with repetition.
            needed_later: The first prompt that later calls will need.

        Returns:
            Batches of encoded prompts, each with the row of every sequence in it; together in the order of `wanted`.
        """
        parts = []
        for number, batch in enumerate(self.batches):
            rows = [index - batch.start for index in wanted if index in batch]
            if rows:
                if number not in self._ready:
                    prompts = self._prompts[batch.start : batch.stop]
                    kept = [self._kept.pop(index) for index in batch if index in self._kept]
                    self._ready[number] = (
                        continue_sequences(self._logits, prompts, kept) if kept else prefill(self._logits, prompts)
                    )
                parts.append((self._ready[number], rows))
            if batch.stop <= needed_later:
                self._ready.pop(number, None)
        return parts
