"""Losses of an update: gaps of the mask and rows of episodes change nothing, and the routers' loss is transformers'."""

from __future__ import annotations

import itertools
import math
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from helpers.episode_rows import cut_into_rows, random_groups
from helpers.episodes import make_episode, make_group
from helpers.rollouts import mini_batch
from helpers.tiny_runs import RaggedEngine
from helpers.versions import needs

from pl_grouprl.algorithms import PPO, OptimizerConfig
from pl_grouprl.attention import shared_prefix
from pl_grouprl.demo.tasks import digit_tokenizer
from pl_grouprl.functional.importance import IMPORTANCE_KINDS, ImportanceSampling
from pl_grouprl.functional.logprobs import TokenScores
from pl_grouprl.functional.losses import LOSS_AGG_MODES
from pl_grouprl.functional.policy_loss import POLICY_LOSSES
from pl_grouprl.models import SharedTrunkCritic, score
from pl_grouprl.models.score import record_router_logits, router_balancing_loss
from pl_grouprl.packing import pack
from pl_grouprl.training.buffer import RolloutBuffer
from pl_grouprl.training.evaluation import Evaluator, evaluation_metrics
from pl_grouprl.training.metrics import rollout_metrics, summarize
from pl_grouprl.training.micro_batches import MicroBatch, RowOptions, lay_out
from pl_grouprl.training.objective import KLOptions, KLPenalty, PolicyObjective
from pl_grouprl.training.rewarder import gather_rewards, rewards_per_token, subtract_kl_penalties
from pl_grouprl.training.run import PlainRun
from pl_grouprl.types import EpisodeRows, Rollout, RolloutGroup

CPU = torch.device("cpu")


def objective_of(name="ppo", **options):
    return PolicyObjective(
        name, {}, **{"loss_agg_mode": "token-mean", "kl": KLPenalty(0.1), "max_new_tokens": 9} | options
    )


# Gaps of the loss mask, such as the result of a tool: as if they were cut out.


NAMES = ("old_logprobs", "ref_logprobs", "rollout_logprobs", "advantages", "policy", "entropy")


def make_buffer(*, with_gaps):
    """An episode after an observation, one that ends with a result, and a plain rollout: 4, 3 and 2 sampled tokens."""
    rollouts = [
        make_episode(observation=2, reward=1.0),
        make_episode(loss_mask=[1, 1, 0, 0, 1, 0], reward=-0.5),
        Rollout([7, 8], logprobs=[-0.5, -0.25], reward=0.25),
    ]
    if not with_gaps:
        rollouts = [Rollout([1] * own.num_sampled_tokens, reward=own.reward) for own in rollouts]
    return RolloutBuffer([make_group(*rollouts)])


def fill(buffer, in_gaps):
    """Random quantities at sampled tokens, the same ones with and without gaps, and something else in the gaps."""
    generator = torch.Generator().manual_seed(3)
    mask_N = buffer.joined("loss_mask")
    for name in NAMES:
        values_N = torch.full((len(mask_N),), in_gaps)
        values_N[mask_N] = -torch.rand(int(mask_N.sum()), generator=generator)
        buffer.put(name, values_N)
    return buffer


def loss_of(buffer, **options):
    """The sums of the loss, and the gradient at every token."""
    tokens = {name: buffer.joined(name) for name in buffer.tokens}
    policy_N = tokens.pop("policy").requires_grad_()
    batch = MicroBatch(pack(buffer.groups, "shared"), tokens, buffer.groups)
    objective = objective_of(kl=KLPenalty(0.1), max_new_tokens=5, entropy_coef=0.01, **options)
    sums = objective.loss(batch, TokenScores(policy_N, entropy_N=tokens["entropy"]))
    (gradient_N,) = torch.autograd.grad(sums.losses["policy"][0], policy_N)
    return sums, gradient_N


