"""Applies `utilities.device_defaults` to a run: what its user left open, decided by its device, and logged once."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from pl_grouprl.attention.backends.saved import checkpointing_of
from pl_grouprl.models.kernels import fuse_if_exact, unfuse_layers
from pl_grouprl.utilities.device_defaults import (
    GIB,
    FastFloat32,
    activation_bytes,
    checkpoints_activations,
    free_memory,
    fuses_adamw,
    tokens_per_micro_batch,
)
from pl_grouprl.utilities.distributed import local_shard, reduce_over_ranks


class DeviceChoices:
    """The open options of a run, as its device decides them.

    Args:
        module: The `RLModule`.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self._fast_float32 = FastFloat32()

    def checkpoint_activations(self) -> None:
        """Let the loaded policy recompute activations, if its source leaves that open and the run is on a GPU."""
        module, enable = self._module, getattr(self._module.policy_source, "enable_checkpointing", None)
        device_type = "cpu" if module._trainer is None else module.trainer.strategy.root_device.type
        setting = getattr(module.policy_source, "gradient_checkpointing", False)
        if setting is None and checkpoints_activations(setting, device_type) and enable is not None:
            enable(module.policy)

    def fuse_layers(self) -> None:
        """Let the models that read rollouts run liger-kernel's layers, as their sources say, or on a GPU by default."""
        module, told = self._module, dict[str | None, list[str]]()
        for name, model in module.scored_models().items():
            source = getattr(module, f"{name}_source", None)
            kernels = getattr(source if hasattr(source, "kernels") else module.policy_source, "kernels", None)
            if kernels == "liger" or (kernels is None and module.device.type == "cuda"):
                with module.support.whole_weights(model), module.support.forward_context():
                    reason = fuse_if_exact(model)
                if reduce_over_ranks(torch.tensor(float(reason is not None)), module.device, "max") and not reason:
                    unfuse_layers(model)
                    reason = "another rank cannot"
                told.setdefault(reason, []).append(name)
        for reason, names in told.items():
            how = "run liger-kernel's fused kernels" if reason is None else f"run without liger-kernel: {reason}"
            rank_zero_info(f"The layers of {' and '.join(names)} {how}.")

    def fused(self) -> bool | None:
        """`fused` of the run's AdamW."""
        module = self._module
        parameters = [p for part, _ in module.optimized_parts().values() for p in part.parameters() if p.requires_grad]
        return fuses_adamw(parameters, getattr(module.trainer.precision_plugin, "scaler", None))

    def describe(self) -> None:
        """Log how the run computes; warn if that is float32 on a GPU, or rounds updates of weights away."""
        module = self._module
        trainer, device = module.trainer, module.device
        lines = [f"computes in {str(self._dtype).removeprefix('torch.')} (precision {trainer.precision})"]
        if hasattr(module.engine, "compute_dtype"):
            sampled = str(module.engine.compute_dtype or module.policy.dtype)
            lines.append(f"samples in {sampled.removeprefix('torch.')}")
        if any(group.get("fused") for optimizer in trainer.optimizers for group in optimizer.param_groups):
            lines.append("fused AdamW")
        if checkpointing := checkpointing_of(module.policy):
            is_default = getattr(module.policy_source, "gradient_checkpointing", True) is None
            saved = " except those of attention" if checkpointing == "attention" else ""
            lines.append(f"recomputes activations{saved}{' (the default on a GPU)' if is_default else ''}")
        where = f"On {device.type}"
        if device.type == "cuda":
            where = f"On {torch.cuda.get_device_name(device)}, {free_memory(device) / GIB:.1f} GiB free"
        rank_zero_info(f"{where}: {', '.join(lines)}.")
        if device.type == "cuda" and self._dtype == torch.float32:
            rank_zero_warn(
                "training computes in float32 on a GPU, which takes several times as long as bfloat16; pass "
                "precision=default_precision() of pl_grouprl, or 'bf16-mixed', to the Trainer."
            )
        # Half-precision weights that stay where they are after a step of the learning rate's size. What the optimizer
        # holds is what counts: DeepSpeed's has float32 copies of such weights.
        lost, total, learning_rates = 0, 0, set()
        for optimizer in trainer.optimizers:
            for group in [] if getattr(optimizer, "bf16_stochastic_round", False) else optimizer.param_groups:
                learning_rate = group.get("initial_lr", group["lr"])  # the peak of the schedule
                for weight in (local_shard(weight).detach() for weight in group["params"] if weight.dtype.itemsize < 4):
                    unmoved = (weight + learning_rate == weight) & (weight - learning_rate == weight)
                    lost, total = lost + int(unmoved.sum()), total + weight.numel()
                    learning_rates.add(f"{learning_rate:g}")
        if lost > 0.01 * total:
            rank_zero_warn(
                f"{lost / total:.1%} of the trained half-precision weights do not move in a step of the size of "
                f"learning_rate ({', '.join(sorted(learning_rates))}), which rounds to nothing; train float32 weights "
                "(dtype='float32' of the model, and precision='bf16-mixed' of the Trainer), or round stochastically "
                "(optim='torchao.optim.AdamW8bit', optim_args={'bf16_stochastic_round': True})."
            )

    def open(self) -> None:
        """Use TF32 for what remains in float32. After the checks at the start, which its rounding would fail."""
        if self._fast_float32.open(self._module.device.type):
            rank_zero_info(
                "Float32 products use TF32; torch.set_float32_matmul_precision('highest') before the run forbids it."
            )

    def close(self) -> None:
        """Restore the models' own layers, which also run on the CPU, and the settings of the process."""
        if self._module.policy is not None:
            for model in self._module.scored_models().values():
                unfuse_layers(model)
        self._fast_float32.close()

    def micro_batch_tokens(self) -> int | None:
        """The token budget that fits in the GPU's free memory; None if there is none to choose.

        Not chosen where it would change the result or is not supported: for losses that compare the tokens of a
        micro-batch, models with dense masks, rows divided among ranks, FSDP1; and not under DeepSpeed, whose buffers
        are not counted.
        """
        module = self._module
        device, objective = module.device, module.objective
        compares = objective.policy_loss.compares_tokens or objective.router_aux_loss_coef > 0
        may_split = module.support.bounds_micro_batches and module.sharing.sequence_parallel_size == 1
        if device.type != "cuda" or compares or module.prefix_sharing.dense or not may_split:
            return None
        width = 4 if self._dtype == torch.float32 else 2
        models = [m for m in module.scored_models().values() if any(p.requires_grad for p in m.parameters())]
        configs = [model.config.get_text_config(decoder=True) for model in models]
        per_token = sum(
            activation_bytes(config, width, checkpointing_of(model))
            for config, model in zip(configs, models, strict=True)
        )
        logits = sum(512 * 8 * config.vocab_size for config in configs)
        free = free_memory(device)
        tokens = tokens_per_micro_batch(free, self._pending(width) + logits, per_token)
        rank_zero_info(
            f"At most {tokens} tokens per micro-batch: {free / GIB:.1f} GiB are free, and a token takes up to "
            f"{per_token / 2**20:.2f} MiB (max_tokens_per_micro_batch sets another number)."
        )
        return tokens

    def _pending(self, width: int) -> int:
        """Bytes that the first step allocates: gradients, moments, and autocast's copies of the weights."""
        module, total = self._module, 0
        states = [optimizer.state for optimizer in module.trainer.optimizers]
        for part, _ in module.optimized_parts().values():
            for weight in part.parameters():
                total += width * weight.numel() if weight.dtype.itemsize > width else 0
                if weight.requires_grad:
                    total += weight.nbytes if weight.grad is None else 0
                    total += 0 if any(weight in state for state in states) else 2 * local_shard(weight).nbytes
        return total

    @property
    def _dtype(self) -> torch.dtype:
        """The dtype of forward and backward."""
        module = self._module
        return module.support.autocast_dtype(module.device.type) or module.policy.dtype
