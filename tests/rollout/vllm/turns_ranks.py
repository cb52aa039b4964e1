"""Run by test_ranks.py: ranks whose episodes have different numbers of turns, with an engine each or one for two."""

from __future__ import annotations

import faulthandler
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).parents[2]))

from helpers.engines import new_engine, new_policy, sync
from helpers.rollouts import assert_same

from pl_grouprl.types import SamplingConfig

HISTORIES = [[(7 * place + first) % 24 for place in range(130 + first)] for first in range(6)]
LIMITS = [5, 1, 9, 3, 12, 7]
TURNS = [([0, 1, 2], [3, 4, 5]), ([], [5, 3]), ([2], []), ([], [])]
"""Episodes of the first two ranks that take part in a turn; others have none."""


def turn(engine, number: int, indices: list[int]):
    """Sample a turn of these episodes."""
    return engine.generate(
        [HISTORIES[index] for index in indices],
        SamplingConfig(stop_token_ids=(4,)),
        num_generations=1,
        seed=number,
        prompt_indices=indices,
        max_new_tokens=[LIMITS[index] for index in indices],
    )


def main(rank: int, ranks: int, folder: Path) -> None:
    """All turns with either kind of engine."""
    faulthandler.dump_traceback_later(300, exit=True)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    model, _ = new_policy("qwen3", vocab_size=100)  # tokens on both ranks
    expected, trainers = [], torch.get_rng_state()
    for size in (1, 2):
        engine = new_engine("vllm", kv_cache_gib=0.1, tensor_parallel_size=size)
        engine.bind(model)
        sync(engine, model)
        with engine.keep_caches():
            for number, shares in enumerate(TURNS):
                if size == 1:  # each rank for itself
                    expected.append(dict(enumerate(turn(engine, number, list(range(6))))))
                own = shares[rank] if rank < 2 else []
                assert_same(turn(engine, number, own), [expected[number][index] for index in own], atol=1e-4)
        engine.close()
    assert torch.equal(torch.get_rng_state(), trainers)
    dist.destroy_process_group()


if __name__ == "__main__":
    count = int(sys.argv[2])
    mp.start_processes(main, (count, Path(sys.argv[1])), nprocs=count, start_method="spawn")
