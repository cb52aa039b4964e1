"""Engines: one with a copy of the weights gets them when they have changed; completions end where turns end."""

from __future__ import annotations

import copy
import itertools
import logging
from contextlib import nullcontext

import pytest
import torch
from helpers import tiny_runs
from helpers.copied_engine import CopiedPolicyEngine
from helpers.sweeps import sweep_pairs
from helpers.tiny_runs import PLAIN, ScriptedEngine, TinyPolicy, same
from lightning.pytorch import Callback

from pl_grouprl.algorithms import GRPO, PPO, OptimizerConfig
from pl_grouprl.data import PromptDataModule
from pl_grouprl.distributed.checksum import WeightsMismatchError
from pl_grouprl.models import LoRAAdapter
from pl_grouprl.rollout import HFRolloutEngine
from pl_grouprl.rollout.engine import SyncedRolloutEngine
from pl_grouprl.rollout.weight_sync import read_to_the_end
from pl_grouprl.types import SamplingConfig


class Adapted(TinyPolicy):
    """The tiny policy with an adapter."""

    def __init__(self, **options):
        super().__init__()
        self.adapter = LoRAAdapter(r=4, alpha=64, **options)

    def load(self):
        return self.adapter.add_to(super().load())


OPTIONS = {"steps": 3, "optimizer": PLAIN}  # so large steps that rollouts of older weights are other rollouts


@pytest.fixture
def fit(tmp_path):
    def run(engine, val=False, trainer=None, **options):
        torch.manual_seed(1)
        data = {"train_size": 16, "val": val}
        trainer = {"num_sanity_val_steps": 0, **(trainer or {})}
        return tiny_runs.fit(tmp_path, engine=engine, data=data, trainer=trainer, **{**OPTIONS, **options})

    return run


@pytest.fixture(scope="module")
def own_weights(tmp_path_factory):
    """The run that samples from the policy itself."""
    torch.manual_seed(1)
    options = {"data": {"train_size": 16}, "trainer": {"num_sanity_val_steps": 0}, **OPTIONS}
    return tiny_runs.fit(tmp_path_factory.mktemp("own"), engine=HFRolloutEngine(), **options)


def versions_of(engine):
    return [version for version, *_ in engine.updates]


@pytest.mark.parametrize("adapter", [None, "merged", "separate"])
def test_a_copy_gives_the_same_trajectory(fit, own_weights, adapter):
    options = {} if adapter is None else {"policy": Adapted()}
    expected = own_weights if adapter is None else fit(HFRolloutEngine(), **options)
    engine = CopiedPolicyEngine(adapter or "merged")
    assert isinstance(engine, SyncedRolloutEngine)
    assert not isinstance(HFRolloutEngine(), SyncedRolloutEngine)
    run = fit(engine, **options)
    assert run.tokens == expected.tokens
    assert same(run.weights[-1], expected.weights[-1])
    assert versions_of(engine) == [1, 2, 3]
    assert [step["sync/count"] for step in run.steps] == [1, 1, 1]
    assert [step["sync/restarts"] for step in run.steps] == [0, 0, 0]
    policy = dict(run.module.policy.named_parameters())
    own = sum(p.nbytes for name, p in policy.items() if "lora_" not in name)
    added = sum(p.nbytes for p in policy.values() if p.requires_grad) if adapter == "separate" else 0
    assert [step["sync/bytes"] for step in run.steps] == [own + added] + [added or own] * 2


def test_older_weights_would_give_another_trajectory(fit, own_weights):
    still = fit(HFRolloutEngine(), optimizer=OptimizerConfig(0.0, eps=1.0))
    assert [a == b for a, b in zip(own_weights.tokens, still.tokens, strict=True)] == [True, False, False]


def test_a_separate_adapter_sends_its_base_once(fit):
    engine = CopiedPolicyEngine("separate", faults={("generate", 3): "lost"})
    run = fit(engine, policy=Adapted(target_modules=["q_proj"]), steps=4)
    base = sum("lora_" not in name for name, _ in run.module.policy.named_parameters())
    # The third time it is lost, with its base.
    assert engine.updates == [(1, base, 4), (2, 0, 4), (3, 0, 4), (4, base, 4), (5, 0, 4)]
    with pytest.raises(ValueError, match=r"CopiedPolicyEngine.adapter is 'separate', but .* has no adapter"):
        fit(CopiedPolicyEngine("separate"))


