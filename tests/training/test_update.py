"""Parts of a run without a Trainer, and updates that are not finite, run out of memory or break a weight."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.tiny_runs import ScriptedEngine, same
from lightning.pytorch import Callback, LightningModule

from pl_grouprl.algorithms import GRPO, PPO, OptimizerConfig
from pl_grouprl.attention import shared_prefix
from pl_grouprl.data import PromptBatch
from pl_grouprl.demo.tasks import digit_tokenizer
from pl_grouprl.models import PolicyCopyCritic, SharedTrunkCritic
from pl_grouprl.models.score import score
from pl_grouprl.rollout import HFRolloutEngine
from pl_grouprl.training.buffer import RolloutBuffer
from pl_grouprl.training.checks import PrefixSharing
from pl_grouprl.training.collector import Collector
from pl_grouprl.training.evaluation import Evaluator
from pl_grouprl.training.metrics import StepTimer
from pl_grouprl.training.micro_batches import MicroBatcher, SharingOptions
from pl_grouprl.training.objective import KLPenalty, PolicyObjective
from pl_grouprl.training.rewarder import Rewarder
from pl_grouprl.training.run import Accumulation, PlainRun
from pl_grouprl.training.sampler import Sampler
from pl_grouprl.training.update import Optimization, Scorer, Updater, clip_gradients
from pl_grouprl.types import Prompt, Rollout, RolloutGroup, SamplingConfig
from pl_grouprl.utilities.modes import is_out_of_memory, naming_memory
from pl_grouprl.utilities.progress import PROGRESS

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


def test_the_check_of_shared_prefixes_is_a_phase_of_the_display(run):
    phases = []
    sharing = PrefixSharing(run, SharingOptions())
    sharing.open({}, lambda: phases.append(PROGRESS.phase) or [])
    assert phases == ["Checking shared prefixes"]
    assert PROGRESS.phase != "Checking shared prefixes"


@pytest.mark.parametrize("options", [{"mode": "repeated"}, {"backend": "prefix_grouper"}])
def test_prompts_cannot_share_where_rollouts_cannot(options):
    with pytest.raises(ValueError, match=r"sharing.across_groups=True needs mode 'shared' and an attention backend"):
        SharingOptions(across_groups=True, **options)


def test_rewarder_and_evaluator(run):
    rewarder = Rewarder(share_of_ones, run, max_unrewarded_batches=2)
    group = RolloutGroup([3], [Rollout(list(run.tokenizer("11")["input_ids"]))])
    rewarder.start([group]).wait()
    assert group.rollouts[0].reward == 1.0
    with pytest.warns(UserWarning, match="no rollout of a batch has a reward"):
        rewarder.count_unrewarded({"reward": math.nan})
    rewarder.count_unrewarded({"reward": 0.0})
    assert rewarder.unrewarded_batches == 0
    evaluator = Evaluator()
    evaluator.groups = [RolloutGroup([1], [Rollout([2], reward=1.0, text="a"), Rollout([3], reward=0.0, text="b")])]
    evaluator.record()
    assert evaluator.metrics("val", CPU)["val/reward"] == 0.5


# Mistakes in a loss of one's own.


class LossOfPlainTensor(GRPO):
    def compute_loss(self, batch):
        return self.score(self.policy, batch.scoring).logprobs_N.sum()


class LossWithoutEntropy(GRPO):
    def compute_loss(self, batch):
        return self.objective.loss(batch, self.score(self.policy, batch.scoring))


@pytest.mark.parametrize(
    ("cls", "error"),
    [
        (LossOfPlainTensor, "compute_loss returned Tensor, not LossSums"),
        (LossWithoutEntropy, r"needs the entropy of each token; score with \*\*self.objective.score_options"),
    ],
)
def test_a_loss_that_lacks_something_says_so(fit, cls, error):
    with pytest.raises((TypeError, ValueError), match=error):
        fit(cls, steps=1)


# Steps that are not finite.


class BrokenLoss(PPO):
    """Breaks one of the losses, or both, at some steps."""

    broken: tuple[str, ...] = ("policy",)
    at: tuple[int, ...] = (1,)

    def compute_loss(self, batch):
        terms = super().compute_loss(batch)
        for name in self.broken if self.last_rollouts.rollout_number in self.at else ():
            terms.losses[name] = (terms.losses[name][0] * float("nan"), terms.losses[name][1])
        return terms


@pytest.mark.parametrize(
    ("broken", "critic"), [("policy", PolicyCopyCritic), ("critic", PolicyCopyCritic), ("critic", SharedTrunkCritic)]
)
def test_a_step_that_is_not_finite_is_skipped(fit, make_module, broken, critic):
    options = {"critic": critic(head_std=0.1), "optimizer": OptimizerConfig(1e-2, weight_decay=0.1)}
    module = make_module(BrokenLoss, **options)
    module.broken = (broken,)
    run = fit(module=module, steps=3)
    assert same(run.weights[0], run.weights[1])
    assert same(run.moments[0], run.moments[1])
    for prefix in ("policy", "critic"):
        assert not same(run.weights[1], run.weights[2], prefix)
    assert module.optimization.nonfinite_steps == 0


def test_too_many_steps_that_are_not_finite_end_the_run(fit, make_module):
    module = make_module(BrokenLoss, guards={"max_nonfinite_steps": 2})
    module.at = (1, 2)
    with pytest.raises(RuntimeError, match=r"2 steps in a row .* \(guards.max_nonfinite_steps=2\)"):
        fit(module=module, steps=5)


# Weights that are not finite.


class BreaksGradient(GRPO):
    """Clips the gradient of one parameter by NaN, after the gradient was found finite."""

    def configure_gradient_clipping(self, *args, **kwargs):
        self.policy.model.norm.weight.grad *= float("nan")


class Writes(Callback):
    """Writes a number into a weight before the optimizer steps."""

    def __init__(self, name, value):
        self.name, self.value = name, value

    def on_before_optimizer_step(self, trainer, module, optimizer):
        module.get_parameter(self.name).data[0, 0] = self.value


CRITIC = {"critic": SharedTrunkCritic(), "critic_optimizer": OptimizerConfig(3e-3)}


@pytest.mark.parametrize(
    ("cls", "options", "trainer", "callbacks", "message"),
    [
        (
            BreaksGradient, {}, {}, [],
            r"NaN or infinity in 1 parameters after optimizer step 1: policy.model.norm.weight.* The gradient was "
            r"finite.*learning_rate=0.01, .* of policy; trainer.gradient_clip_val=1.0",
        ),
        (BreaksGradient, {}, {"precision": "16-true"}, [], r"Use trainer\.precision='bf16-mixed'"),
        (PPO, CRITIC, {}, [Writes("critic.head.weight", math.inf)], r"step 1: critic\..*=0.003, .* of critic"),
    ],
    ids=["clipping", "float16", "critic"],
)  # fmt: skip
def test_a_step_that_breaks_a_weight_ends_the_run_there(fit, cls, options, trainer, callbacks, message):
    with pytest.raises(RuntimeError, match=message):
        fit(cls, steps=2, trainer={"gradient_clip_val": 1.0, **trainer}, callbacks=callbacks, **options)


def test_weights_that_were_broken_before_are_told_apart(fit, make_module):
    module = make_module(engine=ScriptedEngine(), sharing={"mode": "repeated"})
    module.configure_model()
    module.policy.model.layers[0].mlp.up_proj.weight.data[0, 0] = float("nan")
    with pytest.raises(RuntimeError, match=r"step 1: policy.model.layers.0.mlp.up_proj.weight. The step was skipped"):
        fit(module=module, steps=3)


def test_large_weights_whose_norm_overflows_are_no_error(fit):
    run = fit(engine=ScriptedEngine(), callbacks=[Writes("policy.lm_head.weight", 1e30)])  # its square is not finite
    assert run.trainer.global_step == 1


# Out of memory: the error names the option that lowers the need.


OOM = "pl_grouprl.algorithms.module.RLModule"


PASS = r"max_tokens_per_micro_batch=\w+ tokens .*; lower it, .*or raise sharing.sequence_parallel_size\."


class Full(torch.autograd.Function):
    """A node of the graph that has no memory in its backward."""

    @staticmethod
    def forward(ctx, loss):
        return loss.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


class FullBackward(GRPO):
    """Every backward runs out of memory; the last pass's is Lightning's."""

    def compute_loss(self, batch):
        sums = super().compute_loss(batch)
        sums.losses["policy"] = Full.apply(sums.losses["policy"][0]), sums.losses["policy"][1]
        return sums


def out_of_memory(*args, **kwargs):
    raise torch.OutOfMemoryError("CUDA out of memory")


class FullForward(GRPO):
    compute_loss = out_of_memory


class FullScoring(GRPO):
    needs_old_scores = True
    score = out_of_memory


@pytest.mark.parametrize(
    ("cls", "options", "where"),
    [
        (FullBackward, {}, "the backward of a pass of "),  # the last pass's is Lightning's
        (FullBackward, {"max_tokens_per_micro_batch": 32}, "the backward of a pass of "),
        (FullBackward, {"trainer": {"accumulate_grad_batches": 2}}, "the backward of a pass of "),
        (FullForward, {}, "a pass of "),
        (FullScoring, {}, "scoring, a pass of "),
    ],
)
def test_a_pass_names_its_budget(fit, cls, options, where):
    with pytest.raises(RuntimeError, match=f"out of memory in {where}{PASS}") as raised:
        fit(cls, **options)
    assert isinstance(raised.value.__cause__, torch.OutOfMemoryError)


@pytest.mark.parametrize(
    ("where", "options", "message"),
    [
        (f"{OOM}.backward", {"cls": FullBackward}, f"out of memory in a pass of {PASS}"),  # as DeepSpeed's engine does
        ("torch.optim.AdamW._init_group", {}, r"out of memory in the optimizer step, .*strategy.* or train an adapter"),
        (
            "pl_grouprl.rollout.hf.engine.sample_in_batches",
            {"engine": HFRolloutEngine(max_sequences=3, max_prefill_tokens=64)},
            r"max_sequences=3 .* max_prefill_tokens=64 of HFRolloutEngine; lower max_sequences",
        ),
        (
            f"{OOM}.parity_reports",
            {"sharing": {"verify": True}},
            "check of shared prefixes before training; sharing.verify=False skips it",
        ),
    ],
    ids=["engine's backward", "step", "rollout", "check"],
)
def test_other_places_name_their_options(fit, monkeypatch, where, options, message):
    monkeypatch.setattr(where, LightningModule.backward if "backward" in where else out_of_memory)
    with pytest.raises(RuntimeError, match=message):
        fit(**options)


def test_a_reward_model_names_its_budget(monkeypatch):
    from pl_grouprl.rewards import ModelReward
    from pl_grouprl.rewards import models as frozen_model

    monkeypatch.setattr(frozen_model, "hidden_states", out_of_memory)
    monkeypatch.setattr(frozen_model, "pack", lambda *args, **kwargs: Batch())
    own = ModelReward("name-on-the-hub", max_tokens_per_pass=99, sharing="repeated")
    with pytest.raises(
        RuntimeError, match="ModelReward with max_tokens_per_pass=99; lower it, or put the reward model"
    ):
        next(own._states(Model(), [RolloutGroup([1], [Rollout([2])])]))


class Batch:
    def __init__(self):
        self.model_inputs = {"input_ids": torch.zeros(1, dtype=torch.long)}


class Model:
    device = torch.device("cpu")

    def get_input_embeddings(self):
        return torch.nn.Embedding(4, 2)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 80 bytes."),
    ],
)
def test_the_cpus_errors_are_known(error):
    assert is_out_of_memory(error)
    with pytest.raises(RuntimeError, match=r"out of memory in here; do that\."), naming_memory("here", "do that"):
        raise error


def test_other_errors_pass_as_they_are():
    error = RuntimeError("the shapes differ")
    with pytest.raises(RuntimeError) as raised, naming_memory("here", "do that"):
        raise error
    assert raised.value is error
