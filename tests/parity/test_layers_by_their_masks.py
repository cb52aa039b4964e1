"""Layers that pass on only their mask, and layers that select tokens by it: shared = repeated in float64."""

import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from helpers.float64 import InFloat64
from helpers.sweeps import sweep
from helpers.tiny_models import VOCAB, gradients, tiny_model, worst_gradient_error

from pl_grouprl.attention import UnsupportedModelError, shared_prefix
from pl_grouprl.attention import patch as patch_module
from pl_grouprl.attention.call import PrefixStates
from pl_grouprl.packing import SharedPrefixLayout

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

from models_table import select
from tiny_families import build

FORESTS = [
    SharedPrefixLayout([9, 6, 11, 1, 13, 0, 5, 4, 3], [None, 0, 1, 1, 1, 0, None, 6, 6]),
    SharedPrefixLayout([7, 10, 3, 12, 5, 9, 2, 6, 1, 8, 4], [None, 0, 1, 2, 2, 1, 0, None, 7, 8, 9]),
]
WINDOW = {"sliding_window": 4}
DEAF = {
    "stablelm": {},
    "nemotron": {},
    "starcoder2": WINDOW,
    "gemma2": WINDOW,
    "gpt_oss": WINDOW | {"num_local_experts": 4},
}
"""Families whose attention is not given `prefix_layout`, and others from which we keep it."""

SELECTING = ("deepseek_v32", "glm_moe_dsa", "hy_v4", "mistral_large4", "axk2", "dots3_note_text", "qwen4_exp_text")


def in_float64(model):
    model.set_experts_implementation("eager")  # the grouped one has no float64
    return model.double()


def deaf_model(family):
    """Layers of this model hand on their mask and nothing else of ours."""
    model = in_float64(tiny_model(family, **DEAF[family]))
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda module, args, kwargs: (args, kwargs | {"prefix_layout": None}), with_kwargs=True
        )
    return model


def small_model(name):
    family = next(family for family in select([name]) if family.name == name)
    return in_float64(build(family, fill=name.startswith("qwen4")))


def logprobs(model, layout, tokens, targets, packed):
    """Of random targets at all tokens, [T]."""
    if packed:
        logits = model(input_ids=tokens[None], prefix_layout=layout, use_cache=False).logits[0]
        return logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    found = {}
    for path in (layout.path(leaf).tolist() for leaf in layout.leaves):
        logits = model(input_ids=tokens[path][None], use_cache=False).logits[0]
        row = logits.log_softmax(-1).gather(1, targets[path][:, None])[:, 0]
        found |= {token: row[place] for place, token in enumerate(path) if token not in found}
    return torch.stack([found[token] for token in range(len(tokens))])


def step(model, layout, packed):
    tokens, targets = torch.randint(1, 48, (2, layout.num_tokens), generator=torch.Generator().manual_seed(0))
    model.zero_grad()
    values = logprobs(model, layout, tokens, targets, packed)
    (values * torch.linspace(0.5, 1.5, len(values), dtype=values.dtype)).sum().backward()
    return values.detach(), gradients(model)


def assert_exact(model, layout):
    with InFloat64():
        expected, expected_gradients = step(model, layout, packed=False)
        with shared_prefix(model):
            found, found_gradients = step(model, layout, packed=True)
    assert (found - expected).abs().max() < 1e-9
    assert worst_gradient_error(found_gradients, expected_gradients) < 1e-9


def checkpointed(model, use_reentrant):
    model.train().gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    if use_reentrant:
        model.enable_input_require_grads()
    return model


# Layers that pass on only their mask ---------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", sweep(FORESTS, quick=FORESTS[1:]), ids=["depth 2", "depth 3"])
@pytest.mark.parametrize("family", DEAF)
def test_the_mask_alone_brings_the_layout(family, layout):
    assert_exact(deaf_model(family), layout)


@pytest.mark.parametrize(("family", "use_reentrant"), [("nemotron", False), ("starcoder2", True)])
def test_activation_checkpointing(family, use_reentrant):
    assert_exact(checkpointed(deaf_model(family), use_reentrant), FORESTS[1])


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputed_layers_see_the_layout_of_their_own_forward(use_reentrant):
    model, other = (checkpointed(deaf_model(family), use_reentrant) for family in ("nemotron", "stablelm"))
    row, targets = (torch.arange(FORESTS[0].num_tokens) % VOCAB for _ in range(2))
    with shared_prefix(model):
        model.zero_grad()
        logprobs(model, FORESTS[0], row, targets, packed=True).sum().backward()
        expected = gradients(model)
        model.zero_grad()
        values = logprobs(model, FORESTS[0], row, targets, packed=True)
        turned = SharedPrefixLayout([FORESTS[0].num_tokens - 1, 1], [None, 0])
        with shared_prefix(other):
            for one in (model, other):
                logprobs(one, turned, row, targets, packed=True)
            model(row[None])  # and one without a layout
            values.sum().backward()
    assert worst_gradient_error(gradients(model), expected) < 1e-12


