"""The report by kind of layer: what ran, how far it is off, and which kind is to blame."""

import dataclasses

import pytest
import torch
from helpers.tiny_models import random_groups, tiny_model
from helpers.versions import needs

from pl_grouprl.attention import ParityError, check_parity, shared_prefix
from pl_grouprl.attention.backends import choice

SHAPES = [(20, [7, 1, 12, 0]), (9, [5])]
MIXED = {"sliding_window": 8, "num_hidden_layers": 3, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]}
STATEFUL = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8},
    **{"linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"]},
}


def test_one_row_for_each_kind_of_layer():
    report = check_parity(tiny_model("gemma3_text", **MIXED), random_groups(0, SHAPES))
    assert [(layer.kind, layer.count, layer.backend) for layer in report.layers] == [
        ("full", 1, "cascade"),
        ("window 8", 2, "cascade"),
    ]
    assert report.passed
    rows = [line.split() for line in str(report).splitlines()[3:]]
    assert [row[:3] for row in rows[:3]] == [["full", "1", "cascade"], ["window", "8", "2"], ["whole", "model", "3"]]
    assert len(rows) == 4  # and one for padded batches


@needs("transformers", "5.21")
def test_stateful_layers_have_a_row():
    report = check_parity(tiny_model("qwen3_5_text", **STATEFUL), random_groups(0, SHAPES))
    assert {layer.kind: layer.backend for layer in report.layers} == {
        "Qwen3_5GatedDeltaNet": "segment by segment",
        "full": "cascade",
    }


@pytest.mark.parametrize("broken_kind", ["full", "window 8"])
def test_the_differing_kind_is_named(monkeypatch, broken_kind):
    def attend(query, key, value, layout, rule):
        wrong = (rule.window is None) == (broken_kind == "full")
        scale = rule.scale * (1.1 if wrong else 1.0)
        return choice.REFERENCE.attend(query, key, value, layout, dataclasses.replace(rule, scale=scale))

    cascade = dataclasses.replace(choice.CASCADE, attend=attend)
    monkeypatch.setitem(choice.BACKENDS, "cascade", cascade)
    model = tiny_model("gemma3_text", **MIXED)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 1.5  # scores that are far enough from zero for their scale to matter
    monkeypatch.setattr("pl_grouprl.attention.patch.is_whole", lambda decoder: False)  # which skips the check on entry
    report = check_parity(model, random_groups(0, SHAPES), backend="cascade")
    failed = {line.split("  ")[1].split(" differ")[0] for line in str(report).splitlines() if line.endswith("FAILED")}
    assert failed == {broken_kind, "whole model", "tokens of a padded batch"}
    assert not report.passed
    with pytest.raises(ParityError, match=rf"{broken_kind} .*FAILED"):
        report.raise_if_failed()


def test_default_groups_are_longer_than_the_window():
    report = check_parity(tiny_model("mistral", sliding_window=40))
    assert report.longest_sequence > 40
    assert "no sequence was longer" not in str(report)


def test_a_window_that_was_not_reached_is_reported():
    report = check_parity(tiny_model("mistral", sliding_window=100_000))
    assert report.longest_sequence < 100
    assert str(report).endswith("100000 tokens")
    without = check_parity(tiny_model("qwen2", use_sliding_window=False, sliding_window=4096))
    assert "no sequence was longer" not in str(without)


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_frequencies_that_depend_on_the_longest_sequence(rope_type):
    """Each sequence is compared as padded to the longest one, or its frequencies would differ."""
    rope = {"rope_type": rope_type, "rope_theta": 1e4, "factor": 4.0}
    if rope_type == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4, "original_max_position_embeddings": 16}
    family, size = ("llama", 16) if rope_type == "dynamic" else ("phi3", 64)
    options = {"rope_parameters": rope, "max_position_embeddings": size}
    if family == "phi3":
        options |= {"original_max_position_embeddings": 16, "sliding_window": None}
    report = check_parity(tiny_model(family, **options), random_groups(0, SHAPES))
    report.raise_if_failed()
    assert report.max_logprob_difference < 1e-5


def test_what_auto_chose_in_words():
    model = tiny_model("gemma3_text", **MIXED)
    context = shared_prefix(model)
    assert context.describe() == "auto, chosen at the first call"
    with context:
        assert context.describe() == "full: cascade (1 layer); window 8: cascade (2 layers)"
    with shared_prefix(model) as again:  # known without another check
        assert again.describe() == "full: cascade (1 layer); window 8: cascade (2 layers)"
