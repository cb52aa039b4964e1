"""Ordinary padded batches: all results inside the context equal those outside."""

import contextlib
import itertools

import pytest
import torch
from helpers.sweeps import sweep
from helpers.tiny_models import FAMILIES, VOCAB, gradients, repeated_rows, tiny_model, worst_gradient_error
from helpers.variants import VARIANTS, variant

from pl_grouprl.attention import shared_prefix

pytestmark = pytest.mark.usefixtures("layers_checked_once")


def left_padded(rows):
    """Two prompts, the second shorter by 7, as a sampler leaves them."""
    mask = torch.ones_like(rows)
    mask[len(rows) // 2 :, :7] = 0
    return rows * mask, mask


def right_padded(rows):
    mask = torch.ones_like(rows)
    for row, cut in enumerate(range(len(rows))):
        mask[row, rows.shape[1] - cut :] = 0
    return rows * mask, mask


def trl_shape(rows):
    """Prompts padded on the left, completions on the right."""
    ids, left = left_padded(rows)
    ids, right = right_padded(ids)
    return ids, left * right


def holes(rows):
    """[prompt, padding][completion]: the padding is in the middle."""
    mask = torch.ones_like(rows)
    mask[:, 20:24] = 0
    return rows * mask, mask


def unpadded(rows):
    return rows, None


PADDINGS = [left_padded, right_padded, trl_shape, holes, unpadded]
ROWS = repeated_rows(0, [24, 24], 4, 9)


def logits_and_gradients(model, ids, mask, **arguments):
    """Logits at tokens, and gradients of a loss over them."""
    model.zero_grad()
    out = model(input_ids=ids, attention_mask=mask, **arguments)
    kept = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    logits = out.logits[kept]
    targets = ids[kept].roll(-1)
    picked = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    (picked * torch.linspace(0.5, 1.5, len(picked))).sum().backward()
    return logits.detach(), gradients(model)


def assert_transparent(model, ids, mask=None, shared=True, **arguments):
    """Same logits and gradients, and the rows were shared (or not; None for either)."""
    expected = logits_and_gradients(model, ids, mask, **{k: v for k, v in arguments.items() if k != "group_ids"})
    with shared_prefix(model) as context:
        logits, found = logits_and_gradients(model, ids, mask, **arguments)
    assert shared in (None, context.last_call.layout is not None), context.last_call
    torch.testing.assert_close(logits, expected[0], atol=2e-5, rtol=0)
    assert worst_gradient_error(found, expected[1]) < 1e-4
    return context.last_call


def shared_and_not(model, call):
    """What a call gives inside a context, where its rows are shared, and outside."""
    with torch.no_grad():
        expected = call()
        with shared_prefix(model) as context:
            actual = call()
    assert context.last_call.layout is not None
    return actual, expected


OPT = {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0, "init_std": 0.3}
"""OPT numbers the tokens of the attention mask, where the others number columns."""


@pytest.mark.parametrize(
    ("family", "padding"),
    [
        *itertools.product(("llama", "gpt2", "opt"), PADDINGS),
        *((family, trl_shape) for family in FAMILIES if family not in ("llama", "gpt2")),
    ],
)
def test_padded_batches(family, padding):
    call = assert_transparent(tiny_model(family, **(OPT if family == "opt" else {})), *padding(ROWS))
    assert call.token_ratio > 1.5


@pytest.mark.parametrize("padding", sweep([left_padded, right_padded, trl_shape, unpadded], quick=[trl_shape]))
@pytest.mark.parametrize("name", VARIANTS)
def test_padded_batches_of_variants(name, padding):
    """Windows, chunks, soft caps, sinks, latent attention, layers with a state."""
    assert_transparent(variant(name), *padding(ROWS))


@pytest.mark.parametrize("name", VARIANTS)
def test_padding_in_the_middle_of_variants(name):
    """The model's windows, chunks and states count it: rows are what they were, shared or not."""
    assert_transparent(variant(name), *holes(ROWS), shared=None)


ROPES = {
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
    "longrope": {
        **{"rope_type": "longrope", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 16},
        **{"short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [4.0, 3.0, 2.0, 1.0]},
    },
}


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("rope", ROPES)
def test_frequencies_that_depend_on_the_longest_row(rope, padding):
    """Whether a batch is shared or not, rows longer than the original length (of 16) change all rows."""
    model = tiny_model("llama", rope_parameters=ROPES[rope], max_position_embeddings=16)
    # Shared where the longest row has no padding: its last position is that of the batch.
    assert_transparent(model, *padding(ROWS), shared=True if padding in (unpadded, right_padded) else None)
    with torch.no_grad():
        assert (model(ROWS).logits - tiny_model("llama")(ROWS).logits).abs().max() > 1e-3  # the frequencies did move


def test_the_forest_of_the_rows_runs():
    call = assert_transparent(tiny_model(), *right_padded(ROWS))
    assert [segment.parent for segment in call.layout.segments] == [None, 0, 0, 0, 0, None, 5, 5, 5, 5]
    assert [segment.length for segment in call.layout.segments] == [24, 9, 8, 7, 6, 24, 5, 4, 3, 2]
    assert call.input_ids.shape == call.position_ids.shape == (1, 24 * 2 + 30 + 14)
    assert call.padding_fraction == pytest.approx(sum(range(8)) / ROWS.numel())


@pytest.mark.parametrize(
    "group_ids",
    [[0] * 4 + [1] * 4, torch.tensor([5, 5, 5, 5, 2, 2, 2, 2]), tuple("aaaabbbb")],
    ids=["list", "tensor", "names"],
)
def test_group_ids(group_ids):
    call = assert_transparent(tiny_model(), ROWS, group_ids=group_ids)
    names = [segment.group_id for segment in call.layout.segments]
    expected = group_ids.tolist() if isinstance(group_ids, torch.Tensor) else list(group_ids)
    assert names == [expected[0]] * 5 + [expected[4]] * 5


def test_only_rows_of_one_group_are_compared():
    rows = repeated_rows(1, [24], 4, 9)
    call = assert_transparent(tiny_model(), rows, group_ids=[0, 1, 0, 1])
    assert [segment.parent for segment in call.layout.segments] == [None, 0, 0, None, 3, 3]
    assert_transparent(tiny_model(), rows, shared=False, group_ids=[0, 1, 2, 3])


@pytest.mark.parametrize("group_ids", [[0, 0, 1], torch.zeros(9, dtype=torch.long)], ids=["list", "tensor"])
def test_group_ids_of_the_wrong_length(group_ids):
    model = tiny_model()
    with shared_prefix(model), pytest.raises(ValueError, match="group_ids"):
        model(ROWS, group_ids=group_ids)


def interleaved():
    return ROWS[[0, 4, 1, 5, 2, 6, 3, 7]]


def identical():
    return ROWS[:1].repeat(5, 1)


def identical_and_others():
    return ROWS[[0, 1, 0, 4, 1, 0]]


def system_prompt():
    head = repeated_rows(2, [20], 1, 0)
    return torch.cat([head.repeat(8, 1), ROWS], dim=1)


@pytest.mark.parametrize("rows", [interleaved, identical, identical_and_others, system_prompt])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_shapes_of_sharing(family, rows):
    call = assert_transparent(tiny_model(family), rows())
    assert max(call.layout.depths) == (2 if rows in (system_prompt, identical_and_others) else 1)


def test_hundreds_of_rows_each_a_prefix_of_the_next():
    from pl_grouprl.attention.padded_rows import share_rows

    ids = torch.arange(300).expand(300, 300)
    for max_depth in (1, None):
        shared = share_rows(ids, torch.ones_like(ids).tril(), min_saved_tokens=1, max_depth=max_depth)
        rows = shared.unpack(shared.input_ids[..., None])[..., 0]
        assert torch.equal(rows, ids.tril())


def test_one_level_of_prefixes_goes_where_it_saves_most():
    """Prompts after one common first token: a backend of depth 1 shares the prompts, not the token."""
    rows = repeated_rows(4, [24] * 4, 5, 9)
    rows[:, 0] = 1
    model = tiny_model()
    with torch.no_grad():
        expected = model(rows).logits
        with shared_prefix(model, "prefix_grouper") as context:
            actual = model(rows).logits
    assert [segment.length for segment in context.last_call.layout.segments] == [24, 9, 9, 9, 9, 9] * 4
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=0)
    system = torch.cat([repeated_rows(5, [90], 1, 0).repeat(20, 1), rows], dim=1)
    with torch.no_grad(), shared_prefix(model, "prefix_grouper") as context:
        model(system)
    # 19 * 91 tokens saved by the system prompt, 4 * 4 * 114 by the prompts with it.
    assert [segment.length for segment in context.last_call.layout.segments] == [114, 9, 9, 9, 9, 9] * 4
    long = torch.cat([repeated_rows(5, [900], 1, 0).repeat(20, 1)[:, :200], repeated_rows(6, [8] * 10, 2, 9)], dim=1)
    with torch.no_grad(), shared_prefix(model, "prefix_grouper") as context:
        model(long)
    assert [segment.length for segment in context.last_call.layout.segments][:2] == [200, 17]


def test_rows_that_are_prefixes_of_other_rows():
    ids, mask = right_padded(ROWS[:1].repeat(8, 1))
    call = assert_transparent(tiny_model(), ids, mask)
    assert call.layout.num_tokens < 2 * 33
    assert min(segment.length for segment in call.layout.segments) >= 0


def test_a_row_of_one_token_and_a_row_of_none():
    mask, model = torch.ones_like(ROWS), tiny_model()
    mask[0, 1:] = 0
    mask[5, :] = 0
    actual, expected = shared_and_not(model, lambda: model(ROWS, attention_mask=mask).logits)
    torch.testing.assert_close(actual[mask.bool()], expected[mask.bool()], atol=2e-5, rtol=0)
    assert actual.isfinite().all()


def test_rows_of_one_token_each():
    assert_transparent(tiny_model(), torch.tensor([[1], [1], [2]]), shared=False)
    model = tiny_model()
    with torch.no_grad(), shared_prefix(model, min_saved_tokens=1) as context:
        actual = model(torch.tensor([[1], [1], [2]])).logits
    assert context.last_call.layout.num_tokens == 2
    torch.testing.assert_close(actual, model(torch.tensor([[1], [1], [2]])).logits, atol=2e-5, rtol=0)


def test_explicit_positions():
    columns = torch.arange(33).expand(8, 33)
    for positions in (columns, columns[:1], columns + 5):
        assert_transparent(tiny_model(), ROWS, position_ids=positions)
        assert_transparent(tiny_model("gpt2"), ROWS, position_ids=positions)
    _, mask = left_padded(ROWS)
    assert_transparent(tiny_model("gpt2"), ROWS, mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0))


