"""What is measured: shapes of models and groups, and profiles that list them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import torch

from pl_grouprl.attention.backends.saved import save_attention
from pl_grouprl.models import ModelCost
from pl_grouprl.packing import SharedPrefixLayout, Sharing
from pl_grouprl.types import Rollout, RolloutGroup
from pl_grouprl.utilities.device_defaults import Checkpointing


@dataclass(frozen=True)
class Case:
    """A Qwen3-shaped model with random weights, and groups of random tokens.

    Attributes:
        name: Shown above the table.
        prefix: Tokens of a prompt.
        rollout: Tokens of the longest rollout.
        group_size: Rollouts of a prompt.
        groups: Prompts in the batch.
        shortest: Length of a group's shortest rollout as a share of the longest; the others are evenly spaced.
        hidden: Width of the decoder.
        layers: Its depth.
        heads: Query heads.
        kv_heads: Key and value heads.
        head_dim: Size of a head.
        intermediate: Width of the feed-forward layers.
        vocabulary: Tokens that the head predicts.
        dtype: Of weights and activations.
        device: Where it runs.
        checkpointing: How all methods recompute activations, as in `PretrainedPolicy.gradient_checkpointing`.
    """

    name: str
    prefix: int = 2048
    rollout: int = 256
    group_size: int = 8
    groups: int = 1
    shortest: float = 1.0
    hidden: int = 512
    layers: int = 4
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 64
    intermediate: int = 1536
    vocabulary: int = 4096
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: Literal["cpu", "cuda", "meta"] = "cpu"
    checkpointing: Checkpointing = False

    @property
    def rollout_lengths(self) -> list[int]:
        """Tokens of each rollout of a group."""
        steps = max(self.group_size - 1, 1)
        shares = [1 - (1 - self.shortest) * i / steps for i in range(self.group_size)]
        return [max(1, round(self.rollout * share)) for share in shares]

    @property
    def layout(self) -> SharedPrefixLayout:
        """The groups as a forest."""
        return SharedPrefixLayout.from_groups([(self.prefix, self.rollout_lengths)] * self.groups)

    def make_groups(self, seed: int = 0) -> list[RolloutGroup]:
        """Draw the tokens."""
        generator = torch.Generator().manual_seed(seed)

        def tokens(count: int) -> list[int]:
            return torch.randint(self.vocabulary, (count,), generator=generator).tolist()

        return [
            RolloutGroup(tokens(self.prefix), [Rollout(tokens(length)) for length in self.rollout_lengths])
            for _ in range(self.groups)
        ]

    def make_model(self, seed: int = 0) -> Any:
        """Build the model on its device."""
        from transformers import Qwen3Config, Qwen3ForCausalLM

        config = Qwen3Config(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=self.prefix + self.rollout,
            tie_word_embeddings=True,
            dtype=getattr(torch, self.dtype),
        )
        torch.manual_seed(seed)
        with torch.device(self.device):
            model = Qwen3ForCausalLM._from_config(config, attn_implementation="sdpa")
        if self.checkpointing and self.device != "meta":
            saving = {"context_fn": save_attention} if self.checkpointing == "attention" else {}
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False} | saving)
        return model.train()

    @property
    def cost(self) -> ModelCost:
        """Operations of one forward pass, per token and per pair."""
        return _count(replace(self, prefix=1, rollout=1, group_size=1, groups=1, shortest=1.0, device="meta"))

    def operations(self, sharing: Sharing) -> float:
        """Operations of one forward pass: linear layers, attention, and the head on predicted tokens only."""
        group = (self.prefix, self.rollout_lengths)
        return sum(self.cost.of_groups([group] * self.groups, sharing))

    @property
    def ideal_ratio(self) -> float:
        """Operations of the repeated run over those of the shared one."""
        return self.operations("repeated") / self.operations("shared")


@cache
def _count(case: Case) -> ModelCost:
    """Count the operations of a model on the meta device."""
    model = case.make_model()
    return ModelCost.of(model.get_decoder(), model.get_output_embeddings())


QWEN3_0_6B = Case(
    "Qwen3-0.6B shape", rollout=1024, hidden=1024, layers=28, heads=16, kv_heads=8, head_dim=128, intermediate=3072,
    vocabulary=151_936, dtype="bfloat16", device="cuda", checkpointing=True,
)  # fmt: skip
QWEN3_4B = replace(QWEN3_0_6B, name="Qwen3-4B shape", hidden=2560, layers=36, heads=32, intermediate=9728)


def profile_cases(profile: str) -> list[Case]:
    """Cases of a profile: `cpu` is one that takes minutes on two cores, `gpu` those for one GPU with 80 GB or more.

    The GPU cases come in order of importance, since time may be short.
    """
    if profile == "cpu":
        return [Case("Qwen3 shape")]
    return [
        replace(model, prefix=prefix, group_size=group_size)
        for prefix, group_size in ((8192, 4), (4096, 8), (4096, 4), (8192, 8), (4096, 16), (8192, 16))
        for model in (QWEN3_4B, QWEN3_0_6B)
    ]
