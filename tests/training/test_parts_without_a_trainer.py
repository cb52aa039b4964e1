"""Each part of a run does its work without a Trainer and without a LightningModule."""

import math

import pytest
import torch
from helpers.tiny_models import tiny_model

from pl_grouprl import GRPO, PPO
from pl_grouprl.attention import shared_prefix
from pl_grouprl.data import PromptBatch
from pl_grouprl.demo.tasks import digit_tokenizer
from pl_grouprl.models.critic import Critic, ValueHead
from pl_grouprl.models.score import score
from pl_grouprl.training.buffer import RolloutBuffer
from pl_grouprl.training.checkpoint import Attributes, ConsistencyCheck, RandomNumbers, load_parts, save_parts
from pl_grouprl.training.checks import PrefixSharing, refuse_dropout
from pl_grouprl.training.collector import Collector
from pl_grouprl.training.evaluation import Evaluator
from pl_grouprl.training.metrics import StepTimer
from pl_grouprl.training.micro_batches import MicroBatcher, SharingOptions
from pl_grouprl.training.objective import KLOptions, KLPenalty, PolicyObjective
from pl_grouprl.training.rewarder import Rewarder, rewards_per_token
from pl_grouprl.training.run import Accumulation, PlainRun
from pl_grouprl.training.sampler import Sampler
from pl_grouprl.training.update import Optimization, Scorer, Updater, clip_gradients
from pl_grouprl.types import Prompt, Rollout, RolloutGroup, SamplingConfig

SAMPLING = SamplingConfig(max_new_tokens=5)
CPU = torch.device("cpu")


def share_of_ones(completions, **columns):
    return [text.count("1") / max(len(text), 1) for text in completions]


@pytest.fixture
def run():
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    tokenizer = digit_tokenizer()
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Qwen3Config(
        vocab_size=len(tokenizer), num_key_value_heads=1, head_dim=8, eos_token_id=1, pad_token_id=0, **sizes
    )
    return PlainRun(Qwen3ForCausalLM(config), tokenizer)


@pytest.fixture
def prompts():
    ids = [digit_tokenizer()(text)["input_ids"] for text in ("123", "4567")]
    return [Prompt(own, text, {}, "digits") for own, text in zip(ids, ("123", "4567"), strict=True)]


@pytest.fixture
def buffer():
    groups = [
        RolloutGroup([3, 4], [Rollout([5, 6], reward=1.0), Rollout([7], reward=0.0)], 0),
        RolloutGroup([5], [Rollout([8, 9, 10], reward=0.5), Rollout([4, 4], reward=None)], 1),
    ]
    buffer = RolloutBuffer(groups)
    buffer.put_per_rollout("advantages", torch.tensor([1.0, -1.0, 0.5, 0.0]))
    return buffer


def objective(**options):
    options = {"loss_agg_mode": "token-mean", "kl": KLPenalty(), "max_new_tokens": 5} | options
    return PolicyObjective("ppo", {}, **options)


def test_sampler(run, prompts):
    groups = Sampler(run, seed=1).generate(prompts, SAMPLING, 3, seed=("x", 0))
    again = Sampler(run, seed=1).generate(prompts, SAMPLING, 3, seed=("x", 0))
    other = Sampler(run, seed=2).generate(prompts, SAMPLING, 3, seed=("x", 0))
    tokens = [[[rollout.token_ids for rollout in group.rollouts] for group in own] for own in (groups, again, other)]
    assert tokens[0] == tokens[1] != tokens[2]
    assert [(group.group_id, group.prompt, len(group.rollouts)) for group in groups] == [(0, "123", 3), (1, "4567", 3)]
    assert run.policy.training


