"""Compares shared and repeated prefixes for one model: log-probabilities and gradients of all weights.

Legend: T packed tokens of a forest.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from tiny_config import TOKENS, layer_types
from tiny_families import CannotBuildError, Family, build, first_line
from torch import Tensor

from pl_grouprl.attention import UnsupportedModelError, shared_prefix
from pl_grouprl.packing import SharedPrefixLayout

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MAX_LOGPROB, MAX_GRADIENT = 1e-4, 1e-3
LEAST_EFFECT = 1e-3
"""How much, in nats, earlier tokens must change a token's log-probability for parity to be meaningful."""

MAX_NOISE = 1e-3
"""Largest difference of a padded row, in nats, that is forgiven because the model itself has it."""

MAX_ROUNDING = 1e-5
"""Largest difference in float64, in nats, of which the log-probabilities are rounded to float32."""


@dataclass(frozen=True)
class Outcome:
    """The result for one family.

    Attributes:
        family: The family.
        status: `exact`, `refused` (with an error, before any wrong number), `wrong`, or `not built`.
        layers: The model's kinds of layers.
        logprob: Largest difference of a log-probability, in nats.
        gradient: Norm of the difference of all gradients over their norm.
        reason: Why it was refused or not built, or where it is wrong.
        expected: Whether a refusal is one of the package's own errors.
    """

    family: Family
    status: str
    layers: tuple[str, ...] = ()
    logprob: float = math.nan
    gradient: float = math.nan
    reason: str = ""
    expected: bool = True


@dataclass(frozen=True)
class Forest:
    """Segments of a packed row: their lengths and parents."""

    lengths: tuple[int, ...]
    parents: tuple[int | None, ...]

    def paths(self) -> list[list[int]]:
        """The packed tokens from the root to each segment without children."""
        starts = [sum(self.lengths[:index]) for index in range(len(self.lengths))]
        found = []
        for leaf in range(len(self.lengths)):
            path: list[int] = []
            index: int | None = leaf if leaf not in self.parents else None
            while index is not None:
                path = [*range(starts[index], starts[index] + self.lengths[index]), *path]
                index = self.parents[index]
            if path:
                found.append(path)
        return found


FORESTS = {
    "groups": Forest((20, 14, 3, 9, 7, 5, 12), (None, 0, 0, 0, None, 4, 4)),
    "depth 2": Forest((9, 6, 11, 1, 13, 0, 5, 4, 3), (None, 0, 1, 1, 1, 0, None, 6, 6)),
    "depth 3": Forest((7, 10, 3, 12, 5, 9, 2, 6, 1, 8, 4), (None, 0, 1, 2, 2, 1, 0, None, 7, 8, 9)),
}
"""Prompts longer than a window of 8, rollouts shorter and longer, an empty one, segments of one token."""

PADDED = {"a batch padded on the right": 0, "a batch padded on the left": 5}
"""Columns of padding before the longest prompt."""


def try_family(family: Family, backend: str = "auto") -> Outcome:
    """Build one family and compare its two paths on all forests."""
    try:
        model = _build(family)
    except CannotBuildError as error:
        return Outcome(family, "not built", reason=str(error))
    layers = tuple(layer_types(model.config))
    try:
        repeated = {name: _run(model, forest, partial(_repeated, model, forest)) for name, forest in FORESTS.items()}
    except Exception as error:
        return Outcome(family, "not built", layers, reason=first_line(error))
    try:
        with shared_prefix(model, backend):
            shared = {name: _run(model, forest, partial(_shared, model, forest)) for name, forest in FORESTS.items()}
        rows = {name: _padded_rows(model, backend, left) for name, left in PADDED.items()}
    except Exception as error:
        return Outcome(family, "refused", layers, reason=_reason(error), expected=_is_ours(error))
    logprobs = {name: (shared[name][0] - repeated[name][0]).abs().max().item() for name in FORESTS}
    gradients = [_difference(shared[name][1], repeated[name][1]) for name in FORESTS]
    logprobs |= rows
    logprob, gradient = _largest(logprobs.values()), _largest(gradients)
    if logprob <= MAX_LOGPROB and gradient <= MAX_GRADIENT:
        return Outcome(family, "exact", layers, logprob, gradient)
    if gradient <= MAX_GRADIENT and logprob <= _own_rounding(model, backend, repeated):
        return Outcome(family, "exact", layers, logprob, gradient)
    places = ", ".join(name for name, value in logprobs.items() if not value <= MAX_LOGPROB) or "gradients"
    return Outcome(
        family, "wrong", layers, logprob, gradient, f"It differs on {places}: {logprob:.0e}, {gradient:.0e}."
    )


