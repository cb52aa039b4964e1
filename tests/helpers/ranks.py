"""Ranks as threads, for functions that add up sums over all ranks by a `reduce` they are given."""

import threading
from concurrent.futures import ThreadPoolExecutor

import torch


def on_ranks(function, parts):
    """`function(part, reduce)` of each part in a thread of its own; `reduce` adds up over all threads."""
    barrier, sums = threading.Barrier(len(parts), timeout=60), [None] * len(parts)

    def run(rank):
        def reduce(mine):
            sums[rank] = mine
            barrier.wait()
            total = torch.stack(sums).sum(dim=0)
            barrier.wait()
            return total

        return function(parts[rank], reduce)

    with ThreadPoolExecutor(len(parts)) as pool:
        return list(pool.map(run, range(len(parts))))
