"""Shared against repeated prefix for whole models: log-probabilities within 1e-5, gradients within 1e-4 relative."""

import random

import pytest
import torch
from helpers.forests import random_forest, sequences
from helpers.sweeps import sweep
from helpers.tiny_models import FAMILIES, VOCAB, gradients, random_groups, tiny_model, worst_gradient_error
from helpers.variants import VARIANTS, variant

from pl_grouprl.attention import shared_prefix
from pl_grouprl.models.score import rollout_logprobs
from pl_grouprl.packing import SharedPrefixLayout

pytestmark = pytest.mark.usefixtures("layers_checked_once")

SHAPES = {
    "uneven": [(20, [7, 1, 12, 3]), (5, [9, 2])],
    "empty and single": [(6, [0, 4]), (11, [5]), (1, [3, 0, 0, 8]), (4, [1])],
    "long": [(140, [9, 130]), (33, [17, 16])],
    "longer": [(70, [9, 40]), (33, [17, 16])],
}


def loss_weights(count):
    return torch.linspace(0.5, 1.5, count)


def logprobs_and_gradients(model, groups, sharing, backend="auto", **context):
    """Log-probabilities as one tensor, and the gradients of a loss that weighs every token differently."""
    model.zero_grad()
    with shared_prefix(model, backend):
        logprobs = torch.cat(rollout_logprobs(model, groups, sharing=sharing, backend=backend))
        (logprobs * loss_weights(len(logprobs))).sum().backward()
    return logprobs.detach(), gradients(model)


def assert_parity(model, groups, backend="auto", logprob=1e-5, gradient=1e-4):
    shared, shared_gradients = logprobs_and_gradients(model, groups, "shared", backend)
    repeated, repeated_gradients = logprobs_and_gradients(model, groups, "repeated")
    assert (shared - repeated).abs().max() < logprob
    assert worst_gradient_error(shared_gradients, repeated_gradients) < gradient


@pytest.mark.parametrize(
    ("family", "shapes"),
    [*(("llama", shapes) for shapes in ("uneven", "long")), *((f, "empty and single") for f in FAMILIES)],
)
def test_groups(family, shapes):
    assert_parity(tiny_model(family), random_groups(0, SHAPES[shapes]))


@pytest.mark.parametrize("backend", ["cascade", "prefix_grouper", "reference"])
@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_backends(family, backend):
    assert_parity(tiny_model(family), random_groups(1, SHAPES["uneven"]), backend)


@pytest.mark.parametrize("wrapped", ["eager", "sdpa"])
def test_wrapped_implementation(wrapped):
    model = tiny_model("llama", attn_implementation=wrapped)
    assert model.config._attn_implementation == wrapped
    assert_parity(model, random_groups(2, SHAPES["uneven"]))


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt2"])
def test_results_come_back_in_the_caller_s_order(family):
    model, groups = tiny_model(family), random_groups(3, SHAPES["uneven"] + SHAPES["empty and single"])
    order = list(range(len(groups)))
    random.Random(0).shuffle(order)
    with torch.no_grad():
        expected = [rollout_logprobs(model, [group], sharing="repeated") for group in groups]
        actual = rollout_logprobs(model, [groups[number] for number in order])
    expected = [one for number in order for one in expected[number]]
    assert [len(one) for one in actual] == [len(one) for one in expected]
    torch.testing.assert_close(torch.cat(actual), torch.cat(expected), atol=1e-5, rtol=0)


def forest_losses(model, forest, tokens, targets, packed, **call):
    """Log-probability of a random target at every packed token: from the packed row, or sequence by sequence."""
    layout = SharedPrefixLayout(*forest)
    if packed:
        row = tokens[None]
        logits = model(input_ids=row, prefix_layout=layout, use_cache=False, **call).logits[0]
        return logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    rows = {}
    for sequence in sequences(forest):
        logits = model(input_ids=tokens[sequence][None], use_cache=False).logits[0]
        logprobs = logits.log_softmax(-1).gather(1, targets[sequence][:, None])[:, 0]
        for place, token in enumerate(sequence):
            rows.setdefault(token, logprobs[place])
    return torch.stack([rows[token] for token in range(len(tokens))])