def _build(family: Family) -> PreTrainedModel:
    """A model that runs on text; options that are None by default are filled in only if they must be."""
    try:
        model = build(family)
        _check_sensitive(model)
    except CannotBuildError as error:
        try:
            model = build(family, fill=True)
            _check_sensitive(model)
        except CannotBuildError:
            raise error from None
    return model


def _largest(values: Iterable[float]) -> float:
    """The maximum; NaN if any value is."""
    return torch.tensor(list(values)).max().item()


def _check_sensitive(model: PreTrainedModel) -> None:
    """Refuse a model that does not run on text alone, or whose tokens barely depend on each other."""
    tokens = torch.arange(1, 13)[None]
    other = torch.cat([tokens[:, :-1] + 20, tokens[:, -1:]], dim=1)
    try:
        with torch.no_grad():
            one, two = (_logits(model, row)[0] for row in (tokens, other))
    except Exception as error:
        raise CannotBuildError(first_line(error)) from error
    if len(one) != tokens.shape[1]:
        raise CannotBuildError(f"Its logits for {tokens.shape[1]} tokens are those of {len(one)}.")
    if not (one[-1].log_softmax(-1) - two[-1].log_softmax(-1)).abs().max() > LEAST_EFFECT:
        raise CannotBuildError("Earlier tokens barely change a token's log-probabilities.")


def _logits(model: PreTrainedModel, tokens: Tensor, **options: Any) -> Tensor:
    return model(input_ids=tokens, use_cache=False, return_dict=True, **options).logits.float()


def _run(
    model: PreTrainedModel, forest: Forest, logits_of: Callable[[Tensor], Tensor]
) -> tuple[Tensor, list[Tensor | None]]:
    """Log-probabilities [T] of random targets, and the gradients of a loss that weighs every token differently."""
    count = sum(forest.lengths)
    tokens, targets = torch.randint(1, TOKENS, (2, count), generator=torch.Generator().manual_seed(count))
    logprobs = logits_of(tokens).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    loss = (logprobs * torch.linspace(0.5, 1.5, count)).sum()
    return logprobs.detach(), list(torch.autograd.grad(loss, weights, allow_unused=True))


def _shared(model: PreTrainedModel, forest: Forest, tokens: Tensor) -> Tensor:
    layout = SharedPrefixLayout(list(forest.lengths), list(forest.parents))
    return _logits(model, tokens[None], prefix_layout=layout)[0]


def _repeated(model: PreTrainedModel, forest: Forest, tokens: Tensor) -> Tensor:
    """Each sequence separately; padded to the longest row if rotary frequencies depend on that."""
    paths = forest.paths()
    longest = max(map(len, paths)) if _looks_at_the_longest(model) else 0
    rows: dict[int, Tensor] = {}
    for path in paths:
        row = torch.cat([tokens[path], torch.ones(max(longest - len(path), 0), dtype=torch.long)])
        logits = _logits(model, row[None])[0]
        for place, token in enumerate(path):
            rows.setdefault(token, logits[place])
    return torch.stack([rows[token] for token in range(len(tokens))])


