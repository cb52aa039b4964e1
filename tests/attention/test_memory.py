"""What attention over packed rows keeps for the backward pass grows with the tokens, not with their square."""

from __future__ import annotations

import pytest
import torch
from helpers.variants import VARIANTS, variant
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pl_grouprl.attention import find_decoder, shared_prefix
from pl_grouprl.attention.backends import kernels as eager
from pl_grouprl.attention.backends.choice import choose, get_backend
from pl_grouprl.attention.backends.interface import AttentionRule
from pl_grouprl.packing import SharedPrefixLayout

HEADS, KV_HEADS, HEAD_SIZE = 4, 2, 8
FORESTS = {
    "long prompt": SharedPrefixLayout([1024] + 8 * [128], [None] + 8 * [0]),
    "long responses": SharedPrefixLayout([8] + 2 * [1020], [None] + 2 * [0]),
}
TOKENS = 2048
RULES = {
    "full": {},
    "window": {"window": 64},
    "wide window": {"window": 900},
    "chunks": {"chunk": 64},
    "soft cap": {"softcap": 2.0},
    "soft cap, window": {"softcap": 2.0, "window": 64},
    "sinks": {"sinks_H": torch.ones(HEADS)},
    "images": {"blocks": tuple([-1] * 3 + [0] * 4 + [-1] * (TOKENS - 7))},
}


def stored(tensor: torch.Tensor) -> int:
    """Elements that a tensor keeps alive, those that it does not show included."""
    return tensor.untyped_storage().nbytes() // tensor.element_size()


class Saved:
    """The size of the largest tensor that is kept for the backward pass."""

    largest = 0

    def __enter__(self):
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._look, lambda tensor: tensor)
        self._hooks.__enter__()
        return self

    def __exit__(self, *error):
        self._hooks.__exit__(*error)

    def _look(self, tensor):
        self.largest = max(self.largest, stored(tensor))
        return tensor


class Made(TorchDispatchMode):
    """The size of the largest tensor that comes into being."""

    largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        found = [stored(leaf) for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        self.largest = max([self.largest, *found])
        return out


def attend(layout, rule, backend=None):
    """The gradients, and the largest tensors that were kept and made."""
    generator = torch.Generator().manual_seed(0)
    heads = (HEADS, KV_HEADS, KV_HEADS)
    tensors = [torch.randn(1, n, TOKENS, HEAD_SIZE, generator=generator, requires_grad=True) for n in heads]
    rule = rule.simplified(layout)
    backend = backend or choose(*tensors, rule)
    with Saved() as saved, Made() as made:
        out = backend(*tensors, layout, rule)
        grads = torch.autograd.grad((out * torch.linspace(0, 1, HEAD_SIZE)).sum(), tensors)
    return grads, saved.largest, made.largest


@pytest.mark.parametrize(("forest", "name"), [("long responses", "full"), *(("long prompt", name) for name in RULES)])
def test_memory_kept_by_the_backend_that_auto_chooses(name, forest):
    assert FORESTS[forest].num_tokens == TOKENS
    _, kept, _ = attend(FORESTS[forest], AttentionRule(scale=0.3, **RULES[name]))
    assert kept <= TOKENS * HEADS * HEAD_SIZE


def test_a_dense_mask_would_be_detected():
    _, kept, _ = attend(FORESTS["long prompt"], AttentionRule(scale=0.3), get_backend("reference"))
    assert kept == HEADS * TOKENS**2


@pytest.mark.parametrize(("forest", "window"), [("long prompt", None), ("long responses", 64)])
def test_scores_of_capped_attention_are_computed_piece_by_piece(forest, window, monkeypatch):
    rule = AttentionRule(scale=0.3, softcap=2.0, window=window)
    expected, _, _ = attend(FORESTS[forest], rule)
    monkeypatch.setattr(eager, "MAX_SCORES", 2**18)
    found, _, made = attend(FORESTS[forest], rule)
    assert made <= TOKENS**2 / 4
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", [name for name in VARIANTS if name not in ("gemma2, soft cap", "gpt_oss, sinks")])
def test_memory_kept_by_a_whole_decoder(name):
    """Beside attention a token's largest part is that of the experts, or the chunks that a delta rule works through."""
    model = variant(name, max_position_embeddings=TOKENS).train()
    tokens = torch.randint(1, 60, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    with shared_prefix(model), Saved() as saved:
        output = find_decoder(model)(input_ids=tokens, prefix_layout=FORESTS["long prompt"], use_cache=False)
        output.last_hidden_state.sum().backward()
    assert saved.largest <= TOKENS * 512