@pytest.mark.parametrize(("mode", "kind"), itertools.product(LOSS_AGG_MODES, IMPORTANCE_KINDS))
def test_gaps_do_not_change_the_loss(mode, kind):
    importance = ImportanceSampling(kind, *((None, 3.0) if kind == "none" else (0.5, 1.5)))
    options = {"loss_agg_mode": mode, "importance_sampling": importance}
    expected, expected_gradient_N = loss_of(fill(make_buffer(with_gaps=False), 0.0), **options)
    for in_gaps in (0.0, -80.0):
        buffer = fill(make_buffer(with_gaps=True), in_gaps)
        actual, gradient_N = loss_of(buffer, **options)
        mask_N = buffer.joined("loss_mask")
        torch.testing.assert_close(tuple(actual), tuple(expected))
        torch.testing.assert_close(gradient_N[mask_N], expected_gradient_N)
        assert not gradient_N[~mask_N].any()
        assert float(actual.losses["policy"][1]) == (9 if mode == "token-mean" else 3)


def test_sampler_and_policy_are_compared_at_sampled_tokens():
    """Differences of 0.5 and 1 at two of nine tokens; zeros of the sampler in the gaps count for nothing."""
    buffer = fill(make_buffer(with_gaps=True), -80.0)
    sampled_N = buffer.joined("old_logprobs").clone()
    sampled_N[buffer.joined("loss_mask").nonzero().flatten()[:2]] += torch.tensor([0.5, -1.0])
    sampled_N[~buffer.joined("loss_mask")] = 0.0
    buffer.put("rollout_logprobs", sampled_N)
    sums, _ = loss_of(buffer, loss_agg_mode="token-mean")
    total, count = sums.metrics["sampling/sampling_logp_difference/mean"]
    assert (float(total), int(count)) == (pytest.approx(1.5), 9)
    assert float(sums.extremes["sampling/sampling_logp_difference/max"]) == pytest.approx(1.0)
    assert float(sums.extremes["sampling/importance_sampling_ratio/max"]) == pytest.approx(math.e)


def test_the_penalty_in_the_rewards():
    buffers = [fill(make_buffer(with_gaps=gaps), -80.0) for gaps in (True, False)]
    penalties = [
        KLPenalty(0.1, KLOptions("k1", "reward")).of_rewards(buffer, torch.device("cpu")) for buffer in buffers
    ]
    mask_N = buffers[0].joined("loss_mask")
    torch.testing.assert_close(penalties[0][mask_N], penalties[1])
    assert not penalties[0][~mask_N].any()
    assert buffers[0].metrics == pytest.approx(buffers[1].metrics)
    torch.testing.assert_close(rewards_per_token(buffers[0])[mask_N], rewards_per_token(buffers[1]))


def test_a_penalty_by_hand():
    rollouts = [Rollout([5, 6], reward=1.0), Rollout([7], reward=0.0), Rollout([8, 9, 10], reward=0.5), Rollout([4, 4])]
    buffer = RolloutBuffer([RolloutGroup([3, 4], rollouts)])
    buffer.put("old_logprobs", torch.zeros(8))
    buffer.put("ref_logprobs", torch.full((8,), -0.5))
    penalty_N = KLPenalty(0.1, KLOptions("k1", "reward")).of_rewards(buffer, CPU)
    assert torch.allclose(penalty_N, 0.05 * buffer.joined("loss_mask"))  # the last one has no reward
    assert buffer.metrics["kl"] == pytest.approx(0.5)


# Rows of an episode count as one rollout.


def pair(seed, **options):
    """The same episodes, as one rollout each and as rows."""
    groups = random_groups(seed, **options)
    rows = cut_into_rows(groups, seed)
    assert sum(len(group.rollouts) for group in rows) > sum(len(group.rollouts) for group in groups)
    return groups, rows


def test_a_group_knows_its_episodes():
    group = RolloutGroup([1], [Rollout([2], episode=7), Rollout([3]), Rollout([4]), Rollout([5, 6], episode="a"),
                               Rollout([7], episode="a")])  # fmt: skip
    assert [[row.token_ids for row in episode.rows] for episode in group.episodes] == [
        [[2]], [[3]], [[4]], [[5, 6], [7]],
    ]  # fmt: skip
    assert group.episodes[-1].num_tokens == 3
    with pytest.raises(ValueError, match=r"Rollout.episode is \[0, None, 0\].*pass the rows of an episode one after"):
        RolloutGroup([1], [Rollout([2], episode=0), Rollout([3]), Rollout([4], episode=0)])


