"""What this package relies on in other libraries beyond their public API.

What transformers and PEFT may rename is read here and nowhere else. The other names in `NAMES` are read where they are
used. After a new release, `tests/utilities/test_internals.py` says which of them are gone.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

# transformers


@cache
def cache_argument(forward: Callable[..., Any]) -> str | None:
    """The keyword of a transformers forward function for its cache, which differs by release and family.

    Args:
        forward: An unbound function, with or without decorators.

    Returns:
        The parameter annotated as a `Cache`, or else named as by `generate`, now or formerly; None if there is none.
    """
    from transformers.generation.utils import ALL_CACHE_NAMES

    parameters = inspect.signature(inspect.unwrap(forward)).parameters
    annotated = [name for name, one in parameters.items() if re.search(r"Cache\b", str(one.annotation))]
    usual = (ALL_CACHE_NAMES[0], "past_key_values", "cache_params")
    return next(iter(annotated or [name for name in usual if name in parameters]), None)


def holds_cache(arguments: Mapping[str, Any]) -> bool:
    """Whether a cache is among the arguments of a call, under any name."""
    from transformers.cache_utils import Cache

    return any(isinstance(value, Cache) for value in arguments.values())


def mark_adapted(model: Any, adapted: bool) -> None:
    """Tell transformers whether a model has PEFT's layers, so that `save_pretrained` saves those alone.

    Its own `add_adapter` asks for a newer PEFT than it needs: 5.24 for 0.22, before there was one.
    """
    model._hf_peft_config_loaded = adapted


def float32_parts(model: Any) -> frozenset[str]:
    """Parts of the names of weights that transformers keeps in float32 when it loads a model in half precision."""
    return frozenset(getattr(model, "_keep_in_fp32_modules_strict", None) or ())


def attention_implementation(config: Any) -> str | None:
    """The name of the attention function that a decoder's layers look up in each call."""
    name: str | None = getattr(config, "_attn_implementation", None)
    return name


def set_attention_implementation(config: Any, name: str | None) -> None:
    """Let a decoder's layers look up another attention function; `set_attn_implementation` may fetch kernels."""
    config._attn_implementation = name


def uses_attention_functions(decoder: Any) -> bool:
    """Whether all attention of a decoder goes through the registered functions."""
    return bool(decoder._can_set_attn_implementation())


def router_recorders(decoder: Any) -> list[Any]:
    """What records a decoder's router logits: classes of modules, or objects with such a `target_class`."""
    recorders = (getattr(decoder, "_can_record_outputs", None) or {}).get("router_logits") or []
    return recorders if isinstance(recorders, list) else [recorders]


def checkpointing_options(module: Any) -> dict[str, Any]:
    """The arguments with which a module checkpoints its activations; empty if it does not."""
    function = getattr(module, "_gradient_checkpointing_func", None)
    return getattr(function, "keywords", {}) if getattr(module, "gradient_checkpointing", False) else {}


def requires_input_gradients(model: Any) -> bool:
    """Whether `enable_input_require_grads` was called."""
    return hasattr(model, "_require_grads_hook")


def weight_conversions(model: Any) -> list[Any] | None:
    """The conversions that made a model's weights from its checkpoint's; None for a model that was not loaded."""
    conversions = getattr(model, "_weight_conversions", None)
    return None if conversions is None else list(conversions)


def unsaved_names(model: Any) -> set[str]:
    """Names of weights that `save_pretrained` leaves out."""
    return set(model._keys_to_ignore_on_save or ())


