"""Ends a run in the step that leaves its weights with NaN or infinity."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pl_grouprl.utilities.finite import first_names, nonfinite_parameters

if TYPE_CHECKING:
    from pl_grouprl.algorithms.policy_module import PolicyModule


def check_weights(module: PolicyModule) -> None:
    """Look at every trained weight after an optimizer step. All ranks call it, and fail together.

    The norms are quick, and may overflow; only if one does is each weight looked at by itself.

    Raises:
        RuntimeError: With the parameters, and the options that may have done it.
    """
    weights = module.support.weights([own for own in module.parameters() if own.requires_grad])
    norms = torch._foreach_norm([own for own in weights if own.numel()] or [torch.zeros(1)])
    largest = torch.stack([norm.to(module.device, torch.float32) for norm in norms]).max()
    (suspicious,) = module.sum_over_ranks([~largest.isfinite()])
    if not suspicious:
        return
    trained = ((name, own) for name, own in module.named_parameters() if own.requires_grad)
    broken = nonfinite_parameters(trained, module.device)
    if broken:
        raise RuntimeError(
            f"NaN or infinity in {len(broken)} parameters after optimizer step {module.global_step + 1}: "
            f"{first_names(broken)}. {_cause(module, broken)}"
        )


def _cause(module: PolicyModule, broken: list[str]) -> str:
    if module.nonfinite_steps:
        return "The step was skipped, so they were there before: look at the model or the checkpoint it began with."
    parts = module.optimized_parts()
    configs = {name: config for name, (_, config) in parts.items() if any(own.startswith(f"{name}.") for own in broken)}
    options = [
        f"learning_rate={config.learning_rate}, weight_decay={config.weight_decay}, eps={config.eps}, "
        f"max_grad_norm={config.max_grad_norm} of {name}"
        for name, config in (configs or {name: config for name, (_, config) in parts.items()}).items()
    ]
    trainer = module.trainer
    return (
        "The gradient was finite, so clipping or the step itself made them: lower the learning rate first "
        f"({'; '.join(options)}; trainer.gradient_clip_val={trainer.gradient_clip_val}, "
        f"trainer.precision={trainer.precision!r}). Resume from a checkpoint of an earlier step."
    )
