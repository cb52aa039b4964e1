"""Ranks that run a row together compute what one does: log-probs, and gradients summed over the ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.scripts import run_script
from helpers.tiny_models import tiny_model

from pl_grouprl.attention.sequence_parallel import check_sequence_parallel, check_sequence_parallel_size, sequence_mesh

SCRIPT = Path(__file__).with_name("sequence_ranks.py")

ROUNDED = ("gemma2", "gemma3_text")
"""Their norms compute in float32, so gradients of the norms' weights are summed over tokens with its rounding."""

CASES = [
    *({"family": family, "shape": "groups"} for family in ("llama", "qwen3", "gpt2", "mixtral", "deepseek_v3")),
    *({"family": family, "shape": "groups"} for family in ("gpt_oss", "gemma2", "gemma3_text")),
    *({"family": "qwen3", "shape": shape} for shape in ("one_group", "odd", "empty", "short")),
    *({"family": family, "shape": "odd", "backend": "reference"} for family in ("llama", "gpt_oss")),
    {"family": "llama", "shape": "odd", "backend": "prefix_grouper"},
    {"family": "llama", "shape": "groups", "options": {"num_key_value_heads": 1}},
    {"family": "llama", "forest": 1},
    {"family": "gemma3_text", "forest": 2},
    {"family": "llama", "shape": "groups", "checkpointing": True},
    {"family": "llama", "shape": "groups", "checkpointing": "attention"},
    {"family": "qwen3_moe", "shape": "odd", "routers": True},
    {"family": "gpt_oss", "slices": True},
    {"family": "llama", "slices": True, "options": {"num_key_value_heads": 1}, "checkpointing": "attention"},
]
REFUSALS = [
    ({"family": "llama", "other_rows": True}, "different rows"),
    ({"family": "llama", "sharing": "repeated"}, "sharing='repeated'"),
    ({"family": "llama", "compile": True}, "compiled"),
    ({"family": "llama", "options": {"num_attention_heads": 1, "num_key_value_heads": 1}}, "query heads"),
]


def name_of(case):
    return "-".join(f"{key}={value}" for key, value in case.items())


def run_ranks(folder, ranks, size, cases):
    result = folder / "differences.json"
    named = [{**case, "name": name_of(case)} for case in cases]
    run_script(SCRIPT, size, json.dumps(named), result, ranks=ranks, timeout=240)
    return json.loads(result.read_text())


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    refused = [{**case, "refused": True} for case, _ in REFUSALS]
    return run_ranks(tmp_path_factory.mktemp("sequence"), 2, 2, [*CASES, *refused])


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_two_ranks_compute_what_one_does(two_ranks, case):
    outputs, gradients = two_ranks[name_of(case)]
    assert outputs < 1e-9
    assert gradients < (1e-6 if case["family"] in ROUNDED else 1e-9)


@pytest.mark.parametrize(("case", "message"), REFUSALS, ids=[name_of(case) for case, _ in REFUSALS])
def test_what_cannot_be_split_is_refused(two_ranks, case, message):
    assert message in two_ranks[name_of({**case, "refused": True})]


@pytest.mark.slow
@pytest.mark.parametrize(("size", "families"), [(4, ("llama", "gpt_oss")), (2, ("qwen3",))])
def test_four_ranks_share_two_key_value_heads_or_run_separate_rows(size, families, tmp_path):
    cases = [{"family": family, "shape": shape} for family in families for shape in ("groups", "odd", "short")]
    for outputs, gradients in run_ranks(tmp_path, 4, size, cases).values():
        assert outputs < 1e-9
        assert gradients < 1e-9


@pytest.mark.parametrize(
    "call",
    [
        lambda: check_sequence_parallel_size(4, 6),
        lambda: check_sequence_parallel_size(0, 6),
        lambda: sequence_mesh(2, "cpu"),
        lambda: check_sequence_parallel(tiny_model("llama"), 3),
    ],
)
def test_a_size_divides_ranks_and_heads(call):
    check_sequence_parallel_size(2, 6)
    with pytest.raises(ValueError, match="sequence_parallel_size"):
        call()


SCALED = {"num_local_experts": 2, "no_rope_layers": [1, 0], "attn_temperature_tuning": True}


@pytest.mark.parametrize(
    ("family", "options", "reason"),
    [
        ("lfm2", {"layer_types": ["conv", "full_attention"]}, "the state"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "largest position"),
        ("llama4_text", SCALED, "scales queries"),
    ],
)
def test_models_whose_tokens_cannot_be_split_are_refused(family, options, reason):
    model = tiny_model(family, **options)
    check_sequence_parallel(model, 1)
    with pytest.raises(NotImplementedError, match=f"sequence_parallel_size=2 .*{reason}"):
        check_sequence_parallel(model, 2)