def assert_forest_parity(model, forest, backend="auto", logprob=1e-5, gradient=1e-4):
    generator = torch.Generator().manual_seed(0)
    tokens, targets = torch.randint(1, VOCAB, (2, sum(forest.lengths)), generator=generator)
    found = []
    with shared_prefix(model, backend):
        for packed in (True, False):
            model.zero_grad()
            logprobs = forest_losses(model, forest, tokens, targets, packed)
            (logprobs * loss_weights(len(logprobs))).sum().backward()
            found.append((logprobs.detach(), gradients(model)))
    (shared, shared_gradients), (repeated, repeated_gradients) = found
    assert (shared - repeated).abs().max() < logprob
    assert worst_gradient_error(shared_gradients, repeated_gradients) < gradient


@pytest.mark.parametrize("depth", sweep([1, 2, 3, 4], quick=[4]))
@pytest.mark.parametrize("family", FAMILIES)
def test_forests(family, depth):
    assert_forest_parity(tiny_model(family), random_forest(depth, depth))


def test_a_deep_forest_with_the_reference_backend():
    assert_forest_parity(tiny_model("llama"), random_forest(0, 4), "reference")


@pytest.mark.parametrize(("family", "use_reentrant"), [("qwen3", True), ("gpt2", False)])
def test_activation_checkpointing(family, use_reentrant):
    model = tiny_model(family)
    assert_parity_checkpointed(model, use_reentrant)
    assert_forest_parity(model, random_forest(1, 3))


def assert_parity_checkpointed(model, use_reentrant):
    groups = random_groups(4, SHAPES["uneven"])
    expected = logprobs_and_gradients(model.train(), groups, "repeated")
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    if use_reentrant:
        model.enable_input_require_grads()
    logprobs, found = logprobs_and_gradients(model, groups, "shared")
    assert (logprobs - expected[0]).abs().max() < 1e-5
    assert worst_gradient_error(found, expected[1]) < 1e-4


def test_activation_checkpointing_recomputes_with_our_attention():
    """The gradients above would agree too if nothing were recomputed."""
    model, calls = tiny_model("llama").train(), []
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with shared_prefix(model):
        pass  # the first look at a model runs it too
    model.model.layers[0].self_attn.register_forward_hook(lambda *args: calls.append(1))
    logprobs_and_gradients(model, random_groups(4, SHAPES["uneven"]), "shared")
    assert len(calls) == 2


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_float64_leaves_only_what_transformers_rounds(family):
    assert_parity(tiny_model(family, dtype=torch.float64), random_groups(5, SHAPES["uneven"]))


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_bfloat16_is_no_further_from_float32_than_the_repeated_prefix(family):
    groups = random_groups(6, SHAPES["uneven"])
    exact, exact_gradients = logprobs_and_gradients(tiny_model(family), groups, "repeated")
    model = tiny_model(family, dtype=torch.bfloat16)
    errors = {}
    for sharing in ("shared", "repeated"):
        logprobs, found = logprobs_and_gradients(model, groups, sharing)
        assert logprobs.dtype == torch.float32
        squares = [(found[name].double() - exact_gradients[name].double()).square().sum() for name in found]
        errors[sharing] = (logprobs - exact).square().mean().sqrt(), torch.stack(squares).sum().sqrt()
    for shared, repeated in zip(errors["shared"], errors["repeated"], strict=True):
        assert repeated > 0
        assert shared < 1.5 * repeated


@pytest.mark.parametrize("backend", sweep(["cascade", "prefix_grouper", "reference"], quick=["cascade"]))
def test_autocast(backend):
    groups = random_groups(7, SHAPES["uneven"])
    model = tiny_model("qwen3")
    exact, exact_gradients = logprobs_and_gradients(model, groups, "repeated")
    with torch.autocast("cpu", torch.bfloat16):
        shared, found = logprobs_and_gradients(model, groups, "shared", backend)
        repeated, _ = logprobs_and_gradients(model, groups, "repeated")
    assert shared.dtype == torch.float32
    rounding = (repeated - exact).square().mean().sqrt()
    assert 0 < (shared - exact).square().mean().sqrt() < 1.5 * rounding
    assert all(grad.dtype == torch.float32 for grad in found.values())
    norms = [(found[n] - exact_gradients[n]).norm() / exact_gradients[n].norm() for n in found if "weight" in n]
    assert max(norms) < 0.15


