"""ZeRO trains like DDP: norms, clipping, passes, parts and steps that are left out, checkpoints, whole weights.

Two gloo ranks in deepspeed_run.py. DeepSpeed compiles a helper at first use (ninja and g++, minutes on a slow machine),
so all of it is slow.
"""

from __future__ import annotations

import json
import math
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.scripts import run_script
from helpers.tiny_models import tiny_model
from lightning.pytorch import LightningModule
from safetensors.torch import load_file

from pl_grouprl.distributed.strategies import support_of

sys.path.insert(0, str(Path(__file__).parent))

import run_ranks

SCRIPT = Path(__file__).with_name("deepspeed_run.py")
STAGES = ("z2", "z3", "z2_offload", "z3_offload")

if find_spec("deepspeed") is None:
    pytest.skip("DeepSpeed is not installed", allow_module_level=True)


def run(folder: Path, **options: Any) -> tuple[list[dict[str, torch.Tensor]], dict[str, Any]]:
    """Whole weights of policy and critic after training, and what else the script reports."""
    folder.mkdir()
    run_script(SCRIPT, folder, json.dumps(options), ranks=2, cwd=folder, timeout=900)
    return torch.load(folder / "whole.pt", weights_only=True), json.loads((folder / "seen.json").read_text())


def largest_difference(left: Any, right: Any) -> float:
    pairs = [(a[name], b[name]) for a, b in zip(left, right, strict=True) for name in a | b]
    return max((a - b).abs().max().item() for a, b in pairs)


# In the first step the policy is left out, the second is not finite, all are of two passes. The critic has a limit.
EVENTFUL = {"passes": 2, "critic_warmup_steps": 1, "broken_step": 1, "critic_limit": 1.0, "steps": 4}
CLIPPED = {"passes": 3, "limit": 2.0}


@pytest.fixture(scope="module")
def oracles(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ddp")
    cases = {"eventful": EVENTFUL, "clipped": CLIPPED}
    return {name: run(folder / name, strategy="ddp", **options) for name, options in cases.items()}


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("case", "options"), [("eventful", EVENTFUL), ("clipped", CLIPPED)])
def test_zero_trains_like_ddp(tmp_path, oracles, stage, case, options):
    weights, seen = run(tmp_path / stage, strategy=stage, **options)
    expected_weights, expected = oracles[case]
    assert largest_difference(weights, expected_weights) < 1e-5
    for norms, others in zip(seen["norms"], expected["norms"], strict=True):
        for name, norm in norms.items():
            assert norm == pytest.approx(others[name], rel=1e-5, nan_ok=True)
    # Each rank samples another number of tokens, of the weights as they are.
    assert seen["sampled"] == expected["sampled"]
    assert seen["reference"] == pytest.approx(expected["reference"], rel=1e-6)
    assert seen["rates"] == expected["rates"]
    tiny_model("qwen3", tie_word_embeddings=True).load_state_dict(weights[0])  # nothing is missing


@pytest.mark.slow
def test_the_oracle_saw_what_is_tested(oracles):
    _, eventful = oracles["eventful"]
    assert eventful["norms"][0]["policy"] == 0
    assert math.isnan(eventful["norms"][1]["policy"])
    assert all(norms["critic"] > EVENTFUL["critic_limit"] for norms in eventful["norms"][2:])
    assert all(norms["policy"] > CLIPPED["limit"] for norms in oracles["clipped"][1]["norms"])


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_resume_is_exact_and_leaves_the_reference_out(tmp_path, stage):
    options = {"strategy": stage, "passes": 2, "limit": 2.0, "steps": 4}
    weights, seen = run(tmp_path / "whole", **options)
    checkpoint = tmp_path / "whole" / "step=2.ckpt"
    resumed, after = run(tmp_path / "resumed", checkpoint=str(checkpoint), **options)
    assert largest_difference(weights, resumed) == 0
    assert (after["norms"], after["reference"]) == (seen["norms"], seen["reference"])  # two norms of the checkpoint
    for file in checkpoint.glob("checkpoint/*model_states.pt"):
        state = torch.load(file, weights_only=False)
        assert not [name for name in state["module"] if name.startswith("reference.")]
        assert not state["frozen_param_fragments"]


