"""User-defined losses and estimators: registration, checked options, errors with a remedy."""

import copy
import importlib
import pickle
import runpy
import sys
from dataclasses import FrozenInstanceError

import pytest
import torch

from pl_grouprl.functional import policy_loss as loss_registry
from pl_grouprl.functional.advantages import base as estimator_registry
from pl_grouprl.functional.advantages import make_advantage_estimator, register_advantage_estimator
from pl_grouprl.functional.policy_loss import PolicyLoss, make_policy_loss, register_policy_loss
from pl_grouprl.functional.registry import describe


@pytest.fixture(autouse=True)
def registries(monkeypatch):
    """Whatever a test registers is forgotten after it."""
    monkeypatch.setattr(loss_registry, "POLICY_LOSSES", dict(loss_registry.POLICY_LOSSES))
    monkeypatch.setattr(estimator_registry, "ADVANTAGE_ESTIMATORS", dict(estimator_registry.ADVANTAGE_ESTIMATORS))


def scaled(policy_logprobs_N, old_logprobs_N, advantages_N, *, mask_N, scale: float = 1.0, signs: str = "both"):
    if scale <= 0:
        raise ValueError(f"scale is {scale}; it must be larger than 0.")
    return PolicyLoss(-scale * advantages_N * policy_logprobs_N * mask_N, {}, mask_N.sum())


def centred(rewards, group_ids, *, shift: float = 0.0):
    return rewards - rewards.mean() + shift


def test_a_registered_loss_is_the_function_with_options():
    assert register_policy_loss("scaled", compares_tokens=True)(scaled) is scaled
    loss = make_policy_loss("scaled", scale=2)
    assert (loss.name, loss.function, loss.options) == ("scaled", scaled, {"scale": 2, "signs": "both"})
    assert loss.compares_tokens
    assert not loss.uses_rollouts
    assert describe(loss) == repr(loss) == "scaled(scale=2, signs='both')"
    x_N = torch.tensor([1.0, 2.0])
    result = loss(x_N, x_N, x_N, mask_N=x_N > 0, rollout_index_N=x_N.long(), num_rollouts=3)
    assert result.per_token_N.tolist() == [-2.0, -8.0]
    with pytest.raises(FrozenInstanceError):
        loss.name = "other"
    for other in (pickle.loads(pickle.dumps(loss)), copy.deepcopy(loss)):
        assert other == loss


def test_a_loss_of_rollouts_gets_them():
    @register_policy_loss("rollouts", uses_rollouts=True)
    def of_rollouts(policy_logprobs_N, old_logprobs_N, advantages_N, *, mask_N, rollout_index_N, num_rollouts):
        return PolicyLoss(rollout_index_N + num_rollouts, {}, mask_N.sum())

    x_N = torch.zeros(2)
    options = {"mask_N": x_N == 0, "rollout_index_N": torch.tensor([0, 1]), "num_rollouts": 2}
    assert make_policy_loss("rollouts")(x_N, x_N, x_N, **options).per_token_N.tolist() == [2, 3]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": 0.0}, "scale is 0.0; it must be larger than 0"),
        ({"scale": "2"}, "scaled.scale is '2'; it must be a number"),
        ({"signs": 1}, "scaled.signs is 1; it must be a string"),
        ({"mask_N": None}, "policy_loss='scaled' does not use mask_N; it takes scale, signs"),
        ({"scael": 2.0}, "policy_loss='scaled' does not use scael; it takes scale, signs. Leave the others unset."),
    ],
)
def test_options_are_refused_when_the_loss_is_chosen(options, message):
    register_policy_loss("scaled")(scaled)
    with pytest.raises(ValueError, match=message):
        make_policy_loss("scaled", **options)


