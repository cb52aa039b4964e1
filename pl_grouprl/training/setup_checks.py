"""Checks at setup: most before models are loaded, those that need a model right after."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from pl_grouprl.rollout.engine import declares
from pl_grouprl.rollout.limits import length_limits, vocabulary
from pl_grouprl.training.optimizer import OptimizerConfig
from pl_grouprl.training.prompt_checks import check_loader, check_prompts, limits_of_source, prompts_of_stage
from pl_grouprl.training.rollouts_ahead import check_max_staleness
from pl_grouprl.training.trainer_options import check_device, check_trainer, check_updates, refuse_manual_optimization
from pl_grouprl.utilities.run_options import check_allowed
from pl_grouprl.utilities.verified_loading import refuse_unloadable


def check_before_loading(module: Any, stage: str) -> None:
    """Refuse options of module and Trainer, and prompts, that cannot work in a stage.

    Args:
        module: The `RLModule`, attached to its Trainer.
        stage: `fit`, `validate`, `test` or `predict`.

    Raises:
        ValueError: Names the option or the prompt, and what it must be.
        TypeError: If the data cannot hold prompts, or hyperparameters could not be loaded from a checkpoint.
    """
    trainer, is_fit = module.trainer, stage == "fit"
    check_loader(trainer, stage)
    if is_fit:
        refuse_manual_optimization(module)
        check_allowed(module.allow_changed, module.run_options(), module.free_options)
        for saved in (module, getattr(trainer, "datamodule", None)):  # by save_hyperparameters
            refuse_unloadable({"hyper_parameters": dict(getattr(saved, "hparams", {}))})
    check_device(trainer.strategy.root_device)
    check_trainer(trainer, stage)
    module.support.check(module)
    check_quantized(module)
    prompts = prompts_of_stage(trainer, stage)
    for split, prompts_of_split in prompts.items():
        module.rewarder.check_columns(prompts_of_split, split)
    _check_prompts(module, stage, limits_of_source(module.policy_source))
    if is_fit:
        _check_fit(module)
    train_prompts = prompts.get("train", ()) if is_fit else None
    longest = module.episodes.longest_completion(module.sampling.max_new_tokens, module.max_tokens_per_micro_batch)
    module.micro_batcher.check(trainer.world_size, train_prompts, longest)


def check_quantized(module: Any) -> None:
    """Refuse what a strategy that shards weights cannot do: moments and weights in blocks, another optimizer.

    bitsandbytes stores 8-bit moments and 4-bit weights in blocks of whole tensors. An optimizer that looks at whole
    matrices would compute something else from flat shards.

    Raises:
        ValueError: Names the option and the strategy.
    """
    if module.support.keeps_plain_weights:
        return
    strategy = type(module.trainer.strategy).__name__
    configs = [value for value in vars(module).values() if isinstance(value, OptimizerConfig)]
    if any(config.state_bits < 32 for config in configs):
        raise ValueError(
            f"state_bits=8 of an optimizer does not work under {strategy}, which shards weights and moments; leave it "
            "out, or use a single device or ddp."
        )
    other = [config.optim for config in configs if config.optim != OptimizerConfig.optim]
    if other and not module.support.keeps_shapes:
        raise ValueError(
            f"optim is {other[0]} under {strategy}, which flattens weights; use ModelParallelStrategy "
            "(strategy/fsdp2.yaml), ddp, or AdamW."
        )
    for name, value in vars(module).items():
        if name.endswith("_source") and getattr(value, "quantization", None) is not None:
            raise ValueError(
                f"{name.removesuffix('_source')} has a quantization, which does not work "
                f"under {strategy}, which shards weights; leave it out, or use a single device or ddp."
            )


def check_prompts_of_model(module: Any) -> None:
    """Refuse prompts that the loaded policy cannot take; nothing is checked without a running Trainer.

    Raises:
        ValueError: Names the prompt and the limit.
    """
    trainer = module._trainer
    if trainer is not None and trainer.state.fn is not None:
        _check_prompts(module, trainer.state.fn.value, length_limits(module.policy), vocabulary(module.policy))


def _check_prompts(module: Any, stage: str, limits: Mapping[str, int], vocab_size: int | None = None) -> None:
    for split, prompts in prompts_of_stage(module.trainer, stage).items():
        sampling = module.sampling if split == "train" else module.val_sampling
        option = "sampling" if sampling is module.sampling else "val_sampling"
        check_prompts(prompts, split, sampling, option, module.engine, dict(limits), vocab_size)


def _check_whole_logprobs(module: Any) -> None:
    if declares(module.engine, "truncates_logprobs"):
        raise ValueError(
            f"importance_sampling is {module.objective.importance_sampling['kind']!r}, but with top_k, top_p or min_p "
            f"{type(module.engine).__name__} reports log-probabilities of the truncated distribution, and the policy's "
            "are of the whole one; leave importance_sampling 'none', drop these filters from sampling, or sample with "
            "HFRolloutEngine."
        )


def _check_fit(module: Any) -> None:
    trainer = module.trainer
    data = getattr(trainer, "datamodule", None)
    if module.dynamic_sampling and not hasattr(data, "draw_extra"):
        raise ValueError(
            "dynamic_sampling=True needs more prompts than a batch holds; pass a PromptDataModule as datamodule."
        )
    if module.objective.corrects_sampling and module.sampling.is_truncated:
        _check_whole_logprobs(module)
    if module.max_staleness:
        check_max_staleness(module, module.engine, module.objective.corrects_sampling)
    check_updates(trainer, module.num_iterations, module.num_mini_batches)
    module.kl_penalty.check_horizon(getattr(data, "batch_size", None), module.max_rollouts)
    budget, ranks = module.micro_batcher.max_tokens, module.micro_batcher.sequence_parallel_size
    loss = module.objective.policy_loss
    if (budget is not None or ranks > 1) and loss.compares_tokens:
        rank_zero_warn(
            f"policy_loss {loss.name!r} selects tokens by comparing those of one micro-batch, so "
            f"max_tokens_per_micro_batch={budget} and sequence_parallel_size={ranks} change its selection."
        )


def check_groups_fit(module: Any) -> None:
    """Refuse a token budget below the largest possible group if a model gets dense masks, for which no group is split.

    Args:
        module: An `RLModule` whose models share prefixes, attached to its Trainer.

    Raises:
        ValueError: Names the models, the budget, the size of a group and the remedy.
    """
    budget, names = module.max_tokens_per_micro_batch, module.prefix_sharing.dense
    prompts = prompts_of_stage(module.trainer, module.trainer.state.fn.value).get("train", ())
    if budget is None or not names or not prompts:
        return
    prompt = max(prompt.num_tokens for prompt in prompts)
    completion = module.episodes.longest_completion(module.sampling.max_new_tokens, budget)
    largest = prompt + module.max_rollouts * completion
    if largest > budget:
        raise ValueError(
            f"max_tokens_per_micro_batch is {budget}, but a group may have {largest} tokens (a prompt of {prompt} and "
            f"{module.max_rollouts} rollouts of {completion}), and {' and '.join(names)} cannot be run on a part of a "
            "group: the layers compute with the attention mask themselves. Raise it, lower num_generations or "
            "sampling.max_new_tokens, or pass sharing='repeated'."
        )


def check_lengths_of_teacher(module: Any) -> None:
    """Refuse training prompts whose rollouts may become longer than the teacher reads.

    Args:
        module: An `RLModule` with a loaded `policy` and `teacher`, attached to its Trainer.

    Raises:
        ValueError: Names the limit, the longest sequence and the remedy.
    """
    prompts = prompts_of_stage(module.trainer, module.trainer.state.fn.value).get("train", ())
    if not prompts:
        return
    completion = module.episodes.longest_completion(module.sampling.max_new_tokens, module.max_tokens_per_micro_batch)
    prompt = max(prompt.num_tokens for prompt in prompts)
    longest = min([prompt + completion, *length_limits(module.policy).values()])
    for name, limit in length_limits(module.teacher).items():
        if longest > limit:
            raise ValueError(
                f"teacher has {name}={limit}, but sequences may have {longest} tokens (a prompt of {prompt} and a "
                f"completion of {completion}); lower PromptDataModule's max_prompt_length or "
                "sampling.max_new_tokens, or use another teacher."
            )
