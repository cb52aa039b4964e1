"""The critic itself: where the head runs, what belongs to it, where it comes from."""

import copy
import io
import pickle
from functools import partial

import pytest
import torch
from helpers.tiny_models import VOCAB, gradients, random_groups, tiny_model, worst_gradient_error
from torch import nn
from torch.overrides import TorchFunctionMode

from pl_grouprl.attention import find_decoder, shared_prefix
from pl_grouprl.models import (
    CriticSource,
    LoRACritic,
    PolicyCopyCritic,
    PretrainedCritic,
    SharedTrunkCritic,
    ValueHead,
)
from pl_grouprl.models.adapters import LoRAAdapter
from pl_grouprl.models.score import hidden_states, score
from pl_grouprl.packing import pack

SHAPES = [(9, [4, 0, 7]), (3, [1])]


@pytest.fixture
def policy():
    return tiny_model("qwen3")


@pytest.fixture
def batch():
    return pack(random_groups(0, SHAPES))


def classifier(family="qwen3", labels=1, **overrides):
    from transformers import AutoModelForSequenceClassification

    config = tiny_model(family, **overrides).config
    config.num_labels = labels
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).eval()


def test_the_head_by_hand():
    head = ValueHead(2)
    head.weight.data, head.bias.data = torch.tensor([[2.0, -1.0]]), torch.tensor([0.5])
    states = torch.tensor([[1.0, 3.0], [0.25, 0.0]])
    assert head(states).tolist() == [[-0.5], [1.0]]
    assert head(states.bfloat16()).dtype == torch.float32
    assert head(states.double()).dtype == torch.float64
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert head(torch.full((1, 2), 1.001)).item() == pytest.approx(1.501, abs=1e-6)  # bfloat16 knows 1.0 and 1.0078


