"""Draws what a run does step by step: `python tools/step_diagram.py` writes docs/images/step.svg."""

from __future__ import annotations

from html import escape
from pathlib import Path

PATH = Path(__file__).resolve().parents[1] / "docs" / "images" / "step.svg"

# Title, what happens, where (an attribute of the class in WHERE), the metric with its seconds.
ROLLOUT = (
    ("1. Sample", "G completions per prompt;", "rewards start in the background", "Collector.collect", "time/rollout"),
    ("2. Score", "policy, reference, critic", "read rollouts without gradient", "score_rollouts_before_update",
     "time/old_logprobs, ref_logprobs, values"),
    ("3. Reward", "wait for the rewards,", "mask what is not trained", "Collector.finish", "time/reward"),
    ("4. Advantages", "of rollouts or tokens;", "PPO: returns too", "compute_targets", "time/advantages"),
)  # fmt: skip
UPDATE = (
    ("5. Pack", "each prompt once, up to", "max_tokens_per_micro_batch", "Updater.update", "time/update"),
    ("6. Loss", "of a micro-batch, divided by", "the whole step's denominator", "compute_loss", "time/update"),
    ("7. Backward", "after each micro-batch;", "gradients add up", "backward", "time/update"),
    ("8. Step", "clip, step; no step with NaN;", "check the weights", "optimizer_step", "time/update"),
)
_WIDTH, _BOX, _GAP, _LEFT = 1010, 225, 20, 25
_STYLE = """
text { font: 13px system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1a1f36; text-anchor: middle }
.title { font-size: 16px; font-weight: 600 } .panel { font-size: 14px; font-weight: 600; text-anchor: start }
.code { font: 12px ui-monospace, Menlo, Consolas, monospace; fill: #3949ab } .seconds { font-size: 11px; fill: #6b7280 }
.note { text-anchor: start } .arrow { stroke: #3949ab; stroke-width: 2; fill: none; marker-end: url(#head) }
"""


def svg() -> str:
    """The diagram; identical on every machine."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} 490" aria-label="One step of a run">',
        f"<style>{_STYLE}</style>",
        '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L10 5L0 10z" fill="#3949ab"/></marker></defs>',
        f'<rect width="{_WIDTH}" height="490" rx="8" fill="#ffffff"/>',
        *_panel(15, 27, "Once for each batch of prompts: rollouts", "#eef1fb", ROLLOUT),
        *_panel(265, 150, "num_iterations x num_mini_batches times: updates", "#fdf3e7", UPDATE),
        # From the last box of the rollout to the first of the updates, and back for the next prompts.
        '<path class="arrow" d="M872 180V232H137V304"/>',
        '<path class="arrow" d="M872 430V472H7V117H24"/>',
        _text("note", 150, 225, "the rollout buffer: groups, and named quantities per token"),
        _text("note", 150, 465, "the next prompts; a sampler with a copy gets the new weights (time/weight_sync)"),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _panel(top: int, left: int, title: str, colour: str, boxes: tuple[tuple[str, ...], ...]) -> list[str]:
    parts = [
        f'<rect x="15" y="{top}" width="{_WIDTH - 30}" height="180" rx="8" fill="{colour}"/>',
        _text("panel", left, top + 24, title),
    ]
    for index, (name, first, second, where, seconds) in enumerate(boxes):
        x, y = _LEFT + index * (_BOX + _GAP), top + 40
        parts.append(f'<rect x="{x}" y="{y}" width="{_BOX}" height="125" rx="6" fill="#ffffff" stroke="#c5cae9"/>')
        middle = x + _BOX // 2
        lines = (("title", name, 26), ("", first, 50), ("", second, 67), ("code", where, 93), ("seconds", seconds, 113))
        parts += [_text(kind, middle, y + down, words) for kind, words, down in lines]
        if index:
            parts.append(f'<path class="arrow" d="M{x - _GAP} {y + 62}H{x - 1}"/>')
    return parts


def _text(kind: str, x: int, y: int, words: str) -> str:
    return f'<text class="{kind}" x="{x}" y="{y}">{escape(words)}</text>'


if __name__ == "__main__":
    PATH.write_text(svg(), encoding="utf-8")
