"""The stream of a model's weights: the same names, order and bits under every strategy, and little whole at a time."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.scripts import run_script
from helpers.tiny_models import tiny_model
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

sys.path.insert(0, str(Path(__file__).parent))

from named_weights_run import make_policy

from pl_grouprl.distributed.strategies import StrategySupport

SCRIPT = Path(__file__).with_name("named_weights_run.py")
SHARDED = ("fsdp1", "fsdp2", "z3", "z3_offload")
NEEDS_DEEPSPEED = pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
NEEDS_PEFT = pytest.mark.skipif(find_spec("peft") is None, reason="PEFT is not installed")


def stream_of(model: Any) -> dict[str, torch.Tensor]:
    items = list(StrategySupport(None).named_weights(model))
    assert len({name for name, _ in items}) == len(items)
    return dict(items)


def without_buffers(names: Any) -> list[str]:
    return [name for name in names if not name.endswith("offsets")]


def check_names(names: list[str], policy: Any) -> None:
    """Parameters as the whole model has them, the buffer amid them, weights of a module side by side."""
    assert without_buffers(names) == [name for name, _ in policy.named_parameters()]
    (buffer,) = (name for name in policy.state_dict() if name.endswith("offsets"))
    assert set(names) == {*without_buffers(names), buffer}
    owners = [name.rpartition(".")[0] for name in names]
    starts = [owner for owner, before in zip(owners, [None, *owners], strict=False) if owner != before]
    assert len(starts) == len(set(starts))


@pytest.mark.parametrize("lora", [False, pytest.param(True, marks=NEEDS_PEFT)])
def test_one_device_has_each_weight_once(lora):
    policy = make_policy({"lora": lora})
    own = stream_of(policy)
    check_names(list(own), policy)
    assert not any("lm_head" in name or "inv_freq" in name for name in own)  # tied; and no part of a checkpoint
    state = policy.state_dict()
    assert all(torch.equal(weight, state[name]) and not weight.requires_grad for name, weight in own.items())
    if lora:
        names = [
            name.removeprefix("model.layers.0.self_attn.q_proj.") for name in own if "layers.0.self_attn.q_" in name
        ]
        assert names[:3] == ["base_layer.weight", "lora_A.default.weight", "lora_B.default.weight"]


def test_an_untied_head_comes_last():
    assert list(stream_of(tiny_model("llama")))[-1] == "lm_head.weight"


def test_wrappers_leave_no_trace_in_names():
    plain, model = make_policy({}), make_policy({})
    model.model.layers[0].mlp = checkpoint_wrapper(model.model.layers[0].mlp)
    model.model.layers[1] = torch.compile(model.model.layers[1])
    assert "_orig_mod" in " ".join(model.state_dict())
    wrapped, expected = stream_of(torch.compile(model)), stream_of(plain)
    assert list(wrapped) == list(expected)
    assert all(torch.equal(wrapped[name], expected[name]) for name in expected)


def test_nothing_is_copied_on_one_device():
    model = tiny_model("llama")
    with torch.inference_mode():
        own = stream_of(model)
    assert all(own[name].data_ptr() == parameter.data_ptr() for name, parameter in model.named_parameters())


def seen_on_two_ranks(folder: Path, **case: Any) -> list[dict[str, Any]]:
    run_script(SCRIPT, folder, json.dumps(case), ranks=2, cwd=folder, timeout=900)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


LORA = {"lora": True}
SLOW = [pytest.mark.slow]
ZERO = [*SLOW, NEEDS_DEEPSPEED]
CASES = [
    pytest.param({"strategy": "ddp"}, id="ddp", marks=SLOW),
    pytest.param({"strategy": "ddp", **LORA}, id="ddp lora", marks=NEEDS_PEFT),
    pytest.param({"strategy": "fsdp2"}, id="fsdp2", marks=SLOW),
    pytest.param({"strategy": "fsdp2", **LORA}, id="fsdp2 lora", marks=NEEDS_PEFT),
    pytest.param({"strategy": "fsdp1"}, id="fsdp1", marks=SLOW),
    *(pytest.param({"strategy": name}, id=name, marks=ZERO) for name in ("z2", "z3", "z3_offload")),
    *(pytest.param({"strategy": name, **LORA}, id=f"{name} lora", marks=[*ZERO, NEEDS_PEFT]) for name in ("z2", "z3")),
]


@pytest.mark.parametrize("case", CASES)
def test_ranks_read_the_weights_between_steps(tmp_path, case):
    for seen in seen_on_two_ranks(tmp_path, **case):
        check_names(seen["names"], make_policy(case))
        assert len(seen["equal"]) >= 3
        assert all(seen["equal"])  # of the weights that are gathered all at once
        assert all(seen["state"])
        assert seen["trained"] < 1e-5  # neither the streams nor those left midway disturb the steps
        if case["strategy"] in SHARDED:
            assert seen["alive"] == [0] * len(seen["names"])  # nothing of what was yielded lives on in the stream
            assert max(seen["whole"]) == (0 if case["strategy"] == "fsdp2" else 1)
            assert set(seen["left"]) == {0}
