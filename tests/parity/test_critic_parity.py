"""Values of packed shared rows against the repeated run: values and the gradients of every parameter of the critic."""

import copy

import pytest
import torch
from helpers.tiny_models import VOCAB, gradients, random_groups, tiny_model, worst_gradient_error

from pl_grouprl.attention import find_decoder, shared_prefix
from pl_grouprl.models.critic import LoRACritic, PolicyCopyCritic, SharedTrunkCritic, check_critic_parity
from pl_grouprl.packing import pack, truncate_rollouts

pytestmark = pytest.mark.usefixtures("layers_checked_once")

SHAPES = {
    "groups": [(20, [7, 1, 12, 3]), (5, [9, 2])],
    "group of one": [(11, [5])],
    "empty and single": [(6, [0, 4]), (11, [5]), (1, [3, 0, 0, 8]), (4, [1])],
}
SOURCES = {
    "copy": PolicyCopyCritic(head_std=0.3),
    "lora": LoRACritic(r=4, head_std=0.3),
    "shared trunk": SharedTrunkCritic(head_std=0.3),
}


def make_critic(source, policy):
    """With adapters that do something: LoRA's start at zero."""
    critic = source.load(policy)
    generator = torch.Generator().manual_seed(5)
    for name, parameter in critic.named_parameters():
        if "lora_B" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator).to(parameter) * 0.2
    return critic.to(policy.dtype) if policy.dtype == torch.float64 else critic


def values_one_by_one(critic, groups):
    """The definition: the trunk alone with one sequence, the head on each state that predicts a response token."""
    values, last = [], []
    weight, bias = critic.head.weight[0], critic.head.bias[0]
    for group in groups:
        for rollout in group.rollouts:
            tokens = torch.tensor([group.prompt_ids + rollout.token_ids])
            all_values = critic.trunk(input_ids=tokens, use_cache=False).last_hidden_state[0] @ weight + bias
            values.append(all_values[len(group.prompt_ids) - 1 : -1])
            last.append(all_values[-1])
    return torch.cat(values), torch.stack(last)


def loss_of(values, last):
    weights = torch.linspace(0.5, 1.5, len(values), dtype=values.dtype)
    return (values * weights).sum() + (last * torch.linspace(-1, 1, len(last), dtype=last.dtype)).sum()


def packed_values(critic, batch):
    return critic.values(batch), critic.values(batch, batch.final_index_B)


def both(critic, policy, groups, sharing):
    for module in (critic, policy):
        module.zero_grad()
    with shared_prefix(critic.trunk):
        values, last = packed_values(critic, pack(groups, sharing))
        loss_of(values, last).backward()
    found = gradients(critic) | ({} if not critic.shares_trunk else gradients(critic.trunk))
    return torch.cat([values, last]).detach(), found


