"""The engines that samples come from, each with a policy: what holds for one of them holds for all."""

from __future__ import annotations

import gc
import os
import random
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.serving import Server
from helpers.tiny_tokenizers import bytes_tokenizer, letters_tokenizer

from pl_grouprl.rollout.engine import Capability
from pl_grouprl.types import Rollout, SamplingConfig
from pl_grouprl.utilities.options import drop_none

FAMILIES = ("llama", "qwen2_tied", "qwen3", "qwen3_tied", "qwen2_window", "qwen3_moe", "gpt2")


@dataclass(frozen=True)
class Tried:
    """What of the contract an engine is tried with.

    Attributes:
        policies: Policies of `new_policy` that it is started with.
        capabilities: All that it declares; tests that need others leave it out.
        marks: Marks of its tests.
    """

    policies: set[str]
    capabilities: set[Capability]
    marks: tuple[pytest.MarkDecorator, ...] = ()


_OF_ALL: set[Capability] = {"reserves_max_new_tokens", "takes_prompt_indices", "takes_limits"}
ENGINES = {
    "hf": Tried({*FAMILIES, "letters", "digits", "bytes"}, {*_OF_ALL, "samples_from_copies", "keeps_caches"}),
    "vllm": Tried(
        {"llama", "qwen2_tied", "qwen3", "qwen3_tied", "letters", "digits", "bytes"},
        {*_OF_ALL, "keeps_caches", "truncates_logprobs"},
        (pytest.mark.vllm,),
    ),
    "vllm_server": Tried(
        {"qwen3", "letters"}, {*_OF_ALL, "updates_in_flight", "truncates_logprobs"}, (pytest.mark.vllm,)
    ),
}
"""A vLLM takes 4 s to start, a server's process 25 s (2 CPU cores)."""

