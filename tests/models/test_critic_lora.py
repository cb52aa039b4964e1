"""The LoRA critic: base weights exist once, follow the policy, and are neither trained nor saved by the critic."""

import copy
import io
import pickle

import pytest
import torch
from helpers.tiny_models import gradients, random_groups, tiny_model
from torch import nn

from pl_grouprl.attention import find_decoder, shared_prefix
from pl_grouprl.models import CriticSource, LoRACritic, PolicyCopyCritic
from pl_grouprl.models.adapters import LoRAAdapter
from pl_grouprl.packing import pack
from pl_grouprl.utilities import optional

FAMILIES = ("qwen3", "llama", "gpt2")
SOURCE = LoRACritic(r=4, alpha=8, head_std=0.3)


def own_parameters(critic):
    return {name: p for name, p in critic.named_parameters() if p.requires_grad}


def values_of(critic, seed=0):
    batch = pack(random_groups(seed, [(9, [4, 0, 7]), (3, [1])]))
    with shared_prefix(critic.trunk):
        return critic.values(batch)


@pytest.fixture(params=FAMILIES)
def pair(request):
    policy = tiny_model(request.param).train()
    return policy, SOURCE.load(policy)


def test_base_weights_exist_once(pair):
    policy, critic = pair
    theirs = {p.data_ptr() for p in find_decoder(policy).parameters()}
    frozen = {p.data_ptr() for p in critic.parameters() if not p.requires_grad}
    assert frozen == theirs
    assert isinstance(SOURCE, CriticSource)
    assert critic.training
    trained = own_parameters(critic)
    assert trained
    assert all("lora_" in name or name.startswith("head.") for name in trained)
    assert not {p.data_ptr() for p in trained.values()} & theirs


def test_adapters_start_as_zero(pair):
    """LoRA's second matrix is zero, so the critic begins as a copy of the policy with the same head."""
    policy, critic = pair
    expected = values_of(PolicyCopyCritic(head_std=0.3).load(policy))
    torch.testing.assert_close(values_of(critic), expected, atol=1e-6, rtol=1e-6)


def test_no_gradient_reaches_the_policy(pair):
    policy, critic = pair
    values_of(critic).square().sum().backward()
    assert not gradients(policy)
    assert gradients(critic).keys() == own_parameters(critic).keys()
    assert all(p.requires_grad for p in policy.parameters())


def test_an_update_of_the_policy_updates_the_critic(pair):
    policy, critic = pair
    before = values_of(critic).detach()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=0.05)
    policy(torch.tensor([[1, 2, 3]])).logits.square().mean().backward()
    optimizer.step()
    after = values_of(critic).detach()
    assert not torch.allclose(before, after)
    expected = values_of(PolicyCopyCritic(head_std=0.3).load(policy))
    torch.testing.assert_close(after, expected, atol=1e-6, rtol=1e-6)


def test_the_critic_learns_and_the_policy_stays(pair):
    policy, critic = pair
    weights = [p.detach().clone() for p in policy.parameters()]
    optimizer = torch.optim.Adam([p for p in critic.parameters() if p.requires_grad], lr=0.05)
    losses = []
    for _ in range(10):
        loss = (values_of(critic) - 1.0).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert all(torch.equal(a, b) for a, b in zip(weights, policy.parameters(), strict=True))


def test_a_checkpoint_has_adapters_and_head_only_and_resumes(pair):
    policy, critic = pair
    for parameter in own_parameters(critic).values():
        parameter.data += 0.1
    both = nn.ModuleDict({"policy": policy, "critic": critic})
    state = both.state_dict()
    saved = {name.removeprefix("critic.") for name in state if name.startswith("critic.")}
    assert saved == own_parameters(critic).keys()
    expected = values_of(critic).detach()
    stream = io.BytesIO()
    torch.save(state, stream)
    stream.seek(0)
    again = tiny_model(policy.config.model_type, seed=1)
    resumed = nn.ModuleDict({"policy": again, "critic": LoRACritic(r=4, alpha=8, seed=9).load(again)})
    assert not torch.allclose(values_of(resumed["critic"]), expected)
    resumed.load_state_dict(torch.load(stream, weights_only=True))
    assert torch.equal(values_of(resumed["critic"]), expected)
    frozen = {p.data_ptr() for p in resumed["critic"].parameters() if not p.requires_grad}
    assert frozen == {p.data_ptr() for p in find_decoder(again).parameters()}
    del state[next(name for name in state if "lora_A" in name)]
    with pytest.raises(RuntimeError, match="Missing key"):  # what is the critic's own is still missed
        resumed.load_state_dict(state)


def test_retie_after_a_move(pair):
    policy, critic = pair
    for module in (policy, critic):  # what a move to a device does: new storage for each parameter on its own
        for parameter in module.parameters():
            parameter.data = parameter.data.clone()
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(0.5)
    stale = values_of(critic).detach()
    critic.retie(policy)
    assert not torch.allclose(values_of(critic), stale)
    frozen = {p.data_ptr() for p in critic.parameters() if not p.requires_grad}
    assert frozen == {p.data_ptr() for p in find_decoder(policy).parameters()}


def test_retie_follows_a_cast_of_the_policy():
    policy = tiny_model("llama")
    critic = SOURCE.load(policy)
    policy.double()
    critic.retie(policy)
    assert critic.trunk.dtype == torch.float64
    values_of(critic)