def test_rows_with_different_rewards_are_refused():
    rows = EpisodeRows((Rollout([1], reward=1.0, episode=3), Rollout([2], reward=0.5, episode=3)))
    with pytest.raises(ValueError, match=r"reward is \[1.0, 0.5\] in the rows of episode 3"):
        _ = rows.reward
    nothing = EpisodeRows((Rollout([1], reward=float("nan")), Rollout([2], reward=None)))
    assert nothing.reward is None


def test_rewards_of_tokens_belong_to_the_episode():
    first = Rollout([1, 2, 3], reward=5.0, token_rewards=[None, 1.0, None], loss_mask=[1, 1, 0], episode=0)
    second = Rollout([4, 5], reward=5.0, token_rewards=[0.5, None], loss_mask=[0, 1], episode=0)
    group = RolloutGroup([9], [first, second])
    (episode,) = group.episodes
    assert (episode.step_rewards, episode.outcome_reward) == ({1: 1.0, 3: 0.5}, 3.5)
    # The reward of the masked token goes to the trained one before it, in the first row; the outcome to the last.
    assert rewards_per_token(RolloutBuffer([group])).tolist() == [0, 1.5, 0, 0, 3.5]


@pytest.mark.parametrize("seed", range(4))
def test_rewards_and_masks_are_those_of_one_sequence(seed):
    run = PlainRun(torch.nn.Linear(1, 1))
    groups, rows = pair(seed, token_rewards=True)
    whole, cut = gather_rewards(groups, run), gather_rewards(rows, run)
    for name in ("outcomes", "step_rewards_N"):
        torch.testing.assert_close(getattr(cut, name), getattr(whole, name), equal_nan=True, rtol=0, atol=1e-6)
    for name in ("group_ids_E", "lengths_E", "sampled_E"):
        assert torch.equal(getattr(cut, name), getattr(whole, name))
    assert len(cut.of_own_rollouts(cut.outcomes)) == sum(len(group.rollouts) for group in rows)
    buffers = [RolloutBuffer(own, mask_truncated=True) for own in (groups, rows)]
    assert torch.equal(buffers[0].joined("loss_mask"), buffers[1].joined("loss_mask"))
    assert torch.equal(buffers[0].trained_episodes(), buffers[1].trained_episodes())
    torch.testing.assert_close(rewards_per_token(buffers[1]), rewards_per_token(buffers[0]))
    penalty_N = torch.rand(len(buffers[0].joined("loss_mask")))
    for buffer in buffers:
        buffer.put("kl_penalty", penalty_N)
    less = [[e.reward for group in subtract_kl_penalties(buffer) for e in group.episodes] for buffer in buffers]
    assert less[1] == pytest.approx(less[0])


def fake_scores(num_tokens, seed):
    generator = torch.Generator().manual_seed(seed)

    def draw():
        return 0.4 * torch.randn(num_tokens, generator=generator, dtype=torch.float64) - 2

    tokens = {name: draw() for name in ("old_logprobs", "rollout_logprobs", "ref_logprobs")}
    tokens["advantages"] = torch.randn(num_tokens, generator=generator, dtype=torch.float64)
    return TokenScores(draw().requires_grad_(), draw().requires_grad_()), tokens


def losses(groups, objective, seed):
    """The policy's loss of one micro-batch with its denominator, the metrics, the extremes, and the gradient."""
    mask_N = RolloutBuffer(groups).joined("loss_mask")
    scores, tokens = fake_scores(len(mask_N), seed)
    options = RowOptions("shared", None, CPU)
    batch = MicroBatch(lay_out(groups, options), tokens | {"loss_mask": mask_N}, groups, options=options)
    sums = objective.loss(batch, scores)
    (gradient_N,) = torch.autograd.grad(sums.losses["policy"][0], scores.logprobs_N)
    assert torch.equal(objective.denominators(batch.tokens, batch.rollouts)["policy"], sums.losses["policy"][1])
    return *sums, gradient_N


