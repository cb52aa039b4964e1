"""Writes docs/models.md from outcomes, and reads it back."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from family_parity import MAX_GRADIENT, MAX_LOGPROB, Outcome
from tiny_families import Family

_HEADER = """# Is my model supported?

Look up your model here: whether it shares prefixes exactly, is not supported (and why), or could not be tried. For a
model that is not listed, run `python cli.py parity --model path/to/the/model`;
[exactness.md](exactness.md#check-your-own-model-check_parity) explains the check.

How the table was made: every family of the installed transformers with a class for causal language modeling, or for
images and text, is built small from its config, by one recipe that names no family. It runs twice: each sequence on its
own through the unchanged model, and all sequences in one packed row with shared prefixes. Log-probabilities of random
targets at all tokens, and the gradients of all weights, are compared.

Conditions: {conditions}.

`< 1e-5` is an upper bound, in powers of ten: for log-probabilities of the largest difference, in nats (allowed
{logprob:.0e}); for gradients of the norm of the difference over the norm of all gradients (allowed {gradient:.0e}).
A larger difference of log-probabilities counts as exact only if the paths agree in float64 and the model's own float32
is further off.
Families marked with * also take images, and were run with text alone. The kinds of layers are the config's.

`python tools/models_table.py --write docs/models.md` writes this page, `--check` compares it with what is found now; do
not edit it.
"""
_EXACT = "| model type | class | kinds of layers | log-probabilities | gradients |\n|---|---|---|---|---|\n"
_OTHERS = "| model type | class | reason |\n|---|---|---|\n"
_SECTIONS = (
    ("exact", "Exact", "Shared and repeated prefix agree.", _EXACT),
    ("refused", "Unsupported", "An error says why, before any number is wrong.", _OTHERS),
    ("wrong", "Wrong", "The paths differ without an error. These are faults.", _OTHERS),
    (
        "not built",
        "Not tried",
        "The recipe does not build these small, or they do not run on text alone. Nothing is said of them here.",
        _OTHERS,
    ),
)


def page(outcomes: Sequence[Outcome], backend: str) -> str:
    """The whole page; identical on every machine with the same versions."""
    text = _HEADER.format(conditions=_conditions(backend), logprob=MAX_LOGPROB, gradient=MAX_GRADIENT)
    for status, title, meaning, head in _SECTIONS:
        rows = [row(outcome) for outcome in outcomes if outcome.status == status]
        if rows:
            text += f"\n## {title}: {len(rows)}\n\n{meaning}\n\n{head}" + "".join(f"{one}\n" for one in rows)
    return text


def row(outcome: Outcome) -> str:
    """One line of a table."""
    family = outcome.family
    name = (
        f"`{family.model_type}`" + (f", {family.variant}" if family.variant else "") + (" *" if family.images else "")
    )
    cells = [name, f"`{family.model_class}`"]
    if outcome.status == "exact":
        layers = ", ".join(outcome.layers) or "-"
        cells += [layers, bound(outcome.logprob), bound(outcome.gradient)]
    else:
        cells.append(_one_line(outcome.reason))
    return "| " + " | ".join(cells) + " |"


def bound(value: float) -> str:
    """A power of ten above a difference, coarse enough not to depend on the machine's rounding."""
    power = max(math.ceil(math.log10(2 * value)) if value else -9, -5)
    return f"< 1e-{-power:d}"


def key(family: Family) -> str:
    """A family's key in `statuses`."""
    return f"{family.name} {family.model_class}"


def state(outcome: Outcome) -> str:
    """A family's value in `statuses`."""
    return f"refused, {_one_line(outcome.reason)}" if outcome.status == "refused" else outcome.status


def statuses(text: str) -> dict[str, str]:
    """Read a page: for each family, its section, and the reason if it is refused."""
    found, status = {}, None
    titles = {title: status for status, title, *_ in _SECTIONS}
    for line in text.splitlines():
        if line.startswith("## "):
            status = titles.get(line[3:].split(":")[0])
        if status is None or not line.startswith("| `"):
            continue
        name, model_class, reason, *_ = (cell.strip() for cell in line.strip("|").split(" | "))
        name = f"{name.removesuffix(' *').replace(',', '')} {model_class}".replace("`", "")
        found[name] = f"{status}, {reason}" if status == "refused" else status
    return found


def _one_line(reason: str) -> str:
    """A reason on one line; figures are reduced to powers of ten, which do not depend on the machine."""
    reason = re.sub(r"\b\d(?:\.\d+)?e-0?(\d+)\b", r"about 1e-\1", reason)
    return " ".join(reason.split()).replace("|", "/")


def _conditions(backend: str) -> str:
    import torch
    import transformers

    versions = f"transformers {transformers.__version__}, torch {torch.__version__.split('+')[0]}"
    return (
        f"{versions}, CPU, float32, eval mode, backend `{backend}`; hidden size 64, four heads, windows and chunks of "
        "8 tokens; two prompts of 20 and 7 tokens with rollouts of 3 to 14, and two forests, of depth 2 and 3"
    )