def test_a_result_of_the_wrong_shape_is_refused_when_the_function_is_chosen():
    @register_policy_loss("mean")
    def mean(policy_logprobs_N, old_logprobs_N, advantages_N, *, mask_N):
        return policy_logprobs_N.mean()

    @register_advantage_estimator("total")
    def total(rewards, group_ids):
        return rewards.sum()

    register_advantage_estimator("rows", per_token=True)(centred)
    with pytest.raises(TypeError, match="policy_loss='mean' returned a Tensor for two tokens; return a PolicyLoss"):
        make_policy_loss("mean")
    with pytest.raises(TypeError, match=r"'total' returned shape \(\) for two rollouts of one token; .* shape \[B\]"):
        make_advantage_estimator("total")
    with pytest.raises(TypeError, match=r"'rows' returned shape \(2,\) for two rollouts .* shape \[B, T\]"):
        make_advantage_estimator("rows")


def test_an_estimator_gets_what_it_declares():
    @register_advantage_estimator("short", needs=("lengths",))
    def short(rewards, lengths, *, weight: float = 1.0):
        return rewards - weight * lengths

    @register_advantage_estimator("tokens", needs=("mask", "reduce"), per_token=True, takes_token_rewards=True)
    def tokens(rewards, mask, reduce):
        return rewards * mask if reduce is None else reduce(rewards * mask)

    estimator, rewards = make_advantage_estimator("short", weight=2.0), torch.tensor([5.0, 9.0])
    assert estimator(rewards, [0, 0], lengths=torch.tensor([1, 2])).tolist() == [3.0, 5.0]
    with pytest.raises(ValueError, match="lengths is None, but the estimator 'short' needs it"):
        estimator(rewards, [0, 0])
    assert [estimator.compares_rollouts, estimator.needs_greedy, estimator.per_token] == [False] * 3
    rows, mask = torch.tensor([[1.0, 2.0]]), torch.tensor([[True, False]])
    assert make_advantage_estimator("tokens")(rows, [0], mask=mask, reduce=lambda sums: 2 * sums).tolist() == [[2, 0]]


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"needs": ("mask",)}, "'bad' needs mask; with per_token=False there are group_ids, lengths, greedy_rewards"),
        ({"needs": ("lengths",), "per_token": True}, "needs lengths; with per_token=True there are group_ids, mask"),
        ({"takes_token_rewards": True}, "needs takes_token_rewards; with per_token=False"),
        ({"takes_steps": True, "per_token": True}, "'bad' takes steps, for which it may only need group_ids"),
        (
            {"needs": ("group_ids", "lengths")},
            r"'bad' lacks lengths; make the arguments of centred and its .*bad\(rewards, group_ids=\.\.\., lengths",
        ),
        ({"needs": ()}, "'bad' does not declare group_ids; make the arguments of centred"),
    ],
)
def test_mismatched_declarations_are_refused(declared, message):
    with pytest.raises((TypeError, ValueError), match=message):
        register_advantage_estimator("bad", **declared)(centred)
    assert "bad" not in estimator_registry.ADVANTAGE_ESTIMATORS


def test_non_functions_and_missing_names_are_refused():
    with pytest.raises(TypeError, match=r"a name is missing: write @register_policy_loss\('...'\) above a function"):
        register_policy_loss(scaled)
    with pytest.raises(TypeError, match="policy_loss 'torch' is the class Tensor; register a function"):
        register_policy_loss("torch")(torch.Tensor)

    def of_rollouts(policy_logprobs_N, old_logprobs_N, advantages_N, *, mask_N, rollout_index_N): ...

    with pytest.raises(TypeError, match="policy_loss 'own' does not declare rollout_index_N"):
        register_policy_loss("own")(of_rollouts)


