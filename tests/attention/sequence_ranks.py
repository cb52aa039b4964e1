"""Run by test_sequence_parallel.py on each rank: what a sequence group computes against one process, case by case.

Every rank runs the whole row alone too, so each case gives a difference and needs no file of expected numbers.
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

from helpers.forests import random_forest
from helpers.tiny_models import VOCAB, random_groups, tiny_model

from pl_grouprl.attention import shared_prefix
from pl_grouprl.attention.backends.saved import save_attention
from pl_grouprl.attention.sequence_parallel import sequence_mesh
from pl_grouprl.models.score import PrefixPass, hidden_states, record_router_logits, router_balancing_loss, score
from pl_grouprl.packing import ScoringBatch, SharedPrefixLayout, pack
from pl_grouprl.packing.batch import pack_slice

SHAPES = {
    "one_group": [(7, [4, 6, 3])],
    "groups": [(9, [5, 2, 8]), (4, [6]), (6, [1, 3, 3, 7])],
    "odd": [(5, [4, 6]), (3, [2, 1])],
    "empty": [(5, [0, 4, 0]), (3, [0])],
    "short": [(1, [1, 1])],
}
FAMILIES = {
    "gemma2": {"sliding_window": 8, "query_pre_attn_scalar": 8},
    "gpt_oss": {"sliding_window": 5, "num_local_experts": 4, "num_experts_per_tok": 2},
    "mixtral": {"num_local_experts": 4},
    "deepseek_v3": {
        **{"kv_lora_rank": 8, "q_lora_rank": 8, "num_key_value_heads": 4, "head_dim": 8, "first_k_dense_replace": 2},
        **{"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12},
    },
}


def gradients(model) -> list[torch.Tensor]:
    """Of every parameter, zero where it has none; they are taken away."""
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    return grads


def summed(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Over all ranks, as a strategy's mean does with a loss that is multiplied by their number."""
    for tensor in tensors:
        dist.all_reduce(tensor)
    return tensors


def difference(left: list[torch.Tensor], right: list[torch.Tensor]) -> float:
    return max((a - b).abs().max().item() / max(b.abs().max().item(), 1e-3) for a, b in zip(left, right, strict=True))


def of_a_batch(case: dict, model, group) -> tuple[float, float]:
    """Differences of log-probs and gradients, of groups; each sequence group has its own, all are one process's row."""
    groups = [
        random_groups(3 + number, SHAPES[case["shape"]]) for number in range(dist.get_world_size() // group.size())
    ]
    own = pack(groups[dist.get_rank() // group.size()])
    everything = pack([one for each in groups for one in each])
    cut, whole = replace(own, sequence_group=group), everything
    found = [of_scores(case, model, batch) for batch in (cut, whole)]
    assert tokens_run(model, cut) == -(-own.layout.num_tokens // group.size())
    start = len(own.targets_N) * (dist.get_rank() // group.size())
    expected = found[1][0][start : start + len(own.targets_N)]
    return difference([found[0][0]], [expected]), difference(summed(found[0][1]), found[1][1])


def of_scores(case: dict, model, batch: ScoringBatch) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Log-probs and gradients of a loss; a batch of several ranks counts it once, not on each of them."""
    copies = 1 if batch.sequence_group is None else batch.sequence_group.size()
    routers = record_router_logits(model) if case.get("routers") else nullcontext()
    with shared_prefix(model, case.get("backend", "auto")), routers as recorded:
        scores = score(model, batch, entropy=True, entropy_grad=True)
        loss = (batch.targets_N % 7 * scores.logprobs_N + 0.3 * scores.entropy_N).sum()
        if recorded is not None:
            loss = loss + 50 * router_balancing_loss(model, batch, recorded)
        (loss / copies).backward()
    return scores.logprobs_N.detach(), gradients(model)


def of_slices(case: dict, model, group) -> tuple[float, float]:
    """Differences between a group in two slices, run by several ranks, and the whole group on one rank."""
    whole = random_groups(3, SHAPES["one_group"])[0]
    prefix, logprobs = PrefixPass(whole, "cpu", group), []
    with shared_prefix(model):
        for rollouts in ([0, 2], [1]):
            batch = pack_slice(whole, rollouts, prefix)
            logprobs.append(score(model, batch).logprobs_N)
            ((batch.targets_N % 7 * logprobs[-1]).sum() / group.size()).backward()
        prefix.loss(model.parameters()).backward()
    cut = summed(gradients(model))
    with shared_prefix(model):
        batch = pack([replace(whole, rollouts=[whole.rollouts[index] for index in (0, 2, 1)])])
        expected = score(model, batch).logprobs_N
        (batch.targets_N % 7 * expected).sum().backward()
    return difference([torch.cat(logprobs).detach()], [expected.detach()]), difference(cut, gradients(model))


def tokens_run(model, batch: ScoringBatch) -> int:
    """Tokens that this rank's decoder gets."""
    found = []
    handle = model.get_input_embeddings().register_forward_hook(lambda module, args, out: found.append(out.shape[1]))
    with shared_prefix(model), torch.no_grad():
        hidden_states(model, batch)
    handle.remove()
    return found[-1]


def of_a_forest(case: dict, model, group) -> tuple[float, float]:
    """Differences of hidden states and gradients, of a forest of any depth."""
    layout = SharedPrefixLayout(*random_forest(case["forest"], depth=2))
    tokens = torch.randint(0, VOCAB, (1, layout.num_tokens), generator=torch.Generator().manual_seed(1))
    found = []
    for peers in ({"sequence_group": group}, {}):
        with shared_prefix(model, case.get("backend", "auto")):
            states = model.get_decoder()(tokens, prefix_layout=layout, use_cache=False, **peers).last_hidden_state
            loss = (states * torch.linspace(-1, 2, states.numel(), dtype=states.dtype).view_as(states)).sum()
            (loss / group.size() if peers else loss).backward()
        grads = gradients(model)
        found.append((states.detach(), summed(grads) if peers else grads))
    return difference([found[0][0]], [found[1][0]]), difference(found[0][1], found[1][1])


def refused(case: dict, model, group) -> str:
    """What a call that cannot be cut says."""
    batch = pack(random_groups(3, SHAPES["groups"]), case.get("sharing", "shared"))
    if case.get("compile"):
        model.model.layers[0].compile()
    if case.get("other_rows"):
        batch = pack(random_groups(dist.get_rank(), SHAPES["groups"]))
    try:
        with shared_prefix(model):
            hidden_states(model, replace(batch, sequence_group=group))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def main(size: int, cases: list[dict], result: Path) -> None:
    dist.init_process_group("gloo")
    group = sequence_mesh(size, "cpu").get_group("sequence")
    found = {}
    for case in cases:
        family = case["family"]
        options = {**FAMILIES.get(family, {}), **case.get("options", {})}
        model = tiny_model(family, dtype=torch.float64, **options)
        if hasattr(model.config, "num_experts_per_tok"):
            model.set_experts_implementation("eager")  # the other one knows no float64
        if case.get("checkpointing"):
            saving = {"context_fn": save_attention} if case["checkpointing"] == "attention" else {}
            model.train().gradient_checkpointing_enable({"use_reentrant": False} | saving)
        if case.get("refused"):
            found[case["name"]] = refused(case, model, group)
        else:
            run = of_a_forest if "forest" in case else of_slices if "slices" in case else of_a_batch
            found[case["name"]] = run(case, model, group)
    if dist.get_rank() == 0:
        result.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]), Path(sys.argv[3]))
