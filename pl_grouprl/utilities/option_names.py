"""Names of options elsewhere."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

# What to write for an option of TRL or verl whose unit or values differ here.

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


# Finds where an unknown constructor argument belongs, by the name it has here, in TRL or in verl.
#
# A test checks that this agrees with the tables in docs/options.md.

OPTION_PATHS = {
    "data.init_args.add_special_tokens": "",
    "data.init_args.split_special_tokens": "",
    "data.init_args.batch_size": "generation_batch_size train_batch_size",
    "data.init_args.chat_template_kwargs": "apply_chat_template_kwargs",
    "data.init_args.drop_last": "dataloader_drop_last",
    "data.init_args.image_column": "image_key",
    "data.init_args.max_prompt_length": "",
    "data.init_args.overlong_prompts": "filter_overlong_prompts truncation",
    "data.init_args.processor": "processing_class",
    "data.init_args.processor_kwargs": "",
    "data.init_args.prompt_column": "prompt_key",
    "data.init_args.shuffle": "shuffle_dataset",
    "data.init_args.test": "",
    "data.init_args.tokenizer": "",
    "data.init_args.train": "train_dataset train_files",
    "data.init_args.val": "eval_dataset val_files",
    "data.init_args.val_batch_size": "per_device_eval_batch_size",
    "data.init_args.video_column": "video_key",
    "model.init_args.advantage_estimator": "adv_estimator",
    "model.init_args.beta": "use_kl_loss kl_loss_coef kl_coef",
    "model.init_args.branching": "",
    "model.init_args.chat_template": "chat_template_path custom_chat_template",
    "model.init_args.cliprange_value": "",
    "model.init_args.critic": "value_model",
    "model.init_args.critic_warmup_steps": "critic_warmup",
    "model.init_args.delta": "clip_ratio_c",
    "model.init_args.distillation_coef": "distillation_loss_coef",
    "model.init_args.engine": "use_vllm vllm_mode",
    "model.init_args.engine.init_args.bucket_mib": "update_weights_bucket_megabytes",
    "model.init_args.engine.init_args.enforce_eager": "",
    "model.init_args.engine.init_args.gpu_memory_utilization": "vllm_gpu_memory_utilization",
    "model.init_args.engine.init_args.max_model_len": "vllm_max_model_length",
    "model.init_args.engine.init_args.max_num_seqs": "",
    "model.init_args.engine.init_args.max_prefill_tokens": "max_num_batched_tokens",
    "model.init_args.engine.init_args.sleep_level": "vllm_enable_sleep_mode free_cache_engine",
    "model.init_args.engine.init_args.tensor_parallel_size": "vllm_tensor_parallel_size tensor_model_parallel_size",
    "model.init_args.engine.init_args.timeout": "vllm_server_timeout",
    "model.init_args.engine.init_args.urls": "vllm_server_base_url vllm_server_host vllm_server_port",
    "model.init_args.entropy_coef": "entropy_coeff",
    "model.init_args.environment_factory": "interaction_config_path",
    "model.init_args.epsilon": "clip_ratio clip_ratio_low cliprange",
    "model.init_args.epsilon_high": "clip_ratio_high",
    "model.init_args.harness": "",
    "model.init_args.importance_sampling": (
        "vllm_importance_sampling_correction vllm_importance_sampling_mode rollout_is"
    ),
    "model.init_args.importance_sampling_high": (
        "vllm_importance_sampling_clip_max vllm_importance_sampling_cap rollout_is_threshold"
    ),
    "model.init_args.importance_sampling_low": "vllm_importance_sampling_clip_min",
    "model.init_args.kl_horizon": "horizon",
    "model.init_args.kl_in": "use_kl_in_reward",
    "model.init_args.kl_target": "target_kl",
    "model.init_args.kl_type": "kl_loss_type kl_penalty kl_estimator",
    "model.init_args.lam": "",
    "model.init_args.loss_agg_mode": "",
    "model.init_args.loss_type": "",
    "model.init_args.mask_truncated_completions": "",
    "model.init_args.max_episode_tokens": "",
    "model.init_args.max_generation_batches": "max_num_gen_batches",
    "model.init_args.max_tokens_per_micro_batch": (
        "per_device_train_batch_size gradient_accumulation_steps "
        "use_dynamic_bsz ppo_max_token_len_per_gpu log_prob_max_token_len_per_gpu"
    ),
    "model.init_args.max_tool_calling_iterations": "max_assistant_turns",
    "model.init_args.max_turn_tokens": "",
    "model.init_args.multi_objective_aggregation": "",
    "model.init_args.num_generations": "n",
    "model.init_args.num_iterations": "ppo_epochs num_ppo_epochs",
    "model.init_args.num_mini_batches": "steps_per_generation ppo_mini_batch_size",
    "model.init_args.optimizer.betas": "adam_beta1 adam_beta2",
    "model.init_args.optimizer.eps": "adam_epsilon",
    "model.init_args.optimizer.final_fraction": "min_lr_ratio lr_scheduler_kwargs",
    "model.init_args.optimizer.learning_rate": "lr",
    "model.init_args.optimizer.optim": "optimizer_impl",
    "model.init_args.optimizer.optim_args": "override_optimizer_config",
    "model.init_args.optimizer.schedule": "lr_scheduler_type",
    "model.init_args.optimizer.state_bits": "",
    "model.init_args.optimizer.warmup_steps": "lr_warmup_steps",
    "model.init_args.optimizer.weight_decay": "",
    "model.init_args.pass_threshold": "",
    "model.init_args.policy": "model model_name_or_path sft_model_path",
    "model.init_args.policy.init_args.adapter": "peft_config use_peft",
    "model.init_args.policy.init_args.adapter.alpha": "lora_alpha",
    "model.init_args.policy.init_args.adapter.dropout": "lora_dropout",
    "model.init_args.policy.init_args.adapter.path": "lora_adapter_path",
    "model.init_args.policy.init_args.adapter.r": "lora_rank lora_r",
    "model.init_args.policy.init_args.adapter.target_modules": "lora_target_modules",
    "model.init_args.policy.init_args.adapter.use_dora": "",
    "model.init_args.policy.init_args.adapter.use_rslora": "",
    "model.init_args.policy.init_args.attn_implementation": "",
    "model.init_args.policy.init_args.compile_layers": "torch_compile",
    "model.init_args.policy.init_args.disable_dropout": "",
    "model.init_args.policy.init_args.dtype": "model_dtype",
    "model.init_args.policy.init_args.gradient_checkpointing": "enable_gradient_checkpointing",
    "model.init_args.policy.init_args.gradient_checkpointing_kwargs": "",
    "model.init_args.policy.init_args.gguf_file": "",
    "model.init_args.policy.init_args.quantization": (
        "quantization_config load_in_4bit bnb_4bit_quant_type use_bnb_nested_quant"
    ),
    "model.init_args.policy.init_args.revision": "model_revision",
    "model.init_args.policy.init_args.trust_remote_code": "",
    "model.init_args.policy_loss": "loss_mode",
    "model.init_args.policy_loss_options": (
        "sapo_temperature_pos sapo_temperature_neg clip_cov_ratio clip_cov_lb clip_cov_ub kl_cov_ratio ppo_kl_coef"
    ),
    "model.init_args.reward_workers": "launch_reward_fn_async",
    "model.init_args.rewritten_history": "",
    "model.init_args.rewards": "reward_weights reward_model_path reward_funcs",
    "model.init_args.router_aux_loss_coef": "",
    "model.init_args.sampling": "response_length stop_token stop_token_id",
    "model.init_args.sampling.max_new_tokens": "max_completion_length max_response_length",
    "model.init_args.sampling.min_p": "",
    "model.init_args.sampling.stop": "generation_kwargs",
    "model.init_args.sampling.temperature": "",
    "model.init_args.sampling.top_k": "",
    "model.init_args.sampling.top_p": "",
    "model.init_args.scale_rewards": "norm_adv_by_std_in_grpo",
    "model.init_args.seed": "",
    "model.init_args.sequence_parallel_size": "ulysses_sequence_parallel_size",
    "model.init_args.share_across_groups": "",
    "model.init_args.sharing": "use_prefix_grouper",
    "model.init_args.teacher": "teacher_model teacher_model_name_or_path",
    "model.init_args.tool_timeout": "",
    "model.init_args.tool_workers": "max_parallel_calls",
    "model.init_args.tools": "tool_config_path",
    "model.init_args.val_num_generations": "num_generations_eval",
    "model.init_args.val_sampling": "val_kwargs",
    "model.init_args.vf_coef": "",
    "pl_grouprl.callbacks.CompletionsTable": "log_completions num_completions_to_print rollout_data_dir",
    "pl_grouprl.callbacks.ExportPolicy": "save_model",
    "pl_grouprl.callbacks.ValidateAtStart": "eval_on_start val_before_train",
    "pl_grouprl.rewards.CosineLengthReward": "get_cosine_scaled_reward",
    "pl_grouprl.rewards.OverlongPenalty": "get_soft_overlong_punishment penalty_factor",
    "pl_grouprl.rewards.RepetitionPenalty": "get_repetition_penalty_reward",
    "trainer.accelerator": "",
    "trainer.accumulate_grad_batches": "",
    "trainer.callbacks": "",
    "trainer.default_root_dir": "output_dir default_local_dir",
    "trainer.devices": "n_gpus_per_node",
    "trainer.enable_progress_bar": "disable_tqdm",
    "trainer.gradient_clip_val": "max_grad_norm grad_clip",
    "trainer.log_every_n_steps": "logging_steps",
    "trainer.logger": "report_to",
    "trainer.max_epochs": "num_train_epochs total_epochs",
    "trainer.max_steps": "total_training_steps",
    "trainer.num_nodes": "nnodes",
    "trainer.precision": "bf16",
    "trainer.strategy": "",
    "trainer.val_check_interval": "eval_steps test_freq",
}
"""TRL's and verl's names of an option, by its path in a YAML file."""

_OF_PPO = ("cliprange_value", "critic", "lam", "vf_coef")
_CLASSES = (
    ("model.init_args.policy.init_args.adapter.", "of LoRAAdapter: PretrainedPolicy(path, adapter={{{name!r}: ...}})"),
    ("model.init_args.policy.init_args.", "of the policy: PretrainedPolicy(path, {name}=...)"),
    ("model.init_args.engine.init_args.", "of the engine: engine=...({name}=...)"),
    ("model.init_args.optimizer.", "of the optimizer: optimizer={{{name!r}: ...}}"),
    ("model.init_args.sampling.", "of sampling: sampling={{{name!r}: ...}}"),
    *((f"model.init_args.{name}", "of PPO: PPO({name}=...)") for name in _OF_PPO),
    ("model.init_args.teacher", "of Distillation({name}=...)"),
    ("data.init_args.", "of the data: PromptDataModule({name}=...)"),
    ("trainer.", "of the Trainer: Trainer({name}=...)"),
    ("model.init_args.", "of the algorithm, such as GRPO({name}=...)"),
)


def option_path(name: str) -> str | None:
    """The path in a YAML file of an option by its name here, in TRL or in verl; None if it is unknown."""
    ours = {path.rsplit(".", 1)[-1]: path for path in OPTION_PATHS}
    theirs = {foreign: path for path, names in OPTION_PATHS.items() for foreign in names.split()}
    return ours.get(name) or theirs.get(name)


def foreign_path(name: str) -> str | None:
    """The path in a YAML file of an option with its groups: `actor_rollout_ref.rollout.n`, or `num_generations`."""
    groups = name.split(".")
    of_critic = groups[0] == "critic"
    if groups[-2:] == ["model", "path"]:
        return f"model.init_args.{'critic' if of_critic else 'policy'}"
    path = option_path(groups[-1])
    if path is None or not of_critic:
        return path
    return None if ".policy." in path else path.replace(".optimizer.", ".critic_optimizer.")


def locate_option(name: str, known: Container[str] = (), in_yaml: bool = False) -> str | None:
    """Describe where an option belongs; None if it is unknown.

    Args:
        name: An argument that a constructor does not take.
        known: The names that it takes.
        in_yaml: Give the path in a YAML file instead of Python.
    """
    path = option_path(name)
    if path is None:
        return None
    our_name = path.rsplit(".", 1)[-1]
    if our_name in known:
        return f"here it is {our_name}"
    if in_yaml:
        return f"here it is {path}"
    for prefix, words in _CLASSES:
        if path.startswith(prefix):
            what = "it is" if our_name == name else f"here it is {our_name},"
            return f"{what} an option {words.format(name=our_name)}"
    return f"here it is {path}"
