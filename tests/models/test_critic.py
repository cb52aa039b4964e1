"""The critic itself: where the head runs, what belongs to it, where it comes from."""

import copy

import pytest
import torch
from helpers.tiny_models import VOCAB, gradients, random_groups, tiny_model, worst_gradient_error
from torch import nn
from torch.overrides import TorchFunctionMode

from pl_grouprl.attention import find_decoder, shared_prefix
from pl_grouprl.models import Critic, CriticSource, PolicyCopyCritic, PretrainedCritic, SharedTrunkCritic, ValueHead
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
    assert head(states).tolist() == [-0.5, 1.0]
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
        with pytest.raises(ValueError, match=rf"head_std is {wrong}"):
            PolicyCopyCritic(head_std=wrong)
        with pytest.raises(ValueError, match=rf"head_std is {wrong}"):
            PretrainedCritic("gpt2", head_std=wrong)


def test_a_classifier_s_head_is_copied_with_its_bias():
    score = nn.Linear(2, 1)
    score.weight.data, score.bias.data = torch.tensor([[2.0, -1.0]]), torch.tensor([0.5])
    head = ValueHead.from_score(score)
    score.weight.data.zero_()
    score.bias.data.zero_()
    assert head(torch.tensor([[1.0, 3.0]])).tolist() == [-0.5]
    assert ValueHead.from_score(nn.Linear(2, 1, bias=False)).bias.item() == 0


def test_the_head_runs_only_on_the_requested_positions(policy, batch):
    critic, seen = PolicyCopyCritic(head_std=0.3).load(policy), []
    critic.head.register_forward_hook(lambda head, args, out: seen.append(tuple(args[0].shape)))
    with shared_prefix(critic.trunk):
        everywhere = critic.values(batch)
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


def test_forward_is_values(policy, batch):
    critic = PolicyCopyCritic().load(policy)
    with shared_prefix(critic.trunk):
        assert torch.equal(critic(batch), critic.values(batch))


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


def test_a_head_of_another_width_is_refused(policy):
    with pytest.raises(ValueError, match="head takes 31 features, but the trunk's hidden size is 32"):
        Critic(find_decoder(policy), ValueHead(31))


@pytest.mark.parametrize("source", [PolicyCopyCritic(), SharedTrunkCritic()])
def test_the_head_is_as_wide_as_the_states_not_as_the_layers(source):
    from transformers import OPTConfig, OPTForCausalLM

    sizes = {"hidden_size": 32, "word_embed_proj_dim": 16, "ffn_dim": 48, "num_hidden_layers": 1}
    policy = OPTForCausalLM(OPTConfig(vocab_size=VOCAB, num_attention_heads=4, pad_token_id=1, **sizes))
    critic = source.load(policy)
    assert critic.head.in_features == 16
    assert critic.values(pack(random_groups(0, SHAPES), "repeated")).shape == (12,)
    with pytest.raises(ValueError, match="head takes 32 features, but the trunk's hidden size is 16"):
        Critic(find_decoder(policy), ValueHead(32))


@pytest.mark.parametrize("labels", [None, 1, 2])
def test_an_encoder_is_refused_as_a_critic(tmp_path, policy, labels):
    from transformers import BertConfig, BertForSequenceClassification, BertModel

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
    config = BertConfig(vocab_size=VOCAB, **sizes)
    config.num_labels = labels or 2
    (BertModel(config) if labels is None else BertForSequenceClassification(config)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"PretrainedCritic\(path=.*\): BertModel is not causal"):
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
    with pytest.raises(ValueError, match=r"PretrainedCritic\(path=.*\): Qwen3ForSequenceClassification scores"):
        PretrainedCritic(str(tmp_path)).load(policy)


@pytest.mark.parametrize("family", ["qwen3", "llama", "gpt2", "qwen2"])
def test_a_reward_model_s_head_becomes_the_value_head(tmp_path, family, batch):
    model = classifier(family)
    model.save_pretrained(tmp_path)
    critic = PretrainedCritic(str(tmp_path)).load(tiny_model(family))
    groups = random_groups(0, SHAPES)
    with torch.no_grad(), shared_prefix(critic.trunk):
        actual = critic.values(batch, batch.final_index_B)
        expected = [
            model(torch.tensor([group.prompt_ids + rollout.token_ids])).logits[0, 0]
            for group in groups
            for rollout in group.rollouts
        ]
    torch.testing.assert_close(actual, torch.stack(expected), atol=1e-5, rtol=1e-5)


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
    critic = PretrainedCritic(
        str(tmp_path), dtype="bfloat16", attn_implementation="eager", gradient_checkpointing=True
    ).load(policy)
    assert critic.trunk.dtype == torch.bfloat16
    assert critic.trunk.config._attn_implementation == "eager"
    assert critic.trunk.config.attn_pdrop == 0
    assert critic.trunk.is_gradient_checkpointing
    assert critic.head.weight.dtype == torch.float32
    tiny_model("gpt2", vocab_size=20).save_pretrained(tmp_path / "small")
    with pytest.raises(ValueError, match=rf"has embeddings for 20 tokens and the policy for {VOCAB}"):
        PretrainedCritic(str(tmp_path / "small")).load(policy)


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_activation_checkpointing_changes_no_gradient(tmp_path, family):
    tiny_model(family, seed=2).save_pretrained(tmp_path)
    batch, found = pack(random_groups(1, SHAPES)), []
    for checkpointing in (False, True):
        source = PretrainedCritic(str(tmp_path), gradient_checkpointing=checkpointing, head_std=0.3)
        critic = source.load(tiny_model(family))
        layer = (critic.trunk.h if family == "gpt2" else critic.trunk.layers)[0].mlp
        runs = []
        with shared_prefix(critic.trunk):
            layer.register_forward_pre_hook(lambda *_, runs=runs: runs.append(1))
            critic.values(batch).square().sum().backward()
        found.append(gradients(critic))
        assert len(runs) == 1 + checkpointing
    assert worst_gradient_error(found[1], found[0]) < 1e-5


def test_a_copy_checkpoints_where_the_policy_does(policy):
    policy.gradient_checkpointing_enable({"use_reentrant": False})
    assert PolicyCopyCritic().load(policy).trunk.is_gradient_checkpointing