def test_rewarder(run):
    rewarder = Rewarder(share_of_ones, run, max_unrewarded_batches=2)
    tokens = run.tokenizer("11")["input_ids"]
    group = RolloutGroup([3], [Rollout(list(tokens))])
    rewarder.start([group]).wait()
    assert group.rollouts[0].reward == 1.0
    with pytest.warns(UserWarning, match="no rollout of a batch has a reward"):
        rewarder.count_unrewarded({"reward": math.nan})
    rewarder.count_unrewarded({"reward": 0.0})
    assert rewarder.unrewarded_batches == 0
    rewarder.unrewarded_batches = 1
    with (
        pytest.warns(UserWarning, match="no rollout"),
        pytest.raises(RuntimeError, match=r"guards.max_unrewarded_batches=2"),
    ):
        rewarder.count_unrewarded({"reward": math.nan})


def test_collector(run, prompts):
    timer = StepTimer()
    rewarder = Rewarder(share_of_ones, run)
    collector = Collector(run, Sampler(run), rewarder, timer, sampling=SAMPLING, num_generations=4, num_mini_batches=2)
    collected = collector.collect(PromptBatch(prompts, 7))
    assert collected.pending is not None
    assert not collected.buffer.joined("loss_mask").any()  # no rewards yet
    buffer = collector.finish(collected)
    assert buffer.joined("loss_mask").all()
    assert sorted(buffer.mini_batches) == [0, 1]
    rewards = [rollout.reward for group in buffer.groups for rollout in group.rollouts]
    assert buffer.metrics["reward"] == pytest.approx(sum(rewards) / 8)
    lengths = int(buffer.rollout_lengths.sum())
    assert buffer.num_tokens == lengths + 4 * sum(len(prompt.token_ids) for prompt in prompts)
    assert {"rollout", "reward"} <= timer.seconds.keys()


@pytest.mark.parametrize("max_tokens", [None, 6])
def test_scorer(run, buffer, max_tokens):
    scorer = Scorer(run, MicroBatcher(run, max_tokens=max_tokens))
    with shared_prefix(run.policy):
        logprobs_N, none = scorer.map(run.policy, buffer, lambda batch: (score(run.policy, batch).logprobs_N, None))
    assert none is None
    expected = []
    for group in buffer.groups:
        for rollout in group.rollouts:
            ids = torch.tensor([[*group.prompt_ids, *rollout.token_ids]])
            logprobs = run.policy(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
            expected.append(logprobs[len(group.prompt_ids) - 1 :])
    assert torch.allclose(logprobs_N, torch.cat(expected).detach(), atol=1e-5)


def gradients(run, buffer, max_tokens, batches=1):
    micro_batcher, optimization = MicroBatcher(run, max_tokens=max_tokens), Optimization()
    own = objective()

    def compute_loss(batch):
        return own.loss(batch, score(run.policy, batch.scoring, **own.score_options))

    updater = Updater(run, micro_batcher, optimization)
    run.policy.zero_grad()
    with shared_prefix(run.policy):
        for _ in range(batches):
            members, accumulation = range(len(buffer.groups)), Accumulation(mini_batches=batches)
            loss, metrics = updater.update(buffer, members, accumulation, compute_loss, own.denominators)
            (loss / batches).backward()  # as Lightning does
    parts = {"policy": list(run.policy.parameters())}
    norms = optimization.before_step(parts, run.support, accumulated=batches, device=CPU, step=0)
    return [parameter.grad.clone() for parameter in run.policy.parameters()], metrics, float(norms["grad_norm"])


def test_updater_and_optimization(run, buffer):
    whole, metrics, norm = gradients(run, buffer, None)
    split, split_metrics, _ = gradients(run, buffer, 6)
    accumulated, _, _ = gradients(run, buffer, 6, batches=2)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(whole, split, strict=True))
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(whole, accumulated, strict=True))
    assert metrics["loss"] == pytest.approx(split_metrics["loss"], abs=1e-6)
    assert norm == pytest.approx(float(torch.linalg.vector_norm(torch.cat([own.flatten() for own in whole]))), rel=1e-5)


