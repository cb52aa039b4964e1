"""Router replay in every mixture of the installed transformers that shares prefixes exactly."""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.tiny_models import random_groups

from pl_grouprl.attention import find_decoder, shared_prefix
from pl_grouprl.models.router_replay import RouterReplay, mixtures_of
from pl_grouprl.models.score import score
from pl_grouprl.packing import pack

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tools"))

from models_page import key, statuses  # noqa: E402
from models_table import select  # noqa: E402
from tiny_families import CannotBuildError, build  # noqa: E402

PAGE = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
REFUSED = {"phimoe"}
NOT_SCORED = {"deepseek_v2", "qwen3_omni_moe_thinker"}
"""What the tables' builder makes of them has no mixture that runs, or no ids of images."""


def mixtures() -> list[Any]:
    """Families that are exact on the page and have experts, each once."""
    exact = {name for name, status in statuses(PAGE).items() if status == "exact"}
    families = {}
    for family in select(None):
        if key(family) in exact and not family.variant and family.model_type not in NOT_SCORED:
            families.setdefault(family.model_type, family)
    return list(families.values())


def check(model: Any) -> bool:
    """Force experts at random; False if the model has none."""
    try:
        blocks = mixtures_of(find_decoder(model))
    except ValueError:
        return False
    seen: dict[int, torch.Tensor] = {}
    for number, block in enumerate(blocks):
        experts = getattr(block, "experts", None)
        if experts is not None:
            experts.register_forward_pre_hook(
                lambda module, args, number=number: seen.update({number: args[1]} if len(args) > 1 else {})
            )
    with torch.no_grad(), RouterReplay(model) as routers, routers.recording() as recorded:
        model(input_ids=torch.tensor([[1, 2, 3]]), use_cache=False)
    count = max(getattr(getattr(block, "experts", None), "num_experts", 0) or 4 for block in blocks)
    groups_of_experts = getattr(find_decoder(model).config, "n_group", None) or 1
    size, chosen = count // groups_of_experts, recorded().shape[-1]
    generator = torch.Generator().manual_seed(0)

    def record(tokens: int) -> torch.Tensor:
        """Experts of one group."""
        first = size * torch.randint(0, groups_of_experts, (tokens, len(blocks), 1), generator=generator)
        return (first + torch.rand(tokens, len(blocks), size, generator=generator).argsort(-1)[..., :chosen]).short()

    groups = random_groups(0, [(12, [7, 0, 1, 12, 3]), (5, [3, 4])])
    for group in groups:
        group.routed_experts = record(len(group.prompt_ids))
        for rollout in group.rollouts:
            rollout.routed_experts = record(len(rollout.token_ids))
    batch = pack(groups)
    with shared_prefix(model), RouterReplay(model):
        found = score(model, batch).logprobs_N
        assert all(torch.equal(experts, batch.routed_experts[:, n].long()) for n, experts in seen.items())
        found.sum().backward()
        with torch.no_grad():
            torch.testing.assert_close(
                found.detach(), score(model, pack(groups, "repeated")).logprobs_N, atol=1e-4, rtol=0
            )
    return True


@pytest.mark.slow
@pytest.mark.skipif(f"transformers {version('transformers')}," not in PAGE, reason="docs/models.md is of another one")
def test_every_mixture_that_shares_prefixes_replays_its_experts():
    replayed, failed = [], {}
    for family in mixtures():
        try:
            model = build(family).eval()
        except CannotBuildError:
            continue
        if hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("eager")
        try:
            if check(model.double()):
                replayed.append(family.model_type)
        except Exception as error:
            failed[family.model_type] = f"{type(error).__name__}: {error}"
    assert failed.keys() == REFUSED, failed
    assert len(replayed) > 40
