"""docs/models.md is what is found by running: some families always, all of them where slow tests run."""

import re
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tools"))

from family_parity import try_family  # noqa: E402
from models_page import key, page, state, statuses  # noqa: E402
from models_table import select, sweep  # noqa: E402
from tiny_families import build  # noqa: E402

VERSION = version("transformers")
PAGE = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
of_this_transformers = pytest.mark.skipif(
    f"transformers {VERSION}," not in PAGE, reason=f"docs/models.md was written with another one than {VERSION}"
)
ALWAYS = (
    *("llama dynamic rope", "llama llama3 rope", "llama yarn rope", "phi3 longrope", "qwen2 windows"),
    *("mistral", "gemma2", "gemma3_text", "olmo3", "cohere2", "exaone4", "gpt_oss", "llama4_text", "mimo_v2_flash"),
    *("deepseek_v32", "nemotron"),  # selected tokens, only the mask handed on
    *("deepseek_v2", "deepseek_v3", "gpt2", "opt", "phi", "mixtral", "glm4", "hunyuan_v1_dense"),  # latent, positions
    *("qwen3_next", "qwen3_5_text", "lfm2 short convolutions"),  # layers with state
    *("qwen2_5_vl", "qwen3_vl", "gemma3"),  # models that take images
    *("mamba", "bloom", "doge", "bart", "roberta"),  # refused
)


def families(names):
    """One family for each name; a model type alone is the family with its defaults."""
    found = {}
    for family in select(names):
        if family.name in names:
            found.setdefault(family.name, family)
    assert found.keys() == set(names)
    return list(found.values())


@of_this_transformers
@pytest.mark.parametrize("family", families(ALWAYS), ids=lambda family: family.name)
def test_the_page_is_true_of(family):
    outcome = try_family(family)
    assert outcome.status in ("exact", "refused"), outcome.reason
    assert outcome.expected, outcome.reason
    assert state(outcome) == statuses(PAGE)[key(family)]


@of_this_transformers
def test_the_page_names_every_family_of_the_installed_transformers():
    assert set(statuses(PAGE)) == {key(family) for family in select(None)}


@pytest.mark.slow
def test_no_family_is_wrong_and_the_page_is_what_the_command_writes():
    outcomes = sweep(select(None))
    assert [f"{one.family.name}: {one.reason}" for one in outcomes if one.status == "wrong" or not one.expected] == []
    bounds = re.compile(r"< 1e-\d+")  # of rounding, which machines differ in
    assert bounds.sub("<", page(outcomes, "auto")) == bounds.sub("<", PAGE)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("qwen2 windows", "sliding_attention"),
        ("qwen3 windows", "sliding_attention"),
        ("lfm2 short convolutions", "conv"),
        ("lfm2_moe short convolutions", "conv"),
    ],
)
def test_variants_have_the_layers_that_they_are_named_for(name, kind):
    (family,) = families([name])
    assert kind in build(family).config.layer_types