# Families whose attention is more than plain causal softmax ----------------------------------------------------------


@pytest.mark.parametrize("shapes", sweep(["longer", "uneven", "empty and single"], quick=["longer"]))
@pytest.mark.parametrize("name", VARIANTS)
def test_variants_in_groups(name, shapes):
    assert_parity(variant(name), random_groups(1, SHAPES[shapes]), gradient=3e-4 if shapes == "longer" else 1e-4)


@pytest.mark.parametrize("depth", sweep([2, 3], quick=[3]))
@pytest.mark.parametrize("name", VARIANTS)
def test_variants_in_forests(name, depth):
    """Deep enough that windows and chunks begin in parents, grandparents and the segment itself."""
    forest = random_forest(depth, depth)
    assert max(len(sequence) for sequence in sequences(forest)) > 12
    # A delta rule works through a sequence in chunks, which a segment begins anew.
    assert_forest_parity(variant(name), forest, logprob=3e-5 if name == "qwen3_5" else 1e-5)


@pytest.mark.parametrize("use_reentrant", sweep([True, False], quick=[False]))
@pytest.mark.parametrize("name", VARIANTS)
def test_variants_with_activation_checkpointing(name, use_reentrant):
    assert_parity_checkpointed(variant(name), use_reentrant)


@pytest.mark.parametrize("wrapped", sweep(["eager", "sdpa"], quick=["eager"]))
@pytest.mark.parametrize("name", VARIANTS)
def test_variants_over_each_implementation(name, wrapped):
    family, *_ = VARIANTS[name]
    if family in ("gemma2", "gpt_oss") and wrapped == "sdpa":
        pytest.skip("transformers has no soft caps and no sinks in sdpa")
    model = variant(name, attn_implementation=wrapped)
    assert model.config._attn_implementation == wrapped
    assert_parity(model, random_groups(2, SHAPES["uneven"]))


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_are_what_they_say(name):
    """With the feature switched off the same weights say something else, so that the tests above can fail."""
    _, _, kinds, off = VARIANTS[name]
    model, groups = variant(name), random_groups(0, SHAPES["uneven"])
    with shared_prefix(model) as context:
        for kind in kinds:
            assert kind in context.layers
    with torch.no_grad():
        expected = torch.cat(rollout_logprobs(model, groups, sharing="repeated"))
        off(model)
        actual = torch.cat(rollout_logprobs(model, groups, sharing="repeated"))
    assert (actual - expected).abs().max() > 1e-3


# Compilation, training, a GPU -----------------------------------------------------------------------------------------


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    # Otherwise a graph of any lengths is compiled twice: at first with the scale of the scores as a symbol.
    with torch._dynamo.config.patch(specialize_float=True):
        yield
    torch._dynamo.reset()


