"""Run by test_named_weights.py: two ranks train, and read the policy's weights as a stream before each step.

Each rank writes what it saw. Every rank has the same tokens, so a plain loop over a whole model is the oracle.
"""

from __future__ import annotations

import json
import sys
import weakref
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))

from cpu_strategies import make_strategy
from tiny_models import VOCAB, tiny_model

from pl_grouprl.distributed.strategies import support_of
from pl_grouprl.models.adapters import LoRAAdapter

STEPS = 4
PREFIX = "_fsdp_wrapped_module."


def make_policy(case: dict[str, Any]) -> Any:
    """A tiny model with tied embeddings and a buffer of its own, perhaps with LoRA whose products are not zero."""
    policy = tiny_model("qwen3", tie_word_embeddings=True).train()
    policy.model.layers[1].register_buffer("offsets", torch.arange(3.0))
    if case.get("lora"):
        policy = LoRAAdapter(r=2, alpha=4, target_modules=["q_proj", "up_proj"]).add_to(policy)
        generator = torch.Generator().manual_seed(2)
        for name, parameter in policy.named_parameters():
            if "lora_" in name:
                parameter.data.normal_(generator=generator)
    return policy


def make_optimizer(module: nn.Module) -> torch.optim.Optimizer:
    """Momentum, for which weights have to be those that it has moved."""
    return torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.05, momentum=0.9)


def loss_of(policy: Any, step: int) -> Tensor:
    """The same on every rank."""
    ids = torch.randint(1, VOCAB, (2, 6), generator=torch.Generator().manual_seed(step))
    logprobs = policy(input_ids=ids).logits.log_softmax(-1)
    return -logprobs[:, :-1].gather(-1, ids[:, 1:, None]).mean()


def trained_alone(case: dict[str, Any]) -> Any:
    """The policy after as many steps of a plain loop."""
    policy = make_policy(case)
    optimizer = make_optimizer(policy)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(policy, step).backward()
        optimizer.step()
    return policy


class Streaming(LightningModule):
    """Reads the stream in another way before each step: see `on_train_batch_start`."""

    def __init__(self, case: dict[str, Any]) -> None:
        super().__init__()
        self.case = case
        self.policy: Any = None
        self.seen: dict[str, Any] = {"whole": [], "alive": [], "left": [], "equal": [], "state": []}

    def setup(self, stage: str) -> None:
        self.support = support_of(self.trainer)
        self.support.check(self)

    def configure_model(self) -> None:
        if self.policy is None:
            self.policy = make_policy(self.case)
        self.support.shard(self)

    def configure_optimizers(self) -> Any:
        return make_optimizer(self)

    def training_step(self, batch: Any, index: int) -> Tensor:
        with self.support.accumulating(self, last=True):
            return loss_of(self.policy, self.global_step)

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        if self.global_step == 0:  # nothing has run yet
            self.abandon("model.layers.0.mlp")
        elif self.global_step == 1:
            self.compare()
        elif self.global_step == 2:
            with torch.inference_mode():
                self.compare()
                self.abandon("model.layers.1.mlp")
        else:
            self.measure()
            if self.case["strategy"] == "fsdp2":
                with self.support.whole_weights(self.policy):
                    self.compare()
            self.abandon("model.norm")

    def on_train_end(self) -> None:
        self.compare()
        own, expected = dict(self.support.named_weights(self.policy)), trained_alone(self.case).state_dict()
        self.seen["trained"] = max((own[name] - expected[name]).abs().max().item() for name in own)
        (Path(self.trainer.default_root_dir) / f"{self.global_rank}.json").write_text(json.dumps(self.seen))
        self.trainer.strategy.barrier()

    def abandon(self, until: str) -> None:
        """Leave the stream at a weight, while all that it needs is gathered."""
        for name, _ in self.support.named_weights(self.policy):
            if until in name:
                break
        self.seen["left"].append(self.gathered())

    def compare(self) -> None:
        """Keep the stream, and compare it with all weights gathered at once, and with the whole state."""
        mode = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        own = {}
        for name, weight in self.support.named_weights(self.policy):
            assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == mode
            assert not weight.requires_grad
            assert not isinstance(weight, DTensor | nn.Parameter)
            own[name] = weight
        self.seen["names"] = list(own)
        if self.case["strategy"] == "fsdp2":
            self.seen["equal"].append(same(own, self.gathered_at_once()))
        else:
            with self.support.whole_weights(self.policy):
                self.seen["equal"].append(same(own, self.whole_tensors()))
        state = self.support.full_state_dict(self.policy)
        self.seen["state"].append(state is None or same(own, state))
        if state is not None:
            make_policy(self.case).load_state_dict(state)  # nothing is missing, by all names

    def whole_tensors(self) -> dict[str, Tensor]:
        tensors = dict(self.policy.named_parameters(remove_duplicate=False)) | dict(self.policy.named_buffers())
        return {name.replace(PREFIX, ""): own for name, own in tensors.items()}

    def gathered_at_once(self) -> dict[str, Tensor]:
        """FSDP2's weights by PyTorch's own means, which do not mind what is gathered."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        with torch.inference_mode(False):
            return get_model_state_dict(self.policy, options=StateDictOptions(full_state_dict=True))

    def measure(self) -> None:
        """Count what is whole while the stream is read, and what of it lives on when the next is asked for."""
        yielded = []
        stream = self.support.named_weights(self.policy)
        while (item := next(stream, None)) is not None:
            self.seen["whole"].append(self.gathered())
            yielded.append(weakref.ref(item[1]))
            del item
            self.seen["alive"].append(sum(own() is not None for own in yielded))
        self.seen["left"].append(self.gathered())

    def gathered(self) -> int:
        """Units (FSDP1, FSDP2) or modules with weights (ZeRO-3) that are whole."""
        name = self.case["strategy"]
        if name == "fsdp1":
            units = [
                unit for unit in self.trainer.strategy.model.modules() if isinstance(unit, FullyShardedDataParallel)
            ]
            full = [unit._handle.flat_param._full_param_padded for unit in units if unit._handle is not None]
            return sum(own.untyped_storage().size() > 0 for own in full)
        if name == "fsdp2":
            return sum(not isinstance(parameter, DTensor) for parameter in self.policy.parameters())
        if name.startswith("z3"):
            owner_of: dict[nn.Parameter, nn.Module] = {}
            for module in self.policy.modules():
                owner_of |= {p: module for p in module.parameters(recurse=False) if p not in owner_of}
            return len({module for p, module in owner_of.items() if p.ds_status.name == "AVAILABLE"})
        return 0


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    """Whether the weights of a stream are those of a state, which may have more names, bit for bit."""
    return all(torch.equal(weight, right[name]) for name, weight in left.items())


def main(folder: Path, case: dict[str, Any]) -> None:
    """Train, and write what a rank saw."""
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=make_strategy(case["strategy"]),
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        default_root_dir=folder,
    )
    trainer.fit(Streaming(case), range(STEPS))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
