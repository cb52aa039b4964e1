"""Draws how sharing works: `python tools/sharing_diagram.py` writes docs/images/how_sharing_works.svg."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path

PATH = Path(__file__).resolve().parents[1] / "docs" / "images" / "how_sharing_works.svg"

PROMPT = ("3", "+", "4", "=")
ROLLOUTS = (("7", "."), ("is", "7", "."), ("8", "."))
SEGMENTS = (PROMPT, *ROLLOUTS)

_COLORS = ("#a9c4e4", "#f3c98b", "#a5d8ae", "#e5b0d8")
_WIDTH, _LEFT, _CELL, _SMALL = 500, 26, 40, 19
_STYLE = """
text { font: 15px system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: var(--ink) }
svg { --ink: #1a1f36; --card: #ffffff; --panel: #f3f5fa; --quiet: #5b6275; --line: #3949ab }
@media (prefers-color-scheme: dark) {
  svg { --ink: #e8eaf2; --card: #1a1d27; --panel: #252936; --quiet: #a9b0c2; --line: #9fa8da }
}
.card { fill: var(--card) } .panel { fill: var(--panel) } .title { font-size: 17px; font-weight: 600 }
.token { font: 15px ui-monospace, Menlo, Consolas, monospace; fill: #1a1f36; text-anchor: middle }
.call { font-size: 15px; font-weight: 700; fill: #1a1f36; text-anchor: middle }
.strong { font-weight: 600 } .quiet { font-size: 13px; fill: var(--quiet) }
.middle { text-anchor: middle } .end { text-anchor: end } .math { font: 14px ui-monospace, Menlo, Consolas, monospace }
.arrow { stroke: var(--line); stroke-width: 2; fill: none; marker-end: url(#head) } #head path { fill: var(--line) }
.link { stroke: var(--quiet); stroke-width: 1.5; fill: none }
"""


def positions() -> list[int]:
    """The position ids of the packed row: each rollout continues where the prompt ends."""
    return [*range(len(PROMPT)), *(len(PROMPT) + place for rollout in ROLLOUTS for place in range(len(rollout)))]


def attention_pairs() -> dict[str, set[tuple[int, int]]]:
    """Pairs of a query and a key in the packed row, by the call that computes them."""
    own, prompt, start = set(), set(), 0
    for number, segment in enumerate(SEGMENTS):
        queries = range(start, start + len(segment))
        own |= {(query, key) for query in queries for key in range(start, query + 1)}
        prompt |= {(query, key) for query in queries for key in range(len(PROMPT)) if number}
        start += len(segment)
    return {"A": own, "B": prompt}


def svg() -> str:
    """The diagram; identical on every machine."""
    panels, top = [], 12
    for height, panel in ((208, _rows()), (216, _packed()), (456, _attention()), (266, _gradients())):
        panels.append(f'<g transform="translate(0 {top})">')
        panels.append(f'<rect class="panel" x="12" width="{_WIDTH - 24}" height="{height}" rx="8"/>')
        panels += [*panel, "</g>"]
        top += height + 12
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{top}" viewBox="0 0 {_WIDTH} {top}" '
        'role="img" aria-label="A prompt that rollouts share, from separate rows to gradients">\n'
        f"<style>{_STYLE}</style>\n"
        '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="6" markerHeight="6" orient="auto">'
        '<path d="M0 0L10 5L0 10z"/></marker></defs>\n'
        f'<rect class="card" width="{_WIDTH}" height="{top}" rx="10"/>\n' + "\n".join(panels) + "\n</svg>\n"
    )


def _rows() -> Iterator[str]:
    count = sum(len(PROMPT) + len(rollout) for rollout in ROLLOUTS)
    yield _text(_LEFT, 28, "1. The usual batch repeats the prompt", "title")
    for number, rollout in enumerate(ROLLOUTS, start=1):
        top = 44 + 42 * (number - 1)
        yield from _tokens(PROMPT, _COLORS[0], _LEFT, top)
        yield from _tokens(rollout, _COLORS[number], _LEFT + len(PROMPT) * _CELL, top)
        yield _text(_WIDTH - _LEFT, top + 24, f"rollout {number}", "quiet end")
    yield _text(_LEFT, 192, f"{count} tokens. The prompt runs once per rollout.")


def _packed() -> Iterator[str]:
    starts = [0]
    for segment in SEGMENTS:
        starts.append(starts[-1] + len(segment))
    lefts = [_LEFT + start * _CELL for start in starts]
    yield _text(_LEFT, 28, "2. The packed row has it once", "title")
    for number, segment in enumerate(SEGMENTS):
        yield from _tokens(segment, _COLORS[number], lefts[number], 76)
        if number:  # from the last token of the prompt to the first of each rollout
            first = lefts[number] + _CELL // 2
            yield f'<path class="arrow" d="M{lefts[1] - _CELL // 2} 76V{66 - 7 * number}H{first}V75"/>'
    for place, position in enumerate(positions()):
        yield _text(_LEFT + place * _CELL + _CELL // 2, 130, str(position), "quiet middle")
    yield _text(_LEFT, 150, "position ids: each rollout continues the prompt", "quiet")
    yield _text(_LEFT, 178, f"{starts[-1]} tokens, no padding. A row holds any number of")
    yield _text(_LEFT, 199, "such trees, of any depth: a forest.")


def _attention() -> Iterator[str]:
    left, top = _LEFT + 26, 66
    yield _text(_LEFT, 28, "3. Attention: two calls and a merge", "title")
    yield _text(left, 56, "keys", "quiet")
    yield f'<text class="quiet end" transform="translate({_LEFT + 14} {top}) rotate(-90)">queries</text>'
    yield f'<rect class="card" x="{left}" y="{top}" width="{11 * _SMALL}" height="{11 * _SMALL}"/>'
    owners = [number for number, segment in enumerate(SEGMENTS) for _ in segment]
    for call, pairs in attention_pairs().items():
        for query, key in sorted(pairs):
            color, opacity = _COLORS[owners[query if call == "A" else key]], "1" if call == "A" else ".45"
            yield (
                f'<rect x="{left + key * _SMALL}" y="{top + query * _SMALL}" width="{_SMALL - 1}" '
                f'height="{_SMALL - 1}" fill="{color}" fill-opacity="{opacity}"/>'
            )
    start = 0
    for segment in SEGMENTS:  # A: in the lower left of each triangle
        yield _text(left + start * _SMALL + 9, top + (start + len(segment)) * _SMALL - 5, "A", "call")
        start += len(segment)
    yield f'<text x="{left + 2 * _SMALL}" y="{top + 8 * _SMALL - 4}" class="call" style="fill: var(--ink)">B</text>'
    notes = (
        ("A: segments attend", "strong"),
        ("to themselves, causally.", ""),
        ("", ""),
        ("B: all rollouts attend", "strong"),
        ("to the whole prompt. Its", ""),
        ("keys are read once and", ""),
        ("never copied.", ""),
        ("", ""),
        ("Empty: not computed, as", ""),
        ("no rollout sees another.", ""),
    )
    for line, (words, kind) in enumerate(notes):
        yield _text(left + 11 * _SMALL + 18, top + 14 + 21 * line, words, kind)
    below = top + 11 * _SMALL + 30
    yield _text(_LEFT, below, "Each token of a rollout has two results. The log-sum-exp")
    yield _text(_LEFT, below + 21, "(lse) of each call's scores gives their weights:")
    yield _text(_LEFT + 14, below + 52, "w = sigmoid(lse_A - lse_B)", "math")
    yield _text(_LEFT + 14, below + 74, "out = w out_A + (1 - w) out_B", "math")
    yield _text(_LEFT, below + 106, "This is the softmax over prompt and rollout together,")
    yield _text(_LEFT, below + 127, "not an approximation.")


def _gradients() -> Iterator[str]:
    yield _text(_LEFT, 28, "4. Backward: gradients add up in the prompt", "title")
    for number, rollout in enumerate(ROLLOUTS, start=1):
        top = 46 + 44 * (number - 1)
        left = _WIDTH - _LEFT - 3 * _CELL
        yield from _tokens(rollout, _COLORS[number], left, top)
        yield f'<path class="arrow" d="M{left - 4} {top + 17}L{_LEFT + 4 * _CELL + 6} {90 + 10 * number}"/>'
    yield from _tokens(PROMPT, _COLORS[0], _LEFT, 90)
    yield _text(_LEFT, 78, "dK = dK_A + \u03a3 dK_B", "math")
    yield _text(_LEFT, 146, "dV = dV_A + \u03a3 dV_B", "math")
    yield _text(_LEFT, 200, "Both calls run backward with the merged output and")
    yield _text(_LEFT, 221, "log-sum-exp. Then the prompt's layers run backward once,")
    yield _text(_LEFT, 242, "with the sum over all rollouts.")


def _tokens(words: tuple[str, ...], color: str, left: int, top: int) -> Iterator[str]:
    for place, word in enumerate(words):
        x = left + place * _CELL
        yield f'<rect x="{x + 1}" y="{top}" width="{_CELL - 2}" height="34" rx="4" fill="{color}"/>'
        yield _text(x + _CELL // 2, top + 22, word, "token")


def _text(x: int, y: int, words: str, kind: str = "") -> str:
    return f'<text class="{kind}" x="{x}" y="{y}">{escape(words)}</text>' if words else ""


if __name__ == "__main__":
    PATH.write_text(svg(), encoding="utf-8")
