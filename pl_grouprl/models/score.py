"""Scores rollouts: log-probabilities and related quantities per response token, encoding each shared prefix once.

`run_decoder` runs the decoder on a packed batch, `hidden_states` adds what a slice of a group continues, and `score`
runs the head on the states that predict response tokens. `PrefixPass` runs a group that is larger than a micro-batch
in parts.

Legend: B rollouts, L longest row, T packed tokens, N response tokens of all rollouts, concatenated, D hidden size,
V vocabulary, E experts, P tokens of a path (a prompt and the branches below it), K response tokens of that path,
S tokens of a slice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pl_grouprl.attention import find_backbone, find_decoder, in_force, shared_prefix, sharing_paused
from pl_grouprl.attention.backends.choice import get_backend
from pl_grouprl.attention.backends.saved import checkpointing_of
from pl_grouprl.attention.call import Leaf, Name, Prefilled, PrefixStates, RowShards, States
from pl_grouprl.attention.support import has_dynamic_rope, why_not_balanced
from pl_grouprl.functional.logprobs import TokenScores, token_scores
from pl_grouprl.functional.losses import load_balancing_loss
from pl_grouprl.functional.softmax import HeadSketch
from pl_grouprl.media.inputs import check_batch_media, media_position_ids
from pl_grouprl.models.adapters import adapter_layers
from pl_grouprl.models.router_replay import NOT_RECORDED, open_replay
from pl_grouprl.packing import ScoringBatch, Sharing, pack
from pl_grouprl.packing.batch import pack_branch
from pl_grouprl.types import Rollout, RolloutGroup

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def run_decoder(model: PreTrainedModel, batch: ScoringBatch, **more: Any) -> Tensor:
    """Run the decoder on the tokens of a batch, without the states of `batch.prefix`; see `hidden_states`.

    Further keyword arguments are the decoder's.
    """
    inputs = batch.model_inputs | more
    if batch.sequence_group is not None:
        if batch.sharing != "shared":
            raise ValueError(f"several ranks cannot run a batch with sharing={batch.sharing!r} together; use 'shared'.")
        inputs = inputs | {"sequence_group": batch.sequence_group}
    if batch.media or (batch.prefix is not None and batch.prefix.batch.media):
        check_batch_media(model, batch)
        positions = media_position_ids(model, batch)
        inputs = inputs if positions is None else inputs | {"position_ids": positions}
    # Otherwise an active context would detect that the rows of a repeated batch share their prompts.
    with sharing_paused(model), _replaying_experts(model, batch):
        hidden = find_backbone(model)(**inputs, use_cache=False, return_dict=True).last_hidden_state
    return hidden.flatten(0, 1)


def _replaying_experts(model: PreTrainedModel, batch: ScoringBatch) -> AbstractContextManager[None]:
    """Replay the batch's experts in an open `RouterReplay`; not in a policy whose adapters are off, the reference."""
    replay, record = open_replay(model), batch.routed_experts
    if replay is None or record is None or any(layer.disable_adapters for layer in adapter_layers(model)):
        return nullcontext()
    if batch.sequence_group is not None:  # this rank's tokens
        shards = RowShards(batch.sequence_group, len(record))
        padding = record.new_full((shards.num_padding, *record.shape[1:]), NOT_RECORDED)
        record = torch.cat([record, padding])[shards.own_tokens]
    return replay.replaying(record)


def hidden_states(model: PreTrainedModel, batch: ScoringBatch) -> Tensor:
    """Run the decoder and return the hidden states of all positions, rows concatenated, shape [B * L, D].

    A batch with shared prefixes is one row, so [T, D]. The batch's indices (`predict_index_N`, `final_index_B`) point
    into the result. Images and videos are encoded in the same call.

    A slice of a group (`packing.batch.pack_slice`) continues the path of `batch.prefix`, running it first if needed,
    and gives [1 + K + S, D]: the prompt's last position, the path's response tokens, then the slice.

    Args:
        model: A decoder, with or without a head, or a model that contains one.
        batch: Result of `packing.pack`, on the model's device.

    Raises:
        RuntimeError: If the batch has shared prefixes and no `shared_prefix(model)` is active: the model would ignore
            the layout.
        ValueError: If the batch's images and videos do not fit the model; see `media.inputs.check_batch_media`.
    """
    if batch.sharing == "shared" and in_force(model) is None:
        name = type(model).__name__
        raise RuntimeError(
            f"{name} would ignore the layout of the batch; score it inside `with shared_prefix(model):`."
        )
    return run_decoder(model, batch) if batch.prefix is None else batch.prefix.hidden_states(model, batch)


