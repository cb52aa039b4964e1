"""The check of layers: whatever mixes tokens in an unknown way is refused at entry, and nothing else changes."""

import pytest
import torch
import torch.distributed as dist
from helpers.tiny_models import repeated_rows, tiny_model
from torch import nn
from torch.distributed.tensor import distribute_tensor, init_device_mesh

from pl_grouprl.attention import UnsupportedModelError, in_force, shared_prefix
from pl_grouprl.packing import SharedPrefixLayout

ROWS = repeated_rows(0, [24], 4, 9)
LAYOUT = SharedPrefixLayout.from_groups([(24, [9] * 4)])
PACKED = torch.cat([ROWS[0, :24], ROWS[:, 24:].flatten()])[None]


class Roll(nn.Module):
    def forward(self, hidden):
        return hidden.roll(1, dims=1)


class CumulativeMean(nn.Module):
    def forward(self, hidden):
        return hidden.cumsum(dim=1) / torch.arange(1, hidden.shape[1] + 1)[:, None]


class TokenShift(nn.Module):
    """Half of each token's channels come from the token before."""

    def forward(self, hidden):
        before = nn.functional.pad(hidden, (0, 0, 1, 0))[:, :-1]
        return torch.cat([before[..., ::2], hidden[..., 1::2]], dim=-1)


class ConvolutionModule(nn.Conv1d):
    """Seen without running it."""

    def __init__(self):
        super().__init__(32, 32, 3)

    def forward(self, hidden):
        return super().forward(nn.functional.pad(hidden.mT, (2, 0))).mT


class MeanOfTheRow(nn.Module):
    def forward(self, hidden):
        return hidden.mean(dim=1, keepdim=True).expand_as(hidden)


class PositionInTheRow(nn.Module):
    def forward(self, hidden):
        return hidden * torch.arange(hidden.shape[1]).sin()[:, None]


MIXERS = [Roll, CumulativeMean, TokenShift, ConvolutionModule, MeanOfTheRow, PositionInTheRow]


class Beside(nn.Module):
    """A feed-forward network with an additional module."""

    def __init__(self, mlp, other):
        super().__init__()
        self.mlp, self.other = mlp, other

    def forward(self, hidden):
        return self.mlp(hidden) + 0.1 * self.other(hidden)


def with_mixer(mixer):
    model = tiny_model("llama")
    model.model.layers[1].mlp = Beside(model.model.layers[1].mlp, mixer())
    return model


def counted(model):
    """What each run of the decoder found: gradient recorded, training mode, packed or not."""
    runs = []

    def before(decoder, args, kwargs):
        grad = torch.is_grad_enabled()
        runs.append((grad, any(m.training for m in decoder.modules()), kwargs.get("prefix_layout") is not None))

    model.get_decoder().register_forward_pre_hook(before, with_kwargs=True)
    return runs


LOOK = [(False, False, True), *[(False, False, False)] * 6]
"""One run of a packed row, one of the repeated rows, one of a row alone, two at positions far apart, two of a padded
batch; no gradient, evaluation mode."""


def look_at(family):
    """A model without rotary positions is not run at other positions."""
    return LOOK if family != "gpt2" else LOOK[:5]


@pytest.mark.parametrize("mixer", MIXERS)
def test_layers_that_mix_tokens_in_an_unknown_way_are_refused(mixer):
    model = with_mixer(mixer)
    before = model.config._attn_implementation
    message = "LlamaForCausalLM .*(mixes tokens in an unknown way|carry a state).*sharing.mode='repeated'"
    for _ in range(2):  # what was refused once is not taken as known the second time
        with pytest.raises(UnsupportedModelError, match=message), shared_prefix(model):
            raise AssertionError("entered")
    assert model.config._attn_implementation == before
    assert in_force(model) is None
    assert not model.model._forward_pre_hooks
    assert not model.model._forward_hooks
    assert torch.isfinite(model(ROWS).logits).all()


def test_layers_that_mix_no_tokens_are_not_refused():
    class Square(nn.Module):
        def forward(self, hidden):
            return hidden.square()

    with shared_prefix(with_mixer(Square)):
        pass


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_decoder_is_checked_once_for_each_backend(family):
    model = tiny_model(family).train()
    runs = counted(model)
    for _ in range(3):
        with shared_prefix(model):
            pass
    assert runs == look_at(family)
    for backend in ("reference", "reference", "auto", "cascade", "prefix_grouper"):
        with shared_prefix(model, backend):
            pass
    assert runs == look_at(family) * 4
    with shared_prefix(model.get_decoder()):  # the same decoder without its head
        pass
    assert runs == look_at(family) * 4
    runs_of_another = counted(other := tiny_model(family))
    with shared_prefix(other):
        pass
    assert runs_of_another == look_at(family)


def test_kinds_of_layers_are_known_at_every_entry():
    model = tiny_model("gemma2", sliding_window=8)
    kinds = []
    for _ in range(2):
        with shared_prefix(model) as context:
            kinds.append(dict(context.layers))
    assert kinds[0] == kinds[1]
    assert {kind: count for kind, (_, count) in kinds[0].items()} == {"window 8, soft cap 50": 1, "soft cap 50": 1}


