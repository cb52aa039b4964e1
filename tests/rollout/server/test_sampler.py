"""What a server makes its engine do in an update, with an engine that only writes the calls down."""

import asyncio

import pytest

from pl_grouprl.rollout.server.sampler import RefusalError, Sampler


class Engine:
    """vLLM's `AsyncLLM` as an update uses it."""

    errored = False

    def __init__(self, forgets: bool = True) -> None:
        self.calls, self._forgets = [], forgets

    async def start_weight_update(self):
        self.calls.append("start")

    async def finish_weight_update(self, version):
        self.calls.append("finish")

    async def collective_rpc(self, name, args=()):
        self.calls.append(name)
        return [["sums"]]

    async def reset_prefix_cache(self, reset_running_requests=False):
        self.calls.append("reset_prefix_cache")
        return self._forgets


async def update(sampler: Sampler, version: int):
    return await sampler.end(await sampler.begin(), version, [])


def test_each_update_drops_the_prefix_cache_once_its_weights_are_there():
    engine = Engine()
    sampler = Sampler(engine, transfer="http")

    async def twice():
        for version in (1, 2):
            engine.calls.clear()
            assert await update(sampler, version) == [["sums"]]
            after = engine.calls[engine.calls.index("finish") :]
            assert after == ["finish", "refresh_stale_weights", "reset_prefix_cache", "weight_checksums"]

    asyncio.run(twice())


def test_weights_are_not_served_with_old_keys_and_values():
    sampler = Sampler(Engine(forgets=False), transfer="http")
    with pytest.raises(RefusalError, match="vLLM did not drop its prefix cache"):
        asyncio.run(update(sampler, 1))
    assert (sampler.version, sampler.update, sampler.updating) == (None, None, False)
