"""Arguments of vLLM that this package sets, in the trainer's process and in a server."""

from __future__ import annotations

from typing import Any

from pl_grouprl.rollout.vllm.cpu import cpu_arguments

FOLDER_VARIABLE = "PL_GROUPRL_BUCKETS"
"""Environment variable with a server's folder for buckets, which trainers on the same machine write to."""

DECIDED_ALWAYS = {
    "data_parallel_size": "the number of engines or servers",
    "disable_log_stats": "the trainer, which logs",
    "enable_prefix_caching": "the group, whose rollouts share their prompt",
    "generation_config": "the module's sampling options",
    "logprobs_mode": "the loss, which needs log-probabilities at the sampling temperature",
    "quantization": "the comparison of weights, which does not support it",
    "runner": "the policy",
    "skip_tokenizer_init": "the policy's tokenizer, which stays in the trainer",
    "speculative_config": "the loss, which needs log-probabilities that draft tokens lack",
    "weight_transfer_config": "the transfer of weights",
    "worker_extension_cls": "the transfer of weights",
}
"""Arguments that users cannot set, and what decides each."""

DECIDED_BY_SERVER = {name: decides for name, decides in DECIDED_ALWAYS.items() if name != "skip_tokenizer_init"} | {
    **dict.fromkeys(("spec_method", "spec_model", "spec_tokens"), DECIDED_ALWAYS["speculative_config"]),
    "api_key": "--token, which guards every route",
    "config": "the command line, which is checked",
    **{name: f"--{name}, written out" for name in ("model", "host", "port", "token", "transfer")},
    "uds": "--host and --port",
}
"""The same for a server, which may have a tokenizer for other clients."""

DECIDED_IN_PROCESS = DECIDED_ALWAYS | {
    "model": "the policy",
    "dtype": "the engine's dtype",
    "load_format": "the trainer, which sends the weights",
    "tokenizer": "the policy's tokenizer, which stays in the trainer",
    "model_impl": "the trainer, whose models vLLM's Transformers backend would change",
    "enable_sleep_mode": "sleep_level",
    "enable_chunked_prefill": "the device",
    "kv_cache_memory_bytes": "kv_cache_gib",
    "distributed_executor_backend": "tensor_parallel_size",
    "tensor_parallel_size": "tensor_parallel_size",
    "pipeline_parallel_size": "tensor_parallel_size alone",
    "data_parallel_size": "the ranks of the Trainer",
    "hf_overrides": "the policy's config",
    "mm_processor_cache_gb": "the trainer, which processes images itself",
    **dict.fromkeys(
        [
            *("enable_lora", "max_loras", "max_lora_rank", "max_cpu_loras", "lora_dtype", "lora_target_modules"),
            *("fully_sharded_loras", "default_mm_loras", "enable_tower_connector_lora"),
            *("enable_mixed_moe_lora_format", "enable_moe_shared_loras"),
        ],
        "the engine's adapter",
    ),
}
"""The same for a vLLM in the trainer's process."""


def common_arguments(*, transfer: str = "pl_grouprl") -> dict[str, Any]:
    """Arguments that rollouts and the comparison of weights require, as plain values.

    Args:
        transfer: Name of vLLM's weight transfer.
    """
    return {
        "runner": "generate",
        "generation_config": "vllm",  # only the trainer's sampling options
        "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": True,
        "weight_transfer_config": {"backend": transfer},
        "worker_extension_cls": "pl_grouprl.rollout.vllm.worker.WeightReceiver",
        "disable_log_stats": True,
        **cpu_arguments(),
    }