def test_updater_refuses_other_denominators(run, buffer):
    own = objective()
    updater = Updater(run, MicroBatcher(run, max_tokens=6), Optimization())

    def compute_loss(batch):
        return own.loss(batch, score(run.policy, batch.scoring, **own.score_options))

    def denominators(tokens, rollouts):
        return {"policy": torch.tensor(1.0)}

    with shared_prefix(run.policy), pytest.raises(RuntimeError, match="compute_loss divides 'policy' by 6"):
        updater.update(buffer, [0, 1], Accumulation(), compute_loss, denominators)


def test_optimization_skips_a_step_with_nan(run):
    optimization, parameter = Optimization(max_nonfinite_steps=2), torch.nn.Parameter(torch.ones(2))
    parts = {"policy": [parameter]}

    def step(value):
        parameter.grad = torch.full((2,), value)
        return optimization.before_step(parts, run.support, accumulated=1, device=CPU, step=3)

    with pytest.warns(UserWarning, match="gradient norm is nan at step 3; the step is skipped"):
        step(math.nan)
    assert parameter.grad is None
    assert optimization.nonfinite_steps == 1
    assert float(step(3.0)["grad_norm"]) == pytest.approx(3 * 2**0.5)
    assert optimization.nonfinite_steps == 0
    optimization.nonfinite_steps = 1
    with pytest.warns(UserWarning, match="is skipped"), pytest.raises(RuntimeError, match="2 steps in a row"):
        step(math.inf)


def test_gradients_are_clipped_part_by_part(run):
    parts = {name: [torch.nn.Parameter(torch.zeros(4))] for name in ("policy", "critic")}
    for own in parts.values():
        own[0].grad = torch.full((4,), 5.0)
    clip_gradients(parts, {"policy": 1.0, "critic": None}, run.support, 2.0, "norm")
    assert [float(own[0].grad.norm()) for own in parts.values()] == pytest.approx([1.0, 2.0], rel=1e-5)


def test_kl_penalty_and_rewards_per_token(buffer):
    logprobs_N = torch.zeros(8)
    buffer.put("old_logprobs", logprobs_N)
    buffer.put("ref_logprobs", logprobs_N - 0.5)
    penalty_N = KLPenalty(0.1, KLOptions("k1", "reward")).of_rewards(buffer, CPU)
    mask_N = buffer.joined("loss_mask")
    assert torch.allclose(penalty_N, 0.05 * mask_N)  # the last rollout has no reward and is not trained
    assert buffer.metrics["kl"] == pytest.approx(0.5)
    assert rewards_per_token(buffer)[:6].tolist() == [0.0, 1.0, 0.0, 0.0, 0.0, 0.5]


def test_objective_adds_its_terms(run, buffer):
    own = objective(entropy_coef=0.1)
    (batch,) = MicroBatcher(run).for_update(buffer, [0, 1])
    with shared_prefix(run.policy):
        scores = score(run.policy, batch.scoring, **own.score_options)
    sums, plain = own.loss(batch, scores), objective().loss(batch, scores)
    total, count = sums.losses["policy"]
    assert count == 6  # trained tokens
    assert sums.metrics["entropy"][0] == pytest.approx(float(scores.entropy_N[:6].sum()), rel=1e-5)
    expected = float(plain.losses["policy"][0] - 0.1 * sums.metrics["entropy"][0])
    assert float(total) == pytest.approx(expected, rel=1e-4)


def test_prefix_sharing_patches_until_closed(run):
    sharing = PrefixSharing(run, SharingOptions(verify=False))
    sharing.open({"policy": run.policy}, list)
    hooked = len(run.policy.model._forward_pre_hooks) + len(run.policy._forward_pre_hooks)
    sharing.close()
    assert hooked > len(run.policy.model._forward_pre_hooks) + len(run.policy._forward_pre_hooks)
    with pytest.raises(ValueError, match=r"sharing.mode is 'twice'"):
        SharingOptions("twice")