KINDS = [("none", None, 3.0), *((kind, 0.3, 3.0) for kind in IMPORTANCE_KINDS[1:])]


CASES = [(mode, name, KINDS[0]) for mode in LOSS_AGG_MODES for name in POLICY_LOSSES]


@pytest.mark.parametrize(("mode", "name", "importance"), CASES)
def test_losses_are_those_of_one_sequence(mode, name, importance):
    correction = ImportanceSampling(*importance)
    objective = objective_of(name, loss_agg_mode=mode, entropy_coef=0.05, importance_sampling=correction)
    seed = CASES.index((mode, name, importance))
    groups, rows = pair(seed)
    expected, found = losses(groups, objective, seed), losses(rows, objective, seed)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_a_mean_of_sequences_by_hand():
    """Losses 1, 2 | 6 of one episode and 4 of another: (mean(1, 2, 6) + 4) / 2, not ((1.5) + 6 + 4) / 3."""
    rows = [Rollout([1, 2], reward=0.0, episode=0), Rollout([3], reward=0.0, episode=0), Rollout([4], reward=0.0)]
    groups, options = [RolloutGroup([5], rows)], RowOptions("shared", None, CPU)
    tokens = {
        "loss_mask": torch.ones(4, dtype=torch.bool),
        "advantages": torch.tensor([1.0, 2.0, 6.0, 4.0]),
        "old_logprobs": torch.full((4,), -1.0),
    }
    batch = MicroBatch(lay_out(groups, options), tokens, groups, options=options)
    objective = objective_of("gpg", loss_agg_mode="seq-mean-token-mean", kl=KLPenalty())
    total, count = objective.loss(batch, TokenScores(torch.full((4,), -1.0), torch.zeros(4))).losses["policy"]
    assert (float(total), float(count)) == (3 + 4, 2)


@pytest.mark.parametrize(
    ("mode", "name", "kind", "whole"),
    [
        ("token-mean", "ppo", "none", False),
        ("token-mean", "ppo", "token_mask", False),
        ("seq-mean-token-sum", "ppo", "none", True),
        ("token-mean", "gspo", "none", True),
        ("token-mean", "ppo", "sequence_mask", True),
    ],
)
def test_which_losses_need_whole_episodes(mode, name, kind, whole):
    objective = objective_of(name, loss_agg_mode=mode, importance_sampling=ImportanceSampling(kind))
    assert objective.compares_tokens_of_rollouts is whole
    masks = ImportanceSampling(kind, off_policy_mask_threshold=0.1)
    assert objective_of(name, loss_agg_mode=mode, importance_sampling=masks).compares_tokens_of_rollouts


def test_metrics_count_episodes():
    groups, rows = pair(5)
    for own in (groups, rows):
        for episode in (e for group in own for e in group.episodes):
            for row in episode.rows:
                row.rewards = {"letters": episode.reward}
            episode.last.messages = [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}]
            episode.last.tool_counts = {"calls": 2.0, "seconds": 0.5}
            episode.last.text = str(episode.num_tokens % 2)
    whole, cut = (rollout_metrics(summarize(own)) for own in (groups, rows))
    changed = {name for name, value in whole.items() if cut[name] != pytest.approx(value, nan_ok=True)}
    assert changed == {"episode/token_ratio"}  # turns that were cut in the middle
    evaluated = []
    for own in (groups, rows):
        evaluator = Evaluator()
        evaluator.groups = own
        answers = evaluator.record()
        assert [len(of_group) for of_group in answers] == [len(group.episodes) for group in groups]
        evaluated.append(evaluator.metrics("val", CPU))
    assert {name for name in evaluated[0] if evaluated[0][name] != pytest.approx(evaluated[1][name])} == {
        "val/episode/token_ratio"
    }
    assert evaluation_metrics([], "val").keys() == {"val/reward"}


