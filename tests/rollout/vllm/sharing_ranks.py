"""Run by test_ranks.py: ranks of a trainer sample the same with engines of their own, and with shared ones."""

from __future__ import annotations

import faulthandler
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).parents[2]))

from helpers.tiny_models import tiny_model

from pl_grouprl.rollout.vllm.instance import EngineProcess
from pl_grouprl.rollout.vllm.settings import (
    engine_arguments,
    engine_environment,
    engine_group,
    gather_from,
    share_requests,
)
from pl_grouprl.utilities.distributed import gather_plain

CPU = torch.device("cpu")
REQUESTS = [[[5, 6, 7], 1], [[9, 8], 2], [[11, 12, 13, 14, 15], 3], [[20], 4], [[30, 31], 5]]
"""Tokens and seed of each."""


class Sampler:
    """An engine among ranks, as VLLMRolloutEngine has one."""

    def __init__(self, folder: Path, tensor_parallel_size: int) -> None:
        self.process = EngineProcess(CPU, engine_environment(CPU))
        self.engine = self.process.start(lambda: self.build(folder, tensor_parallel_size))
        self.group = engine_group(tensor_parallel_size)

    def build(self, folder: Path, tensor_parallel_size: int):
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        split = engine_arguments(tensor_parallel_size)
        options = {"dtype": "float32", "enforce_eager": True, "max_model_len": 64, "kv_cache_memory_bytes": 2**26}
        return LLMEngine.from_engine_args(EngineArgs(model=str(folder), skip_tokenizer_init=True, **options, **split))

    def __call__(self, requests: list) -> list[list[int]]:
        """Tokens of each request; None for a seed draws from vLLM's own random numbers."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        shared, own = share_requests(requests, self.group)
        tokens: dict[str, list[int]] = {}
        with self.process.inside():
            for place, (prompt, seed) in enumerate(shared):
                parameters = SamplingParams(
                    seed=seed, max_tokens=8, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
                )
                self.engine.add_request(str(place), {"prompt_token_ids": prompt}, parameters)
            while self.engine.has_unfinished_requests():
                tokens |= {output.request_id: list(output.outputs[0].token_ids) for output in self.engine.step()}
        self.sampled = [tokens[str(place)] for place in range(len(shared))]  # of all ranks of the engine
        return self.sampled[own]

    def stop(self) -> None:
        self.process.stop(self.engine)


def deal(requests: list, shares: list[int], rank: int) -> list:
    """A rank's part, where each has so many."""
    start = sum(shares[:rank])
    return requests[start : start + shares[rank]]


def main(rank: int, ranks: int, folder: Path) -> None:
    """Ranks with engines of their own, then ranks with one engine for two."""
    faulthandler.dump_traceback_later(300, exit=True)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    torch.manual_seed(rank)
    trainers = torch.get_rng_state()
    nothing = [0] * (ranks - 2)

    sampler = Sampler(folder, 1)
    expected = sampler(REQUESTS) if rank == 0 else []  # the other ranks have nothing to do, and do not wait
    expected = gather_plain(expected)[0]
    assert len({tuple(tokens) for tokens in expected}) == len(REQUESTS)
    for shares in ([3, 2], [0, 5]):
        assert sampler(deal(REQUESTS, shares + nothing, rank)) == deal(expected, shares + nothing, rank), shares
    sampler.stop()

    sampler = Sampler(folder, 2)
    assert dist.get_process_group_ranks(sampler.group) == [rank - rank % 2, rank - rank % 2 + 1]
    assert gather_from(sampler.group, rank) == dist.get_process_group_ranks(sampler.group)
    for shares in ([3, 2], [0, 5], [0, 0], [*nothing, 1, 4]):
        shares = (shares + nothing)[:ranks]
        assert sampler(deal(REQUESTS, shares, rank)) == deal(expected, shares, rank), shares
    sampler([[[3], None]])  # the trainer's random numbers differ between the ranks, vLLM's do not
    left, right = gather_from(sampler.group, sampler.sampled)
    assert left == right
    assert left[0] != left[1]
    sampler.stop()

    assert torch.equal(torch.get_rng_state(), trainers)
    alive = torch.ones(1)
    dist.all_reduce(alive)
    assert alive == ranks
    dist.destroy_process_group()


if __name__ == "__main__":
    folder, ranks = Path(sys.argv[1]), int(sys.argv[2])
    tiny_model("qwen3", head_dim=32).save_pretrained(folder)
    mp.start_processes(main, (ranks, folder), nprocs=ranks, start_method="spawn")
