"""Run by test_deepspeed.py: a module of two parts asks its strategy what the algorithms ask; rank 0 writes the answers.

The loss of each pass depends on the step, the rank and the pass alone, so DDP is the oracle for every stage of ZeRO.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))

from cpu_strategies import make_strategy
from tiny_models import VOCAB, tiny_model

from pl_grouprl.callbacks import SafeCheckpoint
from pl_grouprl.distributed.strategies import support_of
from pl_grouprl.models.policy import frozen_copy, leave_out_of_checkpoints
from pl_grouprl.training.optimizer import OptimizerConfig, build_optimizer


class TwoParts(LightningModule):
    """A language model and a small critic beside it; the options are the keys of `main`."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self.options = options
        self.policy: Any = None
        self.norms: list[dict[str, float]] = []
        self.seen: dict[str, Any] = {}
        leave_out_of_checkpoints(self, "reference")

    def setup(self, stage: str) -> None:
        self.support = support_of(self.trainer)
        self.support.check(self)

    def configure_model(self) -> None:
        if self.policy is None:
            self.policy = tiny_model("qwen3", tie_word_embeddings=True).train()
            self.reference = frozen_copy(self.policy).eval()
            with torch.random.fork_rng():
                torch.manual_seed(1)
                self.critic = nn.Sequential(nn.Linear(32, 8), nn.Tanh(), nn.Linear(8, 1))
        self.support.shard(self)

    def configure_optimizers(self) -> Any:
        options = OptimizerConfig(0.01, weight_decay=0.1, warmup_steps=2, schedule="linear", eps=1e-4)
        return build_optimizer({"policy": (self.policy, options), "critic": (self.critic, options)}, lambda: 20)

    def parts(self) -> dict[str, list[nn.Parameter]]:
        return {"policy": list(self.policy.parameters()), "critic": list(self.critic.parameters())}

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        step = self.global_step
        torch.manual_seed(step)
        with torch.no_grad():
            with self.support.whole_weights(self.policy):
                sampled = self.sample(3 + 4 * self.global_rank)  # ranks run different numbers of forwards
            self.seen["sampled"] = sampled
            # The reference reads what was sampled, layer by layer under ZeRO-3.
            self.seen["reference"] = self.support.call(self, "read", sampled[:, :3])

    def sample(self, count: int) -> Tensor:
        ids = torch.tensor([[5, 9, 2]])
        for _ in range(count):
            ids = torch.cat([ids, self.policy(input_ids=ids).logits[:, -1:].argmax(-1)], dim=1)
        return ids

    def read(self, ids: Tensor) -> Tensor:
        return self.reference(input_ids=ids).logits.sum()

    def optimizer_zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Gradients are set to zero where a step begins."""

    def training_step(self, batch: Any, index: int) -> Tensor:
        self.zero_grad()
        passes = self.options.get("passes", 1)
        if self.options["strategy"] == "ddp":  # the oracle: all passes in one graph
            return torch.stack([self.loss_of(number) for number in range(passes)]).sum()
        for number in range(passes - 1):
            with self.support.accumulating(self, last=False):
                self.support.backward(self.loss_of(number))
        with self.support.accumulating(self, last=True):
            return self.loss_of(passes - 1)

    def loss_of(self, number: int) -> Tensor:
        seed = 100 * self.global_step + 10 * number + self.global_rank
        ids = torch.randint(1, VOCAB, (2, 5 + number), generator=torch.Generator().manual_seed(seed))
        output = self.policy(input_ids=ids, output_hidden_states=True)
        logprobs = output.logits.log_softmax(-1)
        values = self.critic(output.hidden_states[-1].detach()).squeeze(-1)
        loss = -logprobs[:, :-1].gather(-1, ids[:, 1:, None]).mean() + (values - ids / VOCAB).square().mean()
        broken = self.global_step == self.options.get("broken_step") and self.global_rank == 0 and number == 0
        return loss * (float("nan") if broken else 1.0)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.global_step < self.options.get("critic_warmup_steps", 0):
            self.support.skip_in_next_step(self.parts()["policy"])
        norms = {name: self.support.norm(own) for name, own in self.parts().items()}
        self.norms.append({name: float(norm) for name, norm in norms.items()})
        if not all(norm.isfinite() for norm in norms.values()):
            self.support.skip_in_next_step([p for own in self.parts().values() for p in own])

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        everything = [p for own in self.parts().values() for p in own]
        if gradient_clip_val:
            norm = float(self.support.norm(everything))
            self.support.scale(everything, min(1.0, gradient_clip_val / (norm + 1e-6)))
        if "critic_limit" in self.options:
            critic = self.parts()["critic"]
            self.support.scale(
                critic, min(1.0, self.options["critic_limit"] / (float(self.support.norm(critic)) + 1e-6))
            )

    def on_train_end(self) -> None:
        self.whole = self.support.full_state_dict(self.policy), self.support.full_state_dict(self.critic)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["own"] = {"norms": self.norms}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.norms = checkpoint["own"]["norms"]


def main(folder: Path, options: dict[str, Any]) -> None:
    """Train on two ranks.

    Args:
        folder: Where the answers and a checkpoint of step 2 go.
        options: `strategy`, and whatever else the module reads; `checkpoint` to resume from.
    """
    module = TwoParts(options)
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=make_strategy(options["strategy"]),
        max_steps=options.get("steps", 3),
        gradient_clip_val=options.get("limit"),
        accumulate_grad_batches=options.get("accumulate", 1),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[SafeCheckpoint(dirpath=folder, filename="{step}", every_n_train_steps=2, save_top_k=-1)],
        default_root_dir=folder,
    )
    trainer.fit(module, range(8), ckpt_path=options.get("checkpoint"), weights_only=True)
    if trainer.is_global_zero:
        torch.save(module.whole, folder / "whole.pt")
        rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
        seen = {"norms": module.norms, "reference": float(module.seen["reference"]), "rates": rates}
        seen["sampled"] = module.seen["sampled"].tolist()
        (folder / "seen.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