def test_shifted_positions_share_where_only_distances_matter():
    """The same prompt at two offsets: one root for rotary embeddings, two for learned positions."""
    positions = torch.arange(33) + torch.tensor([0, 0, 0, 0, 3, 3, 3, 3])[:, None]
    rows = repeated_rows(3, [24], 8, 9)
    roots = {
        family: sum(
            segment.parent is None
            for segment in assert_transparent(tiny_model(family), rows, position_ids=positions).layout.segments
        )
        for family in ("llama", "gpt2")
    }
    assert roots == {"llama": 1, "gpt2": 2}


def test_sequences_packed_by_the_caller_go_through():
    packed = ROWS.reshape(2, -1)
    positions = torch.arange(33).repeat(4).expand(2, -1)
    assert_transparent(tiny_model(), packed, shared=False, position_ids=positions)


@pytest.mark.parametrize("keep", [5, torch.tensor([0, 24, 31])])
def test_logits_to_keep(keep):
    model = tiny_model()
    actual, expected = shared_and_not(model, lambda: model(ROWS, logits_to_keep=keep).logits)
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gpt2"])
def test_hidden_states_labels_and_tuples(family):
    model = tiny_model(family)
    ids, mask = trl_shape(ROWS)
    # The first token of a row that is padded on the left would be predicted from padding, which means nothing.
    labels = ids.masked_fill(mask * mask.roll(1, dims=1) == 0, -100)
    options = {
        "attention_mask": mask,
        "labels": labels,
        "output_hidden_states": True,
        "num_items_in_batch": torch.tensor(9),
    }
    actual, expected = shared_and_not(model, lambda: model(ids, **options))
    torch.testing.assert_close(actual.loss, expected.loss, atol=1e-5, rtol=0)
    assert len(actual.hidden_states) == len(expected.hidden_states)
    for one, other in zip(actual.hidden_states, expected.hidden_states, strict=True):
        torch.testing.assert_close(one[mask.bool()], other[mask.bool()], atol=5e-5, rtol=1e-4)
        assert one.shape == other.shape
    actual, expected = shared_and_not(model, lambda: model(ROWS, return_dict=False, use_cache=False))
    assert type(actual) is type(expected) is tuple
    torch.testing.assert_close(actual[0], expected[0], atol=2e-5, rtol=0)