def compiled(model, part):
    if part == "model":
        return torch.compile(model, backend="aot_eager")
    if part == "decoder":
        model.model.compile(backend="aot_eager")
    else:
        for layer in model.model.layers:
            layer.compile(backend="aot_eager")
    return model


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("part", sweep(["layers", "decoder", "model"], quick=["layers"]))
def test_compiled(part):
    model = tiny_model("qwen3").train()
    groups = random_groups(8, SHAPES["uneven"])
    expected = logprobs_and_gradients(model, groups, "repeated")
    forest = random_forest(0, 2)
    tokens, targets = torch.randint(1, VOCAB, (2, sum(forest.lengths)), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected_forest = forest_losses(model, forest, tokens, targets, packed=False)
    run = compiled(model, part)
    logprobs, found = logprobs_and_gradients(model, groups, "shared")
    assert (logprobs - expected[0]).abs().max() < 1e-5
    assert worst_gradient_error(found, expected[1]) < 1e-4
    with torch.no_grad(), shared_prefix(model):
        actual = forest_losses(run, forest, tokens, targets, packed=True)
    assert (actual - expected_forest).abs().max() < 1e-5


@pytest.mark.usefixtures("fresh_compiler")
def test_a_full_graph_of_the_model_is_refused_with_the_reason():
    model = tiny_model("llama")
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    layout = SharedPrefixLayout.from_groups([(4, [2, 3])])
    with shared_prefix(model), pytest.raises(Exception, match="the decoder's layers compile"):
        run(torch.ones(1, 9, dtype=torch.long), prefix_layout=layout, use_cache=False)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("name", sweep(["mistral", "gemma2, windows", "gpt_oss, sinks"], quick=["gpt_oss, sinks"]))
def test_layers_compile_into_full_graphs(name):
    """Windows, soft caps and sinks too; a second forest needs no other graph than the first."""
    model, forests = variant(name).train(), [random_forest(seed, depth) for seed, depth in ((0, 2), (3, 3))]
    inputs = []
    for seed, forest in enumerate(forests):
        generator = torch.Generator().manual_seed(seed)
        inputs.append(torch.randint(1, VOCAB, (2, sum(forest.lengths)), generator=generator))
    expected = []
    for forest, (tokens, targets) in zip(forests, inputs, strict=True):
        model.zero_grad()
        logprobs = forest_losses(model, forest, tokens, targets, packed=False)
        (logprobs * loss_weights(len(logprobs))).sum().backward()
        expected.append((logprobs.detach(), gradients(model)))
    for layer in model.model.layers:
        layer.self_attn.compile(backend="aot_eager", fullgraph=True, dynamic=True)
    with shared_prefix(model):
        for forest, (tokens, targets), (one, found) in zip(forests, inputs, expected, strict=True):
            model.zero_grad()
            logprobs = forest_losses(model, forest, tokens, targets, packed=True)
            (logprobs * loss_weights(len(logprobs))).sum().backward()
            assert (logprobs - one).abs().max() < 1e-5
            assert worst_gradient_error(gradients(model), found) < 1e-4


@pytest.mark.parametrize("family", sweep(["llama", "qwen3", "gpt2", "qwen3_moe"], quick=["qwen3", "gpt2"]))
def test_training_trajectory(family):
    """Twenty-five optimizer steps with sharing on and off stay within 1e-4 in loss."""
    shapes, losses = [(16, [5, 3, 6, 0]), (9, [4, 4])], {}
    for sharing in ("shared", "repeated"):
        model = tiny_model(family)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        losses[sharing] = []
        for step in range(25):
            logprobs = torch.cat(rollout_logprobs(model, random_groups(step % 5, shapes), sharing=sharing))
            loss = -logprobs.mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[sharing].append(loss.item())
    assert losses["shared"][-1] < losses["shared"][0] - 0.1  # it does train
    assert max(abs(a - b) for a, b in zip(*losses.values(), strict=True)) < 1e-4


def test_experts_of_other_rollouts_move_logprobs_by_rounding_alone():
    """Tokens visit experts in one batch for all rollouts, so that the bits may change, and nothing else."""
    model, (before, after) = tiny_model("qwen3_moe"), (random_groups(9, [(30, [9, 6, 12])]) for _ in range(2))
    after[0].rollouts[1].token_ids = [(token + 11) % VOCAB for token in before[0].rollouts[1].token_ids]
    with torch.no_grad():
        one, other = rollout_logprobs(model, before), rollout_logprobs(model, after)
    for number in (0, 2):
        torch.testing.assert_close(one[number], other[number], atol=2e-6, rtol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_on_gpu(family, checkpointing):
    size = {} if family == "gpt2" else {"head_dim": 32}
    groups = random_groups(10, SHAPES["uneven"] + SHAPES["long"])
    exact, _ = logprobs_and_gradients(tiny_model(family, **size), groups, "repeated")
    model = tiny_model(family, dtype=torch.bfloat16, **size).to("cuda").train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    errors, found = {}, {}
    for sharing in ("shared", "repeated"):
        model.zero_grad()
        with shared_prefix(model):
            logprobs = torch.cat(rollout_logprobs(model, groups, sharing=sharing))
            logprobs.mul(loss_weights(len(logprobs)).cuda()).sum().backward()
        errors[sharing] = (logprobs.detach().cpu() - exact).square().mean().sqrt()
        found[sharing] = torch.cat([g.flatten().double() for g in gradients(model).values()])
    assert errors["shared"] < 1.5 * errors["repeated"]
    assert (found["shared"] - found["repeated"]).norm() < 0.1 * found["repeated"].norm()
