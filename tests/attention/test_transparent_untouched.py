"""Calls that cannot be shared go through untouched, and the context says why."""

import contextlib

import pytest
import torch
from helpers.tiny_models import repeated_rows, tiny_model

from pl_grouprl.attention import shared_prefix

ROWS = repeated_rows(0, [24, 24], 4, 9)


def untouched(model, reason, **arguments):
    with torch.no_grad():
        expected = model(**arguments)
        with shared_prefix(model) as context:
            actual = model(**arguments)
    assert context.last_call.layout is None
    assert reason in context.last_call.reason
    assert torch.equal(actual.logits, expected.logits)
    return actual


def test_a_custom_mask_goes_through():
    block = torch.ones(33, 33, dtype=torch.bool).tril()[None, None].expand(8, 1, 33, 33)
    untouched(tiny_model(), "attention_mask is not of the shape", input_ids=ROWS, attention_mask=block)


def test_a_cache_goes_through():
    out = untouched(tiny_model(), "a cache is in use", input_ids=ROWS, use_cache=True)
    assert out.past_key_values.get_seq_length() == 33


def test_decoding_by_hand_cannot_continue_without_a_cache():
    model = tiny_model()
    with torch.no_grad(), shared_prefix(model):
        first = model(ROWS)
        with pytest.raises(RuntimeError, match=r"which keeps none; pass use_cache=True to that call"):
            model(ROWS[:, -1:], past_key_values=first.past_key_values)
        assert model(ROWS, use_cache=False).past_key_values is None
        cached = model(ROWS[:, :-1], use_cache=True)
        actual = model(ROWS[:, -1:], past_key_values=cached.past_key_values).logits[:, 0]
    with pytest.raises(RuntimeError, match="which keeps none"):
        model(ROWS[:, -1:], past_key_values=first.past_key_values)
    torch.testing.assert_close(actual, model(ROWS).logits[:, -1], atol=2e-5, rtol=0)


def test_other_calls_that_go_through():
    untouched(tiny_model(), "it has one row", input_ids=ROWS[:1])
    untouched(tiny_model(), "no rows of the batch share a prefix", input_ids=ROWS.flip(1))
    model = tiny_model(attn_implementation="eager")
    out = untouched(model, "attention weights are requested", input_ids=ROWS, output_attentions=True)
    assert out.attentions[0].shape == (8, 4, 33, 33)
    arguments = {"output_router_logits": True, "return_dict": False}
    with torch.no_grad(), shared_prefix(tiny_model("qwen3_moe")) as context:
        context.decoder(ROWS, **arguments)
    assert "router logits" in context.last_call.reason


def test_embeddings_go_through():
    model = tiny_model()
    embedded = model.get_input_embeddings()(ROWS).detach()
    with torch.no_grad():
        expected = model(inputs_embeds=embedded).logits
        with shared_prefix(model):
            assert torch.equal(model(inputs_embeds=embedded).logits, expected)


def unevenly_left_padded():
    """Rows of two prompts with different padding on the left, and what the model makes of them."""
    ids, mask = ROWS.clone(), torch.ones_like(ROWS)
    for row, padding in enumerate((3, 0, 5, 1)):
        ids[row] = ids[row].roll(padding)
        ids[row, :padding], mask[row, :padding] = 0, 0
    return {"input_ids": ids[:4], "attention_mask": mask[:4]}


def test_norms_after_the_rotation_share_only_at_equal_positions():
    model = tiny_model("hunyuan_v1_dense")
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 1:  # norms that are 1 everywhere would hide the difference
                weight.add_(0.3 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)))
    untouched(model, "no rows of the batch share a prefix", **unevenly_left_padded())


def test_labels_that_padding_predicts_leave_the_call_untouched():
    model = tiny_model()
    inputs = unevenly_left_padded()
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    out = untouched(model, "its labels train tokens that padding predicts", **inputs, labels=labels)
    assert torch.isfinite(out.loss)


def test_embeddings_and_configured_attentions_are_reported():
    model = tiny_model()
    untouched(model, "embeddings cannot be compared", inputs_embeds=model.get_input_embeddings()(ROWS))
    model.config._attn_implementation = "eager"
    model.config.output_attentions = True
    assert len(untouched(model, "attention weights are requested", input_ids=ROWS).attentions) == 2


def test_a_mask_of_another_width_goes_through():
    model = tiny_model()
    wide = torch.ones(8, 40, dtype=torch.long)
    errors = (RuntimeError, ValueError, IndexError)
    with torch.no_grad(), shared_prefix(model) as context, contextlib.suppress(*errors):
        model(ROWS, attention_mask=wide)
    assert "attention_mask is not of the shape" in context.last_call.reason
