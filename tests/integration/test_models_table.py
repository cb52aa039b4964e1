"""The command that writes docs/models.md: a family that comes to transformers is found, and a wrong one is told."""

import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

import family_parity
import models_page
import models_table
import tiny_config
from family_parity import Outcome
from tiny_families import Family, build


@pytest.fixture
def register():
    """Registers a causal language model with transformers, as a new release would, for as long as the test runs."""
    types = []

    def register_family(name, mix=None):
        config_class = type("MadeUpConfig", (LlamaConfig,), {"model_type": name})
        model_class = type("MadeUpForCausalLM", (LlamaForCausalLM,), {"config_class": config_class, "mix": mix})
        if mix is not None:
            model_class.__init__ = _mixing_init
        AutoConfig.register(name, config_class)
        AutoModelForCausalLM.register(config_class, model_class)
        types.append((name, config_class))

    yield register_family
    for name, config_class in types:
        del CONFIG_MAPPING._extra_content[name]
        del AutoModelForCausalLM._model_mapping._extra_content[config_class]


def _mixing_init(model, config):
    LlamaForCausalLM.__init__(model, config)
    model.model.layers[1].register_forward_hook(lambda layer, args, output: type(model).mix(output))


def previous_token(hidden):
    """Adds the row's token before, which in a packed row may be another rollout's."""
    return hidden + 0.5 * torch.roll(hidden, 1, dims=1)


def test_a_new_family_is_found_by_its_registration(register, tmp_path, capsys):
    register("made_up")
    page, key = tmp_path / "models.md", "made_up MadeUpForCausalLM"
    assert models_table.main(["--families", "made_up", "--write", str(page)]) == 0
    assert models_page.statuses(page.read_text()) == {key: "exact"}
    assert models_table.main(["--families", "made_up", "--check", str(page)]) == 0
    old = [Outcome(Family("made_up", "MadeUpForCausalLM"), "refused", reason="it was. ")]
    page.write_text(models_page.page(old, "auto"))  # no longer true
    assert models_table.main(["--families", "made_up", "--check", str(page)]) == 1
    printed = capsys.readouterr().out
    assert f"-{key}: refused, it was." in printed
    assert f"+{key}: exact" in printed
    with pytest.raises(ValueError, match="lama"):
        models_table.select(["llama", "lama"])


def test_layers_that_mix_tokens_are_never_exact(register, tmp_path, capsys):
    register("made_up", mix=previous_token)
    page = tmp_path / "models.md"
    models_table.main(["--families", "made_up", "--write", str(page)])
    (status,) = models_page.statuses(page.read_text()).values()
    assert status == "wrong" or status.startswith("refused")


def test_a_wrong_family_or_an_error_makes_the_command_fail(register, tmp_path, capsys, monkeypatch):
    def broken(*args):
        raise IndexError("out of range")

    register("made_up")
    shared = family_parity._shared
    monkeypatch.setattr(family_parity, "_shared", lambda *args: shared(*args) + torch.linspace(0, 1, 64))
    page = tmp_path / "models.md"
    assert models_table.main(["--families", "made_up", "--write", str(page)]) == 1
    assert models_page.statuses(page.read_text()) == {"made_up MadeUpForCausalLM": "wrong"}
    assert "differs on groups, depth 2, depth 3" in page.read_text()
    assert "made_up: wrong" in capsys.readouterr().err
    monkeypatch.setattr(family_parity, "_shared", broken)
    assert models_table.main(["--families", "made_up"]) == 1
    assert "made_up: refused, IndexError: out of range" in capsys.readouterr().err


def test_a_family_that_hangs_or_crashes_does_not_end_the_others(register, monkeypatch):
    import os
    import time

    ends = {"llama": lambda: time.sleep(60), "gpt2": lambda: os._exit(3)}
    monkeypatch.setattr(models_table, "try_family", lambda family, backend: ends[family.model_type]())
    chosen = [family for family in models_table.select(["llama", "gpt2"]) if not family.variant]
    reasons = {one.family.model_type: (one.status, one.reason) for one in models_table.sweep(chosen, timeout=1.0)}
    assert reasons["gpt2"] == ("not built", "Its process ended with code 3.")
    assert reasons["llama"] == ("not built", "It takes longer than 1 seconds.")


def test_what_the_page_says_is_read_back():
    outcomes = [
        Outcome(Family("a", "A"), "exact", ("conv", "full_attention"), 3e-7, 0.0),
        Outcome(Family("a", "A", variant="no window"), "exact", (), 6e-5, 2e-4),
        Outcome(Family("b", "B", images=True), "refused", reason="differs by 1.7e-03 | of its size"),
        Outcome(Family("c", "C"), "not built", reason="ValueError: no"),
    ]
    text = models_page.page(outcomes, "auto")
    assert "| `a` | `A` | conv, full_attention | < 1e-5 | < 1e-5 |" in text
    assert "| `a`, no window | `A` | - | < 1e-3 | < 1e-3 |" in text  # with a factor of two to spare
    assert "| `b` * | `B` | differs by about 1e-3 / of its size |" in text
    assert models_page.statuses(text) == {models_page.key(one.family): models_page.state(one) for one in outcomes}
    assert list(models_page.statuses(text).values()) == [
        *("exact", "exact", "refused, differs by about 1e-3 / of its size", "not built")
    ]


@pytest.mark.parametrize(
    "family", ["gemma3_text", "olmo3", "qwen3_next", "lfm2", "deepseek_v3", "gpt_neo", "gemma3n_text"]
)
def test_every_kind_of_layer_of_a_family_is_kept(family):
    large = AutoConfig.for_model(family)
    small = tiny_config.small_config(large)
    assert tiny_config.layer_types(small) == tiny_config.layer_types(large)
    assert set(getattr(small, "mlp_layer_types", None) or ()) == set(getattr(large, "mlp_layer_types", None) or ())
    assert 2 <= small.num_hidden_layers <= tiny_config.MAX_LAYERS


def test_nothing_of_a_model_is_invisible():
    """Sinks start at random values, norms at one and biases at zero: all of them move here."""
    (family,) = models_table.select(["gpt_oss"])
    model = build(family)
    assert all(weight.std() > 0.05 for weight in model.parameters() if weight.numel() > 1)
    assert model.config.sliding_window == 8
