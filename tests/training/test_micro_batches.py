"""Micro-batches: trees cut under a token budget, rows laid out once, idle rollouts left out; all change no gradient."""

from __future__ import annotations

import functools
import itertools
import random
import sys

import pytest
import torch
from helpers.branched import branched_groups
from helpers.episode_rows import cut_into_rows, random_groups
from helpers.peak_memory import Peak
from helpers.rank_cases import CASES as CASES_OF_STEPS
from helpers.rank_cases import gradients_of_a_step
from helpers.sweeps import sweep, sweep_pairs
from helpers.tiny_models import gradients, tiny_model, worst_gradient_error
from helpers.tiny_runs import compare_gradients, largest_difference
from lightning.pytorch import Callback

from pl_grouprl.algorithms import GRPO, PPO
from pl_grouprl.attention import shared_prefix
from pl_grouprl.functional.importance import ImportanceSampling
from pl_grouprl.functional.losses import LOSS_AGG_MODES
from pl_grouprl.functional.policy_loss import POLICY_LOSSES
from pl_grouprl.models import PolicyCopyCritic
from pl_grouprl.models.critic import Critic, ValueHead
from pl_grouprl.models.score import PrefixPass, score
from pl_grouprl.packing import build_trie, pack
from pl_grouprl.packing.plan import split_group
from pl_grouprl.training.buffer import RolloutBuffer
from pl_grouprl.training.micro_batches import (
    MicroBatchSchedule,
    PackedRowCache,
    RowOptions,
    Shape,
    largest,
    passes_of,
    plan_micro_batches,
)
from pl_grouprl.training.objective import KLPenalty, PolicyObjective
from pl_grouprl.types import Rollout, RolloutGroup, SamplingConfig

CPU = torch.device("cpu")
layers_once = pytest.mark.usefixtures("layers_checked_once")


# Trees larger than the budget: whichever way they are cut, losses and gradients are those of repeated rows.


QWEN3_NEXT = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 4},
    **{"layer_types": ["linear_attention", "full_attention"], "num_experts": 2, "num_experts_per_tok": 1},
    **{"moe_intermediate_size": 8, "shared_expert_intermediate_size": 8},
}


