"""Two ranks of which the last one's reward file has another text when the run is resumed; what rank 0 is told.

python tests/algorithms/other_reward_ranks.py FOLDER
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))

from forked_runs import checkpointing, fork_ranks, make_data, make_module, make_trainer, wait_for

from pl_grouprl.rewards import FunctionFromFile


def train(rank: int, folder: Path, text: str, checkpoint: Path | None = None) -> None:
    """One rank with a copy of the file of its own, as on another machine; writes its warnings."""
    file = folder / f"rank-{rank}" / "reward.py"
    file.parent.mkdir(exist_ok=True)
    file.write_text(f"def score(completions, **columns):\n    return [{text} for text in completions]\n")
    callbacks = [] if checkpoint else [checkpointing(folder)]
    trainer = make_trainer(folder, "ddp", callbacks, max_steps=4, enable_checkpointing=not checkpoint)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        module = make_module("grpo", FunctionFromFile(str(file), "score"))
        trainer.fit(module, make_data(), ckpt_path=checkpoint, weights_only=True)
    (folder / f"warnings-{rank}.txt").write_text("\n".join(str(warning.message) for warning in told))


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    saved = wait_for(fork_ranks("ddp", lambda rank: train(rank, folder, "len(text)"), folder / "log.txt"))
    resumed = wait_for(
        fork_ranks(
            "ddp",
            lambda rank: train(rank, folder, "-len(text)" if rank else "len(text)", folder / "last.ckpt"),
            folder / "log.txt",
        )
    )
    print((folder / "log.txt").read_text()[-3000:])
    sys.exit(any(saved + resumed))
