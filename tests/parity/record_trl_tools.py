"""Writes `trl_tools.json`: the conversations with tools that TRL's `GRPOTrainer` makes of the cases of `tool_cases`.

Needs `pip install trl datasets jmespath`. Run it from the repository's root, after a change of the cases or with
another version of TRL: `PYTHONPATH=tests python tests/parity/record_trl_tools.py`
"""

from __future__ import annotations

import json
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

from helpers.qwen_tokenizer import qwen_tokenizer
from helpers.tool_cases import tool_cases
from helpers.trl_tools import run_trl

FILE = Path(__file__).with_name("trl_tools.json")


def main() -> None:
    """Run all cases, and write one line for each rollout. Prompts that several rollouts share are written once."""
    prompts: dict[str, int] = {}
    cases = {name: _recorded(run_trl(case), prompts) for name, case in tool_cases().items()}
    versions = {name: version(name) for name in ("trl", "transformers")} | {"python": platform.python_version()}
    FILE.write_text(
        "\n".join(
            [
                f'{{"versions": {json.dumps(versions)},',
                f'"vocabulary": {len(qwen_tokenizer())},',
                '"prompts": [',
                ",\n".join(json.dumps(prompt, ensure_ascii=False) for prompt in prompts),
                '], "cases": {',
                ",\n".join(f"{json.dumps(name)}: {_lines(case)}" for name, case in cases.items()),
                "}}\n",
            ]
        ),
        encoding="utf-8",
    )


def _recorded(result: dict[str, Any], prompts: dict[str, int]) -> dict[str, Any]:
    rollouts = []
    for rollout in result["rollouts"]:
        number = prompts.setdefault(rollout["prompt"], len(prompts))
        rollouts.append({**rollout, "prompt": number, "mask": "".join(map(str, rollout["mask"]))})
    return {**result, "rollouts": rollouts}


def _lines(case: dict[str, Any]) -> str:
    rollouts = ",\n".join(json.dumps(rollout, ensure_ascii=False) for rollout in case["rollouts"])
    return f'{{"calls": {case["calls"]}, "failures": {case["failures"]}, "rollouts": [\n{rollouts}]}}'


if __name__ == "__main__":
    main()