@pytest.mark.parametrize(
    ("options", "trainer", "steps_of_updates"),
    [
        ({"num_iterations": 2, "steps": 4}, {"num_sanity_val_steps": 1}, [0, 2]),
        # Validation after a step shares its sync with the rollout behind it.
        ({"num_mini_batches": 2, "steps": 4}, {"val_check_interval": 2}, [0, 2, 4]),
        # Two rollouts to an optimizer step.
        ({"steps": 2}, {"accumulate_grad_batches": 2, "limit_val_batches": 0}, [0, 1]),
        # Equal rewards move nothing.
        ({"dynamic_sampling": True, "rewards": tiny_runs.constant(0.0)}, {}, [0]),
    ],
    ids=["iterations", "validation", "accumulation", "dynamic sampling"],
)
def test_changed_weights_are_sent_once(fit, options, trainer, steps_of_updates):
    engine, steps, module_of = CopiedPolicyEngine(), [], []
    update = engine.update_weights

    def note(*args, **kwargs):
        steps.append(module_of[0].global_step)
        return update(*args, **kwargs)

    class Module(Callback):
        def setup(self, trainer, pl_module, stage):
            module_of.append(pl_module)

    engine.update_weights = note
    fit(engine, callbacks=[Module()], trainer=trainer, val=True, **options)
    assert steps == steps_of_updates
    assert versions_of(engine) == [*range(1, 1 + len(steps))]
    assert engine.calls["generate"] >= len(steps)


@pytest.mark.parametrize("cls", [GRPO, PPO])
def test_metrics_are_summed_since_the_previous_rollouts(fit, cls, monkeypatch):
    monkeypatch.setattr("pl_grouprl.rollout.weight_sync.num_ranks", lambda: 2)  # times the wait of one for the other
    engine = CopiedPolicyEngine()
    engine.version = 40  # what a server says that another process has left
    run = fit(engine, cls=cls, num_mini_batches=2, steps=4, trainer={"val_check_interval": 1}, val=True)
    assert versions_of(engine) == [41, 42, 43, 44, 45]
    # Each update of the same rollouts shows the same; validation has synced twice since the first ones.
    assert [step["sync/count"] for step in run.steps] == [1, 1, 2, 2]
    assert run.steps[2]["sync/bytes"] == 2 * run.steps[0]["sync/bytes"]
    assert all(step["sync/seconds"] > 0 for step in run.steps)
    for step in run.steps[1:]:
        parts = [value for name, value in step.items() if name.startswith("time/") and name != "time/step"]
        assert sum(parts) == pytest.approx(step["time/step"])
    assert run.steps[1]["time/weight_sync"] > 0  # callbacks see the times of the step before
    assert run.steps[1]["time/wait_for_ranks"] > 0


@pytest.mark.parametrize("by", ["the weight", "its data", "another storage", "a buffer", "a restart"])
def test_a_weight_that_is_written_to_is_sent_again(fit, by):
    class Writes(Callback):
        def on_validation_start(self, trainer, module):
            if by == "a buffer" and not hasattr(module.policy.model, "extra"):
                module.policy.model.register_buffer("extra", torch.zeros(2))

        def on_validation_end(self, trainer, module):
            weight = module.policy.lm_head.weight
            with torch.no_grad():
                if by == "the weight":
                    weight[0, 0] += 1e-3
                elif by == "its data":
                    weight.data[0, 0] += 1e-3
                elif by == "another storage":
                    weight.data = weight.data + 1e-3
                elif by == "a buffer":
                    module.policy.model.extra += 1
                elif len(engine.updates) == 1:
                    engine.close()  # and its version is None

    class NoExtra(CopiedPolicyEngine):
        def update_weights(self, weights, **options):
            return super().update_weights((own for own in weights if "extra" not in own[0]), **options)

    engine = NoExtra()
    fit(engine, callbacks=[Writes()], steps=2, trainer={"num_sanity_val_steps": 1}, val=True)
    assert versions_of(engine) == [1, 2, 3]  # before the first step, again since validation had one; after it


