"""Run by test_run_folder.py: two ranks take a run folder, and each writes which one it got, or why none."""

import sys
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer

from pl_grouprl.callbacks import CompletionsTable, SafeCheckpoint


class Tiny(LightningModule):
    """One step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.last_rollouts = None

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        """Return any loss."""
        return self.layer(batch).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain gradient descent."""
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def main(folder: Path) -> None:
    """Train one step with the table in its place, and one with a table whose file is there already."""
    for number, filename in enumerate(("completions.jsonl", str(folder / "mine.jsonl"))):
        checkpoint = SafeCheckpoint(save_last=True)
        trainer = Trainer(
            accelerator="cpu", devices=2, strategy="ddp", max_steps=1, logger=False, default_root_dir=folder / "runs",
            callbacks=[CompletionsTable(filename=filename), checkpoint],
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        try:
            trainer.fit(Tiny(), torch.utils.data.DataLoader(torch.ones(4, 1)))
            told = str(checkpoint.dirpath)
        except OSError as error:
            told = str(error)
        (folder / f"rank{trainer.global_rank}-{number}.txt").write_text(told)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()  # gloo may abort a process that exits with an open group


if __name__ == "__main__":
    main(Path(sys.argv[1]))
