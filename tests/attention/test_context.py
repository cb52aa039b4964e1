"""Restoring the model on exit, nested contexts, copies, and arguments that contradict a layout."""

import copy
import io
import pickle
from functools import partial

import pytest
import torch
import torch.distributed as dist
from helpers.tiny_models import repeated_rows, tiny_model
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from pl_grouprl.attention import in_force, shared_prefix, sharing_paused
from pl_grouprl.packing import SharedPrefixLayout

ROWS = repeated_rows(0, [24], 4, 9)
LAYOUT = SharedPrefixLayout.from_groups([(24, [9] * 4)])
PACKED = torch.cat([ROWS[0, :24], ROWS[:, 24:].flatten()])[None]


def state(model):
    """All that a patch could touch."""
    decoder = model.get_decoder()
    return (
        decoder.config._attn_implementation,
        list(decoder._forward_pre_hooks),
        list(decoder._forward_hooks),
        sorted(vars(decoder)),
        decoder.forward,
        model.forward,
        in_force(model),
    )


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_exiting_restores_the_model(family):
    model = tiny_model(family)
    before, expected = state(model), model(ROWS).logits
    context = shared_prefix(model)
    assert state(model) == before  # nothing happens before the context is entered
    with context as entered:
        assert entered is context
        assert in_force(model) is context
        assert model.config._attn_implementation != before[0]
        model(ROWS)
    assert state(model) == before
    context.last_call = None
    assert torch.equal(model(ROWS).logits, expected)
    assert context.last_call is None


def test_an_exception_restores_the_model():
    model = tiny_model()
    before = state(model)

    def body():
        with shared_prefix(model):
            model(ROWS)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        body()
    assert state(model) == before
    with shared_prefix(model), pytest.raises(ValueError, match="prefix_layout has 60 tokens"):
        model(PACKED[:, :-1], prefix_layout=LAYOUT)
    assert state(model) == before


def test_a_context_can_be_entered_again_but_not_twice():
    model = tiny_model()
    context = shared_prefix(model)
    for _ in range(2):
        with context:
            model(ROWS)
        assert not model.model._forward_hooks
    with context, pytest.raises(RuntimeError, match="already active; make a new one to nest it"), context:
        pass


@pytest.mark.parametrize("inner", ["auto", "reference", "prefix_grouper"])
def test_nested_contexts(inner):
    model = tiny_model()
    before, expected = state(model), model(ROWS).logits
    with shared_prefix(model) as one:
        with shared_prefix(model, inner) as two:
            assert in_force(model) is one
            torch.testing.assert_close(model(ROWS).logits, expected, atol=2e-5, rtol=0)
            packed = model(PACKED, prefix_layout=LAYOUT, use_cache=False).logits
        assert in_force(model) is one
        torch.testing.assert_close(model(ROWS).logits, expected, atol=2e-5, rtol=0)
        torch.testing.assert_close(packed, model(PACKED, prefix_layout=LAYOUT).logits, atol=2e-5, rtol=0)
    assert one.last_call.layout is not None
    assert two.last_call is None  # the outer context has shared the rows before
    assert state(model) == before


def test_two_models_at_once():
    first, second = tiny_model(seed=0), tiny_model(seed=1)
    expected = first(ROWS).logits, second(ROWS).logits
    with shared_prefix(first) as one, shared_prefix(second, "reference") as two:
        torch.testing.assert_close(first(ROWS).logits, expected[0], atol=2e-5, rtol=0)
        torch.testing.assert_close(second(ROWS).logits, expected[1], atol=2e-5, rtol=0)
    assert one.last_call.layout is not None
    assert two.last_call.layout is not None
    assert in_force(first) is in_force(second) is None


def test_contexts_exited_in_another_order_on_two_models():
    first, second = tiny_model(seed=0), tiny_model(seed=1)
    before = state(first), state(second)
    one, two = shared_prefix(first), shared_prefix(second)
    one.__enter__()
    two.__enter__()
    one.__exit__(None, None, None)
    assert state(first) == before[0]
    assert in_force(second) is two
    two.__exit__(None, None, None)
    assert state(second) == before[1]