_SMALL = {
    **{"vocab_size": 24, "eos_token_id": None, "bos_token_id": None, "pad_token_id": None},
    **{"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 32},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256, "initializer_range": 0.3},
}
_WINDOW = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_GPT2 = {**_SMALL, "n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 256}
_POLICIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2_tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {},
    "qwen3_tied": {"model_type": "qwen3", "tie_word_embeddings": True},
    "qwen2_window": {"model_type": "qwen2", **_WINDOW},
    "qwen3_moe": _EXPERTS,
    "gpt2": {},
    "letters": {"model_type": "qwen3"},
    "digits": {"model_type": "llama", "vocab_size": 32},
    "bytes": {"model_type": "qwen3", "vocab_size": 256},
}


def on(*policies: str, engines: tuple[str, ...] = tuple(ENGINES), needs: tuple[Capability, ...] = ()) -> Any:
    """Give a test its `subject`: each engine that declares what the test `needs`, with each of these policies.

    `letters` and `digits` have a tokenizer and end tokens, `bytes` a tokenizer, the others are families of models.
    """
    params = [
        pytest.param(f"{engine}-{policy}", marks=ENGINES[engine].marks)
        for engine in engines
        for policy in policies
        if policy in ENGINES[engine].policies and ENGINES[engine].capabilities.issuperset(needs)
    ]
    return pytest.mark.parametrize("subject", params, indirect=True)


@dataclass
class Subject:
    """An engine, and the policy that it samples from.

    Attributes:
        engine_name: One of `ENGINES`.
        surroundings: What `surroundings()` was before and after the engine was started and given weights.
    """

    engine_name: str
    engine: Any
    model: Any
    tokenizer: Any
    surroundings: tuple[dict[str, Any], dict[str, Any]]

    def sample(
        self,
        prompts: list[list[int]],
        num_generations: int = 1,
        *,
        seed: int = 0,
        prompt_indices: list[int] | None = None,
        limits: list[int] | None = None,
        **options: Any,
    ) -> list[list[Rollout]]:
        """Sample; `limits` are `max_new_tokens` of each prompt, `options` go to the `SamplingConfig`."""
        given = drop_none(prompt_indices=prompt_indices, max_new_tokens=limits)
        sampling = SamplingConfig(**options)
        return self.engine.generate(prompts, sampling, num_generations=num_generations, seed=seed, **given)

    def sync(self) -> None:
        """Let the engine see what was done to the policy's weights."""
        sync(self.engine, self.model)


def sync(engine: Any, model: Any) -> None:
    """Give an engine that samples from a copy of the weights those of `model`."""
    if hasattr(engine, "update_weights"):
        from pl_grouprl.distributed.weight_stream import checkpoint_weights

        stream = checkpoint_weights(model, iter(model.named_parameters()))
        engine.update_weights(stream, version=(engine.version or 0) + 1)


def surroundings() -> dict[str, Any]:
    """What an engine has to leave alone in the process, as values that can be compared."""
    return {
        "environment": dict(os.environ),
        "threads": torch.get_num_threads(),
        "dtype": torch.get_default_dtype(),
        "torch": torch.get_rng_state().tolist(),
        "numpy": np.random.get_state()[1].tolist(),
        "random": random.getstate(),
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
        "garbage": (gc.isenabled(), gc.get_freeze_count()),
        "functions": (torch.set_num_threads, torch.cuda.Event, torch.Tensor.pin_memory),
    }


def new_engine(name: str, **options: Any) -> Any:
    """An engine without a policy."""
    if name == "hf":
        from pl_grouprl.rollout import HFRolloutEngine

        return HFRolloutEngine(**options)
    pytest.importorskip("vllm")
    if name == "vllm":
        from pl_grouprl.rollout.vllm.colocate import VLLMRolloutEngine

        return VLLMRolloutEngine(**{"enforce_eager": True, **options})
    from pl_grouprl.rollout import VLLMServerRolloutEngine

    return VLLMServerRolloutEngine(**options)


def new_policy(name: str, **overrides: Any) -> tuple[Any, Any]:
    """A small random policy and its tokenizer, None for those without one."""
    import transformers as tf

    options = {"model_type": name, **(_GPT2 if name == "gpt2" else _SMALL), **_POLICIES[name], **overrides}
    config = tf.AutoConfig.for_model(options.pop("model_type"), **options)
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = tf.AutoModelForCausalLM.from_config(config).eval()
        for parameter in model.parameters():
            if parameter.ndim == 1:  # neither norms of ones nor biases of zeros
                torch.nn.init.normal_(parameter, mean=parameter.mean().item(), std=0.2)
    if name == "letters":
        model.generation_config.eos_token_id = [3]
        return model, letters_tokenizer()
    if name == "digits":
        from pl_grouprl.demo import MostFrequentDigit

        return model, MostFrequentDigit(prompt_length=8).tokenizer()
    return model, bytes_tokenizer() if name == "bytes" else None


@contextmanager
def open_subject(name: str, folder: Path) -> Iterator[Subject]:
    """The subject of that name, `engine-policy`.

    Args:
        name: Of engine and policy.
        folder: An empty one, for a server's model and log.
    """
    engine_name, policy = name.split("-")
    model, tokenizer = new_policy(policy)
    with ExitStack() as stack:
        options = {}
        if engine_name == "vllm_server":
            for part in (model, tokenizer):
                if part is not None:
                    part.save_pretrained(folder / "model")
            server = Server(folder / "model", folder / "log", "--load-format", "dummy").start()
            stack.callback(server.stop)
            options = {"urls": server.wait().url}
        engine = new_engine(engine_name, **options)
        stack.callback(getattr(engine, "close", lambda: None))
        gc.unfreeze()  # the number of frozen objects can be compared only if there are none
        before = surroundings()
        engine.bind(model, tokenizer)
        sync(engine, model)
        after = surroundings()
        gc.freeze()  # as it was: to go through all that is imported takes a second
        yield Subject(engine_name, engine, model, tokenizer, (before, after))
