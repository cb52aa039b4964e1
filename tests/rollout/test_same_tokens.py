"""Tokens, finish reasons and log-probabilities that the engine sampled before, in float64, which a change must keep.

`python tests/rollout/test_same_tokens.py` records them anew, from the repository's root.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[1]))

from helpers.sampling_oracle import tiny_decoder

from pl_grouprl.rollout import HFRolloutEngine
from pl_grouprl.types import SamplingConfig

RECORDED = Path(__file__).with_name("same_tokens.json")
FAMILIES = [
    *("llama", "qwen3", "gpt2", "opt", "mistral", "gemma3_text", "olmo3", "cohere2", "qwen3_5_text"),
    *("stablelm", "lfm2", "mamba", "falcon_h1"),
]
LONG = [1 + 7 * place % 23 for place in range(60)]
PROMPTS = [LONG, LONG[5:], LONG[2:7]]
"""The first two share a padded batch; with 8 rollouts each, all three are shared."""

CASES = {
    "plain": (PROMPTS, 8, {"temperature": 2.0, "stop_token_ids": (0, 6)}, None),
    "alone": ([*PROMPTS, LONG[:9]], 1, {"temperature": 1.5, "top_p": 0.9}, None),
    "strings": (PROMPTS, 8, {"temperature": 1.5, "stop": ("bc", "e", "mo")}, None),
    "limits": (PROMPTS, 8, {"temperature": 0.0}, [3, 9, 1]),
}


class Letters:
    eos_token_id = None

    def decode(self, token_ids, skip_special_tokens=False):
        return "".join(chr(ord("a") + token) for token in token_ids)


def noted(groups) -> list[list]:
    """A rollout as its tokens' letters, its finish reason, and the sum of its log-probabilities."""
    letters = Letters()
    return [[letters.decode(one.token_ids), one.finish_reason, sum(one.logprobs)] for group in groups for one in group]


def sample(family: str) -> dict[str, list[list]]:
    engine = HFRolloutEngine(tiny_decoder(family).double(), Letters())
    found = {}
    for name, (prompts, count, options, limits) in CASES.items():
        sampling = SamplingConfig(max_new_tokens=9, **options)
        found[name] = noted(engine.generate(prompts, sampling, num_generations=count, seed=5, max_new_tokens=limits))
    found["turns"], numbers = [], random.Random(3)
    sampling = SamplingConfig(max_new_tokens=6, temperature=2.0, stop_token_ids=(4, 9))
    with engine.keep_caches():
        prompts, count = PROMPTS[:2], 6
        for turn in range(3):
            groups = engine.generate(prompts, sampling, num_generations=count, seed=turn)
            found["turns"] += noted(groups)
            pairs = [(prompt, one) for prompt, group in zip(prompts, groups, strict=True) for one in group]
            prompts, count = [[*p, *one.token_ids, *LONG[: numbers.choice([1, 2, 9])]] for p, one in pairs], 1
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_and_logprobs_are_the_recorded_ones(family):
    expected, found = json.loads(RECORDED.read_text())[family], sample(family)
    assert expected.keys() == found.keys()
    for name, rollouts in expected.items():
        assert [one[:2] for one in found[name]] == [one[:2] for one in rollouts], name
        assert [one[2] for one in found[name]] == pytest.approx([one[2] for one in rollouts], abs=3e-6), name


if __name__ == "__main__":
    recorded = {family: sample(family) for family in FAMILIES}
    lines = [
        f'"{family}": {{\n' + ",\n".join(f'"{n}": {json.dumps(r)}' for n, r in cases.items()) + "\n}"
        for family, cases in recorded.items()
    ]
    RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n")
