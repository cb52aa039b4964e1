"""Scoring of rollouts: the same numbers with shared and repeated prompts, and independence of other rollouts."""

import copy
import sys

import pytest
import torch
from helpers.branched import branched_groups
from helpers.tiny_models import VOCAB, random_groups, tiny_model
from torch import nn

from pl_grouprl.attention import find_decoder, shared_prefix
from pl_grouprl.functional.softmax import HeadSketch
from pl_grouprl.models.score import hidden_states, logits_function, plain_weight, rollout_logprobs, score
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
    assert sum(seen) == 2 * 80 - 16  # forward, and again in the backward pass but for the last chunk


@pytest.mark.parametrize("sharing", ["shared", "repeated"])
def test_rollouts_that_are_all_empty_keep_the_graph(model, sharing):
    logprobs = rollout_logprobs(model, [RolloutGroup([1, 2, 3], [Rollout([]), Rollout([])])], sharing=sharing)
    assert [len(one) for one in logprobs] == [0, 0]
    total = torch.cat(logprobs).sum()
    assert total.item() == 0.0
    model.zero_grad()
    total.backward()
    assert all(not p.grad.any() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize(
    ("family", "backend"),
    [("qwen3", "cascade"), ("gpt2", "cascade"), ("llama", "prefix_grouper"), ("qwen2", "reference")],
)
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
        with pytest.raises(RuntimeError, match="layout"):
            call(model, batch)
    score(model, pack(random_groups(6, SHAPES), "repeated"))


def test_checkpointing_that_would_outlive_the_patch_is_refused():
    model = tiny_model("llama").train()
    model.gradient_checkpointing_enable()
    groups = random_groups(7, SHAPES)
    with pytest.raises(RuntimeError, match="shared_prefix"):
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


@pytest.mark.parametrize(
    ("family", "options"),
    [
        *(
            ("llama", {}),
            ("gpt2", {}),
            ("gemma", {}),
            ("cohere", {"logit_scale": 0.3}),
            ("granite", {"logits_scaling": 0.3}),
        ),
        ("gemma2", {"layer_types": ["full_attention"] * 2, "final_logit_softcapping": 0.5}),
    ],
)
def test_head_matches_the_model(family, options):
    """Cohere and Granite scale their logits, Gemma its embeddings: nothing between decoder and logits is left out."""
    model = tiny_model(family, **options)
    tokens = torch.arange(1, 10)[None]
    with torch.no_grad():
        hidden = find_decoder(model)(input_ids=tokens, use_cache=False).last_hidden_state[0]
        expected = model(tokens, use_cache=False).logits[0]
        torch.testing.assert_close(logits_function(model)(hidden), expected, atol=1e-6, rtol=1e-6)


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


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "gemma"])
def test_a_plain_head_is_recognized_and_unchanged(family):
    model = tiny_model(family)
    head = model.get_output_embeddings()
    assert plain_weight(model, torch.float32) is head.weight
    assert "forward" not in vars(head)


def test_hidden_states_of_another_dtype_are_cast_by_the_model():
    model = tiny_model("llama")
    assert plain_weight(model, torch.bfloat16) is None
    with torch.autocast("cpu", torch.bfloat16):
        assert plain_weight(model, torch.bfloat16) is model.lm_head.weight


def test_in_inference_mode():
    model = tiny_model("llama")
    batch = pack(random_groups(0, SHAPES))
    with shared_prefix(model):
        with torch.no_grad():
            expected = score(model, batch, entropy=True)
        with torch.inference_mode():
            assert plain_weight(model, torch.float32) is model.lm_head.weight
            actual = score(model, batch, entropy=True)
    torch.testing.assert_close(actual[:2], expected[:2], atol=0, rtol=0)


def scaled(family, name, value):
    more = {"layer_types": ["full_attention"] * 2} if family == "gemma2" else {}
    return tiny_model(family, **{name: value}, **more)


@pytest.mark.parametrize(
    ("family", "name", "value"),
    [("cohere", "logit_scale", 0.3), ("granite", "logits_scaling", 3.0), ("gemma2", "final_logit_softcapping", 0.5)],
)
def test_a_head_that_does_more_is_not_plain(family, name, value):
    assert plain_weight(scaled(family, name, value), torch.float32) is None


class Doubled(nn.Linear):
    """A subclass may compute anything: adapters, quantised and sharded layers."""

    def forward(self, states):
        return 2 * super().forward(states)


def with_bias(model, head):
    head.bias = nn.Parameter(torch.zeros(len(head.weight)))


def with_hook(model, head):
    head.register_forward_hook(lambda module, args, logits: logits + 1)


def with_pre_hook(model, head):
    head.register_forward_pre_hook(lambda module, args: None)


def with_own_forward(model, head):
    head.forward = head.forward


