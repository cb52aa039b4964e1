"""Scoring of rollouts: the same numbers with shared and repeated prompts, and independence of other rollouts."""

import copy

import pytest
import torch
from helpers.tiny_models import VOCAB, random_groups, tiny_model

from pl_grouprl.attention import find_decoder, shared_prefix
from pl_grouprl.functional.softmax import HeadSketch
from pl_grouprl.models.score import hidden_states, logits_function, rollout_logprobs, score
from pl_grouprl.packing import pack
from pl_grouprl.types import Rollout, RolloutGroup

pytestmark = pytest.mark.usefixtures("layers_checked_once")

SHAPES = [(9, [4, 0, 7]), (3, [1]), (12, [5, 5])]


@pytest.fixture(scope="module")
def model():
    return tiny_model("qwen3")


def logprobs_one_by_one(model, group, rollout, temperature=1.0):
    """The definition: the model alone with one sequence, softmax over all of its logits."""
    tokens = torch.tensor([group.prompt_ids + rollout.token_ids])
    log_softmax = (model(tokens, use_cache=False).logits[0] / temperature).log_softmax(-1)
    first = len(group.prompt_ids)
    return log_softmax[first - 1 : -1].gather(1, tokens[0, first:, None])[:, 0]


@pytest.mark.parametrize("sharing", ["shared", "repeated"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_each_sequence_alone(model, sharing, temperature):
    groups = random_groups(0, SHAPES)
    with torch.no_grad():
        actual = rollout_logprobs(model, groups, sharing=sharing, temperature=temperature, chunk_size=5)
        expected = [logprobs_one_by_one(model, g, r, temperature) for g in groups for r in g.rollouts]
    assert [len(one) for one in actual] == [4, 0, 7, 1, 5, 5]
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


def test_entropy_and_score_norm_by_definition(model):
    groups = random_groups(1, SHAPES)
    batch = pack(groups)
    with torch.no_grad(), shared_prefix(model):
        scores = score(model, batch, temperature=0.8, entropy=True, score_norm=True)
        logits = model(**batch.model_inputs).logits[0][batch.predict_index_N] / 0.8
    p = logits.double().softmax(-1)
    p_a = p.gather(1, batch.targets_N[:, None])[:, 0]
    torch.testing.assert_close(scores.entropy_N.double(), -(p * p.log()).sum(-1), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(scores.score_norm_N.double(), 1 - 2 * p_a + p.square().sum(-1), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(scores.logprobs_N.double(), p_a.log(), atol=1e-5, rtol=1e-5)


def test_chunks_do_not_change_the_result(model):
    groups = random_groups(2, SHAPES)
    results = [rollout_logprobs(model, groups, chunk_size=size) for size in (1, 3, 512)]
    for other in results[1:]:
        torch.testing.assert_close(torch.cat(other), torch.cat(results[0]), atol=1e-6, rtol=0)


def test_no_tensor_of_all_logits():
    groups = random_groups(3, [(6, [40, 40])])
    model, seen = tiny_model("llama"), []
    model.lm_head.register_forward_hook(lambda head, args, out: seen.append(out.shape[-2]))
    torch.cat(rollout_logprobs(model, groups, chunk_size=16)).sum().backward()
    assert max(seen) == 16
    assert (
        sum(seen) == 2 * 80 - 16
    )  # forward, and again in the backward pass but for the last chunk: rollout tokens alone


@pytest.mark.parametrize("sharing", ["shared", "repeated"])
def test_rollouts_that_are_all_empty_keep_the_graph(model, sharing):
    logprobs = rollout_logprobs(model, [RolloutGroup([1, 2, 3], [Rollout([]), Rollout([])])], sharing=sharing)
    assert [len(one) for one in logprobs] == [0, 0]
    total = torch.cat(logprobs).sum()
    assert total.item() == 0.0
    model.zero_grad()
    total.backward()
    assert all(not p.grad.any() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("backend", ["cascade", "prefix_grouper", "reference"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gpt2"])
def test_one_rollout_does_not_change_others_bitwise(family, backend):
    """Exact: log-probabilities of all other rollouts. Where experts are shared, see the parity tests."""
    model = tiny_model(family)
    before = random_groups(4, [(30, [9, 6, 12, 0]), (7, [5, 5])])
    after = copy.deepcopy(before)
    after[0].rollouts[1].token_ids = [(token + 11) % VOCAB for token in before[0].rollouts[1].token_ids]
    with torch.no_grad():
        one, other = (rollout_logprobs(model, groups, backend=backend) for groups in (before, after))
    for number in range(6):
        assert torch.equal(one[number], other[number]) == (number != 1 or one[number].numel() == 0)


def test_one_rollout_does_not_change_gradients_of_others_bitwise():
    """Exact: the gradient of the other rollouts' loss at every embedding that only they see."""
    model = tiny_model("llama")
    before = random_groups(5, [(30, [9, 6, 12]), (7, [5, 5])])
    after = copy.deepcopy(before)
    after[0].rollouts[1].token_ids = [(token + 11) % VOCAB for token in before[0].rollouts[1].token_ids]
    found = []
    for groups in (before, after):
        batch = pack(groups)
        embedded = model.get_input_embeddings()(batch.model_inputs.pop("input_ids")).detach().requires_grad_()
        with shared_prefix(model):
            hidden = find_decoder(model)(inputs_embeds=embedded, **batch.model_inputs).last_hidden_state[0]
        logits = model.lm_head(hidden[batch.predict_index_N])
        logprobs = logits.log_softmax(-1).gather(1, batch.targets_N[:, None])[:, 0]
        (grad,) = torch.autograd.grad(logprobs[batch.rollout_index_N != 1].sum(), embedded)
        found.append(grad[0])
    changed = batch.layout.segments[2]
    assert not found[0][changed.start : changed.stop].any()  # a rollout takes no part in the others' losses
    assert torch.equal(*found)


def test_a_shared_batch_outside_of_any_context_is_refused(model):
    batch = pack(random_groups(6, SHAPES))
    for call in (score, hidden_states):
        with pytest.raises(RuntimeError, match="Qwen3ForCausalLM would ignore the layout"):
            call(model, batch)
    score(model, pack(random_groups(6, SHAPES), "repeated"))


def test_checkpointing_that_would_outlive_the_patch_is_refused():
    model = tiny_model("llama").train()
    model.gradient_checkpointing_enable()
    groups = random_groups(7, SHAPES)
    with pytest.raises(RuntimeError, match=r"put forward and backward into `with shared_prefix\(model\):`"):
        rollout_logprobs(model, groups)
    with torch.no_grad():
        rollout_logprobs(model, groups)
    with shared_prefix(model):
        torch.cat(rollout_logprobs(model, groups)).sum().backward()


def test_scoring_does_not_change_the_model():
    model = tiny_model("llama").train()
    before = dict(vars(model.model)), model.config._attn_implementation
    rollout_logprobs(model, random_groups(8, SHAPES))
    assert model.training
    assert (dict(vars(model.model)), model.config._attn_implementation) == before
    assert not model.model._forward_pre_hooks
    assert not model.model._forward_hooks


def test_a_config_that_returns_tuples_works():
    model = tiny_model("llama")
    groups = random_groups(9, SHAPES)
    expected = torch.cat(rollout_logprobs(model, groups))
    model.config.return_dict = False
    assert torch.equal(torch.cat(rollout_logprobs(model, groups)), expected)


@pytest.mark.parametrize("family", ["llama", "gpt2", "cohere", "granite", "gemma"])
def test_head_matches_the_model(family):
    """Cohere and Granite scale their logits, Gemma its embeddings: nothing between decoder and logits is left out."""
    model = tiny_model(
        family,
        **(
            {}
            if family in ("llama", "gpt2", "gemma")
            else {"logits_scaling" if family == "granite" else "logit_scale": 0.3}
        ),
    )
    tokens = torch.arange(1, 10)[None]
    with torch.no_grad():
        hidden = find_decoder(model)(input_ids=tokens, use_cache=False).last_hidden_state[0]
        expected = model(tokens, use_cache=False).logits[0]
        torch.testing.assert_close(logits_function(model)(hidden), expected, atol=1e-6, rtol=1e-6)


def test_head_soft_cap():
    model = tiny_model("gemma2", layer_types=["full_attention"] * 2, final_logit_softcapping=0.5)
    tokens = torch.arange(1, 10)[None]
    with torch.no_grad():
        hidden = find_decoder(model)(input_ids=tokens, use_cache=False).last_hidden_state[0]
        logits = logits_function(model)(hidden)
    assert logits.abs().max() < 0.5
    torch.testing.assert_close(logits, model(tokens, use_cache=False).logits[0], atol=1e-6, rtol=1e-6)


def test_head_keeps_a_patched_forward_of_the_decoder():
    """As accelerate does."""
    model = tiny_model("llama")
    decoder, calls = find_decoder(model), []
    original = decoder.forward
    decoder.forward = lambda *args, **kwargs: calls.append(1) or original(*args, **kwargs)
    logits_function(model)(torch.randn(3, 32))
    assert calls == []
    model(torch.ones(1, 3, dtype=torch.long))
    assert calls == [1]


def test_a_repeated_batch_is_repeated_inside_a_context_too():
    model = tiny_model()
    with shared_prefix(model) as context:
        rollout_logprobs(model, random_groups(0, SHAPES), sharing="repeated")
        assert context.last_call is None
        rollout_logprobs(model, random_groups(0, SHAPES))
        assert context.last_call.token_ratio > 1


def test_scoring_leaves_nothing_in_global_registries():
    from torch.utils import _pytree

    model = tiny_model()
    rollout_logprobs(model, random_groups(0, SHAPES))
    before = len(_pytree.SUPPORTED_NODES)
    for _ in range(3):
        torch.cat(rollout_logprobs(model, random_groups(0, SHAPES), chunk_size=4)).sum().backward()
    assert len(_pytree.SUPPORTED_NODES) == before


@pytest.mark.parametrize("sharing", ["shared", "repeated"])
def test_hidden_states_once_serve_several_heads(model, sharing):
    batch, calls = pack(random_groups(10, SHAPES), sharing), []
    # The head runs with the decoder standing aside: its hooks see no tokens then.
    handle = model.model.register_forward_pre_hook(
        lambda _, args, kwargs: calls.append("input_ids" in kwargs and kwargs["input_ids"] is not None),
        with_kwargs=True,
    )
    with shared_prefix(model), torch.no_grad():
        expected = score(model, batch)
        states = hidden_states(model, batch)
        calls.clear()
        actual = score(model, batch, states=states)
        handle.remove()
        assert states.shape == (batch.num_tokens_run, 32)
    assert torch.equal(actual.logprobs_N, expected.logprobs_N)
    assert not any(calls)


def test_a_sketch_comes_from_the_same_pass(model):
    batch = pack(random_groups(11, SHAPES))
    with shared_prefix(model), torch.no_grad():
        scores = score(model, batch, sketch=HeadSketch(dim=4))
        assert score(model, batch).sketch_NS is None
    assert scores.sketch_NS.shape == (len(batch.targets_N), 4)
    assert scores.sketch_NS.abs().sum() > 0