class OfAGPU(TorchFunctionMode):
    """Like a GPU as the default device: random numbers of a CPU generator must name the CPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if "generator" in kwargs and "device" not in kwargs:
            raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")
        return func(*args, **kwargs)


def test_a_head_is_drawn_while_the_default_device_is_a_gpu():
    with OfAGPU():
        head = ValueHead.near_zero(16)
    assert torch.equal(head.weight, ValueHead.near_zero(16).weight)
    with OfAGPU(), pytest.raises(RuntimeError, match="device type for generator"):
        torch.randn(2, generator=torch.Generator())


def test_a_new_head_is_near_zero_and_the_same_everywhere():
    one, other = (ValueHead.near_zero(4096, std=1e-2) for _ in range(2))
    assert torch.equal(one.weight, other.weight)
    assert one.weight.std().item() == pytest.approx(1e-2, rel=0.05)
    assert one.bias.item() == 0
    assert not torch.equal(one.weight, ValueHead.near_zero(4096, std=1e-2, seed=1).weight)
    for wrong in (-1, float("nan"), float("inf")):
        for make in (PolicyCopyCritic, partial(PretrainedCritic, "gpt2"), LoRACritic):
            with pytest.raises(ValueError, match="head_std"):
                make(head_std=wrong)


def test_a_classifier_s_head_is_copied_with_its_bias():
    score = nn.Linear(2, 1)
    score.weight.data, score.bias.data = torch.tensor([[2.0, -1.0]]), torch.tensor([0.5])
    head = ValueHead.from_score(score)
    score.weight.data.zero_()
    score.bias.data.zero_()
    assert head(torch.tensor([[1.0, 3.0]])).tolist() == [[-0.5]]
    assert ValueHead.from_score(nn.Linear(2, 1, bias=False)).bias.item() == 0


def test_the_head_runs_only_on_the_requested_positions(policy, batch):
    critic, seen = PolicyCopyCritic(head_std=0.3).load(policy), []
    critic.head.register_forward_hook(lambda head, args, out: seen.append(tuple(args[0].shape)))
    with shared_prefix(critic.trunk):
        everywhere = critic(batch)
        chosen = batch.predict_index_N[torch.tensor([2, 5])]
        values = critic.values(batch, chosen)
        nowhere = critic.values(batch, chosen[:0])
    assert seen == [(12, 32), (2, 32), (0, 32)]
    torch.testing.assert_close(values, everywhere[[2, 5]])
    states = hidden_states_of(critic, batch).requires_grad_()
    critic.values(batch, chosen, states=states).sum().backward()
    touched = states.grad.abs().sum(dim=1).nonzero()[:, 0]
    assert touched.tolist() == sorted(chosen.tolist())
    torch.testing.assert_close(states.grad[chosen[0]], critic.head.weight[0])
    assert nowhere.shape == (0,)
    nowhere.sum().backward()  # still in the graph


def hidden_states_of(critic, batch):
    with torch.no_grad(), shared_prefix(critic.trunk):
        return hidden_states(critic.trunk, batch)


def test_a_copy_has_separate_weights(policy):
    for_training = copy.deepcopy(policy).train()
    critic = PolicyCopyCritic().load(for_training)
    assert not critic.shares_trunk
    assert critic.training
    assert critic.trunk.training
    own, theirs = dict(critic.trunk.named_parameters()), dict(find_decoder(for_training).named_parameters())
    assert own.keys() == theirs.keys()
    for name, parameter in own.items():
        assert torch.equal(parameter, theirs[name])
        assert parameter.data_ptr() != theirs[name].data_ptr()
    assert {name.split(".")[0] for name, _ in critic.named_parameters()} == {"own_trunk", "head"}
    assert isinstance(PolicyCopyCritic(), CriticSource)


def test_a_patched_policy_is_not_copied(policy):
    with shared_prefix(policy), pytest.raises(RuntimeError, match="inside a shared_prefix context"):
        PolicyCopyCritic().load(policy)


def test_a_shared_trunk_is_listed_once(policy):
    critic = SharedTrunkCritic().load(policy)
    both = nn.ModuleDict({"policy": policy, "critic": critic})
    assert critic.shares_trunk
    assert critic.trunk is find_decoder(policy)
    assert [name for name, _ in critic.named_parameters()] == ["head.weight", "head.bias"]
    names = [name for name, _ in both.named_parameters(remove_duplicate=False)]
    assert len(names) == len(list(policy.parameters())) + 2
    assert set(critic.state_dict()) == {"head.weight", "head.bias"}


@pytest.mark.parametrize("detach", [False, True])
def test_one_forward_serves_policy_and_value_head(policy, batch, detach):
    critic = SharedTrunkCritic(detach=detach, head_std=0.3).load(policy)
    calls = []
    with shared_prefix(policy):
        policy.model.register_forward_hook(lambda *_: calls.append(1))
        states = hidden_states(policy, batch)
        reused = critic.values(batch, states=states)
        assert len(calls) == 1
        own = critic.values(batch)
        torch.testing.assert_close(reused, own)
        for values in (reused, own):
            policy.zero_grad()
            critic.zero_grad()
            values.square().sum().backward()
            assert critic.head.weight.grad.abs().sum() > 0
            assert bool(gradients(policy)) != detach
        policy.zero_grad()
        score(policy, batch).logprobs_N.sum().backward()
    assert gradients(policy)


@pytest.mark.parametrize("source", [PolicyCopyCritic(), SharedTrunkCritic()])
def test_the_head_is_as_wide_as_the_states_not_as_the_layers(source):
    from transformers import OPTConfig, OPTForCausalLM

    sizes = {"hidden_size": 32, "word_embed_proj_dim": 16, "ffn_dim": 48, "num_hidden_layers": 1}
    policy = OPTForCausalLM(OPTConfig(vocab_size=VOCAB, num_attention_heads=4, pad_token_id=1, **sizes))
    critic = source.load(policy)
    assert critic.head.in_features == 16
    assert critic.values(pack(random_groups(0, SHAPES), "repeated")).shape == (12,)


@pytest.mark.parametrize("labels", [None, 1, 2])
def test_an_encoder_is_refused_as_a_critic(tmp_path, policy, labels):
    from transformers import BertConfig, BertForSequenceClassification, BertModel

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
    config = BertConfig(vocab_size=VOCAB, **sizes)
    config.num_labels = labels or 2
    (BertModel(config) if labels is None else BertForSequenceClassification(config)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="not causal"):
        PretrainedCritic(str(tmp_path)).load(policy)


def test_a_reward_model_whose_score_is_more_than_its_head_is_refused(tmp_path, policy, monkeypatch):
    """A decoder whose classifier puts a nonlinearity before its linear layer would give other values."""
    from transformers import Qwen3ForSequenceClassification

    classifier().save_pretrained(tmp_path)
    plain = Qwen3ForSequenceClassification.forward

    def squashed(self, *args, **kwargs):
        output = plain(self, *args, **kwargs)
        output.logits = output.logits.tanh()
        return output

    monkeypatch.setattr(Qwen3ForSequenceClassification, "forward", squashed)
    with pytest.raises(ValueError, match="Qwen3ForSequenceClassification scores"):
        PretrainedCritic(str(tmp_path)).load(policy)


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_a_reward_model_s_head_becomes_the_value_head(tmp_path, family, batch):
    model = classifier(family)
    model.save_pretrained(tmp_path)
    critic = PretrainedCritic(str(tmp_path)).load(tiny_model(family))
    groups = random_groups(0, SHAPES)
    with torch.no_grad(), shared_prefix(critic.trunk):
        actual = critic.values(batch, batch.final_index_B)
        sequences = [group.prompt_ids + rollout.token_ids for group in groups for rollout in group.rollouts]
        expected = torch.stack([model(torch.tensor([tokens])).logits[0, 0] for tokens in sequences])
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def logits_of(model, groups):
    """The logit at the position that predicts each response token, of the repeated prefixes."""
    found = []
    for group in groups:
        for rollout in group.rollouts:
            logits = model(torch.tensor([group.prompt_ids + rollout.token_ids])).logits
            assert logits.shape[-1] == 1
            found.append(logits[0, len(group.prompt_ids) - 1 : -1, 0])
    return torch.cat(found)


@pytest.mark.parametrize("family", ["qwen3", "gpt2", "llama", "qwen3_moe"])
@pytest.mark.parametrize("source", [PolicyCopyCritic(head_std=0.3), LoRACritic(r=4, head_std=0.3)])
def test_as_a_token_classifier(family, source, batch):
    critic = source.load(tiny_model(family, tie_word_embeddings=True))
    for parameter in critic.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1
    model, groups = critic.as_token_classifier(), random_groups(0, SHAPES)
    with torch.no_grad():
        with shared_prefix(critic.trunk):
            expected = critic.values(batch)
        torch.testing.assert_close(logits_of(model, groups), expected, atol=1e-5, rtol=1e-4)
        assert expected.std() > 1e-3
        critic.head.bias.data += 1  # the weights are the critic's
        torch.testing.assert_close(logits_of(model, groups), expected + 1, atol=1e-5, rtol=1e-4)


def test_a_trunk_without_a_token_classifier_is_refused(policy):
    with pytest.raises(ValueError, match="Lfm2Config"):
        PolicyCopyCritic().load(tiny_model("lfm2")).as_token_classifier()


def test_other_models_get_a_new_head(tmp_path, policy):
    other = tiny_model("llama", seed=3)
    other.save_pretrained(tmp_path / "lm")
    classifier(labels=3).save_pretrained(tmp_path / "three")
    for folder, decoder in (("lm", other.model), ("three", classifier(labels=3).model)):
        critic = PretrainedCritic(str(tmp_path / folder), head_std=0.3).load(policy)
        assert torch.equal(critic.head.weight, ValueHead.near_zero(32, 0.3).weight)
        for own, theirs in zip(critic.trunk.parameters(), decoder.parameters(), strict=True):
            assert torch.equal(own, theirs)


def test_options_of_a_pretrained_critic(tmp_path, policy):
    tiny_model("gpt2", attn_pdrop=0.3).save_pretrained(tmp_path)
    options = {"dtype": "bfloat16", "attn_implementation": "eager", "gradient_checkpointing": True}
    critic = PretrainedCritic(str(tmp_path), **options).load(policy)
    assert critic.trunk.dtype == torch.bfloat16
    assert critic.trunk.config._attn_implementation == "eager"
    assert critic.trunk.config.attn_pdrop == 0
    assert critic.trunk.is_gradient_checkpointing
    assert critic.head.weight.dtype == torch.float32
    tiny_model("gpt2", vocab_size=20).save_pretrained(tmp_path / "small")
    with pytest.raises(ValueError, match="embeddings"):
        PretrainedCritic(str(tmp_path / "small")).load(policy)


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_activation_checkpointing_changes_no_gradient(tmp_path, family):
    tiny_model(family, seed=2).save_pretrained(tmp_path)
    batch, found = pack(random_groups(1, SHAPES)), []
    for checkpointing in (False, True, "attention"):
        source = PretrainedCritic(str(tmp_path), gradient_checkpointing=checkpointing, head_std=0.3)
        critic = source.load(tiny_model(family))
        layer = (critic.trunk.h if family == "gpt2" else critic.trunk.layers)[0].mlp
        runs = []
        with shared_prefix(critic.trunk):
            layer.register_forward_pre_hook(lambda *_, runs=runs: runs.append(1))
            critic.values(batch).square().sum().backward()
        found.append(gradients(critic))
        assert len(runs) == 1 + bool(checkpointing)
    assert worst_gradient_error(found[1], found[0]) < 1e-5
    assert all(torch.equal(found[2][name], gradient) for name, gradient in found[1].items())


def test_a_copy_checkpoints_where_the_policy_does(policy):
    policy.gradient_checkpointing_enable({"use_reentrant": False})
    assert PolicyCopyCritic().load(policy).trunk.is_gradient_checkpointing


LORA_FAMILIES = ("qwen3", "gpt2")
SOURCE = LoRACritic(r=4, alpha=8, head_std=0.3)


def own_parameters(critic):
    return {name: p for name, p in critic.named_parameters() if p.requires_grad}


def values_of(critic, seed=0):
    batch = pack(random_groups(seed, SHAPES))
    with shared_prefix(critic.trunk):
        return critic.values(batch)


@pytest.fixture(params=LORA_FAMILIES)
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
    with pytest.raises(ValueError, match=r"norm.weight"):
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


def test_options_of_a_lora_critic():
    policy = tiny_model("llama")
    critic = LoRACritic(r=2, target_modules=["q_proj"]).load(policy)
    adapted = {name for name in own_parameters(critic) if "lora_A" in name}
    assert {name.split(".")[-4] for name in adapted} == {"q_proj"}
    assert len(adapted) == 2
    assert own_parameters(critic)[min(adapted)].shape == (2, 32)
    torch.testing.assert_close(critic.trunk.layers[0].self_attn.q_proj.scaling["critic"], 16.0)
    for name, wrong in {"r": 0, "alpha": 0, "dropout": 0.1, "target_modules": []}.items():
        with pytest.raises(ValueError, match=name):
            LoRACritic(**{name: wrong})
    with pytest.raises(ValueError, match="nowhere_proj"):
        LoRACritic(target_modules=["nowhere_proj"]).load(policy)


def test_activation_checkpointing_of_a_lora_critic():
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
    policy.load_state_dict(tiny_model("llama", seed=1).state_dict(), assign=True)
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
    theirs = {p.data_ptr() for p in policy.parameters()}
    assert {p.data_ptr() for p in critic.parameters() if not p.requires_grad} <= theirs
    values_of(critic).square().sum().backward()
    assert not gradients(policy)
    assert gradients(critic).keys() == own_parameters(critic).keys()


def test_a_peft_model_as_policy():
    import peft

    config = peft.LoraConfig(r=3, target_modules=["q_proj"], init_lora_weights=False)
    wrapped = peft.get_peft_model(tiny_model("llama"), config)
    critic, plain = SOURCE.load(wrapped), SOURCE.load(tiny_model("llama"))
    torch.testing.assert_close(values_of(critic), values_of(plain), atol=1e-6, rtol=1e-6)