@pytest.mark.parametrize(
    ("family", "shapes", "source", "sharing"),
    [
        *(("qwen3", shapes, source, "shared") for shapes in SHAPES for source in SOURCES),
        *((family, "groups", source, "shared") for family in ("llama", "gpt2") for source in SOURCES),
        *(("qwen3", "empty and single", source, "repeated") for source in SOURCES),
    ],
)
def test_values_and_gradients(family, shapes, source, sharing):
    policy, groups = tiny_model(family), random_groups(0, SHAPES[shapes])
    critic = make_critic(SOURCES[source], policy)
    actual, actual_gradients = both(critic, policy, groups, sharing)
    critic.zero_grad()
    policy.zero_grad()
    expected = values_one_by_one(critic, groups)
    loss_of(*expected).backward()
    expected_gradients = gradients(critic) | ({} if not critic.shares_trunk else gradients(critic.trunk))
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, torch.cat(expected).detach(), atol=1e-5, rtol=1e-5)
    assert worst_gradient_error(actual_gradients, expected_gradients) < 1e-4
    trained = {name for name, p in critic.named_parameters() if p.requires_grad}
    assert trained <= expected_gradients.keys()


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_float64(family):
    policy, groups = tiny_model(family, dtype=torch.float64), random_groups(1, SHAPES["groups"])
    critic = make_critic(PolicyCopyCritic(head_std=0.3), policy)
    shared, shared_gradients = both(critic, policy, groups, "shared")
    repeated, repeated_gradients = both(critic, policy, groups, "repeated")
    assert shared.dtype == torch.float64
    # GPT2 has no rotary angles or root-mean-square norms, which transformers takes in float32.
    tolerance = 1e-12 if family == "gpt2" else 2e-6
    torch.testing.assert_close(shared, repeated, atol=tolerance, rtol=tolerance)
    assert worst_gradient_error(shared_gradients, repeated_gradients) < 10 * tolerance


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_a_value_sees_nothing_from_its_token_on(family):
    critic = PolicyCopyCritic(head_std=0.3).load(tiny_model(family))
    before = random_groups(2, [(9, [6, 4])])
    after = copy.deepcopy(before)
    after[0].rollouts[0].token_ids[3] = (before[0].rollouts[0].token_ids[3] + 1) % VOCAB
    with torch.no_grad(), shared_prefix(critic.trunk):
        (one, one_last), (other, other_last) = (packed_values(critic, pack(groups)) for groups in (before, after))
    assert torch.equal(one[:4], other[:4])  # V[3] stands before the changed token
    assert (one[4:6] != other[4:6]).all()
    assert torch.equal(one[6:], other[6:])
    assert (one_last != other_last).tolist() == [True, False]


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_truncated_rollouts_give_the_same_values_at_the_starts(family):
    """What GROUP PPO trains its critic on: starts alone, and no token run behind the last of them."""
    groups = random_groups(3, [(8, [6, 0, 9]), (5, [4])])
    starts = [[0, 2], [], [0, 1, 5], [3]]
    critic = make_critic(PolicyCopyCritic(head_std=0.3), tiny_model(family))
    batch = pack(groups)
    offsets = [0, 6, 6, 15]
    chosen = torch.tensor([offset + s for offset, own in zip(offsets, starts, strict=True) for s in own])
    is_start_N = torch.zeros(19, dtype=torch.bool)
    is_start_N[chosen] = True
    short_groups, kept_index_M = truncate_rollouts(groups, [3, 0, 6, 4])
    short = pack(short_groups)
    assert short.num_tokens_run == batch.num_tokens_run - 6
    found = []
    for rows, at in ((batch, is_start_N), (short, is_start_N[kept_index_M])):
        critic.zero_grad()
        with shared_prefix(critic.trunk):
            values = critic.values(rows, rows.predict_index_N[at])
            (values - torch.arange(6.0)).square().sum().backward()
        found.append((values.detach(), gradients(critic)))
    torch.testing.assert_close(found[1][0], found[0][0], atol=1e-6, rtol=1e-6)
    assert worst_gradient_error(found[1][1], found[0][1]) < 1e-5


@pytest.mark.parametrize(("family", "source"), [("qwen3", "copy"), ("llama", "shared trunk"), ("gpt2", "lora")])
def test_the_parity_check_passes(family, source):
    policy = tiny_model(family)
    report = check_critic_parity(make_critic(SOURCES[source], policy))
    report.raise_if_failed()
    assert "differences of hidden states along the value head" in str(report)
    assert report.compared_weights > 0
    assert report.token_ratio > 1
    assert not gradients(policy)


def test_the_parity_check_notices_a_wrong_trunk():
    """Negative control: positions that are off by one behind the prompt, with a head that is exactly zero."""
    critic = PolicyCopyCritic(head_std=0.0).load(tiny_model("gpt2"))
    check_critic_parity(critic).raise_if_failed()

    def move(decoder, args, kwargs):
        if "prefix_layout" in kwargs:
            kwargs["position_ids"] = kwargs["position_ids"] + 1
        return args, kwargs

    critic.trunk.register_forward_pre_hook(move, with_kwargs=True)
    assert not check_critic_parity(critic).passed


def test_a_trunk_in_no_context_is_refused():
    policy = tiny_model("llama")
    critic = PolicyCopyCritic().load(policy)
    batch = pack(random_groups(4, SHAPES["groups"]))
    with shared_prefix(policy), pytest.raises(RuntimeError, match="layout"):
        critic.values(batch)
    with shared_prefix(policy):  # which is the shared trunk's too
        SharedTrunkCritic().load(policy).values(batch)
    assert find_decoder(policy) is SharedTrunkCritic().load(policy).trunk