@pytest.mark.parametrize("mixer", [None, Roll], ids=["passes", "refused"])
def test_the_check_changes_neither_model_nor_process(mixer):
    model = tiny_model("llama", attention_dropout=0.5) if mixer is None else with_mixer(mixer)
    model.train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.model.norm.weight.grad = torch.full((32,), 3.0)
    heard, context = [], shared_prefix(model)
    context.listeners.append(heard.append)
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    if mixer is None:
        with context:
            assert [module.training for module in model.modules()] == modes
            assert torch.is_grad_enabled()
            assert not context.paused
    else:
        with pytest.raises(UnsupportedModelError):
            context.__enter__()
    assert torch.equal(torch.rand(3), expected)
    assert [module.training for module in model.modules()] == modes
    assert heard == []
    assert len(context.listeners) == 1
    assert context.last_call is None
    assert not context.paused
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())
    assert (model.model.norm.weight.grad == 3.0).all()
    assert all(p.grad is None for p in model.parameters() if p is not model.model.norm.weight)


@pytest.mark.parametrize("outer", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_entered_in_any_mode(outer):
    """And what is kept of the first look serves a training step afterwards."""
    model = tiny_model("llama")
    runs = counted(model)
    with outer():
        context = shared_prefix(model)
        context.__enter__()
    assert runs == LOOK
    logits = model(PACKED, prefix_layout=LAYOUT).logits
    logits.square().sum().backward()
    context.__exit__(None, None, None)
    assert model.lm_head.weight.grad is not None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "qwen3_moe"])
def test_good_models_of_every_dtype_are_entered(family, dtype):
    if family == "qwen3_moe" and dtype == torch.float64:
        pytest.skip("transformers has no float64 experts")
    with shared_prefix(tiny_model(family, dtype=dtype)):
        pass


def test_small_vocabularies():
    with shared_prefix(tiny_model("llama", vocab_size=3)):  # smaller than the check needs
        pass
    model = with_mixer(Roll)
    model.resize_token_embeddings(7)
    with pytest.raises(UnsupportedModelError, match="mixes tokens"), shared_prefix(model):
        pass


def test_models_on_meta_are_not_checked():
    model = tiny_model("llama").to("meta")
    runs = counted(model)
    with shared_prefix(model) as context:
        assert context.layers == {}
    assert runs == []


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")
@pytest.mark.usefixtures("one_rank")
def test_sharded_models_are_not_checked():
    """Ranks may enter at different times; a run of a sharded model would wait for all of them."""
    model = with_mixer(Roll)
    norm = model.model.norm
    norm.weight = nn.Parameter(distribute_tensor(norm.weight.detach(), init_device_mesh("cpu", (1,))))
    runs = counted(model)
    with shared_prefix(model):
        pass
    assert runs == []


def test_replacing_a_layer_repeats_the_check():
    model = tiny_model("llama")
    with shared_prefix(model):
        pass
    model.model.layers[1].mlp = Roll()
    with pytest.raises(UnsupportedModelError, match="mixes tokens"), shared_prefix(model):
        pass


def test_entering_does_not_change_dynamic_frequencies():
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    model = tiny_model("llama", rope_parameters=rope, max_position_embeddings=16)
    model(torch.arange(40)[None])  # the frequencies are now those of 40 tokens
    before = model.model.rotary_emb.inv_freq.clone()
    with shared_prefix(model):
        pass
    assert torch.equal(model.model.rotary_emb.inv_freq, before)
    assert model.model.rotary_emb.max_seq_len_cached == 40


def test_positions_that_do_more_than_rotate_are_detected():
    model = tiny_model("llama")

    def scale(layer, args, kwargs):
        return (args[0] * (1 + 0.01 * kwargs["position_ids"][..., None]), *args[1:]), kwargs

    model.model.layers[0].register_forward_pre_hook(scale, with_kwargs=True)
    rows = torch.arange(1, 41).repeat(2, 1)
    rows[1, 30:] = 5
    mask = torch.ones_like(rows)
    rows[1], mask[1, :3] = rows[1].roll(3), 0  # the second row is padded on the left
    with torch.no_grad():
        expected = model(rows, attention_mask=mask).logits
        with shared_prefix(model, min_saved_tokens=1):
            actual = model(rows, attention_mask=mask).logits
    torch.testing.assert_close(actual[mask == 1], expected[mask == 1], atol=1e-5, rtol=0)


def test_a_failing_listener_does_not_affect_ordinary_calls():
    model = tiny_model("llama")
    rows = torch.arange(40).repeat(2, 1)
    rows[1, 30:] = 5
    expected = model(rows[:1]).logits
    with shared_prefix(model) as context:
        context.listeners.append(lambda report: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(rows)
        context.listeners.clear()
        torch.testing.assert_close(model(rows[:1]).logits, expected)


def test_an_inner_context_reuses_the_outer_check():
    model, heard = tiny_model("gemma2", sliding_window=8), []
    with shared_prefix(model, min_saved_tokens=1) as outer:
        outer.listeners.append(heard.append)
        with shared_prefix(model, "reference") as inner:
            assert inner.layers == outer.layers
        assert heard == []
    with shared_prefix(model, "reference") as alone:  # not taken as seen by having been inside
        assert {ran for ran, _ in alone.layers.values()} == {"reference"}
