"""Encodes prompts that extend kept sequences: only tokens that are not cached run through the model.

A batch is right-aligned, with no padding between cached and new tokens, because sliding windows and linear attention
could not skip it. So each sequence runs as many tokens as the one with the most new ones; the others rerun some cached
tokens. If a layer cannot drop cached tokens, all sequences of a batch have the same number of new tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pl_grouprl.rollout.kept_caches import KeptSequence
from pl_grouprl.rollout.kv_cache import gather_cache, needs_padding_mask, shares_prompts
from pl_grouprl.rollout.prefill import MAX_PADDING, NextTokenLogits, Prefix, left_padding_mask, plan_batches
from pl_grouprl.rollout.prompt_rows import EncodedPrompt, find_shared_prompts
from pl_grouprl.types import Prompt

MAX_REPEATED = 16
"""Cached tokens per sequence that may be rerun to share a forward pass: about the cost of a pass."""


def plan_continuing(
    lengths: Sequence[int], kept: Sequence[KeptSequence], max_tokens: int, *, padding: bool = True
) -> list[range]:
    """Split prompts that continue kept sequences into batches.

    Args:
        lengths: Tokens of each prompt, sorted by the number of new ones, then by length.
        kept: The sequence that each continues.
        max_tokens: Most tokens that a batch runs; a prompt with more gets a separate batch.
        padding: Whether prompts of different lengths may share a forward pass.

    Returns:
        The consecutive indices of each batch.
    """
    new = [length - sequence.num_tokens for length, sequence in zip(lengths, kept, strict=True)]

    def fits(first: int, last: int) -> bool:
        if (last + 1 - first) * new[last] > max_tokens or (not padding and lengths[first] != lengths[last]):
            return False
        max_repeated = max(MAX_REPEATED, MAX_PADDING * new[first]) if padding else 0
        return new[last] - new[first] <= max_repeated and all(
            new[last] - new[index] <= kept[index].num_removable for index in range(first, last)
        )

    return plan_batches(len(lengths), fits)


def continue_sequences(logits: NextTokenLogits, prompts: Sequence[Prompt], kept: Sequence[KeptSequence]) -> Prefix:
    """Encode prompts that extend kept sequences, in one forward pass.

    Args:
        logits: The model.
        prompts: Prompts without media; a batch of `plan_continuing`.
        kept: The sequence that each continues.
    """
    lengths, device = [len(prompt.token_ids) for prompt in prompts], logits.device
    new = max(length - sequence.num_tokens for length, sequence in zip(lengths, kept, strict=True))
    cached = [length - new for length in lengths]
    width, row = max(cached), torch.zeros(1, dtype=torch.int64, device=device)
    parts = [(sequence.first(count), row) for sequence, count in zip(kept, cached, strict=True)]
    shared = [sequence.prompt or EncodedPrompt(count) for sequence, count in zip(kept, cached, strict=True)]
    prompts_of_rows = [([prompt], [count], [0]) for prompt, count in zip(shared, cached, strict=True)]
    cache = gather_cache(parts, width, width + new, find_shared_prompts(prompts_of_rows, device, 0))
    input_ids = torch.tensor([list(prompt.token_ids[-new:]) for prompt in prompts], device=device)
    position_ids = torch.tensor(cached, device=device).unsqueeze(-1) + torch.arange(new, device=device)
    mask = left_padding_mask(lengths, width + new, device) if needs_padding_mask(cache) else None
    if not shares_prompts(cache):
        shared = [EncodedPrompt(length) for length in lengths]
    return Prefix(cache, logits(input_ids, cache, position_ids, mask), lengths, lengths, shared)