def score(
    model: PreTrainedModel,
    batch: ScoringBatch,
    *,
    temperature: float = 1.0,
    chunk_size: int = 512,
    entropy: bool = False,
    entropy_grad: bool = False,
    score_norm: bool = False,
    sketch: HeadSketch | None = None,
    states: Tensor | None = None,
) -> TokenScores:
    """Score the response tokens of a batch in one pass, without materializing all logits.

    The head runs only on hidden states that predict response tokens: in blocks of the vocabulary if it is a plain
    matrix, otherwise in chunks of `chunk_size` tokens; see `token_scores`.

    Args:
        model: A causal language model. A batch with shared prefixes needs `shared_prefix(model)` to be active until
            the backward pass is done.
        batch: Result of `packing.pack`, on the model's device.
        temperature: Divides the logits; use the sampler's.
        chunk_size: Maximum number of tokens with logits in memory at a time.
        entropy: Also return the entropy of each distribution.
        entropy_grad: Let gradients flow through the entropy.
        score_norm: Also return the squared norm of the log-probability's gradient with respect to the logits.
        sketch: Also return this sketch of the log-probability's gradient with respect to the head's weights.
        states: Result of `hidden_states(model, batch)`, if the decoder has already run.

    Returns:
        Tensors of shape [N], in the order of the batch's targets.
    """
    if states is None:
        states = hidden_states(model, batch)
    predict_M, targets_M = batch.predict_index_N, batch.targets_N
    if batch.shared_tokens is not None:  # what rollouts have in common meets the head once, too
        predict_M, targets_M = predict_M[batch.shared_tokens.distinct_M], targets_M[batch.shared_tokens.distinct_M]
    scores = token_scores(
        states.index_select(0, predict_M),
        targets_M,
        logits_function(model),
        temperature=temperature,
        chunk_size=chunk_size,
        entropy=entropy,
        entropy_grad=entropy_grad,
        score_norm=score_norm,
        sketch=sketch,
        weight_VD=plain_weight(model, states.dtype),
    )
    return scores if batch.shared_tokens is None else scores.select(batch.shared_tokens.index_N)


def rollout_logprobs(
    model: PreTrainedModel,
    groups: Sequence[RolloutGroup],
    *,
    sharing: Sharing = "shared",
    temperature: float = 1.0,
    backend: str = "auto",
    chunk_size: int = 512,
) -> list[Tensor]:
    """Log-probability of every token of every rollout, given its prompt and earlier tokens.

    Args:
        model: A causal language model. Its mode (train or eval) does not change.
        groups: Prompts with their rollouts, of any number and length.
        sharing: `shared` encodes each prompt once, `repeated` once per rollout in a padded batch.
        temperature: Divides the logits.
        backend: Attention backend for shared prefixes; see `shared_prefix`.
        chunk_size: Maximum number of tokens with logits in memory at a time.

    Returns:
        One tensor of shape [tokens] per rollout, group by group in the caller's order, in float32 (float64 for a
        float64 model); with gradient if enabled.

    Raises:
        UnsupportedModelError: If the model cannot share prefixes.
        RuntimeError: If activation checkpointing would recompute the forward after the patch is removed.
    """
    least = get_backend(backend).min_saved_tokens  # fails early if unknown, even with repeated prefixes
    batch = pack(groups, sharing, min_saved_tokens=least, device=model.device)
    options: dict[str, Any] = {"temperature": temperature, "chunk_size": chunk_size}
    if sharing == "repeated":
        return list(score(model, batch, **options).logprobs_N.split(batch.rollout_lengths))
    if _recomputes(model) and torch.is_grad_enabled() and in_force(model) is None:
        raise RuntimeError("with activation checkpointing, put forward and backward into `with shared_prefix(model):`.")
    with shared_prefix(model, backend):
        return list(score(model, batch, **options).logprobs_N.split(batch.rollout_lengths))


def _recomputes(model: PreTrainedModel) -> bool:
    """Whether activation checkpointing runs layers again in the backward pass."""
    return model.training and bool(checkpointing_of(model))


# The head: from hidden states to logits, with the model's own code.

_LINEAR = nn.Linear.forward  # some libraries replace it


