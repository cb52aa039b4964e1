"""An engine with a copy of the policy's weights gets them when they have changed, and again where it has lost them."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from helpers.copied_engine import CopiedPolicyEngine
from helpers.sweeps import sweep_pairs
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from pl_grouprl.algorithms import GRPO, PPO, OptimizerConfig
from pl_grouprl.distributed.checksum import WeightsMismatchError
from pl_grouprl.models import LoRAAdapter
from pl_grouprl.rollout import HFRolloutEngine
from pl_grouprl.rollout.engine import SyncedRolloutEngine
from pl_grouprl.rollout.weight_sync import read_to_the_end

FAST = OptimizerConfig(learning_rate=1.0, eps=1.0)
"""So large steps that rollouts of older weights are other rollouts."""


class Adapted:
    """The tiny policy with an adapter."""

    def __init__(self, tiny_policy, **options):
        self.source, self.adapter = tiny_policy(), LoRAAdapter(r=4, alpha=64, **options)
        self.load_tokenizer = self.source.load_tokenizer

    def load(self):
        return self.adapter.add_to(self.source.load())


class Rollouts(Callback):
    """The tokens of every batch of rollouts, and the metrics of every step."""

    def __init__(self):
        self.tokens, self.steps = [], []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        groups = module.last_rollouts.groups
        self.tokens.append([[rollout.token_ids for rollout in group.rollouts] for group in groups])
        self.steps.append({name: float(value) for name, value in trainer.callback_metrics.items()})


@pytest.fixture
def fit(make_module, make_data, make_trainer, parameters):
    """Train with an engine; gives the module, what its rollouts were, and the weights at the end."""

    def run(engine, callbacks=(), ckpt_path=None, trainer=None, val=False, **options):
        torch.manual_seed(1)
        module = make_module(**{"engine": engine, "optimizer": FAST, **options})
        rollouts = Rollouts()
        options = {"max_steps": 3, "num_sanity_val_steps": 0, **(trainer or {})}
        trainer = make_trainer(callbacks=[rollouts, *callbacks], enable_checkpointing=bool(callbacks), **options)
        trainer.fit(module, make_data(train_size=16, val=val), ckpt_path=ckpt_path, weights_only=True)
        return module, rollouts, parameters(module)

    return run


def same(left, right):
    return all(torch.equal(one, other) for one, other in zip(left, right, strict=True))


def test_the_test_engine_is_a_synced_engine():
    assert isinstance(CopiedPolicyEngine(), SyncedRolloutEngine)
    assert not isinstance(HFRolloutEngine(), SyncedRolloutEngine)


@pytest.mark.parametrize("adapter", [None, "merged", "separate"])
def test_a_copy_gives_the_same_trajectory(fit, tiny_policy, adapter):
    options = {} if adapter is None else {"policy": Adapted(tiny_policy)}
    _, expected, weights = fit(HFRolloutEngine(), **options)
    engine = CopiedPolicyEngine(adapter or "merged")
    module, rollouts, own_weights = fit(engine, **options)
    assert rollouts.tokens == expected.tokens
    assert same(weights, own_weights)
    assert [version for version, *_ in engine.updates] == [1, 2, 3]
    assert [step["sync/count"] for step in rollouts.steps] == [1, 1, 1]
    assert [step["sync/restarts"] for step in rollouts.steps] == [0, 0, 0]
    own = sum(p.nbytes for name, p in module.policy.named_parameters() if "lora_" not in name)
    added = sum(p.nbytes for p in module.policy.parameters() if p.requires_grad) if adapter == "separate" else 0
    sizes = [own + added] + [added or own] * 2
    assert [step["sync/bytes"] for step in rollouts.steps] == sizes


def test_a_separate_adapter_sends_its_base_once(fit, tiny_policy):
    engine = CopiedPolicyEngine("separate", faults={("generate", 3): "lost"})
    module, *_ = fit(engine, policy=Adapted(tiny_policy, target_modules=["q_proj"]), trainer={"max_steps": 4})
    base = sum("lora_" not in name for name, _ in module.policy.named_parameters())
    # The third time it is lost, with its base.
    assert engine.updates == [(1, base, 4), (2, 0, 4), (3, 0, 4), (4, base, 4), (5, 0, 4)]


def test_older_weights_would_give_another_trajectory(fit):
    moving, still = (fit(HFRolloutEngine(), optimizer=OptimizerConfig(rate, eps=1.0))[1] for rate in (1.0, 0.0))
    assert moving.tokens[0] == still.tokens[0]
    assert moving.tokens[1] != still.tokens[1]
    assert moving.tokens[2] != still.tokens[2]


@pytest.mark.parametrize(
    ("options", "trainer", "steps_of_updates"),
    [
        ({"num_mini_batches": 2}, {"max_steps": 6}, [0, 2, 4]),
        ({"num_iterations": 2}, {"max_steps": 4, "num_sanity_val_steps": 1}, [0, 2]),
        # Validation after a step shares its sync with the rollout behind it.
        ({"num_mini_batches": 2}, {"max_steps": 4, "val_check_interval": 2}, [0, 2, 4]),
        ({"num_mini_batches": 2}, {"max_steps": 4, "val_check_interval": 1}, [0, 1, 2, 3, 4]),
        # Two rollouts to an optimizer step.
        ({}, {"max_steps": 2, "accumulate_grad_batches": 2, "limit_val_batches": 0}, [0, 1]),
        # Equal rewards move nothing.
        ({"dynamic_sampling": True, "rewards": lambda completions, **columns: [0.0] * len(completions)}, {}, [0]),
    ],
    ids=["mini-batches", "iterations", "validation", "much validation", "accumulation", "dynamic sampling"],
)
def test_changed_weights_are_sent_once(fit, options, trainer, steps_of_updates):
    engine, steps = CopiedPolicyEngine(), []
    update = engine.update_weights

    def note(*args, **kwargs):
        steps.append(module_of[0].global_step)
        return update(*args, **kwargs)

    class Module(Callback):
        def setup(self, trainer, pl_module, stage):
            module_of.append(pl_module)

    module_of, engine.update_weights = [], note
    fit(engine, callbacks=[Module()], trainer=trainer, val=True, **options)
    assert steps == steps_of_updates
    assert [version for version, *_ in engine.updates] == [*range(1, 1 + len(steps))]
    assert engine.calls["generate"] >= len(steps)


def test_metrics_are_summed_since_the_previous_rollouts(fit):
    trainer = {"max_steps": 4, "val_check_interval": 1}
    _, rollouts, _ = fit(CopiedPolicyEngine(), num_mini_batches=2, trainer=trainer, val=True)
    # Each update of the same rollouts shows the same; validation has synced twice since the first ones.
    assert [step["sync/count"] for step in rollouts.steps] == [1, 1, 2, 2]
    assert rollouts.steps[2]["sync/bytes"] == 2 * rollouts.steps[0]["sync/bytes"]
    assert all(step["sync/seconds"] > 0 for step in rollouts.steps)


@pytest.mark.parametrize("cls", [GRPO, PPO])
def test_its_time_is_a_part_of_the_step(fit, cls):
    _, rollouts, _ = fit(CopiedPolicyEngine(), cls=cls, num_mini_batches=2, trainer={"max_steps": 4})
    for place, step in enumerate(rollouts.steps[1:]):  # callbacks see the times of the step before
        assert (step["time/weight_sync"] > 0) == (place % 2 == 0)
        parts = [value for name, value in step.items() if name.startswith("time/") and name != "time/step"]
        assert sum(parts) == pytest.approx(step["time/step"])


@pytest.mark.parametrize("by", ["the weight", "its data", "another storage", "a buffer"])
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
                else:
                    module.policy.model.extra += 1

    class NoExtra(CopiedPolicyEngine):
        def update_weights(self, weights, **options):
            return super().update_weights((own for own in weights if "extra" not in own[0]), **options)

    engine = NoExtra()
    fit(engine, callbacks=[Writes()], trainer={"max_steps": 2, "num_sanity_val_steps": 1}, val=True)
    assert len(engine.updates) == 3  # before the first step, again since validation had one; after it


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

    options = {"trainer": {"max_steps": 4, "val_check_interval": 1}, "num_mini_batches": 2, "val": True}
    _, expected, weights = fit(HFRolloutEngine(), callbacks=[Swaps()], **options)
    _, rollouts, own = fit(CopiedPolicyEngine(), callbacks=[Swaps()], **options)
    assert rollouts.tokens == expected.tokens
    assert same(own, weights)


def test_a_sampler_that_computes_something_else_with_the_weights_stops_the_run(fit, tiny_policy):
    class Decided:
        """The tiny policy with large logits."""

        def load(self):
            policy = tiny_policy().load()
            with torch.no_grad():
                policy.lm_head.weight.mul_(100)
            return policy

        def load_tokenizer(self):
            return tiny_policy().load_tokenizer()

    class ReadsTheConfigOtherwise(CopiedPolicyEngine):
        def bind(self, model, tokenizer=None):
            super().bind(model, tokenizer)
            self._config = copy.deepcopy(self._config)
            self._config.rms_norm_eps = 10.0

    with pytest.raises(WeightsMismatchError, match=r"log-probabilities differ from the policy's by .* nats on average"):
        fit(ReadsTheConfigOtherwise(), policy=Decided(), trainer={"max_steps": 1})
    fit(CopiedPolicyEngine(), policy=Decided(), trainer={"max_steps": 1})


def test_a_sampler_with_other_weights_gets_them_again(fit):
    engine = CopiedPolicyEngine()

    class Restarts(Callback):
        def on_validation_end(self, trainer, module):
            engine._lose()  # and its version is None

    fit(engine, callbacks=[Restarts()], trainer={"max_steps": 1, "num_sanity_val_steps": 1}, val=True)
    assert [version for version, *_ in engine.updates] == [1, 2]


def test_versions_continue_from_the_engines(fit):
    engine = CopiedPolicyEngine()
    engine.version = 40  # what a server says that another process has left
    fit(engine)
    assert [version for version, *_ in engine.updates] == [41, 42, 43]


# What goes wrong.


@pytest.fixture(scope="module")
def expected():
    return {}


@pytest.mark.parametrize("fault", ["lost", "lost at once"])
@pytest.mark.parametrize("method", ["update", "generate"])
def test_a_lost_sampler_changes_nothing(fit, expected, method, fault):
    if not expected:
        expected["tokens"], expected["weights"] = fit(HFRolloutEngine())[1:]
        expected["tokens"] = expected["tokens"].tokens
    engine = CopiedPolicyEngine(faults={(method, 2): fault, (method, 3): fault})
    _, rollouts, weights = fit(engine)
    assert rollouts.tokens == expected["tokens"]
    assert same(weights, expected["weights"])
    assert [step["sync/restarts"] for step in rollouts.steps] == [0, 2, 0]
    assert engine.calls[method] == 5


@pytest.mark.parametrize("method", ["update", "generate"])
def test_a_sampler_that_is_lost_repeatedly_ends_the_run(fit, method):
    engine = CopiedPolicyEngine(faults=dict.fromkeys([(method, 2), (method, 3), (method, 4)], "lost"))
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
def test_an_error_closes_the_engine_and_another_fit_works(fit, method, fault):
    engine = CopiedPolicyEngine(faults={(method, 2): fault})
    with pytest.raises(OSError, match="no space left"):
        fit(engine)
    assert engine.closes == 1
    _, rollouts, weights = fit(engine)  # whose faults are over
    _, expected_rollouts, expected_weights = fit(HFRolloutEngine())
    assert rollouts.tokens == expected_rollouts.tokens
    assert same(weights, expected_weights)
    assert engine.starts == 2


def test_an_error_while_closing_hides_nothing(fit):
    engine = CopiedPolicyEngine(faults={("generate", 2): "failed"})

    def close():
        raise KeyError("sampler")

    engine.close = close
    with (
        pytest.warns(UserWarning, match=r"CopiedPolicyEngine.close failed after an exception: 'sampler'"),
        pytest.raises(OSError, match="no space left"),
    ):
        fit(engine)


def test_every_run_closes_the_engine_and_starts_it_again(fit, make_data, make_trainer):
    engine = CopiedPolicyEngine()
    module, *_ = fit(engine)
    assert (engine.starts, engine.closes) == (1, 1)
    for verb in ("validate", "validate"):
        getattr(make_trainer(), verb)(module, make_data(val=True), verbose=False)
    assert (engine.starts, engine.closes) == (3, 3)
    make_trainer(max_steps=1).fit(module, make_data())
    assert [version for version, *_ in engine.updates] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("step", [2, 3])
def test_resume_is_exact(fit, tmp_path, step):
    # Behind the updates of the first rollouts, and amid those of the second.
    saving = ModelCheckpoint(dirpath=tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    options = {"num_mini_batches": 2, "trainer": {"max_steps": 6}}
    _, whole, weights = fit(CopiedPolicyEngine(), callbacks=[saving], **options)
    engine = CopiedPolicyEngine()
    _, resumed, own_weights = fit(engine, ckpt_path=tmp_path / f"step={step}.ckpt", **options)
    assert resumed.tokens == whole.tokens[step:]
    assert same(weights, own_weights)
    assert len(engine.updates) == {2: 2, 3: 1}[step]


def test_a_separate_adapter_is_required(fit):
    with pytest.raises(
        ValueError, match=r"CopiedPolicyEngine.adapter is 'separate', but the Qwen3ForCausalLM has no adapter; pass 'me"
    ):
        fit(CopiedPolicyEngine("separate"))


def test_rollouts_ahead_are_refused(fit):
    with pytest.raises(
        ValueError, match=r"engine is CopiedPolicyEngine, which cannot sample while the policy is updated"
    ):
        fit(CopiedPolicyEngine(), max_staleness=1, importance_sampling={"mode": "token_truncate"})


# Parts.


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