def test_retie_to_something_else_is_refused():
    policy = tiny_model("llama")
    critic = SOURCE.load(policy)
    find_decoder(policy).norm.weight = nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match=r"policy's 'norm.weight' of shape \[32\], which is now a Parameter of \[3\]"):
        critic.retie(policy)


def test_adapters_are_float32_with_a_bfloat16_policy():
    policy = tiny_model("llama", dtype=torch.bfloat16)
    critic = SOURCE.load(policy)
    assert {p.dtype for p in own_parameters(critic).values()} == {torch.float32}
    assert values_of(critic).dtype == torch.float32
    values_of(critic).sum().backward()


def test_the_same_critic_on_every_rank():
    policy = tiny_model("llama")
    with torch.random.fork_rng():
        torch.manual_seed(1)
        before = torch.random.get_rng_state()
        one = own_parameters(SOURCE.load(policy))
        assert torch.equal(before, torch.random.get_rng_state())
        torch.manual_seed(2)
        other = own_parameters(SOURCE.load(policy))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_options():
    policy = tiny_model("llama")
    critic = LoRACritic(r=2, target_modules=["q_proj"]).load(policy)
    adapted = {name for name in own_parameters(critic) if "lora_A" in name}
    assert {name.split(".")[-4] for name in adapted} == {"q_proj"}
    assert len(adapted) == 2
    assert own_parameters(critic)[min(adapted)].shape == (2, 32)
    torch.testing.assert_close(critic.trunk.layers[0].self_attn.q_proj.scaling["critic"], 16.0)
    for name, wrong in {"r": 0, "alpha": 0, "dropout": 0.1, "target_modules": [], "head_std": -1.0}.items():
        with pytest.raises(ValueError, match=rf"{name} is .*; it must be"):
            LoRACritic(**{name: wrong})
    with pytest.raises(ValueError, match="nowhere_proj"):
        LoRACritic(target_modules=["nowhere_proj"]).load(policy)


def test_without_peft_the_constructor_says_what_to_install(monkeypatch):
    monkeypatch.setattr(optional, "PEFT_AVAILABLE", False)
    with pytest.raises(ModuleNotFoundError, match=r"LoRACritic needs an optional package; .*'pl-grouprl\[lora\]'"):
        LoRACritic()


def test_activation_checkpointing():
    policy = tiny_model("qwen3").train()
    expected = SOURCE.load(policy)
    policy.gradient_checkpointing_enable({"use_reentrant": False})
    critic = SOURCE.load(policy)
    batch = pack(random_groups(1, [(9, [4, 5])]))
    for one in (expected, critic):
        with shared_prefix(one.trunk):
            one.values(batch).square().sum().backward()
    assert critic.trunk.is_gradient_checkpointing
    for name, grad in gradients(expected).items():
        torch.testing.assert_close(gradients(critic)[name], grad, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))])
def test_copies_are_tied_again(duplicate):
    policy = tiny_model("llama")
    both = duplicate(nn.ModuleDict({"policy": policy, "critic": SOURCE.load(policy)}))
    policy, critic = both["policy"], both["critic"]
    critic.retie(policy)
    frozen = {p.data_ptr() for p in critic.parameters() if not p.requires_grad}
    assert frozen == {p.data_ptr() for p in find_decoder(policy).parameters()}
    saved = {name.removeprefix("critic.") for name in both.state_dict() if name.startswith("critic.")}
    assert saved == own_parameters(critic).keys()
    both.load_state_dict(both.state_dict())


def test_assigned_weights_need_a_retie():
    policy = tiny_model("llama")
    critic = SOURCE.load(policy)
    before = values_of(critic).detach()
    policy.load_state_dict(
        {name: p.clone() for name, p in tiny_model("llama", seed=1).state_dict().items()}, assign=True
    )
    assert torch.equal(values_of(critic), before)
    critic.retie(policy)
    expected = values_of(PolicyCopyCritic(head_std=0.3).load(policy))
    torch.testing.assert_close(values_of(critic), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("use_dora", [False, True])
def test_the_adapter_of_a_policy_is_not_part_of_the_critic(use_dora):
    """Both have the same base: the critic of an adapted policy is that of the policy without its adapter."""
    policy = LoRAAdapter(r=3).add_to(tiny_model("llama")).train()
    for parameter in policy.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter)
    source = LoRACritic(r=4, head_std=0.3, use_dora=use_dora)
    critic, plain = source.load(policy), source.load(tiny_model("llama"))
    torch.testing.assert_close(values_of(critic), values_of(plain), atol=1e-6, rtol=1e-6)
    assert not any("default" in name for name, _ in critic.named_modules())
    theirs = {p.data_ptr() for p in find_decoder(policy).parameters() if not p.requires_grad}
    assert {p.data_ptr() for p in critic.parameters() if not p.requires_grad} == theirs
    for parameter in policy.parameters():  # a move: new storage
        parameter.data = 0.5 * parameter.data
    critic.retie(policy)
    assert {p.data_ptr() for p in critic.parameters() if not p.requires_grad} <= {
        p.data_ptr() for p in policy.parameters()
    }
    values_of(critic).square().sum().backward()
    assert not gradients(policy)
    assert gradients(critic).keys() == own_parameters(critic).keys()


def test_a_peft_model_as_policy():
    import peft

    config = peft.LoraConfig(r=3, target_modules=["q_proj"], init_lora_weights=False)
    wrapped = peft.get_peft_model(tiny_model("llama"), config)
    critic, plain = SOURCE.load(wrapped), SOURCE.load(tiny_model("llama"))
    torch.testing.assert_close(values_of(critic), values_of(plain), atol=1e-6, rtol=1e-6)