def logits_function(model: PreTrainedModel) -> Callable[[Tensor], Tensor]:
    """Return hidden states [N, D] -> logits [N, V], as the model computes them from its decoder's output.

    Runs the model's own forward with its decoder bypassed, so everything between decoder and logits is included: soft
    caps, scales, biases. Does not run the model's hooks: hooks that gather sharded weights already ran with the
    decoder, and would deadlock if ranks have different numbers of chunks.
    """
    decoder = find_decoder(model)

    def logits(hidden_ND: Tensor) -> Tensor:
        output = _output_class()(last_hidden_state=hidden_ND[None])
        # Some libraries (accelerate) set `forward` on the instance.
        before = {name: value for name, value in vars(decoder).items() if name == "forward"}
        with sharing_paused(model):
            decoder.forward = lambda *args, **kwargs: output
            try:
                return model.forward(inputs_embeds=hidden_ND[None], use_cache=False, return_dict=True).logits[0]
            finally:
                del decoder.forward
                vars(decoder).update(before)

    return logits


@cache
def _output_class() -> Any:
    from transformers.modeling_outputs import BaseModelOutputWithPast

    class HiddenStatesAlone(BaseModelOutputWithPast):
        """Hidden states, with None for router logits, cross attentions and other outputs."""

        def __getattr__(self, name: str) -> None:
            if name.startswith("__"):
                raise AttributeError(name)

    return HiddenStatesAlone


def plain_weight(model: PreTrainedModel, dtype: torch.dtype) -> Tensor | None:
    """Return the head's weight, shape [V, D], if the model's logits are `hidden @ weight.T` and nothing else, or None.

    The head must be a plain `nn.Linear` (no adapter, quantized or sharded layer) without bias and hooks. A trial run of
    the model's forward, with decoder and head bypassed, shows whether it changes the head's input or output: both must
    be the same memory, unchanged.

    Args:
        model: A causal language model.
        dtype: Dtype of the hidden states; must be the weight's, except under autocast.
    """
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear or head.bias is not None or "forward" in vars(head):
        return None
    hooks = (head._forward_hooks, head._forward_pre_hooks, head._backward_hooks, head._backward_pre_hooks)
    if any(hooks) or nn.Linear.forward is not _LINEAR:
        return None
    weight = head.weight
    if type(weight) not in (nn.Parameter, Tensor) or weight.dim() != 2:
        return None
    if weight.dtype != dtype and not torch.is_autocast_enabled(weight.device.type):
        return None
    with torch.inference_mode(False), torch.no_grad():  # inference tensors have no version counter
        hidden_ND, logits_NV = weight.new_ones(2, weight.shape[1]), weight.new_ones(2, len(weight))
        versions = hidden_ND._version, logits_NV._version
        seen: list[Tensor] = []

        def forward(states: Tensor) -> Tensor:
            seen.append(states)
            return logits_NV[None]

        head.forward = forward  # type: ignore[method-assign,assignment]
        try:
            seen.append(logits_function(model)(hidden_ND))
        finally:
            del head.forward
    if len(seen) != 2 or versions != (hidden_ND._version, logits_NV._version):
        return None
    pairs = zip(seen, (hidden_ND[None], logits_NV), strict=True)
    same = all((a.data_ptr(), a.shape, a.stride()) == (b.data_ptr(), b.shape, b.stride()) for a, b in pairs)
    return weight if same else None


# Runs a group larger than a micro-batch in parts: the prompt once, then slices of rollouts that continue it.
#
# One forward of the prompt records tensors in every layer (`attention.call.PrefixStates`). They are detached from their
# graph, so each slice of rollouts runs its own backward and adds to their gradients. A final backward propagates the
# sum through the prompt. Tokens that several rollouts share after the prompt may run as a branch, which is to its
# slices what the prompt is to the others. The gradients equal those of the whole group in one call, with the memory of
# one path and one slice.

_HIDDEN: Name = ("hidden",)