def test_a_decoder_without_a_head_and_positional_arguments():
    decoder = tiny_model().model
    ids, mask = left_padded(ROWS)
    actual, expected = shared_and_not(decoder, lambda: decoder(ids, mask).last_hidden_state)
    torch.testing.assert_close(actual[mask.bool()], expected[mask.bool()], atol=2e-5, rtol=1e-5)
    actual, expected = shared_and_not(decoder, lambda: decoder(ROWS, return_dict=False, use_cache=False)[0])
    assert actual.shape == (8, 33, 32)
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=1e-5)


def test_one_row_does_not_change_others_bitwise():
    """Exact where the rows keep their lengths and their common prefixes."""
    model = tiny_model("llama")
    for seed in range(4):
        rows = repeated_rows(seed, [24, 24], 4, 9)
        changed = rows.clone()
        changed[2, 24:] = (rows[2, 24:] + 7 * seed + 3) % VOCAB
        with torch.no_grad(), shared_prefix(model):
            one, other = model(rows).logits, model(changed).logits
        others = [row for row in range(8) if row != 2]
        assert torch.equal(one[others], other[others])
        assert torch.equal(one[2, :24], other[2, :24])


@pytest.mark.parametrize(("family", "sample"), [("llama", False), ("gpt2", True)])
def test_generation(family, sample):
    model = tiny_model(family)
    ids, mask = left_padded(ROWS)
    arguments = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": sample, "pad_token_id": 0}
    torch.manual_seed(0)
    expected = model.generate(ids, **arguments)
    torch.manual_seed(0)
    with shared_prefix(model):
        assert torch.equal(model.generate(ids, **arguments), expected)