def test_contexts_exited_in_another_order_on_one_model():
    model = tiny_model()
    before, expected = state(model), model(ROWS).logits
    one, two = shared_prefix(model), shared_prefix(model, "reference")
    one.__enter__()
    two.__enter__()
    one.__exit__(None, None, None)
    assert in_force(model) is two
    torch.testing.assert_close(model(ROWS).logits, expected, atol=2e-5, rtol=0)
    assert two.last_call.layout is not None
    two.__exit__(None, None, None)
    assert state(model) == before


def test_a_copy_made_inside_shares_inside_and_is_unpatched_outside():
    model = tiny_model()
    expected = model(ROWS).logits
    with shared_prefix(model) as context:
        model(ROWS)
        twin = copy.deepcopy(model)
        context.last_call = None
        torch.testing.assert_close(twin(ROWS).logits, expected, atol=2e-5, rtol=0)
        assert context.last_call.layout is not None
    context.last_call = None
    assert torch.equal(twin(ROWS).logits, expected)
    assert context.last_call is None
    with shared_prefix(twin) as own:
        torch.testing.assert_close(twin(ROWS).logits, expected, atol=2e-5, rtol=0)
    assert own.last_call.layout is not None


def test_saving_inside_does_not_save_the_patch(tmp_path):
    from transformers import AutoModelForCausalLM

    model = tiny_model()
    with shared_prefix(model):
        model.save_pretrained(tmp_path)
        weights = io.BytesIO()
        torch.save(model.state_dict(), weights)
    assert "shared_prefix" not in (tmp_path / "config.json").read_text()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config._attn_implementation == "sdpa"
    torch.testing.assert_close(loaded(ROWS).logits, model(ROWS).logits)


@pytest.mark.parametrize("family", ["qwen3", "gpt2", "lfm2"])
def test_a_model_pickled_whole_inside_has_nothing_of_the_context(family):
    model = tiny_model(family)
    expected = model(ROWS).logits
    with shared_prefix(model), shared_prefix(model, "reference"):
        pickled = pickle.dumps(model)
        torch.save(model, saved := io.BytesIO())
    for content in (pickled, saved.getvalue()):
        assert b"pl_grouprl" not in content
        assert b"shared_prefix" not in content
    loaded = pickle.loads(pickled)
    assert loaded.config._attn_implementation == "sdpa"
    assert torch.equal(loaded(ROWS).logits, expected)
    with shared_prefix(loaded) as context:
        torch.testing.assert_close(loaded(ROWS).logits, expected, atol=2e-5, rtol=0)
    assert context.last_call.layout is not None


@pytest.fixture
def process_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def with_adapter(model):
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"]))