def test_a_saved_buffer_has_the_rows():
    _, rows = pair(2)
    restored = RolloutBuffer.from_state_dict(RolloutBuffer(rows).state_dict())
    assert [[row.episode for row in group.rollouts] for group in restored.groups] == [
        [row.episode for row in group.rollouts] for group in rows
    ]
    assert replace(restored.groups[0], columns=rows[0].columns) == rows[0]


# The routers' loss.


COEF = 0.5


GROUPS = [
    RolloutGroup([3, 4, 5, 6, 7], [Rollout([8, 9]), Rollout([]), Rollout([10, 11, 12])]),
    RolloutGroup([9, 8, 7], [Rollout([6])]),
]


class MixturePolicy:
    """The same random mixture of experts each time: 2 of 4 experts in each of 2 layers."""

    def __init__(self, checkpointing: bool = False, reentrant: bool = False, model_type: str = "qwen3_moe") -> None:
        self.checkpointing = checkpointing
        self.reentrant = reentrant
        self.model_type = model_type

    def load(self):
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.for_model(
            self.model_type, vocab_size=len(digit_tokenizer()), hidden_size=32, intermediate_size=48,
            num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=64,
            num_experts=4, num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
            initializer_range=0.1, eos_token_id=1, pad_token_id=0,
        )  # fmt: skip
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config)
        if self.checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": self.reentrant})
        return model

    def load_tokenizer(self):
        return digit_tokenizer()


def own_loss(model, groups):
    """Transformers' load-balancing loss of the padded rows."""
    inputs = pack(groups, "repeated").model_inputs
    return model(**inputs, output_router_logits=True, use_cache=False).aux_loss


@pytest.fixture
def fit_mixture(fit):
    def run(coef, sharing="shared", num_mini_batches=1, **options):
        trainer = {"accumulate_grad_batches": num_mini_batches}
        options = {"policy": MixturePolicy(), "optimizer": OptimizerConfig(learning_rate=1e-3)} | options
        return fit(
            engine=RaggedEngine(), sharing={"mode": sharing}, router_aux_loss_coef=coef,
            num_mini_batches=num_mini_batches, trainer=trainer, **options,
        )  # fmt: skip

    return run


def assert_same_gradients(left, right, tolerance=1e-4):
    assert left.keys() == right.keys()
    largest = max(g.norm() for g in right.values() if g is not None)
    for name, gradient in left.items():
        if gradient is not None:
            assert (gradient - right[name]).norm() <= tolerance * max(right[name].norm(), 1e-2 * largest), name


@pytest.mark.parametrize("checkpointing", [False, True])
def test_shared_and_repeated_prompts_give_the_same_loss_and_gradients(fit_mixture, checkpointing):
    policy = MixturePolicy(checkpointing)
    shared, repeated = (fit_mixture(COEF, sharing, policy=policy) for sharing in ("shared", "repeated"))
    assert shared.steps[0]["prefix/token_ratio"] > 1.2
    assert shared.steps[0]["policy/router_aux_loss"] > 2.01  # 2 is balanced
    for name in ("policy/router_aux_loss", "loss"):
        assert shared.steps[0][name] == pytest.approx(repeated.steps[0][name], rel=1e-5), name
    assert_same_gradients(shared.gradients[0], repeated.gradients[0])


@pytest.mark.parametrize("sharing", ["shared", "repeated"])
@pytest.mark.parametrize(
    "model_type", ["qwen3_moe", "mixtral", "gpt_oss", pytest.param("granitemoe", marks=needs("transformers", "5.21"))]
)
def test_it_is_transformers_loss_of_the_repeated_rows(model_type, sharing):
    model = MixturePolicy(model_type=model_type).load()
    expected = own_loss(model, GROUPS)
    batch = pack(GROUPS, sharing)
    with shared_prefix(model) if sharing == "shared" else nullcontext():
        with record_router_logits(model) as recorded:
            score(model, batch)
        actual = router_balancing_loss(model, batch, recorded)
        gradients = torch.autograd.grad(actual, list(model.parameters()), allow_unused=True)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=0)
    names = [name for name, _ in model.named_parameters()]
    theirs = torch.autograd.grad(expected, list(model.parameters()), allow_unused=True)
    assert any(gradient is not None and gradient.norm() > 0 for gradient in theirs)
    assert_same_gradients(dict(zip(names, gradients, strict=True)), dict(zip(names, theirs, strict=True)))


