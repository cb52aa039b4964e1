"""Traces as those of the library verifiers, and an environment that makes them, without the library."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any


class Message(SimpleNamespace):
    def model_dump(self, exclude_none=False):
        return {name: value for name, value in vars(self).items() if value is not None}


def node(token_ids, mask=None, logprobs=(), role="user", sampled=False, content="text"):
    return SimpleNamespace(
        token_ids=list(token_ids),
        mask=[bool(one) for one in mask or [0] * len(token_ids)],
        logprobs=list(logprobs),
        message=Message(role=role, content=content),
        sampled=sampled,
    )


def reply(scaffold, token_ids, content="reply"):
    """What the model wrote, behind the header of its turn."""
    mask = [0] * len(scaffold) + [1] * len(token_ids)
    return node([*scaffold, *token_ids], mask, [-0.5] * len(token_ids), "assistant", True, content)


def branch(*nodes, trainable=True, media=None):
    return SimpleNamespace(nodes=list(nodes), trainable=trainable, mm_token_type_ids=media)


def trace(*branches, rewards=None, metrics=None, name="agent", trainable=True, **options):
    rewards = {"right": 1.0} if rewards is None else rewards
    found = {key: None if value is None else SimpleNamespace(score=value) for key, value in rewards.items()}
    return SimpleNamespace(
        **{
            "id": "t",
            "agent": SimpleNamespace(name=name, trainable=trainable),
            "branches": list(branches),
            "rewards": found,
            "reward": sum(reward.score for reward in found.values() if reward is not None),
            "metrics": metrics or {},
            "calls": [],
            "errors": [],
            "ok": True,
            "is_truncated": False,
            "is_timeout": False,
            "tool_messages": [],
            "timing": SimpleNamespace(agent=SimpleNamespace(harness=SimpleNamespace(duration=0.25))),
            **options,
        }
    )


def episode(*traces, ok=True, errors=()):
    return SimpleNamespace(traces=list(traces), ok=ok, errors=list(errors), env=SimpleNamespace(id="letters"))


class Task(SimpleNamespace):
    def model_dump_json(self):
        return json.dumps(vars(self))


def task(place, prompt="ab"):
    return Task(idx=place, name=None, prompt=prompt, system_prompt=None)


class FakeEnvironment:
    """Plays two turns; the reward is the share of tokens below 12 among those that the model wrote.

    Tasks whose prompt begins with `f` fail, and those that begin with `h` fail in every second episode.
    """

    def __init__(self, config: Any, base_url: str, tokenizer_folder: str, renderer: Any, max_concurrent: int) -> None:
        self._url = base_url.removesuffix("/v1") + "/inference/v1/generate"
        self.is_serving = False
        self.played = 0

    @asynccontextmanager
    async def serving(self):
        self.is_serving = True
        yield
        self.is_serving = False

    async def play(self, task: str, seed: int, sampling: Any) -> Any:
        from aiohttp import ClientSession

        assert self.is_serving
        self.played += 1
        name, prompt = f"trace {self.played}", json.loads(task)["prompt"]
        if prompt[0] == "f" or (prompt[0] == "h" and self.played % 2):
            return episode(ok=False, errors=[SimpleNamespace(type="EnvError", message="no sandbox")])
        nodes, history = [node([ord(letter) - ord("a") for letter in prompt])], []
        async with ClientSession() as client:
            for turn in range(2):
                scaffold = [6] if turn == 0 else [6, 7, 6]
                history += [*(nodes[0].token_ids if turn == 0 else []), *scaffold]
                body = {"token_ids": history, "sampling_params": {"seed": seed, "stop_token_ids": [6]}}
                async with client.post(self._url, json=body, headers={"X-Session-ID": name}) as answer:
                    if answer.status != 200:
                        break
                    (choice,) = (await answer.json())["choices"]
                written = reply(scaffold, choice["token_ids"])
                written.logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
                nodes.append(written)
                history += choice["token_ids"]
        tokens = [token for one in nodes for token, mask in zip(one.token_ids, one.mask, strict=True) if mask]
        share = sum(token < 12 for token in tokens) / max(len(tokens), 1)
        return episode(trace(branch(*nodes), id=name, rewards={"low": share}, metrics={"turns": len(nodes) - 1}))