def test_averaged_weights_are_validated_and_not_trained_on(fit):
    """Weights that a callback puts in for validation, as averages of earlier ones are, and takes out again."""

    class Swaps(Callback):
        def on_validation_start(self, trainer, module):
            self.kept = [parameter.data.clone() for parameter in module.policy.parameters()]
            for parameter in module.policy.parameters():
                parameter.data.mul_(0.5)

        def on_validation_end(self, trainer, module):
            for parameter, kept in zip(module.policy.parameters(), self.kept, strict=True):
                parameter.data.copy_(kept)

    options = {"trainer": {"val_check_interval": 1}, "num_mini_batches": 2, "val": True}
    expected, run = (fit(engine(), callbacks=[Swaps()], **options) for engine in (HFRolloutEngine, CopiedPolicyEngine))
    assert run.tokens == expected.tokens
    assert same(run.weights[-1], expected.weights[-1])


def test_a_sampler_that_computes_something_else_with_the_weights_stops_the_run(fit):
    class Decided(TinyPolicy):
        """Large logits."""

        def load(self):
            policy = super().load()
            with torch.no_grad():
                policy.lm_head.weight.mul_(100)
            return policy

    class ReadsTheConfigOtherwise(CopiedPolicyEngine):
        def bind(self, model, tokenizer=None):
            super().bind(model, tokenizer)
            self._config = copy.deepcopy(self._config)
            self._config.rms_norm_eps = 10.0

    with pytest.raises(WeightsMismatchError, match="log-probabilities differ from the policy's"):
        fit(ReadsTheConfigOtherwise(), policy=Decided(), steps=1)
    fit(CopiedPolicyEngine(), policy=Decided(), steps=1)


@pytest.mark.parametrize("fault", ["lost", "lost at once"])
@pytest.mark.parametrize("method", ["update", "generate"])
def test_a_lost_sampler_changes_nothing_unless_it_is_lost_repeatedly(fit, own_weights, method, fault):
    engine = CopiedPolicyEngine(faults={(method, 2): fault, (method, 3): fault})
    run = fit(engine)
    assert run.tokens == own_weights.tokens
    assert same(run.weights[-1], own_weights.weights[-1])
    assert [step["sync/restarts"] for step in run.steps] == [0, 2, 0]
    assert engine.calls[method] == 5
    if fault == "lost":
        engine = CopiedPolicyEngine(faults=dict.fromkeys([(method, 2), (method, 3), (method, 4)], fault))
        with pytest.raises(RuntimeError, match=r"CopiedPolicyEngine was lost 3 times in a row.* it was restarted"):
            fit(engine)
        assert engine.calls[method] == 4


def test_other_weights_in_the_sampler_stop_the_run(fit):
    engine = CopiedPolicyEngine()

    class Meddles(Callback):
        def on_validation_end(self, trainer, module):
            with torch.no_grad():
                engine.model.lm_head.weight[3, 5] += 1e-6

    with pytest.raises(WeightsMismatchError, match=r"lm_head.weight is not as it was given"):
        fit(engine, callbacks=[Meddles()], trainer={"num_sanity_val_steps": 1}, val=True)
    assert engine.model is None  # closed


@pytest.mark.parametrize(
    ("method", "fault"),
    sweep_pairs(
        itertools.product(["update", "generate"], ["failed", "failed at once"]),
        quick=[("update", "failed"), ("generate", "failed at once")],
    ),
)
def test_an_error_closes_the_engine_and_another_fit_works(fit, own_weights, method, fault):
    engine = CopiedPolicyEngine(faults={(method, 2): fault})
    with pytest.raises(OSError, match="no space left"):
        fit(engine)
    assert engine.closes == 1
    run = fit(engine)  # whose faults are over
    assert run.tokens == own_weights.tokens
    assert same(run.weights[-1], own_weights.weights[-1])
    assert engine.starts == 2


def test_an_error_while_closing_hides_nothing(fit, monkeypatch):
    engine = CopiedPolicyEngine(faults={("generate", 2): "failed"})
    monkeypatch.setattr(engine, "close", lambda: {}["sampler"])
    with (
        pytest.warns(UserWarning, match=r"CopiedPolicyEngine.close failed after an exception: 'sampler'"),
        pytest.raises(OSError, match="no space left"),
    ):
        fit(engine)


