"""How far sampler and trainer differ: the metrics by hand, and five planted mismatches that the warning names."""

import copy
import math
import warnings
from contextlib import contextmanager
from functools import partial
from itertools import islice
from types import SimpleNamespace

import pytest
import torch
from helpers import tiny_runs
from helpers.tiny_models import tiny_model
from helpers.tiny_runs import AHEAD, RaggedEngine, TinyPolicy

from pl_grouprl import GRPO, SamplingConfig
from pl_grouprl.algorithms import OptimizerConfig
from pl_grouprl.demo.tasks import digit_tokenizer
from pl_grouprl.rollout import HFRolloutEngine
from pl_grouprl.training.buffer import RolloutBuffer
from pl_grouprl.training.mismatch import FIRST_TOKENS, Mismatch, diagnose, mark_tokens, mismatch_sums
from pl_grouprl.types import NOT_SAMPLED, Rollout, RolloutGroup

SAMPLING = SamplingConfig(max_new_tokens=24)


class Sampler:
    """A plain loop over whole forward passes, which may go wrong in one way.

    Args:
        dtype: Of its copy of the policy.
        top_k: Log-probabilities are those after this filter.
        temperature: Its temperature over the one asked for.
        flips: Share of tokens that visit other experts than the router says, in each layer.
    """

    def __init__(self, dtype=torch.float32, top_k=0, temperature=1.0, flips=0.0):
        self.dtype, self.top_k, self.temperature, self.flips = dtype, top_k, temperature, flips

    def bind(self, model, tokenizer=None):
        self.model = model

    @torch.no_grad()
    def generate(self, prompts, sampling, *, num_generations, seed):
        model, generator = copy.deepcopy(self.model).to(self.dtype), torch.Generator().manual_seed(7)
        if self.flips:
            flip_routing(model, self.flips)
        tokens, logprobs = torch.tensor(prompts).repeat_interleave(num_generations, 0), []
        length = tokens.shape[1]
        for _ in range(sampling.max_new_tokens):
            logits = model(tokens).logits[:, -1].float() / (self.temperature * sampling.temperature)
            if self.top_k:
                logits[logits < logits.topk(self.top_k).values[:, -1:]] = -math.inf
            chosen = logits.softmax(-1).multinomial(1, generator=generator)
            logprobs.append(logits.log_softmax(-1).gather(1, chosen))
            tokens = torch.cat([tokens, chosen], 1)
        rows = zip(tokens[:, length:].tolist(), torch.cat(logprobs, 1).tolist(), strict=True)
        rollouts = iter([Rollout(*row, finish_reason="length") for row in rows])
        return [list(islice(rollouts, num_generations)) for _ in prompts]


def flip_routing(model, share):
    """Let some tokens visit the experts that the router likes least, decided by what enters the router."""

    def flip(gate, args, output):
        states = args[0].reshape(-1, gate.hidden_dim)
        flipped = (states[:, 0] * 1e3).frac().abs() < share
        logits, scores, indices = output
        least = logits.topk(gate.top_k, largest=False).indices
        return logits, scores, torch.where(flipped[:, None], least, indices)

    for module in model.modules():
        if type(module).__name__.endswith("TopKRouter"):
            module.register_forward_hook(flip)


class SharpPolicy(TinyPolicy):
    """With distributions far from uniform."""

    def __init__(self, initializer_range=0.25):
        super().__init__(initializer_range=initializer_range)


class Mixture(SharpPolicy):
    def load(self):
        return tiny_model("qwen3_moe", vocab_size=len(digit_tokenizer()), num_experts=8)


@contextmanager
def caught():
    """The warnings about a mismatch."""
    found = []
    with warnings.catch_warnings(record=True) as recorded:
        warnings.simplefilter("always")
        yield found
    found += [str(one.message) for one in recorded if "Sampler and trainer differ" in str(one.message)]


def by_letters(completions, **columns):
    return [float(len(set(text))) for text in completions]


def run(tmp_path, policy=None, steps=1, **options):
    options = {"sampling": SAMPLING, "num_generations": 8, **options}
    module = GRPO(policy or SharpPolicy(), by_letters, **options)
    with caught() as found:
        history = tiny_runs.fit(tmp_path, module=module, steps=steps)
    return history.steps[-1], found


