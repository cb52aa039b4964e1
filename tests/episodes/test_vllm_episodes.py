"""Episodes that vLLM samples, in this process and as a server: what it reports is what the policy says of them."""

from __future__ import annotations

import importlib
import logging
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from helpers.engines import new_engine
from helpers.qwen_tokenizer import qwen_tokenizer
from helpers.rollouts import num_turns, worst_logprob_error
from helpers.sampled_episodes import open_episodes
from helpers.serving import Server
from helpers.tiny_models import tiny_model

from pl_grouprl.chat import ToolParser, register_tool_parser
from pl_grouprl.types import RolloutGroup, SamplingConfig

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm")
importlib.import_module("vllm.v1.engine.llm_engine")  # here, because imports set variables for good

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ROWS = [{"prompt": [{"role": "user", "content": "how much " * times}]} for times in (1, 7, 20)]
"""The last one is longer than a block of vLLM's prefix cache on CPUs; all become so."""

SAMPLING = SamplingConfig(max_new_tokens=60, stop_token_ids=tuple(range(0, 280, 7)))


def look_up(key: str) -> str:
    """Look a key up.

    Args:
        key: The key.

    Returns:
        Its value.
    """
    return f"{key} is " + "so " * 20


def parse_by_chance(text: str, tools: Any = ()) -> dict[str, Any]:
    """Three texts of four are a call."""
    number = zlib.crc32(text.encode("utf-8", "replace"))
    call = {"type": "function", "function": {"name": "look_up", "arguments": {"key": "abcd"[number % 4]}}}
    return {"role": "assistant", "content": text, **({"tool_calls": [call]} if number % 4 else {})}


@pytest.fixture(autouse=True)
def _chance_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pl_grouprl.chat.parsing._PARSERS", [])
    register_tool_parser(ToolParser("chance", ("<tool_call>",), "<|im_start|>assistant\n", parse_by_chance))


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    """Starting vLLM in this process sets variables and a log level."""
    logger = logging.getLogger("httpx2")
    with patch.dict(os.environ), patch.object(logger, "level", logger.level):
        yield


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    own = qwen_tokenizer()
    own.chat_template = TEMPLATE
    return own


@pytest.fixture
def policy(tokenizer: Any) -> Any:
    """With heads of a size that vLLM has kernels for on CPUs."""
    options = {"head_dim": 32, "num_attention_heads": 2, "max_position_embeddings": 2048}
    return tiny_model("qwen3", vocab_size=len(tokenizer), **options)


@pytest.fixture(params=["vllm", "vllm_server"])
def engine(request: pytest.FixtureRequest, policy: Any, tmp_path: Path) -> Iterator[Any]:
    if request.param == "vllm":
        engine = new_engine("vllm", kv_cache_gib=0.1)
        yield engine
        engine.close()
        return
    policy.save_pretrained(tmp_path / "model")
    server = Server(tmp_path / "model", tmp_path / "log", "--load-format", "dummy").start()
    try:
        yield new_engine("vllm_server", urls=server.wait().url)
    finally:
        server.stop()


def tokens(groups: list[RolloutGroup]) -> list[list[int]]:
    return [rollout.token_ids for group in groups for rollout in group.rollouts]


def test_logprobs_of_episodes_are_those_of_a_forward(engine: Any, policy: Any, tokenizer: Any) -> None:
    """Under three weights, whose episodes share prompts: no keys and values of older weights are read."""
    limits = {"max_tool_calling_iterations": 4, "max_turn_tokens": 30}
    with open_episodes(policy, tokenizer, engine, tools=[look_up], **limits) as sample:
        found: list[list[list[int]]] = []
        for seed in range(3):
            groups = sample(ROWS, SAMPLING, 4)
            assert worst_logprob_error(policy, groups) < 1e-4
            assert {num_turns(rollout) for group in groups for rollout in group.rollouts} == {1, 2, 3, 4, 5}
            found.append(tokens(groups))
            assert tokens(sample(ROWS, SAMPLING, 4)) == found[-1]
            disturb(policy, seed)
    assert found[0] != found[1] != found[2]


@torch.no_grad()
def disturb(policy: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in policy.parameters():
        parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
