"""Score a policy on a configuration's test questions with transformers and reasoning-gym alone.

Checks an exported policy outside this package, which provides only the prompts. Greedy accuracy must equal that of
`python cli.py test`; sampled accuracy is a different random draw.

    python examples/evaluate_exported.py runs/grpo_smollm2/version_0/policy
    python examples/evaluate_exported.py data/smollm2 --gguf_file SmolLM2-135M-Instruct.Q4_1.gguf   # before training

`--output FILE` keeps the questions, reference answers and completions as JSON.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import torch
import yaml
from reasoning_gym import get_score_answer_fn
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

from pl_grouprl.tasks import ReasoningGym

CONFIG = Path(__file__).resolve().parents[1] / "configs" / "grpo_smollm2.yaml"


def read_task(config: Path) -> tuple[dict[str, Any], int]:
    """The arguments of a configuration's ReasoningGym, and its limit on new tokens."""
    values = yaml.safe_load(config.read_text())
    sampling = values["model"]["init_args"]["sampling"]
    return values["data"]["init_args"]["test"]["init_args"], sampling["max_new_tokens"]


@torch.no_grad()
def complete(model: Any, tokenizer: Any, prompts: list[Any], max_new_tokens: int, temperature: float) -> list[str]:
    """One completion for each conversation, greedy at temperature 0."""
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    options = sampling if temperature > 0 else {"do_sample": False}
    completions = []
    for begin in range(0, len(prompts), 32):
        texts = [
            tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
            for prompt in prompts[begin : begin + 32]
        ]
        batch = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        sequences = model.generate(**batch, max_new_tokens=max_new_tokens, **options)
        completions += tokenizer.batch_decode(sequences[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return completions


def is_correct(completion: str, row: dict[str, Any]) -> bool:
    """Whether the completion is a line `Answer: X`, and reasoning-gym gives X the full score."""
    found = re.fullmatch(r"\s*Answer:(.*)\s*", completion)
    info = row["extra_info"]
    entry = {"answer": row["answer"], "metadata": {"source_dataset": info["task"]}}
    return found is not None and get_score_answer_fn(info["task"])(found[1].strip(), entry) == 1


def evaluate(options: argparse.Namespace) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Accuracy by name, and for each question its reference answer and completions."""
    task, max_new_tokens = read_task(options.config)
    rows = ReasoningGym(**task).rows("test")
    files = {} if options.gguf_file is None else {"gguf_file": options.gguf_file}
    model = AutoModelForCausalLM.from_pretrained(options.policy, dtype=torch.float32, **files).eval()
    tokenizer = AutoTokenizer.from_pretrained(options.policy, padding_side="left", **files)
    accuracy = {}
    records: list[dict[str, Any]] = [
        {"question": row["prompt"][-1]["content"], "answer": row["answer"]} for row in rows
    ]
    for name, temperature in (("greedy", 0.0), ("sampled", 1.0)):
        set_seed(options.seed)
        completions = complete(model, tokenizer, [row["prompt"] for row in rows], max_new_tokens, temperature)
        correct = [is_correct(completion, row) for completion, row in zip(completions, rows, strict=True)]
        accuracy[name] = sum(correct) / len(correct)
        for record, completion, right in zip(records, completions, correct, strict=True):
            record[name] = {"completion": completion, "correct": right}
    return accuracy, records


def main() -> dict[str, float]:
    """Score the policy, print both accuracies, and return them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("policy", help="folder or hub name, as for from_pretrained")
    parser.add_argument("--gguf_file", help="name of a GGUF file in the folder")
    parser.add_argument("--config", type=Path, default=CONFIG, help="configuration with the test questions")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    options = parser.parse_args()

    accuracy, records = evaluate(options)
    print(f"accuracy of {len(records)} questions: greedy {accuracy['greedy']:.3f}, sampled {accuracy['sampled']:.3f}")
    if options.output:
        options.output.write_text(json.dumps({"accuracy": accuracy, "completions": records}, indent=1))
    return accuracy


if __name__ == "__main__":
    main()