PLANTED = {
    "precision": (partial(SharpPolicy, 1.0), {"engine": Sampler(dtype=torch.bfloat16)}),
    "truncated sampling": (SharpPolicy, {"engine": Sampler(top_k=6)}),
    "routing of experts": (Mixture, {"engine": Sampler(flips=0.05)}),
    "stale weights": (SharpPolicy, {**AHEAD, "optimizer": OptimizerConfig(learning_rate=3e-3)}),
    "temperature": (SharpPolicy, {"engine": Sampler(temperature=0.8)}),
}


@pytest.mark.parametrize("cause", PLANTED)
def test_a_planted_mismatch_is_named(tmp_path, cause):
    policy, options = PLANTED[cause]
    metrics, found = run(tmp_path, policy(), steps=3, **options)
    (message,) = found  # once, although it stays
    assert f"Likely cause: {cause}." in message
    assert metrics["sampling/kl"] > 1e-3
    if cause == "temperature":
        assert "were 0.80 times the trainer's" in message


def test_experts_that_are_replayed_are_not_blamed(tmp_path, monkeypatch):
    monkeypatch.setattr("pl_grouprl.training.mismatch.open_replay", lambda model: model)
    policy, options = PLANTED["routing of experts"]
    (message,) = run(tmp_path, policy(), steps=3, **options)[1]
    assert "router_replay" not in message


def test_a_sampler_that_agrees_gives_no_warning(tmp_path):
    metrics, found = run(tmp_path, steps=2)
    assert not found
    assert 0 <= metrics["sampling/kl"] < 1e-9
    assert metrics["sampling/beyond_2_percent"] == 0
    assert metrics["sampling/largest_ratio"] == pytest.approx(1, abs=1e-4)
    assert not any(name.startswith("mismatch/") or "kl_at_turn" in name for name in metrics)
    assert {name for name in metrics if "kl_at_token" in name} == {f"sampling/kl_at_token/{n}" for n in (1, 4, 16)}


def test_weights_a_little_stale_are_what_was_asked_for(tmp_path):
    slow = OptimizerConfig(learning_rate=6e-4)
    metrics, found = run(tmp_path, **AHEAD, optimizer=slow, steps=2)
    assert 1e-3 < metrics["sampling/kl"] < 1e-2
    assert not found


def test_a_penalty_makes_them_differ_on_purpose(tmp_path):
    sampling = SamplingConfig(max_new_tokens=24, repetition_penalty=1.5)
    metrics, found = run(tmp_path, engine=HFRolloutEngine(), sampling=sampling)
    assert metrics["sampling/kl"] > 1e-2
    assert not found


def test_by_turn_in_a_run(tmp_path):
    """Completions with tool output amid, compared with a forward pass of each."""
    still = OptimizerConfig(learning_rate=1e-12)
    module = GRPO(SharpPolicy(), by_letters, engine=RaggedEngine(logprobs=True), optimizer=still)
    with caught():
        history = tiny_runs.fit(tmp_path, module=module)
    kl = {1: [], 2: []}
    for group in module.last_rollouts.groups:
        for rollout in group.rollouts:
            tokens = torch.tensor([group.prompt_ids + rollout.token_ids])
            with torch.no_grad():
                logprobs = module.policy(tokens).logits[0, len(group.prompt_ids) - 1 : -1].log_softmax(-1)
            turn, before = 0, 0
            for place, (token, written) in enumerate(
                zip(rollout.token_ids, rollout.loss_mask or [1] * len(rollout.token_ids), strict=True)
            ):
                turn, before = turn + (written and not before), written
                x = float(logprobs[place, token]) - rollout.logprobs[place]
                kl[turn] += [math.exp(x) - 1 - x] * written
    metrics = history.steps[-1]
    for turn, values in kl.items():
        assert metrics[f"sampling/kl_at_turn/{turn}"] == pytest.approx(sum(values) / len(values), rel=1e-4)
    everything = kl[1] + kl[2]
    assert metrics["sampling/kl"] == pytest.approx(sum(everything) / len(everything), rel=1e-4)


# By hand.


def a_batch(lengths, turns, staleness=None, masked=()):
    number = sum(lengths)
    mask_N = torch.ones(number, dtype=torch.bool)
    mask_N[list(masked)] = False
    index_N = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    tokens = {"turn": torch.tensor(turns, dtype=torch.int32)}
    if staleness is not None:
        tokens["staleness"] = torch.tensor(staleness)
    scoring = SimpleNamespace(rollout_index_N=index_N, num_rollouts=len(lengths))
    return SimpleNamespace(mask_N=mask_N, scoring=scoring, tokens=tokens)