def buffer_of(groups):
    buffer = RolloutBuffer(groups)
    lengths = [len(rollout.token_ids) for group in groups for rollout in group.rollouts]
    weights = torch.randn(sum(lengths), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    buffer.put("weights", weights)
    return buffer


def loss_of(model, scoring, weights_N):
    """Weighs each token of each rollout on its own; half of it couples the tokens of a rollout, as GSPO does."""
    logprobs_N = score(model, scoring).logprobs_N.double()
    sums_B = torch.zeros(scoring.num_rollouts, dtype=torch.float64).index_add(
        0, scoring.rollout_index_N, logprobs_N * weights_N
    )
    return sums_B.sum() + sums_B.square().sum(), logprobs_N.detach()


def in_passes(model, buffer, options):
    """The log-probabilities of all tokens in the buffer's order, and the gradients."""
    model.zero_grad()
    schedule = MicroBatchSchedule(buffer, range(len(buffer.groups)), options)
    found, numbers, passes = [], [], 0
    with shared_prefix(model):
        for micro_batch in schedule:
            passes += 1
            if isinstance(micro_batch, PrefixPass):
                micro_batch.loss(model.parameters()).backward()
                continue
            loss, logprobs_N = loss_of(model, micro_batch.scoring, micro_batch.tokens["weights"])
            loss.backward()
            if micro_batch.rollout_numbers:
                found.append(logprobs_N)
                numbers += micro_batch.rollout_numbers
    assert passes == schedule.number
    return buffer.in_order(found, numbers, per_token=True), gradients(model)


def repeated(model, buffer):
    model.zero_grad()
    batch = pack(buffer.groups, "repeated")
    loss, logprobs_N = loss_of(model, batch, torch.cat(buffer.tokens["weights"]))
    loss.backward()
    return logprobs_N, gradients(model)


def assert_same(model, groups, budget, tolerance):
    buffer = buffer_of(groups)
    expected, others = repeated(model, buffer)
    actual, found = in_passes(model, buffer, RowOptions("shared", budget, CPU, min_saved_tokens=1))
    torch.testing.assert_close(actual.double(), expected.double(), atol=tolerance, rtol=tolerance)
    assert worst_gradient_error(found, others) < tolerance


@layers_once
@pytest.mark.parametrize("budget", [8, 13, 30])
def test_losses_and_gradients(budget):
    for seed in range(12):
        assert_same(tiny_model("gpt2", dtype=torch.float64), branched_groups(seed, 3, most=14), budget, 1e-9)


@layers_once
@pytest.mark.parametrize("family", ["qwen3", "qwen3_next", "gemma3_text"])
def test_other_layers(family):
    model = tiny_model(family, dtype=torch.float64, **(QWEN3_NEXT if family == "qwen3_next" else {}))
    model.set_experts_implementation("eager")
    for seed in range(4):
        assert_same(model, branched_groups(seed, 2, most=14), 8, 1e-5)


def test_the_trees_are_deep_enough_to_tell():
    depths = [depth_of(plan(seed)) for seed in range(12)]
    assert max(depths) >= 3
    assert depths.count(1) < 6


def plan(seed):
    groups = branched_groups(seed, 3, most=14)
    return plan_micro_batches(groups, range(len(groups)), RowOptions("shared", 8, CPU, min_saved_tokens=1))


def depth_of(plan):
    return max((1 + depth for split in plan.splits for depth, _ in split.shape), default=0)


def comb(depth):
    """A prompt and rollouts that leave the longest of them one after another, every two tokens."""
    spine = torch.randint(1, 40, (2 * depth,), generator=torch.Generator().manual_seed(0)).tolist()
    ends = [Rollout([*spine[: 2 * level], 50]) for level in range(1, depth)]
    return RolloutGroup([3, 4], [*ends, Rollout(spine)])


@layers_once
def test_more_branches_on_a_path_than_frames_on_the_stack():
    model, group = tiny_model("gpt2", dtype=torch.float64), comb(30)
    assert depth_of(plan_micro_batches([group], [0], RowOptions("shared", 4, CPU, min_saved_tokens=1))) > 25
    before = sys.getrecursionlimit()
    frame, frames = sys._getframe(), 0
    while frame is not None:
        frame, frames = frame.f_back, frames + 1
    sys.setrecursionlimit(frames + 80)  # the model takes fewer than 60
    try:
        assert_same(model, [group], 4, 1e-9)
    finally:
        sys.setrecursionlimit(before)


def test_thousands_of_branches_are_planned_and_merged():
    depth, group = 1100, comb(1100)
    split = split_group(0, 2, build_trie([rollout.token_ids for rollout in group.rollouts], 1), 4)
    found = [rollout for part in (split, *split.branches) for indices in part.slices for rollout in indices]
    assert sorted(found) == list(range(depth))
    assert [branch.depth for branch in split.branches] == list(range(1, depth))
    shape = Shape(0, (split.shape,))
    assert largest([shape, Shape(2, (((0, 4), (1, 1)),))]).number == shape.number + 6
    passes = passes_of(group, split, shape.splits[0], lambda chosen: ([group], {}, tuple(chosen)), ([group], {}, ()))
    assert [token for one in passes for token in one.token_ids if one.depth] == group.rollouts[-1].token_ids[:-2]


def test_ranks_agree_on_the_largest_shape():
    one = Shape(2, (((0, 3),), ((0, 1), (1, 2), (1, 1))))
    other = Shape(0, (((0, 1), (1, 4)),))
    both = largest([one, other])
    assert both == Shape(2, (((0, 3), (1, 4)), ((0, 1), (1, 2), (1, 1))))
    # Rows and slices: 2 + (3 + 4) + (1 + 2 + 1), and each prompt and branch by itself: 2 + 1 + 2.
    assert both.number == 2 + 7 + 4 + 5


@layers_once
@pytest.mark.parametrize("seed", range(3))
def test_a_rank_fills_up_with_dummies_that_change_nothing(seed, monkeypatch):
    """A dummy has one token of weight 0."""
    trees = ((0, 5), (1, 2), (2, 3), (1, 2)), ((0, 2),), ((0, 3),), ((0, 1), (1, 1))
    others = tuple(Shape(3, trees))
    monkeypatch.setattr("pl_grouprl.training.micro_batches.gather_plain", lambda own, *_: [own, others])
    assert_same(tiny_model("gpt2", dtype=torch.float64), branched_groups(seed, 3, most=14), 8, 1e-9)


# Every policy loss and aggregation, and the value loss.


CASES = [(name, mode) for mode in LOSS_AGG_MODES for name in POLICY_LOSSES]


def trained_buffer(groups, policy, generator):
    """Rollouts with advantages per token, and old, reference and sampler's log-probabilities near the policy's."""
    buffer = RolloutBuffer(groups)
    (row,) = MicroBatchSchedule(buffer, range(len(groups)), RowOptions("repeated", None, CPU))
    with torch.no_grad():
        logprobs_N = score(policy, row.scoring).logprobs_N
    for name in ("old_logprobs", "ref_logprobs", "rollout_logprobs"):
        noise_N = 0.3 * torch.randn(len(logprobs_N), generator=generator, dtype=torch.float64)
        buffer.put(name, buffer.in_order([logprobs_N + noise_N], row.rollout_numbers, per_token=True))
    for name in ("advantages", "returns"):
        buffer.put(name, torch.randn(len(logprobs_N), generator=generator, dtype=torch.float64))
    return buffer


def step(policy, critic, buffer, objective, options):
    """The sums of the policy's and the critic's loss over all micro-batches, and the gradients."""
    both = torch.nn.ModuleDict({"policy": policy, "critic": critic})
    both.zero_grad()
    total = 0.0
    with shared_prefix(policy), shared_prefix(critic.trunk):
        for batch in MicroBatchSchedule(buffer, range(len(buffer.groups)), options):
            if isinstance(batch, PrefixPass):
                batch.loss(both.parameters()).backward()
                continue
            sums = objective.loss(batch, score(policy, batch.scoring, **objective.score_options))
            loss, denominator = sums.losses["policy"]
            values_N = critic.values(batch.scoring)
            final_B = critic.values(batch.scoring, batch.scoring.final_index_B)
            loss = loss + ((values_N - batch.tokens["returns"]).square() * batch.mask_N).sum()
            loss = loss + (final_B.square().sum() if batch.rollout_numbers else 0 * final_B.sum())
            loss.backward()
            total = total + torch.stack([loss.detach(), denominator.to(loss.dtype)])
    return total, gradients(both)


@pytest.fixture(scope="module")
def models():
    head = ValueHead.near_zero(32, std=0.5).double()
    trunk = tiny_model("gpt2", dtype=torch.float64, seed=1).transformer
    return tiny_model("gpt2", dtype=torch.float64), Critic(trunk, head)


def check_losses(models, seed, name, mode):
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    policy, critic = models
    buffer = trained_buffer(branched_groups(seed, 3, most=10, common=3), policy, generator)
    objective = PolicyObjective(
        name, {}, loss_agg_mode=mode, kl=KLPenalty(0.1), max_new_tokens=16, entropy_coef=0.05,
        importance_sampling=ImportanceSampling("token_truncate", high=1.2),
    )  # fmt: skip
    loss, expected = step(policy, critic, buffer, objective, RowOptions("repeated", None, CPU))
    cuts = [None] if POLICY_LOSSES[name].compares_tokens else [None, rng.choice([13, 16, 25])]
    for budget in cuts:
        options = RowOptions("shared", budget, CPU, share_across_groups=bool(seed % 2), min_saved_tokens=1 + seed % 3)
        found, gradients_ = step(policy, critic, buffer, objective, options)
        torch.testing.assert_close(found, loss, atol=0, rtol=1e-9)
        assert worst_gradient_error(gradients_, expected) < 1e-9


@layers_once
@pytest.mark.parametrize("seed", sweep(range(200), quick=range(len(CASES))))
def test_losses_on_trees(models, seed):
    check_losses(models, seed, *CASES[seed % len(CASES)])


# Memory of a split tree: that of its longest path and one slice, however many leaves it has.


SEGMENT = 48


def random_tokens(count):
    return torch.randint(1, 60, (count,), generator=torch.Generator().manual_seed(count)).tolist()


def tree(depth):
    """A prompt, and below it a binary tree of segments, which begin with different tokens."""
    paths = [[60, *random_tokens(SEGMENT - 1)]]
    for _ in range(depth - 1):
        paths = [[*path, first, *random_tokens(SEGMENT - 1)] for path in paths for first in (1, 2)]
    return RolloutGroup(random_tokens(SEGMENT), [Rollout(path) for path in paths])


def line(depth, segment=SEGMENT):
    """A prompt and one rollout, as long as a path of that tree."""
    return RolloutGroup(random_tokens(segment), [Rollout(random_tokens(depth * segment))])


def fishbone(depth, segment):
    """A prompt and a rollout, which others leave at the end of each segment."""
    spine = random_tokens(depth * segment)
    ends = [Rollout([*spine[: level * segment], 60, *random_tokens(segment - 1)]) for level in range(1, depth)]
    return RolloutGroup(random_tokens(segment), [*ends, Rollout(spine)])


def peak(model, group, budget):
    options = RowOptions("shared", budget, torch.device("cpu"))
    model.zero_grad()
    with shared_prefix(model), Peak() as found:
        for batch in MicroBatchSchedule(RolloutBuffer([group]), [0], options):
            loss = batch.loss(model.parameters()) if isinstance(batch, PrefixPass) else None
            (score(model, batch.scoring).logprobs_N.sum() if loss is None else loss).backward()
            del batch, loss
    return found.peak


def test_memory_of_a_split_tree_is_that_of_a_path_and_a_level():
    sizes = {"hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 8, "num_key_value_heads": 2}
    model = tiny_model("llama", num_hidden_layers=4, **sizes).train()
    path = {depth: peak(model, line(depth), None) for depth in (4, 5)}
    split, whole = (peak(model, tree(5), budget) for budget in (SEGMENT, None))
    assert split < 1.1 * (path[5] + path[5] - path[4])
    assert split < whole / 2.5
    # Of a path of 40 branches, nothing is kept for each pair of them.
    path = {depth: peak(model, line(depth, 16), None) for depth in (39, 40)}
    assert peak(model, fishbone(40, 16), 16) < 1.1 * (path[40] + path[40] - path[39])


# A laid-out row serves scoring and update, and no rollouts but those that it was made of.


OPTIONS = RowOptions("shared", None, torch.device("cpu"))


EDITS = {
    "cut": lambda groups: groups[0].rollouts[0].token_ids.__setitem__(-1, 9),
    "swap": lambda groups: groups[0].rollouts.reverse(),
    "mask": lambda groups: groups[1].rollouts[0].loss_mask.__setitem__(0, 0),
    "prompt": lambda groups: groups[0].prompt_ids.__setitem__(0, 8),
}


@pytest.mark.parametrize("edit", EDITS)
def test_a_row_is_laid_out_again_once_its_rollouts_were_edited(edit):
    groups = [RolloutGroup([1, 2], [Rollout([3, 4]), Rollout([5])]), RolloutGroup([6], [Rollout([7], loss_mask=[1])])]
    kept = PackedRowCache()
    first = kept.get(groups, OPTIONS, lambda: pack(groups))
    assert kept.get(groups, OPTIONS, lambda: pack(groups)) is first
    EDITS[edit](groups)
    found, expected = kept.get(groups, OPTIONS, lambda: pack(groups)), pack(groups)
    for name in ("targets_N", "loss_mask_N", "predict_index_N"):
        assert torch.equal(getattr(found, name), getattr(expected, name))
    assert torch.equal(found.model_inputs["input_ids"], expected.model_inputs["input_ids"])
    kept.clear()
    assert kept.get(groups, OPTIONS, lambda: pack(groups)) is not found


# Episodes of several rows stay whole.


def parts_of(plan):
    """For each micro-batch, its rollouts as (group, rollout)."""
    rows = [[(group, rollout) for group, rollouts in row for rollout in rollouts] for row in plan.rows]

    def slices(split, group):
        found = [[(group, rollout) for rollout in own] for own in split.slices]
        return found + [own for branch in split.branches for own in slices(branch, group)]

    return rows + [own for split in plan.splits for own in slices(split, split.group)]


def pair(seed, **options):
    """The same episodes, as one rollout each and as rows."""
    groups = random_groups(seed, **options)
    rows = cut_into_rows(groups, seed)
    assert sum(len(group.rollouts) for group in rows) > sum(len(group.rollouts) for group in groups)
    return groups, rows


@pytest.mark.parametrize("sharing", ["shared", "repeated"])
@pytest.mark.parametrize("budget", [20, 40])
def test_micro_batches_keep_episodes_whole(sharing, budget):
    num_cut = 0
    for seed in range(30):
        _, groups = pair(seed, num_groups=4)
        names = {}
        for number, group in enumerate(groups):
            rollouts = [(number, place) for place in range(len(group.rollouts))]
            for place, episode in enumerate(group.episodes):
                names |= {rollouts.pop(0): (number, place) for _ in episode.rows}
        try:
            plan = plan_micro_batches(groups, range(4), RowOptions(sharing, budget, CPU, whole_episodes=True))
        except ValueError as error:
            assert (sharing, "max_tokens_per_micro_batch allows" in str(error)) == ("repeated", True)  # noqa: PT017
            continue
        parts = parts_of(plan)
        assert sorted(rollout for part in parts for rollout in part) == sorted(names)
        owners = [{names[rollout] for rollout in part} for part in parts]
        assert sum(map(len, owners)) == len(set(names.values())), seed
        num_cut += len(parts) > 1
        whole = plan_micro_batches(groups, range(4), RowOptions(sharing, None, CPU, whole_episodes=True))
        assert len(parts_of(whole)) == 1
    assert num_cut >= 10


@pytest.mark.parametrize("sharing", ["shared", "repeated"])
def test_an_episode_larger_than_the_budget_is_refused_where_the_loss_needs_it_whole(sharing):
    rows = [Rollout(list(range(first, first + 8)), episode="long") for first in (0, 8, 16)]
    group = RolloutGroup([1], [*rows, Rollout([30])], 5)
    with pytest.raises(ValueError, match=r"allows 16 tokens, but the 3 rows of episode 'long' of group 5 have 2[47], .*"
                       "use loss_agg_mode='token-mean'"):  # fmt: skip
        plan_micro_batches([group], [0], RowOptions(sharing, 16, CPU, whole_episodes=True))
    plan = plan_micro_batches([group], [0], RowOptions(sharing, 16, CPU))
    assert sorted(rollout for part in parts_of(plan) for rollout in part) == [(0, place) for place in range(4)]


# Rollouts that no loss trains are not encoded in updates, which changes neither loss nor gradients.


VINE = {
    "advantage_estimator": "vine",
    "episodes": {"branching": {"points": "every_n", "width": 3, "depth": 2, "every_n": 4}},
    "num_generations": 2,
}


TRUNCATED = {"mask_truncated_completions": True, "beta": 0.1, "kl": {"type": "k3"}, "entropy_coef": 0.05}


class Custom(GRPO):
    """A loss that is not ours may train any rollout."""

    def compute_loss(self, batch):
        return super().compute_loss(batch)


class CountTokens(Callback):
    """Counts the tokens that the policy runs on with gradient."""

    def on_train_start(self, trainer, module):
        self.tokens = 0
        module.policy.get_input_embeddings().register_forward_hook(self._count)

    def _count(self, embedding, args, out):
        self.tokens += args[0].numel() if torch.is_grad_enabled() else 0


@pytest.fixture
def train(fit, make_module):
    def train(cls=GRPO, *, divides=True, **options):
        """One step: its gradients, its metrics, and the tokens that the policy ran on with gradient."""
        module, counter = make_module(cls, sampling=SamplingConfig(max_new_tokens=24), **options), CountTokens()
        if not divides:
            update = module.updater.update
            module.updater.update = lambda *args, **kwargs: update(*args, **kwargs | {"skips_idle": False})
        run = fit(module=module, data={"batch_size": 2}, trainer={"precision": "64-true"}, callbacks=[counter])
        return run.gradients[0], run.steps[0], counter.tokens

    return train


PPO_TRUNCATED = {"cls": PPO, "critic": PolicyCopyCritic(head_std=0.3), **TRUNCATED}


@pytest.mark.parametrize(
    "options",
    [
        {**VINE, "loss_agg_mode": "token-mean"},
        {**VINE, "loss_agg_mode": "token-mean", "max_tokens_per_micro_batch": 30},
        {**VINE, "loss_agg_mode": "seq-mean-token-mean"},
        TRUNCATED,
        PPO_TRUNCATED,
    ],
    ids=["vine", "vine, cut", "vine, sequences", "truncated", "truncated, ppo"],
)
def test_idle_rollouts_are_not_encoded(train, options):
    found, metrics, tokens = train(**options)
    expected, whole, all_tokens = train(divides=False, **options)
    scale = max(gradient.abs().max() for gradient in expected.values())
    assert scale > 1e-5
    assert largest_difference(found, expected) < 1e-7 * scale  # norms are in float32
    assert tokens < (0.6 if "episodes" in options else 1) * all_tokens
    assert metrics.keys() == whole.keys()
    assert metrics["loss"] == pytest.approx(whole["loss"], rel=1e-5)
    if "episodes" in options:  # others are measured where something is encoded
        return
    kept = {name for name in metrics if not name.startswith(("time/", "prefix/", "memory/", "throughput/", "perf/"))}
    assert {name: metrics[name] for name in kept} == pytest.approx({name: whole[name] for name in kept}, rel=1e-5)


@pytest.mark.parametrize(
    "options", [{"beta": 0.1, "entropy_coef": 0.01}, {"advantage_estimator": "tree"}, {"cls": Custom}], ids=str
)
def test_what_another_loss_trains_is_encoded(train, options):
    options = VINE | options
    assert train(**options)[2] == train(divides=False, **options)[2]


def test_a_batch_in_which_nothing_is_trained(train):
    gradients_, metrics, _ = train(rewards=lambda completions, **columns: [None] * len(completions))
    assert all(gradient is None for gradient in gradients_.values())
    assert metrics["loss"] == 0
    assert "prefix/token_ratio" not in metrics  # no rollout was run with prefixes shared or repeated


def test_a_loss_that_is_not_ours_finds_its_rollouts_by_number(fit):
    found = []

    class ByNumber(GRPO):
        def compute_loss(self, batch):
            rollouts = self.last_rollouts.rollouts
            own = [rollout for group in batch.groups for rollout in group.rollouts]
            found.extend(rollouts[n] is rollout for n, rollout in zip(batch.rollout_numbers, own, strict=True))
            return super().compute_loss(batch)

    fit(ByNumber, steps=2, num_mini_batches=2, sampling=SamplingConfig(max_new_tokens=4))
    assert found == [True] * 4 * 4


# Whole runs: every denominator is the step's. What ranks change is in tests/algorithms/test_ranks.py.


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The gradient of one mini-batch."""
    return functools.cache(lambda name: gradients_of_a_step(name, folder=tmp_path_factory.mktemp("whole")))


# Prompts have 20 tokens and groups up to 34 of rollouts: 70 takes a group or two at once, 24 splits the larger ones.
CUTS = {
    "budget 70": {"max_tokens_per_micro_batch": 70},
    "budget 24": {"max_tokens_per_micro_batch": 24},
    "repeated, budget 70": {"max_tokens_per_micro_batch": 70, "sharing": {"mode": "repeated"}},
    "mini-batches": {"cut": 4},
    "repeated, mini-batches": {"cut": 2, "sharing": {"mode": "repeated"}},
    "mini-batches, budget 70": {"cut": 2, "max_tokens_per_micro_batch": 70},
    "mini-batches, budget 24": {"cut": 2, "max_tokens_per_micro_batch": 24},
}
QUICK_CUTS = [
    *((name, "mini-batches") for name in CASES_OF_STEPS if name != "ppo shared"),
    *((name, "budget 24") for name in ("grpo token-mean", "dr_grpo", "gspo", "ppo", "group_ppo", "ppo shared")),
    ("ppo", "budget 70"), ("group_ppo", "repeated, budget 70"), ("gspo", "repeated, mini-batches"),
    ("ppo", "repeated, mini-batches"), ("grpo token-mean", "mini-batches, budget 24"),
    ("ppo", "mini-batches, budget 70"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "cut"),
    sweep_pairs(
        [pair for pair in itertools.product(CASES_OF_STEPS, CUTS) if pair[0] != "ppo shared" or "mini" not in pair[1]],
        QUICK_CUTS,
    ),
)
def test_a_cut_step_has_the_gradient_of_a_whole_one(whole, name, cut, tmp_path):
    found = gradients_of_a_step(name, folder=tmp_path, **CUTS[cut])
    compare_gradients(found, whole(name), 1e-5 if cut == "repeated, budget 70" else 1e-6)
