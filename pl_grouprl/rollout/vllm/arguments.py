"""Arguments that every vLLM of ours is started with, whether in the trainer's process or as a server."""

from __future__ import annotations

from typing import Any


def common_arguments(*, transfer: str = "pl_grouprl") -> dict[str, Any]:
    """What rollouts and the comparison of weights depend on.

    vLLM 0.32 forgets the random number that it has drawn behind a part of a prompt, which it cannot do on CPUs: there
    prompts are not cut.

    Args:
        transfer: Name of vLLM's weight transfer.
    """
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.platforms import current_platform

    return {
        "runner": "generate",
        "generation_config": "vllm",  # what the trainer asks for, and nothing else
        "skip_tokenizer_init": True,  # prompts are tokens, and stop strings are looked for here
        "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": True,
        "weight_transfer_config": WeightTransferConfig(backend=transfer),
        "worker_extension_cls": "pl_grouprl.rollout.vllm.worker.WeightReceiver",
        "disable_log_stats": True,
        **({"enable_chunked_prefill": False} if current_platform.is_cpu() else {}),
    }
