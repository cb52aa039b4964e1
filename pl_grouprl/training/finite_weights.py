"""Stops a run at the first optimizer step that leaves NaN or infinity in the weights."""

from __future__ import annotations

from typing import Any

import torch

from pl_grouprl.utilities.distributed import sum_over_ranks
from pl_grouprl.utilities.finite import nonfinite_parameters
from pl_grouprl.utilities.text import first_names


def check_weights(module: Any) -> None:
    """Check every trained weight after an optimizer step. Collective; all ranks fail together.

    Norms are cheap but may overflow, so individual weights are inspected only if a norm is not finite.

    Args:
        module: An `RLModule`.

    Raises:
        RuntimeError: Names the parameters and the options that may be the cause.
    """
    weights = module.support.weights([parameter for parameter in module.parameters() if parameter.requires_grad])
    norms = torch._foreach_norm([weight for weight in weights if weight.numel()] or [torch.zeros(1)])
    largest = torch.stack([norm.to(module.device, torch.float32) for norm in norms]).max()
    (suspicious,) = sum_over_ranks([~largest.isfinite()], module.device)
    if not suspicious:
        return
    trained = ((name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad)
    broken = nonfinite_parameters(trained, module.device)
    if broken:
        raise RuntimeError(
            f"NaN or infinity in {len(broken)} parameters after optimizer step {module.global_step + 1}: "
            f"{first_names(broken)}. {_cause(module, broken)}"
        )


def _cause(module: Any, broken: list[str]) -> str:
    if module.optimization.nonfinite_steps:
        return "The step was skipped, so they were there before it: check the model or checkpoint the run started from."
    parts = module.optimized_parts()
    configs = {part: config for part, (_, config) in parts.items()}
    affected = {part: config for part, config in configs.items() if any(name.startswith(f"{part}.") for name in broken)}
    options = [
        f"learning_rate={config.learning_rate}, weight_decay={config.weight_decay}, eps={config.eps}, "
        f"max_grad_norm={config.max_grad_norm} of {part}"
        for part, config in (affected or configs).items()
    ]
    trainer = module.trainer
    first = "lower the learning rate first"
    if trainer.precision == "16-true":
        first = "use trainer.precision='bf16-mixed' or 'bf16-true', since an eps below 6e-8 is 0 in float16"
    return (
        f"The gradient was finite, so clipping or the step itself caused them: {first} "
        f"({'; '.join(options)}; trainer.gradient_clip_val={trainer.gradient_clip_val}, "
        f"trainer.precision={trainer.precision!r}). Resume from a checkpoint of an earlier step."
    )