NAMES = {
    # what a family can do, and how it saves
    "transformers.PreTrainedModel": (
        "_can_set_attn_implementation _can_record_outputs _require_grads_hook _keys_to_ignore_on_save "
        "_keep_in_fp32_modules_strict"
    ),
    "transformers.PretrainedConfig": "_attn_implementation",  # our attention in place of the model's
    "transformers.core_model_loading": "revert_weight_conversion WeightConverter",  # checkpoint names
    "transformers.conversion_mapping": "get_model_conversion_mapping",  # checkpoint names
    "transformers.modeling_utils": "remove_tied_weights_from_state_dict",  # names of tied weights
    "transformers.generation.utils": "ALL_CACHE_NAMES",  # the cache's argument, where it is not annotated
    "transformers.integrations.peft.PeftAdapterMixin": "_hf_peft_config_loaded",  # models with adapters
    # logging many numbers at once; writing, finding and resuming checkpoints; validation before the first step
    "lightning.pytorch.Trainer": "_results _checkpoint_connector _logger_connector _accelerator_connector",
    # metrics without a value are not repeated; compiled modules are refused
    "lightning.pytorch.LightningModule": "_current_fx_name _trainer _compiler_ctx",
    "lightning.pytorch.trainer.call": "_call_configure_model",  # models before callbacks that read them
    # ckpt_path 'last'; checkpoints that are complete or absent
    "lightning.pytorch.trainer.connectors.checkpoint_connector._CheckpointConnector": (
        "_parse_ckpt_path dump_checkpoint hpc_save_path"
    ),
    # validation before the first step
    "lightning.pytorch.trainer.connectors.logger_connector.logger_connector._LoggerConnector": "_first_loop_iter",
    # the end of a run; the position in the data after a resume; whether validation follows a step
    "lightning.pytorch.loops.fit_loop._FitLoop": (
        "_can_stop_early _combined_loader _combined_loader_states_to_load _data_source _data_fetcher"
    ),
    # whether a batch ends with a step, and validation follows; repaired counters of a resumed run
    "lightning.pytorch.loops.training_epoch_loop._TrainingEpochLoop": (
        "_should_accumulate _batches_that_stepped _should_check_val_fx"
    ),
    # validation on fewer prompts before the first step
    "lightning.pytorch.loops.evaluation_loop._EvaluationLoop": "_max_batches",
    "lightning.pytorch.utilities.combined_loader.CombinedLoader": "_load_state_dicts",  # a resume's data
    "lightning.pytorch.strategies.Strategy": "_checkpoint_io _forward_redirection",  # checkpoints; FSDP1
    "lightning.pytorch.strategies.FSDPStrategy": "_setup_model",  # the second run of a module
    "lightning.pytorch.strategies.DeepSpeedStrategy": "_restore_zero_state",  # evaluation under ZeRO-3
    "lightning.pytorch.strategies.launchers": "_SubprocessScriptLauncher",  # ending the other ranks
    # SafeCheckpoint writes by itself, and lets Lightning decide when
    "lightning.pytorch.callbacks.ModelCheckpoint": (
        "_every_n_epochs _every_n_train_steps _train_time_interval _monitor_candidates _save_checkpoint "
        "_save_last_checkpoint _save_topk_checkpoint _should_skip_saving_checkpoint "
        "_last_checkpoint_saved _last_global_step_saved _link_checkpoint _remove_checkpoint "
        "_find_last_checkpoints _format_checkpoint_name _defer_save_until_validation"
    ),
    "lightning.pytorch.callbacks.ModelSummary": "_summarize_kwargs _max_depth",  # our table in its place
    # our progress bar in its place
    "lightning.pytorch.callbacks.RichProgressBar": (
        "_refresh_rate _leave _console_kwargs _initialize_train_progress_bar_id _progress_stopped _update"
    ),
    # whether the logger has begun to write, and where the Trainer's own writes
    "lightning.pytorch.loggers.CSVLogger": "_experiment _save_dir _root_dir _name _version _get_next_version",
    # where the Trainer's own writes
    "lightning.pytorch.loggers.TensorBoardLogger": "_experiment _root_dir _name _version _get_next_version",
    "lightning.fabric.utilities.logger": "_convert_params _flatten_dict",  # the logger for trackio
    # weights by owner; copies without hooks; whether a module is hooked or compiled
    "torch.nn.Module": (
        "_modules _parameters _buffers _non_persistent_buffers_set _compiled_call_impl _forward_hooks "
        "_forward_pre_hooks _backward_hooks _backward_pre_hooks"
    ),
    "torch._dynamo": "OptimizedModule",  # compiled modules are refused
    "torch._dynamo.OptimizedModule": "_orig_mod",  # the model inside
    "torch": "_assert_async _foreach_norm _foreach_mul_",  # checks and norms without waiting for the GPU
    "torch._C": "_cuda_endAllocateToPool _cuda_releasePool",  # the allocator after a capture that failed
    # attention that also returns its log-sum-exp, which merging needs
    "torch.ops.aten": (
        "_flash_attention_forward _flash_attention_backward _scaled_dot_product_flash_attention "
        "_scaled_dot_product_flash_attention_for_cpu "
        "_scaled_dot_product_flash_attention_for_cpu_backward"
    ),
    "torch.ops.mkldnn": "_linear_pointwise _reorder_linear_weight",  # linear layers on packed weights
    "torch.distributed.distributed_c10d": "_get_default_store _world",  # the watchdog's store and counters
    "torch.distributed.PrefixStore": "_underlying_non_prefix_store",  # the watchdog's store
    "torch.distributed.ProcessGroup": "_get_sequence_number_for_group",  # the watchdog's counters
    "torch.Tensor": "_version",  # whether a saved output was changed in place
    "torch.UntypedStorage": "_cdata",  # whether two tensors share memory
    "deepspeed.runtime.engine.DeepSpeedEngine": "_backward_prologue",  # several backward passes a step
    # skipping a group; evaluation under ZeRO-3
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3": "_optimizer_step _restore_from_bit16_weights",
    "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer": "_optimizer_step",  # skipping a group
    "jsonargparse.ArgumentParser": "_actions",  # options of a configuration
    "lightning.pytorch.cli.LightningCLI": "_subcommand_method_arguments",  # options of a subcommand
    "vllm.v1.engine.core_client.MPClient": "_finalizer",  # the trainer's process group survives the engine
    "vllm.distributed.weight_transfer.factory.WeightTransferEngineFactory": "_registry",  # our transfer
    "vllm.v1.worker.gpu_worker.Worker": "_weight_update_active",  # abandoned updates of weights
    "vllm.model_executor.model_loader.reload.layerwise": "_place_kernel_tensors",  # abandoned reloads
    "vllm.distributed.device_communicators.cpu_communicator": "_CPUSHMDistributed",  # shared memory of one engine
}
"""Non-public names that this package uses, by the module or class that owns them, and what they are needed for.

Names of a class may be attributes of its instances, or inherited. `tests/utilities/test_internals.py` checks that they
exist.
"""