@pytest.mark.parametrize("sharing", ["shared", "repeated"])
def test_mini_batches_are_weighted_by_their_share_of_the_loss(fit_mixture, sharing):
    with_loss, without = (fit_mixture(coef, sharing, num_mini_batches=2) for coef in (COEF, 0.0))
    model = MixturePolicy().load().train()
    parts = [mini_batch(with_loss.buffer, index) for index in range(2)]
    counts = [int(tokens["loss_mask"].sum()) for _, tokens in parts]
    assert counts[0] != counts[1]
    losses = [own_loss(model, groups) for groups, _ in parts]
    for step, loss in zip(with_loss.steps, losses, strict=True):
        assert step["policy/router_aux_loss"] == pytest.approx(loss.item(), rel=1e-5)
    mean = sum(loss * count for loss, count in zip(losses, counts, strict=True)) / sum(counts)
    (COEF * mean).backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    last = [run.gradients[-1] for run in (with_loss, without)]
    actual = {name: last[0][f"policy.{name}"] - last[1][f"policy.{name}"] for name in expected}
    assert_same_gradients(actual, expected, tolerance=1e-3)


def test_without_the_option_nothing_is_recorded(fit_mixture, monkeypatch):
    monkeypatch.setattr("pl_grouprl.training.objective.record_router_logits", None)
    assert "policy/router_aux_loss" not in fit_mixture(0.0).steps[0]


def test_it_balances_the_experts(fit_mixture):
    values = [step["policy/router_aux_loss"] for step in fit_mixture(10.0, steps=5).steps]
    assert values[-1] < values[0] - 0.02


@pytest.mark.parametrize("critic", [None, SharedTrunkCritic(head_std=0.1)])
def test_ppo_has_it_too_but_not_while_the_critic_warms_up(fit_mixture, critic):
    options = {"cls": PPO, "critic": critic, "critic_warmup_steps": 1, "steps": 2}
    shared, repeated = (fit_mixture(COEF, sharing, **options) for sharing in ("shared", "repeated"))
    assert "policy/router_aux_loss" not in shared.steps[0]
    assert shared.steps[1]["policy/router_aux_loss"] > 2
    for name in ("policy/router_aux_loss", "loss"):
        assert shared.steps[1][name] == pytest.approx(repeated.steps[1][name], rel=1e-4), name


def test_routers_that_are_refused(fit, fit_mixture, make_module):
    with pytest.raises(ValueError, match=r"router_aux_loss_coef=0.01 for a policy of model type 'qwen3'"):
        fit(router_aux_loss_coef=0.01)
    with pytest.raises(ValueError, match="model type 'minimax_m2'"):
        make_module(policy=MixturePolicy(model_type="minimax_m2"), router_aux_loss_coef=0.01).configure_model()
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        fit_mixture(COEF, "repeated", policy=MixturePolicy(checkpointing=True, reentrant=True))


def test_recording_leaves_the_model_as_it_was():
    model = MixturePolicy().load()
    inputs = pack(GROUPS, "repeated").model_inputs
    before = len(model.model._forward_hooks), len(model.model._forward_pre_hooks)
    with pytest.raises(KeyError), record_router_logits(model):
        raise KeyError
    assert (len(model.model._forward_hooks), len(model.model._forward_pre_hooks)) == before
    assert model.model(**inputs).get("router_logits") is None
    with pytest.raises(RuntimeError, match="the recorded router logits"):
        router_balancing_loss(model, pack(GROUPS), [])