def test_a_name_belongs_to_one_function(tmp_path, monkeypatch):
    with pytest.raises(
        ValueError, match=r"'grpo' is pl_grouprl\S+.group_relative_advantages already; choose another name"
    ):
        register_advantage_estimator("grpo")(centred)
    (tmp_path / "own_losses.py").write_text(
        "from pl_grouprl.functional.advantages import register_advantage_estimator\n\n"
        "@register_advantage_estimator('own')\ndef own(rewards, group_ids): return rewards\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("own_losses")
    first = module.own
    assert importlib.reload(module).own is not first
    assert make_advantage_estimator("own").function is module.own
    del sys.modules["own_losses"]


def test_options_are_keyword_only_and_have_defaults():
    def positional(policy_logprobs_N, old_logprobs_N, advantages_N, mask_N, weight=1.0): ...

    def required(policy_logprobs_N, old_logprobs_N, advantages_N, *, mask_N, weight): ...

    for function in (positional, required):
        with pytest.raises(TypeError, match=r"'own': weight must be keyword-only with a default to be an option"):
            register_policy_loss("own")(function)
    with pytest.raises(TypeError, match=r"needs is the string 'group_ids'; pass a tuple, \('group_ids',\)"):
        register_advantage_estimator("own", needs="group_ids")


def test_an_unresolvable_annotation_names_the_option():
    def typed(rewards, group_ids, *, weight: "Missing" = 1.0):  # noqa: F821
        return rewards

    register_advantage_estimator("typed")(typed)
    make_advantage_estimator("typed")
    with pytest.raises(
        TypeError, match="weight of advantage_estimator 'typed' has the type 'Missing', not known at run"
    ):
        make_advantage_estimator("typed", weight=2.0)


def test_closures_of_one_factory_are_distinct():
    def scaled_by(factor):
        def scaled(rewards, group_ids):
            return factor * rewards

        return scaled

    register_advantage_estimator("made")(scaled_by(2))
    register_advantage_estimator("made")(scaled_by(2))
    with pytest.raises(ValueError, match=r"'made' is .*scaled already"):
        register_advantage_estimator("made")(scaled_by(3))
    register_advantage_estimator("line")(lambda rewards, group_ids: rewards)
    with pytest.raises(ValueError, match=r"'line' is .*lambda> already"):
        register_advantage_estimator("line")(lambda rewards, group_ids: -rewards)


def test_one_file_under_two_module_names_is_one_function(tmp_path, monkeypatch):
    (tmp_path / "train_it.py").write_text(
        "from pl_grouprl.functional.advantages import register_advantage_estimator\n\n"
        "@register_advantage_estimator('twice')\ndef twice(rewards, group_ids): return rewards\n"
    )
    runpy.run_path(str(tmp_path / "train_it.py"), run_name="__main__")
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("train_it")
    assert make_advantage_estimator("twice").function is module.twice
    del sys.modules["train_it"]


def test_an_option_that_is_a_function_is_recorded_by_its_name():
    @register_advantage_estimator("shaped")
    def shaped(rewards, group_ids, *, shape=centred):
        return shape(rewards, group_ids)

    record = describe(make_advantage_estimator("shaped"))
    assert "centred" in record
    assert " at 0x" not in record


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda p, mask: PolicyLoss(p, None, mask.sum()), "returned metrics=None; metrics must map names to"),
        (lambda p, mask: PolicyLoss(p, {"mine": 1.0}, mask.sum()), "returned mine; metrics must map names to sums"),
        (lambda p, mask: PolicyLoss(p, {"mine": p}, mask.sum()), "returned mine; metrics must map names to sums"),
        (lambda p, mask: PolicyLoss(p[mask], {}, mask.sum()), "for two tokens; return a PolicyLoss whose per_token_N"),
    ],
)
def test_a_loss_is_tried_out_with_and_without_trained_tokens(result, message):
    @register_policy_loss("tried")
    def tried(policy_logprobs_N, old_logprobs_N, advantages_N, *, mask_N):
        return result(policy_logprobs_N, mask_N)

    with pytest.raises(TypeError, match=message):
        make_policy_loss("tried")


def test_a_loss_with_arguments_of_other_names_is_told_the_call():
    call = r"own\(policy_logprobs_N, old_logprobs_N, advantages_N, mask_N=\.\.\., options\)"
    with pytest.raises(TypeError, match=rf"'own' lacks mask_N; .* called as {call}"):
        register_policy_loss("own")(lambda new, old, advantages, *, mask: None)