@pytest.mark.parametrize(
    ("family", "option", "named"),
    [
        ("llama", "attention_dropout", "model.layers.0.self_attn.attention_dropout"),
        ("gpt2", "attn_pdrop", "transformer.h.0.attn.attn_dropout.p"),
        ("gpt2", "resid_pdrop", "transformer.h.0.attn.resid_dropout.p"),
        ("gpt2", "embd_pdrop", "transformer.drop.p"),
        ("opt", "dropout", "model.decoder.dropout"),
        ("opt", "layerdrop", "model.decoder.layerdrop"),
    ],
)
def test_dropout_is_refused_before_the_first_step(family, option, named):
    model = tiny_model(family, **({"dropout": 0.0} if family == "opt" else {}) | {option: 0.25})
    with pytest.raises(ValueError, match=rf"^policy has dropout \({named}=0.25\).*\(disable_dropout=True of Pret"):
        refuse_dropout("policy", model.train())
    for safe in (model.eval(), tiny_model("llama").train()):
        refuse_dropout("policy", safe)


def test_dropout_of_a_critics_head_is_refused():
    trunk = tiny_model("llama").model
    head = ValueHead(trunk.config.hidden_size)
    head.dropout = torch.nn.Dropout(1)  # an integer
    with pytest.raises(ValueError, match=r"^critic has dropout \(head.dropout.p=1\)"):
        refuse_dropout("critic", Critic(trunk, head))


def test_random_numbers_continue_after_a_validation_and_a_restart(run):
    numbers = RandomNumbers(run)
    torch.manual_seed(5)
    numbers.set_aside()
    torch.rand(3)  # a validation
    state = numbers.state_dict()
    numbers.continue_training()
    expected = torch.rand(2)
    numbers.load_state_dict(state)
    numbers.restore()
    assert torch.equal(torch.rand(2), expected)


def test_evaluator_starts_over_after_its_metrics():
    evaluator = Evaluator()
    evaluator.groups = [RolloutGroup([1], [Rollout([2], reward=1.0, text="a"), Rollout([3], reward=0.0, text="b")])]
    evaluator.record()
    assert evaluator.metrics("val", CPU)["val/reward"] == 0.5
    assert math.isnan(evaluator.metrics("val", CPU)["val/reward"])


def test_run_state_saves_loads_and_compares():
    class Owner:
        level = 1

    owner, seen = Owner(), []
    parts = {
        "own": Attributes(owner, "level"),
        "fact": ConsistencyCheck(lambda: owner.level, lambda then, now: seen.append((then, now))),
        "new": Attributes(owner, "level"),
    }
    state = save_parts(parts)
    del state["new"]  # an older checkpoint
    owner.level = 9
    load_parts(parts, state, leave_out={"own"})
    assert (owner.level, seen) == (9, [(1, 9)])
    load_parts(parts, state, leave_out=())
    assert owner.level == 1


def test_a_runs_checkpoint_holds_every_part_and_knows_its_algorithm(run):
    class Source:
        def load(self):
            return run.policy

        def load_tokenizer(self):
            return run.tokenizer

    def module(algorithm=GRPO, **options):
        built = algorithm(Source(), share_of_ones, num_generations=2, **options)
        built.configure_model()
        return built

    saved, checkpoint = module(), {}
    saved.num_tokens, saved.rewarder.unrewarded_batches = 123, 2
    saved.run_checkpoint.save(checkpoint)
    assert checkpoint["pl_grouprl"].keys() == saved.run_checkpoint.standard_parts().keys()
    loaded = module()
    loaded.run_checkpoint.load(checkpoint)
    assert (loaded.num_tokens, loaded.rewarder.unrewarded_batches) == (123, 2)
    with pytest.raises(ValueError, match="the checkpoint was written by GRPO, and the module is PPO"):
        module(PPO).run_checkpoint.load(checkpoint)
    assert "It was written by GRPO" in loaded.run_checkpoint.describe_misfit("size mismatch")


@pytest.mark.parametrize("options", [{"mode": "repeated"}, {"backend": "prefix_grouper"}])
def test_prompts_cannot_share_where_rollouts_cannot(options):
    with pytest.raises(ValueError, match=r"sharing.across_groups=True needs mode 'shared' and an attention backend"):
        SharingOptions(across_groups=True, **options)