class PrefixPass:
    """One pass over a group's prompt, or over a branch after it, in each model that scores the slices below.

    Valid for one set of weights: create a new one after an optimizer step.

    Args:
        group: The group; its rollouts are not read.
        device: Device of the models.
        sequence_group: The ranks that run the prompt and each slice together; see `ScoringBatch`. Each then holds the
            states of its own heads.

    Attributes:
        num_tokens: P.
        batch: The prompt or the branch, without the path above it.
    """

    def __init__(self, group: RolloutGroup, device: torch.device | str, sequence_group: Any = None) -> None:
        self.num_tokens = len(group.prompt_ids)
        prompt = pack([replace(group, rollouts=[Rollout([])])], device=device)
        self.batch = replace(prompt, sequence_group=sequence_group)
        self._above: tuple[PrefixPass, ...] = ()  # the prompt's first
        self._own_ids: list[int] = group.prompt_ids
        self._done: dict[tuple[Any, ...], Prefix] = {}
        self._counted = False

    def branch(self, token_ids: Sequence[int], routed_experts: Tensor | None = None) -> PrefixPass:
        """Create the pass over response tokens that some of the rollouts share after this one.

        Its `loss` must run backward before this pass's.

        Args:
            token_ids: The tokens.
            routed_experts: Their experts; see `Rollout.routed_experts`.

        Raises:
            NotImplementedError: If the prompt has images or videos.
        """
        if self.batch.media:
            raise NotImplementedError("a branch cannot run by itself after a prompt with images or videos.")
        below = copy(self)
        below.num_tokens, below._own_ids = self.num_tokens + len(token_ids), list(token_ids)
        below.batch = pack_branch(token_ids, self, self.batch.targets_N.device, routed_experts)
        below._above, below._done, below._counted = (*self._above, self), {}, False
        return below

    @property
    def path_ids(self) -> list[int]:
        """The K response tokens of the path. A rollout below begins with them, or is a prefix of them."""
        return [token for one in (*self._above, self)[1:] for token in one._own_ids]

    def count_once(self) -> int:
        """Number of the path's tokens that no earlier call has counted, here or above, for sums over slices."""
        uncounted = [one for one in (*self._above, self) if not one._counted]
        for one in uncounted:
            one._counted = True
        return sum(len(one._own_ids) for one in uncounted)

    def states(self, model: PreTrainedModel) -> Prefix:
        """Return the states of the path in a model. The first call runs it, with gradient if enabled.

        States with and without gradient, and with and without adapters, are cached separately.

        Args:
            model: A model in a `shared_prefix` context.

        Raises:
            NotImplementedError: If the model cannot run a group in slices.
            ValueError: If the prompt's images and videos do not fit the model.
        """
        switched_off = any(layer.disable_adapters for layer in adapter_layers(model))
        key = (find_backbone(model), torch.is_grad_enabled(), switched_off)
        path_down, found = (*self._above, self), None
        done = [number for number, one in enumerate(path_down) if key in one._done]
        if done:
            found = path_down[done[-1]]._done[key]
        missing = path_down[done[-1] + 1 :] if done else path_down
        if missing and has_dynamic_rope(find_decoder(model)):
            raise NotImplementedError(
                f"{type(model).__name__} has rotary frequencies that depend on the longest sequence of a call, so its "
                "groups cannot be split; use a larger token budget."
            )
        for one in missing:
            path = () if found is None else found.path
            recorder = PrefixStates(path, record=True, recomputes=_recomputes(model))
            hidden = run_decoder(model, one.batch, prefix_states=recorder)
            backbone, own = find_backbone(model), {_HIDDEN: Leaf(hidden if path else hidden[-1:])}
            states: States = {backbone: own, **recorder.pop_all()}
            leaves = [leaf for part in states.values() for leaf in part.values() if leaf.recorded.requires_grad]
            found = one._done[key] = Prefix((*path, states), backbone, leaves)
        assert found is not None
        return found

    def hidden_states(self, model: PreTrainedModel, batch: ScoringBatch) -> Tensor:
        """Run a slice; return the states of the prompt's last token, the path and the slice, shape [1 + K + S, D]."""
        prefix = self.states(model)
        states = PrefixStates(prefix.path, record=False, recomputes=_recomputes(model))
        hidden = run_decoder(model, batch, prefix_states=states)
        return Prefilled(prefix.path, prefix.backbone, _HIDDEN).join(hidden)

    def loss(self, parameters: Iterable[nn.Parameter] = (), *, loss_scale: float = 1.0) -> Tensor:
        """A zero whose backward propagates the gradients that slices left, through every model that ran this pass.

        Call it once, after the backward of all slices; it drops the states. A model in which no slice ran backward gets
        zero gradients, so that collectives of sharded weights match across ranks.

        Args:
            parameters: Parameters that must have a gradient; it is zero if they get no other.
            loss_scale: The gradient scaler's factor, which the slices' gradients already include; set it if the scaler
                will also multiply this loss.

        Returns:
            A differentiable scalar, even if no model ran this pass with gradient.
        """
        done, self._done = self._done, {}
        zeros = []
        for leaves in [prefix.leaves for prefix in done.values() if prefix.leaves]:
            # Always include the first, the last layer's output, so that every layer runs backward with its collectives.
            used = [leaf for number, leaf in enumerate(leaves) if leaf.gradient is not None or number == 0]
            gradients, recorded = [leaf.gradient for leaf in used], [leaf.recorded for leaf in used]
            zeros.append(_Propagate.apply(gradients, loss_scale, *recorded))
        zeros += [0 * parameter.flatten()[:1].sum() for parameter in parameters]
        zeros.append(torch.zeros((), device=self.batch.targets_N.device, requires_grad=True))
        return torch.stack([zero.to(torch.float32) for zero in zeros]).sum()