def test_paused():
    model = tiny_model()
    with shared_prefix(model) as context, torch.no_grad():
        context.paused = True
        paused = model(ROWS).logits
        assert context.last_call is None
        context.paused = False
        model(ROWS)
        assert context.last_call.layout is not None
    assert torch.equal(paused, model(ROWS).logits)


# Training -----------------------------------------------------------------------------------------------------------


def train(model, steps=20):
    """A plain loop that knows nothing of shared prefixes."""
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(steps):
        ids, mask = trl_shape(repeated_rows(step % 4, [24, 24], 4, 9))
        logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1]
        logprobs = logits.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
        completion = mask[:, 1:] * (torch.arange(32) >= 23)
        loss = -(logprobs * completion).sum() / completion.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("family", "checkpointing"), [("llama", None), ("gpt2", True), ("llama", False)])
def test_a_training_loop_has_the_same_losses(family, checkpointing):
    expected = train(tiny_model(family))
    model = tiny_model(family)
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    if checkpointing:
        model.enable_input_require_grads()
    with shared_prefix(model) as context:
        ratios = []
        context.listeners.append(lambda call: ratios.append(call.token_ratio))
        losses = train(model)
    assert len(ratios) == 20
    assert min(ratios) > 1.5
    assert losses[-1] < losses[0] - 0.2
    assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) < 1e-5


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
    untouched(tiny_model(), "attention_mask", input_ids=ROWS, attention_mask=block)


def test_a_cache_goes_through():
    out = untouched(tiny_model(), "cache", input_ids=ROWS, use_cache=True)
    assert out.past_key_values.get_seq_length() == 33


def test_decoding_by_hand_cannot_continue_without_a_cache():
    model = tiny_model()
    with torch.no_grad(), shared_prefix(model):
        first = model(ROWS)
        with pytest.raises(RuntimeError, match="keeps no cache"):
            model(ROWS[:, -1:], past_key_values=first.past_key_values)
        assert model(ROWS, use_cache=False).past_key_values is None
        cached = model(ROWS[:, :-1], use_cache=True)
        actual = model(ROWS[:, -1:], past_key_values=cached.past_key_values).logits[:, 0]
    with pytest.raises(RuntimeError, match="keeps no cache"):
        model(ROWS[:, -1:], past_key_values=first.past_key_values)
    torch.testing.assert_close(actual, model(ROWS).logits[:, -1], atol=2e-5, rtol=0)


def test_other_calls_that_go_through():
    untouched(tiny_model(), "one row", input_ids=ROWS[:1])
    untouched(tiny_model(), "share a prefix", input_ids=ROWS.flip(1))
    model = tiny_model(attn_implementation="eager")
    out = untouched(model, "attention weights", input_ids=ROWS, output_attentions=True)
    assert out.attentions[0].shape == (8, 4, 33, 33)
    arguments = {"output_router_logits": True, "return_dict": False}
    with torch.no_grad(), shared_prefix(tiny_model("qwen3_moe")) as context:
        context.decoder(ROWS, **arguments)
    assert "router logits" in context.last_call.reason


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
    untouched(model, "share a prefix", **unevenly_left_padded())


def test_labels_that_padding_predicts_leave_the_call_untouched():
    model = tiny_model()
    inputs = unevenly_left_padded()
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    out = untouched(model, "labels", **inputs, labels=labels)
    assert torch.isfinite(out.loss)


def test_embeddings_and_configured_attentions_are_reported():
    model = tiny_model()
    untouched(model, "embeddings", inputs_embeds=model.get_input_embeddings()(ROWS))
    model.config._attn_implementation = "eager"
    model.config.output_attentions = True
    assert len(untouched(model, "attention weights", input_ids=ROWS).attentions) == 2


def test_a_mask_of_another_width_goes_through():
    model = tiny_model()
    wide = torch.ones(8, 40, dtype=torch.long)
    errors = (RuntimeError, ValueError, IndexError)
    with torch.no_grad(), shared_prefix(model) as context, contextlib.suppress(*errors):
        model(ROWS, attention_mask=wide)
    assert "attention_mask" in context.last_call.reason
