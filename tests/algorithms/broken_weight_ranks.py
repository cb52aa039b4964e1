"""Two ranks of which the last breaks a weight, or its shard of one, in the first step; what each rank ends with.

python tests/algorithms/broken_weight_ranks.py STRATEGY FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))

from forked_runs import fork_ranks, make_data, make_module, make_trainer, wait_for
from lightning.pytorch import Callback


class BreaksOnOneRank(Callback):
    """NaN in the last number that the last rank holds of one weight."""

    def on_before_optimizer_step(self, trainer, module, optimizer):
        if trainer.global_rank == trainer.world_size - 1:
            weight = module.policy.model.norm.weight.data
            getattr(weight, "to_local", lambda: weight)()[-1] = float("nan")


def train(strategy: str, rank: int, folder: Path) -> None:
    """One rank; writes the error that it ends with."""
    trainer = make_trainer(folder, strategy, [BreaksOnOneRank()], enable_checkpointing=False)
    try:
        trainer.fit(make_module("grpo"), make_data())
    except RuntimeError as error:
        (folder / f"error-{rank}.txt").write_text(str(error))


if __name__ == "__main__":
    strategy, folder = sys.argv[1], Path(sys.argv[2])
    codes = wait_for(fork_ranks(strategy, lambda rank: train(strategy, rank, folder), folder / "log.txt"))
    print((folder / "log.txt").read_text()[-2000:], file=sys.stderr)
    sys.exit(any(codes))