def means_of(pairs):
    return {name: float(total) / (float(count) or 1.0) for name, (total, count) in pairs.items()}


def test_metrics_by_hand():
    p, q = [0.5, 0.2, 0.9, 0.1, 0.4], [0.5, 0.25, 0.3, 0.1, 0.4]
    logs = torch.tensor(p).log(), torch.tensor(q).log()
    batch = a_batch([4, 1], [1, 1, 9, 2, 1], staleness=[0, 1, 1, 0, 0], masked=[2])
    metrics = means_of(mismatch_sums(*logs, torch.zeros(5), batch))
    ratio = 0.2 / 0.25
    kl = ratio - 1 - math.log(ratio)
    found = Mismatch(None, SAMPLING).finish({**metrics, "loss": 1.0, "sampling/sampling_logp_difference/max": 0.25})
    assert found == pytest.approx(
        {
            "loss": 1.0,
            "sampling/sampling_logp_difference/max": 0.25,
            "sampling/kl": kl / 4,
            "sampling/beyond_2_percent": 1 / 4,
            "sampling/largest_ratio": math.exp(0.25),
            "sampling/kl_at_token/1": kl / 3,  # tokens 1, 2 of the first rollout, and 1 of the second
            "sampling/kl_at_token/4": 0.0,
            "sampling/kl_at_turn/1": kl / 3,
            "sampling/kl_at_turn/2": 0.0,
        },
        abs=1e-6,
    )
    assert metrics["mismatch/fresh"] == 3 / 4
    assert metrics["mismatch/kl_fresh"] == pytest.approx(0, abs=1e-7)


def test_later_tokens_and_turns_have_bins():
    number = 40_000
    logs = torch.zeros(number), torch.full((number,), -0.1)
    batch = a_batch([number], [1 + place // 4000 for place in range(number)])
    metrics = means_of(mismatch_sums(*logs, torch.zeros(number), batch))
    shares = [round(metrics[f"mismatch/token_share/{first}"] * number) for first in FIRST_TOKENS]
    assert shares == [3, 12, 48, 192, 768, 3072, 12288, number - 16383]
    assert [round(metrics[f"mismatch/turn_share/{turn}"] * number) for turn in range(1, 9)] == [4000] * 7 + [12000]


def test_tokens_are_marked_by_turn_and_age():
    mask = [1, 1, 0, 1]
    versions = [3, 2, NOT_SAMPLED, 3]
    rollouts = [
        Rollout([5, 6, 7, 8], [0.0] * 4, loss_mask=mask, weight_versions=versions),
        Rollout([5], [0.0], episode=0),
        Rollout([9, 9], [0.0] * 2, loss_mask=[0, 1], episode=0),
    ]
    buffer = RolloutBuffer([RolloutGroup([1, 2], rollouts)])
    mark_tokens(buffer, None)
    assert buffer.joined("turn").tolist() == [1, 1, 1, 2, 1, 1, 2]
    assert "staleness" not in buffer.values
    mark_tokens(buffer, 3)
    assert buffer.joined("staleness").tolist() == [0, 1, 0, 0, 0, 0, 0]


NOISE = {"x": 0.0, "u": 0.0, "abs": 0.04, "xx": 0.0025, "uu": 1.0, "ux": 0.0, "kl": 0.00125}


@pytest.mark.parametrize(
    ("changed", "mixture", "cause"),
    [
        ({}, False, "precision"),
        ({}, True, "precision"),
        ({"xx": 0.02}, True, "routing of experts"),
        ({"abs": 0.08, "xx": 0.01}, True, "routing of experts"),
        ({"abs": 0.4, "xx": 0.25, "kl": 0.125}, False, "unknown"),
        ({"x": -0.04}, False, "truncated sampling"),
        ({"ux": 0.045}, False, "temperature"),
        ({"fresh": 0.5, "kl_fresh": 0.00001}, False, "stale weights"),
        ({"fresh": 0.5, "kl_fresh": 0.0006}, False, "precision"),
        ({"fresh": 0.0, "kl_fresh": 0.0}, False, "stale weights"),
        ({"fresh": 1.0, "kl_fresh": 0.00125}, False, "precision"),
    ],
)
def test_causes_by_hand(changed, mixture, cause):
    assert diagnose({**NOISE, **changed}, mixture=mixture).cause == cause
