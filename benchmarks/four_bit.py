"""The effect of 4-bit quantization on a model: log-probabilities, greedy answers and bytes, on the CPU.

    python benchmarks/four_bit.py --model data/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf

The unquantized model answers each prompt greedily in float32; the quantized ones then score the answers' tokens. No
adapter is trained, which would recover some of the difference (arXiv:2305.14314).
"""

from __future__ import annotations

import argparse
import itertools
import platform
import tempfile
from collections.abc import Sequence
from typing import Any

import torch

from pl_grouprl.models import FourBit, LoRAAdapter, PretrainedPolicy, rollout_logprobs
from pl_grouprl.models.policy import as_policy_source
from pl_grouprl.types import Rollout, RolloutGroup

QUESTIONS = (
    "What is the capital of France?",
    "What is 17 + 25?",
    "Name three colors of the rainbow.",
    "Which animal barks?",
)
KINDS = {
    "nf4, float32": FourBit("nf4", compute_dtype="float32"),
    "nf4, bfloat16": FourBit("nf4", compute_dtype="bfloat16"),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", required=True, help="folder, hub name or GGUF file of a chat model")
    parser.add_argument("--tokens", type=int, default=24, help="longest answer (default: 24)")
    options = parser.parse_args(arguments)
    source = as_policy_source(options.model)
    tokenizer, model = source.load_tokenizer(), source.load().eval()
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    prompts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) for chat in chats]
    ids = [tokenizer(prompt, add_special_tokens=False).input_ids for prompt in prompts]
    answers = [greedy(model, prompt, options.tokens) for prompt in ids]
    groups = [RolloutGroup(prompt, [Rollout(answer)]) for prompt, answer in zip(ids, answers, strict=True)]
    expected_N = logprobs(model, groups)
    print(f"{options.model}: {len(expected_N)} tokens of {len(groups)} answers, {versions()}")
    print("| weights, products | bytes of the model | mean difference of a log-probability | same greedy tokens |")
    print("|---|---|---|---|")
    print(f"| float32 | {size(model) / 1e6:.0f} MB | | |")
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        for name, kind in KINDS.items():
            quantized = PretrainedPolicy(folder, adapter=LoRAAdapter(r=1), quantization=kind).load().eval()
            difference = (logprobs(quantized, groups) - expected_N).abs().mean()
            same = [
                agreeing(greedy(quantized, prompt, options.tokens), own)
                for prompt, own in zip(ids, answers, strict=True)
            ]
            share = sum(same) / sum(map(len, answers))
            print(f"| {name} | {size(quantized) / 1e6:.0f} MB | {difference:.3f} | {share:.2f} |", flush=True)


@torch.no_grad()
def greedy(model: Any, prompt: list[int], tokens: int) -> list[int]:
    """The most likely continuation of a prompt."""
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False)
    return out[0, len(prompt) :].tolist()


def agreeing(one: list[int], other: list[int]) -> int:
    """Number of tokens before the first difference."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


@torch.no_grad()
def logprobs(model: Any, groups: list[RolloutGroup]) -> torch.Tensor:
    """Log-probabilities of all answers, concatenated."""
    return torch.cat(rollout_logprobs(model, groups))


def size(model: Any) -> int:
    """Bytes of the weights and scales, without the adapter."""
    state = {name: value for name, value in model.state_dict().items() if "lora_" not in name}
    return sum(
        {value.untyped_storage().data_ptr(): value.untyped_storage().nbytes() for value in state.values()}.values()
    )


def versions() -> str:
    """Versions and processor."""
    import bitsandbytes

    return f"torch {torch.__version__}, bitsandbytes {bitsandbytes.__version__}, {platform.machine()}"


if __name__ == "__main__":
    main()
