"""Run by test_token_group_monitor.py: one step on two ranks whose groups differ; each writes what it logged."""

import sys
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer

from pl_grouprl.callbacks.token_groups import CompressionRatio, TokenGroupMonitor
from pl_grouprl.functional.token_groups import find_token_groups


class Foreign(LightningModule):
    """8 tokens in groups of 1 on rank 0, 24 in groups of 4 on rank 1."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.ratio = CompressionRatio()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> dict:
        """Return the groups beside the loss."""
        ones = torch.ones(1, (8, 24)[self.global_rank])
        groups = find_token_groups(ones, ones, ones.bool(), threshold=(1.0, 4.0)[self.global_rank])
        self.ratio.update(groups)
        return {"loss": self.layer(batch).sum(), "token_groups": groups}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain gradient descent."""
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def main(folder: Path) -> None:
    """Train one step."""
    module = Foreign()
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_steps=1, logger=False, callbacks=[TokenGroupMonitor()],
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(torch.ones(4, 1)))
    figures = {name: float(value) for name, value in trainer.callback_metrics.items()}
    torch.save({**figures, "metric": float(module.ratio.compute())}, folder / f"rank{trainer.global_rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
