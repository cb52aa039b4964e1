import asyncio

import pytest

pytest.importorskip("aiohttp")

from pl_grouprl.episodes.loop import EpisodeLimits
from pl_grouprl.harnesses.gateway import Gateway, RoundRequests
from pl_grouprl.rollout.engine import SamplerLostError
from pl_grouprl.types import SamplingConfig
from tests.helpers.fake_vllm import FakeVLLM
from tests.helpers.tiny_models import VOCAB, tiny_model


@pytest.fixture
def server():
    server = FakeVLLM(token="secret")
    server.model, server.version = tiny_model(), "run:1"
    yield server
    server.close()


def sampled():
    return RoundRequests(SamplingConfig(max_new_tokens=4), "run:1", EpisodeLimits(max_turn_tokens=2), vocab_size=VOCAB)


def with_gateway(urls, use, token="secret"):
    async def run():
        from aiohttp import ClientSession

        gateway = Gateway(urls, token)
        await gateway.start()
        try:
            async with ClientSession() as client:
                return await use(gateway, client)
        finally:
            await gateway.close()

    return asyncio.run(run())


async def turn(gateway, client, episode="a", ids=(3, 4), seed=1):
    url = gateway.base_url.removesuffix("/v1") + "/inference/v1/generate"
    body = {"token_ids": list(ids), "sampling_params": {"seed": seed}}
    async with client.post(url, json=body, headers={"X-Session-ID": episode}) as answer:
        return answer.status, await answer.json()


def test_turns_reach_the_server_with_its_token(server):
    async def use(gateway, client):
        assert await gateway.versions() == ["run:1"]
        gateway.begin(sampled())
        return [await turn(gateway, client, episode, seed=seed) for episode, seed in zip("abc", (1, 1, 2), strict=True)]

    first, second, other = with_gateway([server.url], use)
    assert first[0] == second[0] == other[0] == 200
    assert len({tuple(found["choices"][0]["token_ids"]) for _, found in (first, second, other)}) == 3
    assert first[1]["choices"][0]["logprobs"]["content"][0]["token"].startswith("token_id:")


def test_an_episode_stays_with_one_of_the_servers(server):
    other = FakeVLLM(token="secret")
    other.model, other.version = server.model, "run:1"

    async def use(gateway, client):
        gateway.begin(sampled())
        for episode in "abab":
            await turn(gateway, client, episode, seed=ord(episode))

    with_gateway([server.url, other.url], use)
    other.close()
    assert [len(server.asked), len(other.asked)] == [2, 2]
    assert {headers["Authorization"] for _, headers in other.asked} == {"Bearer secret"}


def test_what_is_wrong_with_one_episode_ends_no_other(server):
    async def use(gateway, client):
        failed = gateway.begin(sampled())
        refused = await turn(gateway, client, ids=(3, VOCAB))
        return refused, await turn(gateway, client, "b"), failed.done()

    (status, answer), (other, _), failed = with_gateway([server.url], use)
    assert (status, other, failed) == (400, 200, False)
    assert f"the largest {VOCAB}" in answer["error"]["message"]


def test_a_lost_server_fails_the_round(server):
    def spoil(answer):
        raise RuntimeError

    async def use(gateway, client):
        server.spoil = spoil
        failed = gateway.begin(sampled())
        status, _ = await turn(gateway, client)
        later, _ = await turn(gateway, client, "b")
        with pytest.raises(SamplerLostError, match=f"the sampling server at {server.url} answers 500"):
            failed.result()
        return status, later

    assert with_gateway([server.url], use) == (409, 409)
    assert len(server.asked) == 1


def test_a_server_that_is_not_there_is_lost_and_a_wrong_token_is_none(server):
    def ends_in(error, message):
        async def use(gateway, client):
            with pytest.raises(error, match=message) as raised:
                await gateway.versions()
            return raised.type

        return use

    with_gateway(["http://127.0.0.1:9"], ends_in(SamplerLostError, "does not answer"))
    assert with_gateway([server.url], ends_in(RuntimeError, "answers 401"), token="wrong") is RuntimeError


def test_no_turns_between_rounds(server):
    async def use(gateway, client):
        before, _ = await turn(gateway, client)
        gateway.begin(sampled())
        gateway.end()
        after, _ = await turn(gateway, client)
        async with client.post(gateway.base_url.rsplit("/", 2)[0] + "/inference/v1/generate", json={}) as answer:
            return before, after, answer.status  # without the secret

    assert with_gateway([server.url], use) == (409, 409, 404)
    assert server.asked == []