@dataclass
class Prefix:
    """The states of a path in one model.

    Attributes:
        path: What slices read: the states of the prompt, then of each branch. With the states in each layer are the
            hidden states that predict the tokens of the path after the prompt, and the tokens that follow it: of the
            prompt's last token, then of each branch; together [1 + K, D].
        backbone: The module whose output they are.
        leaves: Those of the last part that depend on a trained parameter; slices leave their gradients there.
    """

    path: tuple[States, ...]
    backbone: nn.Module
    leaves: list[Leaf]


class _Propagate(torch.autograd.Function):
    """A zero with prescribed gradients. A sum of products would have the same ones, but a meaningless value."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor | None], loss_scale: float, *recorded: Tensor) -> Tensor:
        ctx.gradients, ctx.loss_scale = gradients, loss_scale
        ctx.like = [(tensor.shape, tensor.dtype, tensor.device) for tensor in recorded]
        return torch.zeros((), device=recorded[0].device)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        factor = grads[0] / ctx.loss_scale
        scaled = [
            torch.zeros(shape, dtype=dtype, device=device) if gradient is None else (gradient * factor).to(dtype)
            for gradient, (shape, dtype, device) in zip(ctx.gradients, ctx.like, strict=True)
        ]
        return None, None, *scaled


# The routers of a mixture of experts, while the policy scores a batch.

RouterLogits = list[Tensor]
"""Router logits of each layer for all positions of one decoder call, shape [B * L, E] or [T, E] each."""


def check_balanced(model: PreTrainedModel, option: str) -> None:
    """Check that the load-balancing loss applies to a model.

    Args:
        model: A causal language model.
        option: The option that enables the loss, with its value, for the error.

    Raises:
        ValueError: If the model is not a mixture of experts, or its routers work differently.
    """
    reason = why_not_balanced(find_decoder(model))
    if reason is not None:
        kind = getattr(model.config, "model_type", type(model).__name__)
        raise ValueError(f"{option} for a policy of model type {kind!r}: {reason}; keep the option at 0.")


@contextmanager
def record_router_logits(model: PreTrainedModel) -> Iterator[RouterLogits]:
    """Collect the router logits of the decoder's call inside the context.

    The decoder returns them once per call; recomputation by activation checkpointing is not recorded.

    Args:
        model: A model accepted by `check_balanced`.

    Yields:
        A list, filled with the logits of the decoder's latest call.
    """
    recorded: RouterLogits = []

    def request(decoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, kwargs | {"output_router_logits": True}

    def record(decoder: Any, args: tuple[Any, ...], output: Any) -> None:
        # When only the head runs, the decoder is bypassed and returns none.
        if output.get("router_logits") is not None:
            recorded[:] = output.router_logits

    decoder = find_decoder(model)
    handles = [decoder.register_forward_pre_hook(request, with_kwargs=True), decoder.register_forward_hook(record)]
    try:
        yield recorded
    finally:
        for handle in handles:
            handle.remove()


def router_balancing_loss(model: PreTrainedModel, batch: ScoringBatch, recorded: RouterLogits) -> Tensor:
    """The load-balancing loss of one decoder call, the same for shared and repeated prefixes.

    Every token counts as often as with repeated prefixes: prompt tokens once per rollout, padding never.

    Args:
        model: The model whose decoder ran.
        batch: The batch that it ran on.
        recorded: The logits collected by `record_router_logits`.

    Returns:
        A scalar, with gradient if enabled.

    Raises:
        RuntimeError: If no gradient would reach the routers.
    """
    if torch.is_grad_enabled() and not any(logits.requires_grad for logits in recorded):
        raise RuntimeError("the recorded router logits have no gradient; train routers, and set use_reentrant=False.")
    counts = (getattr(owner, "num_experts_per_tok", None) for owner in (model, find_decoder(model).config))
    top_k: Any = next((count for count in counts if isinstance(count, int)), None)
    # How often each position of the decoder's call occurs with repeated prefixes, shape [T] or [B * L].
    is_packed = batch.sharing == "shared"
    copies = batch.layout.multiplicity if is_packed else batch.model_inputs["attention_mask"].flatten()
    return load_balancing_loss(recorded, top_k, copies)
