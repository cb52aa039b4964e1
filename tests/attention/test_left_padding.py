"""Models that count columns, padding included: padded batches inside a context, and its checks."""

import pytest
import torch
from helpers.tiny_models import gradients, repeated_rows, tiny_model, worst_gradient_error
from torch import nn

from pl_grouprl.attention import UnsupportedModelError, check_parity, patch, shared_prefix
from pl_grouprl.attention.function import rescale_by_column

ROWS = repeated_rows(0, [24, 24], 4, 9)


def llama4(**options):
    """Two layers, the second without rotation; its scale moves every two columns."""
    sizes = {"no_rope_layers": [1, 0], "num_local_experts": 2, "attention_chunk_size": 64, "intermediate_size_mlp": 48}
    scale = {"attn_temperature_tuning": True, "floor_scale": 2, "attn_scale": 0.5}
    return tiny_model("llama4_text", **(sizes | scale | options))


def shifted(count, *paddings):
    """The first rows, each with so many columns of padding on its left, and a column of it on the right."""
    width = ROWS.shape[1] + max(paddings) + 1
    ids, mask = torch.zeros(count, width, dtype=torch.long), torch.zeros(count, width, dtype=torch.long)
    for row, left in enumerate(paddings):
        ids[row, left : left + ROWS.shape[1]], mask[row, left : left + ROWS.shape[1]] = ROWS[row], 1
    return ids, mask


def run(model, ids, mask, **arguments):
    model.zero_grad()
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False, **arguments).logits[mask.bool()]
    picked = logits.log_softmax(-1).gather(1, ids[mask.bool()].roll(-1)[:, None])[:, 0]
    (picked * torch.linspace(0.5, 1.5, len(picked))).sum().backward()
    return logits.detach(), gradients(model)


def assert_same(model, ids, mask, **arguments):
    """Logits and gradients of the model itself; returns what became of the call."""
    logits, expected = run(model, ids, mask, **arguments)
    with shared_prefix(model) as context:
        found_logits, found = run(model, ids, mask, **arguments)
    torch.testing.assert_close(found_logits, logits, atol=2e-5, rtol=0)
    assert worst_gradient_error(found, expected) < 1e-4
    return context.last_call


def test_the_scale_is_that_of_the_column():
    model = llama4()
    columns = model(*shifted(1, 0)).logits[0, :33], model(*shifted(1, 7)).logits[0, 7:40]
    assert (columns[0] - columns[1]).abs().max() > 0.1  # the padding alone moves the logits
    call = assert_same(model, *shifted(4, 7, 7, 7, 7))
    assert call.token_ratio > 1.5
    assert_same(model, *shifted(8, 0, 0, 0, 0, 7, 7, 7, 7))


def test_rows_share_only_in_the_same_columns():
    """Whatever positions the caller gives: the scale is of the column, the rotation of the position."""
    model = llama4()
    ids, mask = shifted(4, 0, 5, 0, 5)
    positions = (mask.cumsum(1) - 1).clamp(min=0)  # equal for equal tokens
    call = assert_same(model, ids, mask, position_ids=positions)
    assert [segment.length for segment in call.layout.segments if segment.parent is None] == [24, 24]
    assert_same(model, *shifted(4, 3, 1, 3, 1))


def test_padding_in_the_middle_and_activation_checkpointing():
    model = llama4(attention_chunk_size=8192).train()
    ids, mask = shifted(4, 4, 4, 4, 4)
    mask[:, 20:23] = 0
    assert_same(model, ids, mask)
    model.gradient_checkpointing_enable()
    ids, mask = shifted(4, 4, 4, 4, 4)
    expected = run(model, ids, mask)
    with shared_prefix(model) as context:
        found = run(model, ids, mask)
    assert context.last_call.layout is not None
    torch.testing.assert_close(found[0], expected[0], atol=2e-5, rtol=0)


class ScaledByColumn(nn.Module):
    """An unknown layer that scales by the column if `counts(mask)`, which is false in packed rows."""

    def __init__(self, mlp, counts):
        super().__init__()
        self.mlp, self.counts, self.active = mlp, counts, False

    def look(self, decoder, args, kwargs):
        packed, mask = kwargs.get("prefix_layout") is not None, kwargs.get("attention_mask")
        self.active = not packed and mask is not None and self.counts(mask)

    def forward(self, hidden):
        columns = torch.arange(hidden.shape[1], device=hidden.device)[:, None]
        return self.mlp(hidden) * (1 + 0.05 * columns if self.active else 1)


def with_unknown_layer(counts):
    model = tiny_model("llama")
    model.model.layers[1].mlp = own = ScaledByColumn(model.model.layers[1].mlp, counts)
    model.model.register_forward_pre_hook(own.look, with_kwargs=True)
    return model


@pytest.mark.parametrize(
    ("counts", "kind", "harmless"),
    [
        (lambda mask: bool((mask[:, 0] == 0).any()), "padding on the left", (0, 0, 0, 0)),
        (lambda mask: mask.shape[1] > 12, "padding", None),  # longer than what is run in a packed row's stead
    ],
)
def test_other_models_that_differ_through_padding_are_detected_and_run_unshared(counts, kind, harmless):
    model = with_unknown_layer(counts)
    ids, mask = shifted(4, 5, 5, 5, 5)
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).logits
        with shared_prefix(model) as context:
            found = model(ids, attention_mask=mask).logits
            assert context.last_call.reason == f"a trial on a few tokens with {kind} differed from the unshared run"
            assert torch.equal(found, expected)
            model(ROWS)
            assert context.last_call.layout is not None  # without padding
            if harmless:
                model(*shifted(4, *harmless))
                assert context.last_call.layout is not None
    report = check_parity(model)
    report.raise_if_failed()
    assert kind in report.padded.reason


def by_position(module, query, layout, columns_T=None):
    return rescale_by_column(module, query, layout)


def test_both_checks_see_columns(monkeypatch):
    """With the scale of the position, as it was: the first look leaves such rows alone, parity fails without it."""
    monkeypatch.setattr("pl_grouprl.attention.function.rescale_by_column", by_position)
    with shared_prefix(llama4()) as context:
        assert context._row_sharing.differing_padding == "padding on the left"
    monkeypatch.setattr(patch, "differing_padding", lambda *_: None)
    report = check_parity(llama4())
    assert report.max_logprob_difference < 1e-4  # packed rows do not show it
    assert report.padded.max_logprob_difference > 1e-2
    assert not report.passed
    monkeypatch.undo()
    report = check_parity(llama4())
    report.raise_if_failed()
    assert report.padded.reason is None


def test_a_model_that_gives_nan_is_named_as_their_source():
    """float64: the mask's lowest number is infinite in the float32 in which this family takes its softmax."""
    model = tiny_model("gemma2", dtype=torch.float64, sliding_window=5)
    with pytest.raises(UnsupportedModelError, match="the model itself gives NaN"), shared_prefix(model):
        raise AssertionError("entered")
    with shared_prefix(tiny_model("gemma2", sliding_window=5)):
        pass
