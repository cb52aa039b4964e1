"""Router logits of calls that shared prefixes: unpacked row by row, for models whose loss ignores padding."""

import pytest
import torch
from helpers.tiny_models import gradients, repeated_rows, tiny_model, worst_gradient_error

from pl_grouprl.attention import shared_prefix
from pl_grouprl.attention.padded_rows import share_rows, unpack_router_logits, unsharable

ROWS = repeated_rows(0, [24, 24], 4, 9)


def padded():
    """Two prompts, the second shorter on the left, and completions of all lengths."""
    mask = torch.ones_like(ROWS)
    mask[4:, :7] = 0
    for row in range(len(ROWS)):
        mask[row, ROWS.shape[1] - row :] = 0
    return ROWS * mask, mask


def run(model, ids, mask, **arguments):
    model.zero_grad()
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, 0] = -100
    labels[:, 1:] = labels[:, 1:].masked_fill(mask[:, :-1] == 0, -100)
    out = model(input_ids=ids, attention_mask=mask, labels=labels, output_router_logits=True, **arguments)
    out.loss.backward()
    return out, gradients(model)


@pytest.mark.parametrize(("family", "checkpointing"), [("qwen3_moe", True), ("mixtral", False), ("olmoe", False)])
def test_the_models_own_auxiliary_loss_is_that_of_the_repeated_run(family, checkpointing):
    sizes = {"num_local_experts": 4} if family == "mixtral" else {"num_experts": 4}
    options = {"num_experts_per_tok": 2, "router_aux_loss_coef": 3.0}
    model = tiny_model(family, dtype=torch.float64, **sizes, **options)
    model.set_experts_implementation("eager")  # the other one knows no float64
    if checkpointing:
        model.train().gradient_checkpointing_enable({"use_reentrant": False})
    ids, mask = padded()
    expected, expected_gradients = run(model, ids, mask)
    with shared_prefix(model) as context:
        actual, actual_gradients = run(model, ids, mask)
        assert context.last_call.reason is None
        assert context.last_call.token_ratio > 1
    torch.testing.assert_close(actual.aux_loss, expected.aux_loss)
    torch.testing.assert_close(actual.loss, expected.loss)
    assert worst_gradient_error(actual_gradients, expected_gradients) < 1e-5  # their balancing loss is in float32
    assert len(actual.router_logits) == len(expected.router_logits) == 2
    kept = mask.flatten().bool()  # norms and rotations are in float32 whatever the model is
    for own, theirs in zip(actual.router_logits, expected.router_logits, strict=True):
        assert own.shape == theirs.shape == (ids.numel(), 4)
        torch.testing.assert_close(own[kept], theirs[kept], atol=5e-6, rtol=1e-5)
        assert (own[~kept] == 0).all()


def test_router_logits_requested_by_the_config():
    model = tiny_model("qwen3_moe", output_router_logits=True)
    with torch.no_grad():
        expected = model(ROWS)
        with shared_prefix(model) as context:
            actual = model(ROWS)
            assert context.last_call.reason is None
    torch.testing.assert_close(actual.aux_loss, expected.aux_loss)
    torch.testing.assert_close(actual.router_logits, expected.router_logits, atol=2e-5, rtol=1e-5)


def reason(model, **arguments):
    asked = {"input_ids": ROWS, "output_router_logits": True, **arguments}
    return unsharable(asked, model.config, model.model)


def test_when_router_logits_can_be_returned():
    model = tiny_model("qwen3_moe")
    assert reason(model) is None
    assert reason(model, return_dict=False) == "router logits are requested"
    assert unsharable({"input_ids": ROWS, "output_router_logits": True}, model.config) == "router logits are requested"
    assert reason(tiny_model("llama")) == "router logits are requested"


def test_a_family_whose_loss_counts_padding_is_not_shared(monkeypatch):
    from transformers.models.qwen3_moe import modeling_qwen3_moe

    model = tiny_model("qwen3_moe")
    monkeypatch.setattr(modeling_qwen3_moe, "load_balancing_loss_func", lambda gate_logits, num_experts, top_k: 0)
    assert reason(model) == "router logits are requested"
    monkeypatch.delattr(modeling_qwen3_moe, "load_balancing_loss_func")
    assert reason(model) == "router logits are requested"


def test_logits_of_another_shape_are_refused():
    rows = share_rows(ROWS)
    tokens = rows.layout.num_tokens
    unpack_router_logits({}, rows)
    for shape in ((1, tokens, 4), (tokens + 1, 4)):
        with pytest.raises(RuntimeError, match="router logits have shape"):
            unpack_router_logits({"router_logits": (torch.zeros(shape),)}, rows)