def _looks_at_the_longest(model: PreTrainedModel) -> bool:
    rope = getattr(model.config.get_text_config(decoder=True), "rope_parameters", None) or {}
    return any(kind in str(rope) for kind in ("dynamic", "longrope"))


@torch.no_grad()
def _padded_rows(model: PreTrainedModel, backend: str, left: int) -> float:
    """Largest difference of a log-probability between an ordinary padded batch inside and outside the context.

    Prompts are padded on the left by at least `left` columns, completions on the right. If the difference is more than
    `MAX_LOGPROB`, that of the model itself, between these rows and the same ones alone, is subtracted: some models
    amplify the rounding of float32.
    """
    generator = random.Random(0)

    def draw(count: int) -> list[int]:
        return [generator.randrange(1, TOKENS) for _ in range(count)]

    prompts = [draw(20), draw(20 - left)]
    rows = [(prompts[number], draw(length)) for number, length in ((0, 14), (0, 3), (0, 9), (1, 12), (1, 5))]
    tokens, mask = torch.zeros(len(rows), 34 + left, dtype=torch.long), torch.zeros(len(rows), 34 + left)
    for number, (prompt, completion) in enumerate(rows):
        first, row = 20 + left - len(prompt), torch.tensor(prompt + completion)
        tokens[number, first : first + len(row)], mask[number, first : first + len(row)] = row, 1
    mask = mask.long()
    try:
        expected = _logits(model, tokens, attention_mask=mask).log_softmax(-1)[mask.bool()]
    except Exception:  # the model itself does not run on a padded batch
        return 0.0
    with shared_prefix(model, backend):
        found = _logits(model, tokens, attention_mask=mask).log_softmax(-1)[mask.bool()]
    error = (found - expected).abs().max().item()
    return error if error <= MAX_LOGPROB else max(error - _noise(model, rows, expected), 0.0)


def _noise(model: PreTrainedModel, rows: Sequence[tuple[list[int], list[int]]], expected: Tensor) -> float:
    """Largest difference of a log-probability between rows of a batch and the same ones alone, at most `MAX_NOISE`."""
    alone = [_logits(model, torch.tensor([prompt + completion]))[0] for prompt, completion in rows]
    return min((torch.cat(alone).log_softmax(-1) - expected).abs().max().item(), MAX_NOISE)


def _own_rounding(model: PreTrainedModel, backend: str, repeated: dict[str, tuple[Tensor, Any]]) -> float:
    """How far the model's float32 log-probabilities are from float64, in nats; 0 unless both paths agree in float64."""
    precise = copy.deepcopy(model).double()
    inside = shared_prefix(precise, backend)
    noise = 0.0
    for name, forest in FORESTS.items():
        expected, _ = _run(precise, forest, partial(_repeated, precise, forest))
        with inside:
            found, _ = _run(precise, forest, partial(_shared, precise, forest))
        if not (found - expected).abs().max() <= MAX_ROUNDING:
            return 0.0
        noise = max(noise, (repeated[name][0] - expected).abs().max().item())
    return noise


def _difference(actual: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> float:
    error = norm = 0.0
    for one, other in zip(actual, expected, strict=True):
        if one is None and other is None:
            continue
        a, b = (0.0 if grad is None else grad.double() for grad in (one, other))
        error += float(torch.as_tensor(a - b).square().sum())
        norm += float(torch.as_tensor(b).square().sum())
    return math.sqrt(error / norm) if norm else math.sqrt(error)


def _is_ours(error: BaseException) -> bool:
    """Whether the package refused the model, rather than something breaking."""
    if isinstance(error, UnsupportedModelError):
        return True
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and "pl_grouprl" in trace.tb_frame.f_globals.get("__name__", "")


def _reason(error: BaseException) -> str:
    """The reason in a refusal, without the model's name; for other errors, with their class."""
    if not _is_ours(error):
        return first_line(error)
    sentence = " ".join(str(error).split()).split(". ")[0].rstrip(".")
    return sentence.split("cannot share prefixes: ")[-1]