def test_threads_keep_their_layouts():
    from concurrent.futures import ThreadPoolExecutor

    model = deaf_model("nemotron")
    row, targets = (torch.arange(FORESTS[0].num_tokens) % VOCAB for _ in range(2))
    turned = SharedPrefixLayout([FORESTS[0].num_tokens - 1, 1], [None, 0])
    with shared_prefix(model), torch.no_grad():
        layouts = [FORESTS[0], turned] * 4
        expected = [logprobs(model, layout, row, targets, packed=True) for layout in layouts]
        with ThreadPoolExecutor(2) as threads:
            found = list(threads.map(lambda layout: one_thread(model, layout, row, targets), layouts))
    assert not torch.equal(expected[0], expected[1])
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def one_thread(model, layout, row, targets):
    with torch.no_grad():
        return logprobs(model, layout, row, targets, packed=True)


def test_a_call_ends_with_its_markers():
    """Without the help of the garbage collector, which would keep a step's tensors for longer."""
    import gc

    from pl_grouprl.attention.masks import _MARKED

    model = checkpointed(deaf_model("starcoder2"), use_reentrant=False)
    gc.collect()
    before = len(_MARKED)
    gc.disable()
    try:
        with shared_prefix(model):
            step(model, FORESTS[0], packed=True)
            assert len(_MARKED) == before
    finally:
        gc.enable()


# Layers that select tokens by their mask -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", sweep(SELECTING, quick=["deepseek_v32"]))
def test_selected_tokens_are_those_of_the_sequence_alone(name):
    """They select 8 tokens, or 4 blocks of 2, of up to 34; each depth of forest."""
    for layout in FORESTS:
        assert_exact(small_model(name), layout)


@pytest.mark.parametrize("name", ["deepseek_v32", "qwen4_exp_text"])
def test_selection_with_activation_checkpointing(name):
    model = small_model(name).train()
    kwargs = {"use_reentrant": False, "context_fn": lambda: (nullcontext(), InFloat64())}
    model.gradient_checkpointing_enable(kwargs)
    assert_exact(model, FORESTS[0])


def test_selection_with_masks_that_are_added():
    model = small_model("deepseek_v32")
    model.set_attn_implementation("eager")
    assert_exact(model, FORESTS[0])


def test_ordinary_rows_inside_a_context_select_too():
    """Layers know `sdpa` by its name, and hand the selection to other implementations."""
    model, row = small_model("deepseek_v32"), torch.arange(1, 31)[None]
    with torch.no_grad():
        expected = model(row).logits
        with shared_prefix(model) as patch:
            assert torch.equal(model(row).logits, expected)
            assert patch.describe() == "dense mask: sdpa (2 layers)"


def test_selecting_layers_are_found_in_models_that_cannot_be_checked(monkeypatch):
    """Their weights may be sharded."""
    monkeypatch.setattr(patch_module, "is_whole", lambda model: False)
    assert_exact(small_model("deepseek_v32"), FORESTS[0])
    with shared_prefix(tiny_model("mixtral")) as patch:  # its routers select experts
        assert not patch.dense


def selecting_by_place(indexer):
    """Its scores grow along the row, whatever lies between."""

    def changed(self, hidden_states, q_resid, position_embeddings, attention_mask, *args, **kwargs):
        places = torch.arange(attention_mask.shape[-1]) % 7 * 100.0
        scores = torch.where(attention_mask, places, -1.0)
        return scores.topk(min(self.index_topk, scores.shape[-1]), dim=-1).indices.to(torch.int32)

    indexer.forward = changed.__get__(indexer)


def test_layers_that_select_by_place_are_refused():
    model = small_model("deepseek_v32")
    for layer in model.model.layers:
        selecting_by_place(layer.self_attn.indexer)
    # In Doge's first layer, equal tokens have equal scores wherever they are.
    for own in (model, small_model("doge")):
        with pytest.raises(UnsupportedModelError, match="mixes tokens, or selects them"), shared_prefix(own):
            pass


def test_what_needs_a_marker_is_refused():
    model = small_model("deepseek_v32")
    with pytest.raises(UnsupportedModelError, match="attention mask"):
        shared_prefix(model, "cascade").__enter__()
    layout = SharedPrefixLayout([4], [None])
    with shared_prefix(model), pytest.raises(NotImplementedError, match="dense mask"):
        model.model(torch.ones(1, 4, dtype=torch.long), prefix_layout=layout, prefix_states=PrefixStates(record=True))


# Layers that do not run ----------------------------------------------------------------------------------------------


def test_layers_that_text_alone_does_not_run():
    model = build(next(family for family in select(["mllama"]))).double()
    assert_exact(model, FORESTS[0])
    decoder, row = model.get_decoder(), torch.ones(1, 4, dtype=torch.long)
    images = torch.zeros(1, 5, model.config.get_text_config().hidden_size, dtype=torch.float64)
    message = "MllamaCrossAttentionDecoderLayer"
    with shared_prefix(model):
        for _ in range(2):
            with pytest.raises(NotImplementedError, match=message):
                decoder(row, prefix_layout=SharedPrefixLayout([4], [None]), cross_attention_states=images)
    decoder(row, cross_attention_states=images)