WRAPPERS = {
    "ddp": DistributedDataParallel,
    "fsdp1": partial(FullyShardedDataParallel, device_id=torch.device("cpu"), use_orig_params=True),
    "compiled": partial(torch.compile, backend="eager"),
    "ddp of compiled": lambda model: DistributedDataParallel(torch.compile(model, backend="eager")),
    "averaged": torch.optim.swa_utils.AveragedModel,
    "peft": with_adapter,
    "ddp of peft": lambda model: DistributedDataParallel(with_adapter(model)),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_wrapped_models(name, process_group):
    model = tiny_model("qwen3")
    loss = model(ROWS, labels=ROWS).loss
    (expected,) = torch.autograd.grad(loss, model.model.layers[0].mlp.up_proj.weight)
    wrapped = WRAPPERS[name](model)
    wrapped.requires_grad_(True)
    with shared_prefix(wrapped) as context:
        assert in_force(wrapped) is context
        shared = wrapped(input_ids=ROWS, labels=ROWS).loss
        assert context.last_call.layout is not None
        shared.backward()
        torch.testing.assert_close(shared, loss)
        gradients = dict(wrapped.named_parameters())
        gradient = next(weight.grad for path, weight in gradients.items() if path.endswith("up_proj.weight"))
        torch.testing.assert_close(gradient.flatten(), expected.flatten(), atol=1e-6, rtol=1e-4)
        with sharing_paused(wrapped):
            wrapped(ROWS)
            assert context.last_call.layout is not None  # of the call before
        wrapped(PACKED, prefix_layout=LAYOUT)
        assert context.last_call.layout is LAYOUT
    assert in_force(wrapped) is None


def test_listeners_are_called_for_every_call():
    model, heard = tiny_model(), []
    with shared_prefix(model) as context:
        context.listeners.append(heard.append)
        model(ROWS)
        model(ROWS[:1])
        model(PACKED, prefix_layout=LAYOUT)
    assert [call.token_ratio for call in heard] == [pytest.approx(132 / 60), 1.0, pytest.approx(132 / 60)]
    assert heard[1].reason == "it has one row"
    assert heard[-1] is context.last_call
    assert heard[-1].layout is LAYOUT


# An explicit layout -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_packed_row_with_and_without_positions(family):
    model = tiny_model(family)
    with torch.no_grad(), shared_prefix(model):
        expected = model(PACKED, prefix_layout=LAYOUT).logits
        for extra in (
            {"position_ids": LAYOUT.position_ids[None]},
            {"position_ids": LAYOUT.position_ids},
            {"attention_mask": torch.ones_like(PACKED)},
            {"use_cache": False},
        ):
            assert torch.equal(model(PACKED, prefix_layout=LAYOUT, **extra).logits, expected)
        embedded = model.get_input_embeddings()(PACKED)
        assert torch.equal(model(inputs_embeds=embedded, prefix_layout=LAYOUT).logits, expected)


@pytest.mark.parametrize(
    ("ids", "extra", "message"),
    [
        (PACKED[:, :-1], {}, r"prefix_layout has 60 tokens.*shape \[1, 59\]; pass one packed row"),
        (PACKED.repeat(2, 1), {}, r"shape \[2, 60\]; pass one packed row"),
        (
            PACKED,
            {"position_ids": torch.arange(59)[None]},
            "position_ids",
        ),
        (PACKED, {"attention_mask": torch.ones(1, 60).tril(-1)}, "attention_mask hides tokens of a packed row"),
        (PACKED, {"use_cache": True}, "runs without a cache; pass use_cache=False"),
    ],
    ids=["short row", "two rows", "positions", "mask", "cache"],
)
def test_arguments_that_contradict_the_layout_are_refused(ids, extra, message):
    model = tiny_model()
    with shared_prefix(model), pytest.raises(ValueError, match=message):
        model(ids, prefix_layout=LAYOUT, **extra)


def test_a_layout_reaches_an_unpatched_decoder_with_our_attention():
    """A copy that is used after its context: the layout is not ignored."""
    model = tiny_model()
    with shared_prefix(model):
        twin = copy.deepcopy(model)
    with pytest.raises(RuntimeError, match=r"decoder that is not patched; run the model inside `with shared_prefix"):
        twin(PACKED, prefix_layout=LAYOUT)


def test_an_unknown_backend_is_refused_before_anything_is_patched():
    model = tiny_model()
    before = state(model)
    with pytest.raises(ValueError, match="backend is 'fast'; choose one of"):
        shared_prefix(model, "fast")
    assert state(model) == before


def test_flex_refuses_to_train_on_cpu():
    model = tiny_model()
    model.requires_grad_(False)
    for layer in model.model.layers:  # adapters on the values alone: no query needs a gradient
        layer.self_attn.v_proj.requires_grad_(True)
    with (
        shared_prefix(model, "flex"),
        pytest.raises(RuntimeError, match="no backward pass on CPU; use backend 'cascade'"),
    ):
        model(ROWS)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpointed_backward_after_the_context_fails_loudly(use_reentrant):
    model = tiny_model("qwen3").train()
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    with shared_prefix(model):
        loss = model(PACKED, prefix_layout=LAYOUT).logits.square().sum()
    with pytest.raises(RuntimeError):
        loss.backward()


def test_labels_with_a_layout_are_refused():
    model = tiny_model("qwen3")
    with shared_prefix(model), pytest.raises(ValueError, match="labels are shifted by one token along the packed row"):
        model(PACKED, labels=PACKED, prefix_layout=LAYOUT)
