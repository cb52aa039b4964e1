"""What to write for an option of TRL or verl whose unit or values differ here."""

from __future__ import annotations

from typing import Any

_TOKENS = "It counts tokens, not completions: 16384, say, each prompt once; leave it out if memory suffices."
_UPDATES = "It counts optimizer steps; verl counts rollouts: multiply by num_mini_batches times num_iterations."
_BOOLEAN = "False is 'none' and True is 'group'; left out, it is that of loss_type."
_ENGINES = (
    "Import it from pl_grouprl.rollout: VLLMRolloutEngine() in the training processes (colocate) or "
    "VLLMServerRolloutEngine(urls=...); on the command line, --config rollout/vllm_colocate.yaml or "
    "rollout/vllm_server.yaml."
)
_CLIPPING = "The Trainer's gradient_clip_val does the same for all weights; use one of them."
_PPO = "pl_grouprl.PPO always uses GAE: leave it out."
_WHITENED = "PPO normalizes advantages over the batch instead: whiten_advantages=True or False."

_UNAVAILABLE = "It is not available yet: docs/options.md#not-available-yet."
_NOT_YET = (
    "cache_implementation",
    "cast_lm_head_to_fp32",
    "entropy_coef_delta",
    "entropy_coef_max",
    "entropy_coef_min",
    "entropy_target",
    "off_policy_mask_threshold",
    "ref_model_mixup_alpha",
    "ref_model_sync_steps",
    "repetition_penalty",
    "sync_ref_model",
    "top_entropy_quantile",
    "transformers_continuous_batching_config",
    "use_adaptive_entropy",
    "use_bias_correction_kl",
    "use_transformers_continuous_batching",
    "vespo_k_neg",
    "vespo_k_pos",
    "vespo_lambda_neg",
    "vespo_lambda_pos",
    "vllm_structured_outputs_regex",
    "whiten_rewards",
)

OPTION_NOTES = dict.fromkeys(_NOT_YET, _UNAVAILABLE) | {
    "adv_estimator": "verl's 'gae' is pl_grouprl.PPO.",
    "args": "Pass the fields of a GRPOConfig one by one: docs/coming_from_trl.md.",
    "critic_warmup": _UPDATES,
    "free_cache_engine": "It is 0 (off), 1 or 2.",
    "generation_batch_size": "It counts prompts: generation_batch_size / num_generations.",
    "grad_clip": "optimizer={'max_grad_norm': ...} clips the policy alone, where there is a critic.",
    "gradient_accumulation_steps": _TOKENS,
    "custom_reward_function": "Pass rewards=FunctionFromFile(path, name, kwargs) of pl_grouprl.rewards.",
    "importance_sampling_level": "'sequence' is loss_type='gspo'; 'token' is the default.",
    "kl_ctrl": "beta is the coefficient; kl_target and kl_horizon make it adaptive.",
    "launch_reward_fn_async": "It is a number of processes.",
    "max_grad_norm": _CLIPPING,
    "model_init_kwargs": "They are options of the policy: PretrainedPolicy(path, dtype=..., attn_implementation=...).",
    "multi_turn": "Pass tools or environment_factory: docs/tools_and_environments.md.",
    "norm_adv_by_std_in_grpo": "False is 'none' and True is 'group'.",
    "per_device_train_batch_size": _TOKENS,
    "ppo_micro_batch_size_per_gpu": f"max_tokens_per_micro_batch takes its place. {_TOKENS}",
    "ppo_mini_batch_size": "It is a number of parts: train_batch_size / ppo_mini_batch_size.",
    "processing_class": "A tokenizer is tokenizer=... there; left out, it is the policy's.",
    "reward_fn_key": "The column is data_source.",
    "reward_kwargs": "Pass rewards=FunctionFromFile(path, name, kwargs) of pl_grouprl.rewards.",
    "reward_weights": "Weights stand next to the functions: rewards=[{'function': accuracy, 'weight': 0.5}].",
    "save_steps": "Add the callback pl_grouprl.callbacks.SafeCheckpoint(every_n_train_steps=...) to the Trainer.",
    "steps_per_generation": "It is a number of optimizer steps: steps_per_generation / gradient_accumulation_steps.",
    "total_training_steps": _UPDATES,
    "use_dynamic_bsz": "It is a number of tokens: verl's ppo_max_token_len_per_gpu. It is off by default.",
    "use_kl_in_reward": "True is kl_in='reward', with the coefficient in beta.",
    "use_kl_loss": "It is the coefficient, verl's kl_loss_coef: 0.001, say, and 0 is off.",
    "use_vllm": _ENGINES,
    "vllm_enable_sleep_mode": "It is 0 (off), 1 or 2.",
    "vllm_importance_sampling_correction": "True is 'sequence_mask' and False is 'none'.",
    "vllm_mode": _ENGINES,
    "warmup_ratio": "optimizer={'warmup_steps': ...} counts optimizer steps.",
}
"""A sentence for each option, by its name in TRL or verl."""

_NOTES_OF_CLASSES = {
    "whiten_advantages": {
        "advantage_estimator": _PPO,
        "adv_estimator": _PPO,
        "norm_adv_by_std_in_grpo": _WHITENED,
        "scale_rewards": _WHITENED,
    }
}
"""What classes that take the first option say of others, which they do not take."""

_VALUE_NOTES: dict[tuple[str, Any], str] = {
    ("advantage_estimator", "gae"): "'gae' is pl_grouprl.PPO.",
    ("advantage_estimator", "group_ppo"): "'group_ppo' is pl_grouprl.GroupPPO.",
    ("policy_loss", "bypass_mode"): "importance_sampling corrects for the sampler, with any loss.",
    ("loss_type", "luspo"): _UNAVAILABLE,
    ("loss_type", "vespo"): _UNAVAILABLE,
    ("scale_rewards", False): _BOOLEAN,
    ("scale_rewards", True): _BOOLEAN,
}
_LORA_CONFIG = (
    "PEFT's LoraConfig(r=8, lora_alpha=16, target_modules=['q_proj']) is written "
    "LoRAAdapter(r=8, alpha=16, target_modules=['q_proj'])."
)
_PARSED = {"False": False, "True": True}


def note_on_option(name: str) -> str:
    """A space and the sentence on an option of TRL or verl; empty if its values are the same here."""
    return f" {OPTION_NOTES[name]}" if name in OPTION_NOTES else ""


def note_of_class(name: str, known: dict[str, Any]) -> str | None:
    """What a class says of an option that others take, by the options that it takes itself."""
    notes = (notes for option, notes in _NOTES_OF_CLASSES.items() if option in known)
    return next((own[name] for own in notes if name in own), None)


def note_on_value(option: str, value: Any) -> str:
    """A space and the sentence on a refused value of an option; empty if there is none.

    Args:
        option: Its name, perhaps after others and a dot.
        value: A value, or how it is printed.
    """
    if type(value).__name__ == "LoraConfig":
        return f" {_LORA_CONFIG}"
    value = _PARSED.get(value, value) if isinstance(value, str) else value
    if not isinstance(value, str | bool):
        return ""
    return "".join(f" {note}" for key, note in _VALUE_NOTES.items() if key == (option.rsplit(".", 1)[-1], value))
