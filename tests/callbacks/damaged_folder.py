"""Run by test_end_of_run.py: what FSDP2 does with a folder that is damaged or of another algorithm; prints JSON.

By case, the exit codes of the ranks and how often the error was printed; afterwards, what a run from the folder as it
was comes to.
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))

from forked_runs import checkpointing, fork_ranks, make_data, make_module, make_trainer, wait_for

CASES = {
    "flipped byte": ("grpo", "fit", "is damaged: the contents of"),
    "cut short": ("grpo", "validate", "bytes of"),
    "missing shard": ("grpo", "fit", "is missing"),
    "other algorithm": ("group_ppo", "fit", "was written by GRPO, and the module is GroupPPO"),
    "whole": ("grpo", "fit", "Restored all states"),
}


def train(folder, algorithm, stage="fit", steps=1, checkpoint=None):
    """One rank."""
    module = make_module(algorithm)
    trainer = make_trainer(folder, "fsdp2", [checkpointing(folder)], max_steps=steps)
    getattr(trainer, stage)(module, datamodule=make_data(), ckpt_path=checkpoint, weights_only=True)


def damage(folder, case):
    """Harm a copy of a checkpoint."""
    shard = max(folder.glob("*.distcp"), key=lambda path: path.stat().st_size)
    content = bytearray(shard.read_bytes())
    if case == "flipped byte":
        content[len(content) // 2] ^= 0x40
        shard.write_bytes(content)
    elif case == "cut short":
        shard.write_bytes(content[:-100])
    elif case == "missing shard":
        shard.unlink()


def main():
    """Run all cases."""
    root = Path(tempfile.mkdtemp())
    log = root / "log.txt"
    codes = wait_for(fork_ranks("fsdp2", lambda rank: train(root, "grpo"), log))
    assert not any(codes), log.read_text()[-3000:]
    results = {}
    for case, (algorithm, stage, text) in CASES.items():
        folder = root / case.replace(" ", "_")
        folder.mkdir()
        checkpoint = folder / "own.ckpt"
        shutil.copytree(root / "step=1.ckpt", checkpoint)
        damage(checkpoint, case)
        log = folder / "log.txt"
        pids = fork_ranks("fsdp2", lambda rank: train(folder, algorithm, stage, 2, checkpoint), log)  # noqa: B023
        codes = wait_for(pids)
        errors = [line for line in log.read_text().splitlines() if not line.startswith("[rank watchdog]")]
        told = sum(text in line and "own.ckpt" in line for line in errors)
        results[case] = {"codes": codes, "told": told, "log": log.read_text()[-1500:]}
    print(json.dumps(results))
    shutil.rmtree(root)


main()