MIXED = {"trainer": {"precision": "bf16-mixed"}}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_mixed_precision_exports_the_float32_weights_that_are_stepped(tmp_path, strategy):
    trained = run_ranks.run(tmp_path / strategy, strategy, tied=True, **MIXED)
    for name, weight in trained.weights.items():  # the optimizer's steps are finer than bfloat16
        assert weight.dtype == torch.float32
        assert not torch.equal(weight, weight.bfloat16().float()), name
    assert run_ranks.exported_difference(trained) == 0
    assert json.loads((trained.folder / "export" / "config.json").read_text())["dtype"] == "float32"


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "form"), [("zero2", "merged"), ("zero3", "separate")])
def test_mixed_precision_exports_the_float32_adapter(tmp_path, strategy, form):
    adapter = {"r": 4, "alpha": 8, "target_modules": ["q_proj"]}
    trained = run_ranks.run(tmp_path / strategy, strategy, adapter=adapter, export=form, **MIXED)
    name = "model.layers.0.self_attn.q_proj"
    down, up = (trained.weights[f"{name}.lora_{which}.default.weight"] for which in "AB")
    if form == "separate":
        exported = load_file(trained.folder / "export" / "adapter_model.safetensors")
        assert torch.equal(exported[f"base_model.model.{name}.lora_B.weight"], up)
        return
    exported = load_file(trained.folder / "export" / "model.safetensors")
    expected = trained.weights[f"{name}.base_layer.weight"] + 8 / 4 * up @ down
    torch.testing.assert_close(exported[f"{name}.weight"], expected)


@pytest.mark.slow
def test_a_module_runs_again_under_zero_3(tmp_path):
    first = run_ranks.run(tmp_path / "first", "zero3")
    later = run_ranks.run(tmp_path / "later", "zero3", before=["validate", "test"])
    assert run_ranks.largest_difference(first, later) == 0


def support_with(strategy_options: dict[str, Any] | None = None, **trainer_options: Any) -> tuple[Any, Any]:
    from lightning.pytorch.strategies import DeepSpeedStrategy

    strategy = DeepSpeedStrategy(**(strategy_options or {}))
    options = {"accumulate_grad_batches": 1, "precision": "32-true", **trainer_options}
    trainer: Any = SimpleNamespace(strategy=strategy, **options)
    return support_of(trainer), strategy


@pytest.mark.parametrize(
    ("strategy", "trainer", "message"),
    [
        ({}, {"accumulate_grad_batches": 2}, "accumulate_grad_batches is 2"),
        ({"stage": 0}, {}, "stage is 0"),
        ({}, {"precision": "16-mixed"}, "precision is .16-mixed"),
        *(
            ({"config": {"zero_optimization": {"stage": 2}, name: value}}, {}, f"{name}=")
            for name, value in (("gradient_clipping", 1.0), ("optimizer", {"type": "Adam"}))
        ),
    ],
)
def test_what_zero_cannot_do_is_refused(strategy, trainer, message):
    support, _ = support_with(strategy, **trainer)
    with pytest.raises(ValueError, match=message):
        support.check(None)


def test_a_warning_about_clipping_is_silenced_while_deepspeed_starts(recwarn):
    class Clips(LightningModule):
        def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
            pass

    support, strategy = support_with()
    strategy.model = strategy._lightning_module = Clips()
    strategy.model._trainer = SimpleNamespace(training=False, gradient_clip_algorithm=None)
    strategy._initialize_deepspeed_inference = lambda module: None  # the engine
    strategy.init_deepspeed()
    filters = list(warnings.filters)
    support.check(None)
    assert warnings.filters == filters
    strategy.init_deepspeed()
    assert len([w for w in recwarn if "DeepSpeed handles gradient clipping" in str(w.message)]) == 1  # the first


def test_only_stage_three_shards_weights():
    assert [support_with({"stage": stage})[0].shards for stage in (1, 2, 3)] == [False, False, True]
