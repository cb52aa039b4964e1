"""Run by test_lora.py: two ranks with one engine, each of which has its part of an adapter."""

from __future__ import annotations

import faulthandler
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).parents[2]))

import pytest
import test_lora as lora
from helpers.engines import new_engine
from helpers.rollouts import PROMPTS

from pl_grouprl.distributed.checksum import WeightsMismatchError


def main(rank: int, folder: Path) -> None:
    """Two adapters one after the other, and one of which a rank has other weights."""
    faulthandler.dump_traceback_later(300, exit=True)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    lora.POLICIES["ranks"] = ("qwen2_tied", {"vocab_size": 100})  # tokens on both; one head of keys for both
    model = lora.adapted("ranks")
    engine = new_engine("vllm", adapter="separate", kv_cache_gib=0.1, tensor_parallel_size=2)
    engine.bind(model)
    lora.sync(engine, model, base=True)
    before = lora.assert_greedy(engine, model)
    lora.renew(model, 1)
    lora.sync(engine, model)
    assert lora.assert_greedy(engine, model) != before
    for part in ("q_proj.lora_B", "k_proj.lora_A", "o_proj.lora_A", "down_proj.lora_B", "up_proj.lora_B"):
        check_one_rank(rank, engine, model, part)
    lora.sync(engine, model)
    lora.assert_greedy(engine, model, PROMPTS[rank:2])  # prompts of their own
    engine.close()
    dist.destroy_process_group()


def check_one_rank(rank: int, engine, model, part: str) -> None:
    """The last entry of a weight differs in what the second rank loads."""
    load = engine._vllm.load_adapter

    def load_otherwise(version, config, weights):
        name = [name for name in weights if part in name][-1]
        other = weights[name].clone()
        other[-1, -1] += rank
        load(version, config, {**weights, name: other})

    engine._vllm.load_adapter = load_otherwise
    with pytest.raises(WeightsMismatchError, match=part):
        lora.sync(engine, model)
    engine._vllm.load_adapter = load


if __name__ == "__main__":
    mp.start_processes(main, (Path(sys.argv[1]),), nprocs=2, start_method="spawn")
