"""A small engine that samples from a copy of the policy's weights, which is told when to go wrong."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from pl_grouprl.distributed.checksum import WeightsMismatchError, checksum
from pl_grouprl.rollout import HFRolloutEngine
from pl_grouprl.rollout.engine import AdapterWeights, SamplerLostError

Fault = Literal["lost", "lost at once", "failed", "failed at once"]

ADAPTER = "sampler"
PREFIX = "base_model.model."
"""What PEFT's files put in front of the names of a model's modules."""


class CopiedPolicyEngine:
    """Loads the weights that it is given into a model of its own, by their names in a checkpoint, and samples from it.

    The model begins with random weights that are not the policy's. Its checksums are compared with those of what
    arrived, behind each update and before each sampling.

    Args:
        adapter: As in `SyncedRolloutEngine`.
        faults: What goes wrong, by method and the number of its call from 1: the sampler is `lost`, or an error is
            raised, `failed`. It does so amid the call (behind the first weight), or `at once`.
    """

    takes_prompt_indices = True

    def __init__(
        self,
        adapter: Literal["merged", "separate"] = "merged",
        faults: Mapping[tuple[Literal["update", "generate"], int], Fault] | None = None,
    ) -> None:
        self.adapter = adapter
        self.faults = dict(faults or {})
        self.version: int | None = None
        self.model: Any = None
        self.updates: list[tuple[int, int, int]] = []
        """Version, weights and weights of the adapter of each update that went through."""
        self.calls = {"update": 0, "generate": 0}
        self.starts = self.closes = 0
        self._sums: dict[str, int] = {}

    def bind(self, model: Any, tokenizer: Any = None) -> None:
        self._config, self._tokenizer = model.config, tokenizer

    def update_weights(
        self, weights: Iterable[tuple[str, Tensor]], *, version: int, adapter: AdapterWeights | None = None
    ) -> dict[str, float]:
        fault = self._next_fault("update")
        assert self.version is None or version > self.version
        assert (adapter is not None) == (self.adapter == "separate")
        if self.model is None:
            self.model = self._start()
        number, size = self._load(weights, fault)
        adapter_number, adapter_size = (0, 0) if adapter is None else self._load_adapter(adapter, fault)
        self._compare()
        self.version = version
        self.updates.append((version, number, adapter_number))
        return {"bytes": float(size + adapter_size)}

    def generate(self, prompts, sampling, *, num_generations, seed, prompt_indices=None):
        fault = self._next_fault("generate")
        self._compare()
        engine = HFRolloutEngine(self.model, self._tokenizer)
        groups = engine.generate(
            prompts, sampling, num_generations=num_generations, seed=seed, prompt_indices=prompt_indices
        )
        self._go_wrong(fault)
        return groups

    def close(self) -> None:
        self.closes += 1
        self._lose()

    def _lose(self) -> None:
        self.model, self.version, self._sums = None, None, {}

    def _next_fault(self, method: Literal["update", "generate"]) -> str:
        self.calls[method] += 1
        fault = self.faults.get((method, self.calls[method]), "")
        if fault.endswith("at once"):
            self._go_wrong(fault)
        return fault

    def _go_wrong(self, fault: str) -> None:
        if fault.startswith("lost"):
            self._lose()
            raise SamplerLostError("it was restarted")
        if fault:
            raise OSError("no space left")

    def _start(self) -> Any:
        from transformers import AutoModelForCausalLM

        self.starts += 1
        with torch.random.fork_rng():
            torch.manual_seed(1000)
            return AutoModelForCausalLM.from_config(copy.deepcopy(self._config)).eval()

    def _parameters(self) -> dict[str, Tensor]:
        """Those of the model, by the names that they are given by."""
        return {_given_name(name): parameter for name, parameter in self.model.named_parameters()}

    @torch.no_grad()
    def _load(self, weights: Iterable[tuple[str, Tensor]], fault: str) -> tuple[int, int]:
        own = self._parameters()
        number = size = 0
        for name, weight in weights:
            assert not weight.is_inference()
            assert weight.shape == own[name].shape, name
            own[name].copy_(weight)
            number, size = number + 1, size + weight.nbytes
            self._sums[name] = checksum(weight.to(own[name].dtype))
            self._go_wrong(fault)
        return number, size

    def _load_adapter(self, adapter: AdapterWeights, fault: str) -> tuple[int, int]:
        from peft import LoraConfig, inject_adapter_in_model

        if not hasattr(self.model, "peft_config"):
            with torch.random.fork_rng():
                inject_adapter_in_model(LoraConfig(**adapter.config), self.model, ADAPTER)
        return self._load(adapter.weights, fault)

    def _compare(self) -> None:
        for name, parameter in self._parameters().items():
            if checksum(parameter) != self._sums.get(name):
                raise WeightsMismatchError(f"{name} is not as it was given.")


def _given_name(name: str) -> str:
    if f".{ADAPTER}." in name:
        return PREFIX + name.replace(f".{ADAPTER}.", ".")
    return name.replace(".base_layer.", ".")