def test_every_run_closes_the_engine_and_starts_it_again(fit, make_data, make_trainer):
    engine = CopiedPolicyEngine()
    module = fit(engine).module
    assert (engine.starts, engine.closes) == (1, 1)
    for _ in range(2):
        make_trainer().validate(module, make_data(val=True), verbose=False)
    assert (engine.starts, engine.closes) == (3, 3)
    make_trainer(max_steps=1).fit(module, make_data())
    assert versions_of(engine) == [1, 2, 3, 4, 5, 6]


def test_resume_is_exact(fit):
    """Behind the updates of the first rollouts, and amid those of the second."""
    options = {"num_mini_batches": 2, "steps": 6}
    whole = fit(CopiedPolicyEngine(), save=True, **options)
    for step, updates in ((2, 2), (3, 1)):
        resumed = fit(engine := CopiedPolicyEngine(), resume=step, **options)
        assert resumed.tokens == whole.tokens[step:]
        assert same(resumed.weights[-1], whole.weights[-1])
        assert len(engine.updates) == updates


def test_unread_weights_are_exhausted():
    read, given = [], [("a", torch.zeros(1)), ("b", torch.ones(1)), ("c", torch.ones(1))]

    def stream(name):
        for weight in given:
            read.append((name, weight[0]))
            yield weight

    def partly(weights):
        yield from weights

    def fail():
        with read_to_the_end(stream("first"), stream("second")) as (first, _):
            reader = partly(first)
            next(reader)
            reader.close()  # a generator that is given up closes what it yields from
            raise OSError("amid")

    with pytest.raises(OSError, match="amid"):
        fail()
    assert read == [(part, name) for part in ("first", "second") for name in "abc"]


# Completions end where the chat template ends the model's turns, whatever the engine.

ENDED = "{% for m in messages %}{{ m.content }}<pad>{% endfor %}"
NEW_TOKEN = "{% for m in messages %}{{ m.content }}z{% endfor %}"
ENDLESS = "{{ messages[0].content }}"


@pytest.mark.parametrize(
    ("template", "option", "kwargs", "end"),
    [
        (None, ENDED, {}, "<pad>"),
        (ENDED, None, {}, "<pad>"),
        (None, None, {"chat_template": ENDED}, "<pad>"),
        (NEW_TOKEN, None, {}, "z"),
        (ENDLESS, None, {}, None),
    ],
)
def test_completions_end_with_the_turn_of_the_chat_template(tmp_path, caplog, template, option, kwargs, end):
    """Its token is not the tokenizer's EOS token, as with a base model; every engine is told."""
    seen = []

    class Policy(TinyPolicy):
        def load_tokenizer(self):
            tokenizer = super().load_tokenizer()
            tokenizer.add_tokens(["z"], special_tokens=True)  # which the vocabulary has
            tokenizer.chat_template = template
            return tokenizer

    class Engine(ScriptedEngine):
        def generate(self, prompts, sampling, **options):
            seen.append(sampling.stop_token_ids)
            return super().generate(prompts, sampling, **options)

    rows = [{"prompt": "12"}, {"prompt": "345"}]
    data = PromptDataModule(rows, rows, batch_size=2, chat_template_kwargs=kwargs)
    own = {"episodes": {"chat_template": option}} if option else {}
    sampling = SamplingConfig(5, stop_token_ids=(7,))
    told = pytest.warns(UserWarning, match="turns without an end token") if end is None else nullcontext()
    with caplog.at_level(logging.INFO), told:
        run = tiny_runs.fit(tmp_path, policy=Policy(), engine=Engine(), sampling=sampling, data=data, **own)
    ids = [] if end is None else Policy().load_tokenizer()(end, add_special_tokens=False)["input_ids"]
    assert set(seen) == {(7, *ids)}
    assert run.module.sampling.stop_token_ids == (7,)
    assert caplog.text.count(f"The chat template ends the model's turns with {end!r}; completions end there") == (
        0 if end is None else 1
    )