def of_a_subclass(model, head):
    model.set_output_embeddings(Doubled(head.in_features, head.out_features, bias=False))


def changed_in_place(model, head):
    forward = model.forward

    def changed(*args, **kwargs):
        output = forward(*args, **kwargs)
        output.logits.mul_(2)
        return output

    model.forward = changed


def without_head(model, head):
    model.set_output_embeddings(None)


@pytest.mark.parametrize(
    "change", [with_bias, with_hook, with_pre_hook, with_own_forward, of_a_subclass, changed_in_place, without_head]
)
def test_a_changed_head_is_not_plain(change):
    model = tiny_model("llama")
    change(model, model.get_output_embeddings())
    assert plain_weight(model, torch.float32) is None


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt2"])  # gpt2: the weight is that of the embeddings too
def test_scoring_by_blocks_and_by_chunks_agree(family, frozen, monkeypatch):
    model = tiny_model(family).double()
    model.get_output_embeddings().weight.requires_grad_(not frozen)
    batch = pack(random_groups(0, SHAPES))
    results = []
    for known in (True, False):
        if not known:
            monkeypatch.setattr(sys.modules["pl_grouprl.models.score"], "plain_weight", lambda model, dtype: None)
        model.zero_grad()
        with shared_prefix(model):
            scores = score(model, batch, temperature=0.8, entropy=True, score_norm=True)
            scores.logprobs_N.square().sum().backward()
        grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        results.append((scores[:3], grads))
    (one, one_grads), (other, other_grads) = results
    torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-10)
    assert one_grads.keys() == other_grads.keys()
    for name, gradient in one_grads.items():
        torch.testing.assert_close(gradient, other_grads[name], atol=1e-11, rtol=1e-9)


@pytest.fixture(scope="module")
def in_float64():
    return tiny_model("gpt2").double()  # nothing in it rounds to float32, as RMSNorm does elsewhere


def scores_and_gradients(model, batch, weights_N):
    """All scores, and the gradients of a weighted sum in which each token of each rollout has its own weight."""
    model.zero_grad()
    with shared_prefix(model):
        scores = score(model, batch, temperature=0.9, entropy=True, entropy_grad=True, score_norm=True)
        (weights_N @ scores.logprobs_N + 0.1 * weights_N.square() @ scores.entropy_N).backward()
    return scores, [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_branched_rollouts_shared_equal_repeated(in_float64, seed, across):
    groups = branched_groups(seed, 3, common=4)
    shared = pack(groups, share_across_groups=across, min_saved_tokens=1)
    weights_N = torch.randn(len(shared.targets_N), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    actual, gradients = scores_and_gradients(in_float64, shared, weights_N)
    expected, others = scores_and_gradients(in_float64, pack(groups, "repeated"), weights_N)
    for one, other in zip(actual[:3], expected[:3], strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-9)
    largest = max(float(gradient.abs().max()) for gradient in others)
    for one, other in zip(gradients, others, strict=True):
        torch.testing.assert_close(one, other, atol=1e-9 * largest, rtol=1e-9)


BRANCHED = [[5, 6, 7, 8, 9, 10], [5, 6, 7, 11, 12], [5, 6, 13, 14, 15, 16], [20, 21, 22]]


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
def test_tokens_after_the_last_branch_point_move_no_bit_of_other_rollouts(family):
    model = tiny_model(family)

    def logprobs(rollouts):
        batch = pack([RolloutGroup([1, 2, 3], [Rollout(ids) for ids in rollouts])], min_saved_tokens=1)
        assert [segment.length for segment in batch.layout.segments] == [3, 2, 1, 3, 2, 4, 3]
        with torch.no_grad(), shared_prefix(model):
            return score(model, batch).logprobs_N.split(batch.rollout_lengths)

    before = logprobs(BRANCHED)
    for number, place in ((0, 4), (1, 4), (2, 3), (3, 0)):
        changed = [list(ids) for ids in BRANCHED]
        changed[number][place] = 30
        for other, (one, two) in enumerate(zip(before, logprobs(changed), strict=True)):
            assert torch.equal(one, two) == (other != number)


def test_shared_tokens_move_those_after_them_alone():
    model = tiny_model("qwen3")
    groups = [RolloutGroup([1, 2, 3], [Rollout(ids) for ids in BRANCHED])]
    with torch.no_grad(), shared_prefix(model):
        before = score(model, pack(groups, min_saved_tokens=1)).logprobs_N
        for rollout in groups[0].rollouts[:3]:
            rollout.token_ids[1] = 30  # of what three have in common
        after = score(model, pack(groups, min_saved_tokens=1)).logprobs_N
    moved = (before != after).tolist()
    assert moved == [False, *[True] * 5, False, *[True] * 4, False, *[True] * 5, *[False] * 3]
