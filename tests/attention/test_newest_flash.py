"""The newest FlashAttention that is installed runs where it is right, and PyTorch's own otherwise.

Stubs stand in for PyTorch's switch and the GPU; the operators run on CPU in closed form, one version right, one wrong.
"""

import pytest
import torch
from helpers import flash_attention
from torch._subclasses.fake_tensor import FakeTensorMode

from pl_grouprl.attention.backends import cascade, choice
from pl_grouprl.attention.backends.interface import AttentionRule
from pl_grouprl.attention.backends.kernels import CUDAKernel

CPU, HALF, SIZES = torch.device("cpu"), torch.bfloat16, (4, 2, 16, 16)
NOTICE = "Attention runs FA3, which is installed; sharing.backend: cascade keeps FlashAttention-2."


class Switch:
    """PyTorch's, on a machine where each version computes attention or fails as told."""

    def __init__(self, monkeypatch, **versions):
        self.versions, self.active, self.calls = versions, None, []
        for name in ("activate", "restore", "current"):
            function = f"{name}_flash_attention_impl"
            monkeypatch.setattr(torch.nn.attention, function, getattr(self, name), raising=False)

    def activate(self, name):
        self.calls.append(name)
        self.active = name
        if self.versions[name] == "broken":
            self.active = None
            raise ImportError(f"no kernels of {name}")

    def restore(self):
        self.calls.append("restore")
        self.active = None

    def current(self):
        return self.active

    def forward(self, *args, **options):
        kind = self.versions.get(self.active, "right")
        if kind == "no windows" and options.get("window_size_left") is not None:
            raise RuntimeError("windows are not supported")
        out, *rest = flash_attention._forward(*args, **options)
        return (out * 1.2 if kind == "wrong" else out), *rest


@pytest.fixture
def machine(monkeypatch):
    """A GPU of a compute capability, with versions installed."""
    monkeypatch.setattr(cascade, "CPUKernel", CUDAKernel)
    library = torch.library.Library("aten", "IMPL")

    def made(major=9, **versions):
        switch = Switch(monkeypatch, **versions)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
        monkeypatch.setattr(choice, "_NEWER", {name: name in versions for name in ("FA3", "FA4")})
        monkeypatch.setattr(choice, "_given_up", [])
        choice.use_newest_flash_attention.cache_clear()
        library.impl("_flash_attention_forward", switch.forward, "CPU")
        library.impl("_flash_attention_backward", flash_attention._backward, "CPU")
        return switch

    yield made
    library._destroy()
    choice.use_newest_flash_attention.cache_clear()


def use(*windows, sizes=SIZES):
    for has_window in windows or (False,):
        choice.use_newest_flash_attention(CPU, HALF, sizes, has_window)


@pytest.mark.parametrize(
    ("major", "versions", "expected"),
    [
        (9, {"FA3": "right", "FA4": "right"}, "FA3"),
        (9, {"FA4": "right"}, "FA4"),
        (10, {"FA3": "right", "FA4": "right"}, "FA4"),
        (8, {"FA3": "right", "FA4": "right"}, None),
        (10, {"FA3": "right"}, None),
        (9, {}, None),
    ],
)
def test_the_newest_that_the_gpu_runs(machine, major, versions, expected):
    switch = machine(major, **versions)
    use(False, True, False)
    use(sizes=(4, 4, 24, 16))  # padded to one size of heads
    assert switch.active == expected
    assert switch.calls == ([expected] if expected else [])


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("wrong", "it differs from the reference by"),
        ("no windows", "windows are not supported"),
        ("broken", "no kernels of FA3"),
    ],
)
def test_one_that_fails_is_given_up_and_said_once(machine, kind, problem, recwarn):
    switch = machine(FA3=kind, FA4="right")
    use(False, True)
    use(sizes=(8, 2, 16, 16))
    assert switch.active is None
    assert switch.calls == ["FA3", "restore"]
    said = [str(warning.message) for warning in recwarn if "FA3" in str(warning.message)]
    assert len(said) == 1
    assert said[0].startswith("FA3 is installed but not used, attention runs PyTorch's FlashAttention-2: ")
    assert problem in said[0]


def test_it_is_said_once_what_runs(machine, caplog):
    with caplog.at_level("INFO"):
        machine(FA3="right")
        use(False, True)
    assert [record.message for record in caplog.records] == [NOTICE]


def test_another_version_that_is_active_stays(machine):
    switch = machine(FA3="right", FA4="wrong")
    switch.active = "FA4"
    use()
    assert (switch.active, switch.calls) == ("FA4", [])


def test_pytorch_that_cannot_switch_back_keeps_its_own(machine, monkeypatch):
    switch = machine(FA3="right")
    monkeypatch.delattr(torch.nn.attention, "restore_flash_attention_impl")
    use()
    assert switch.calls == []


def test_the_check_disturbs_nothing_around_it(machine):
    """Neither random numbers nor autocast nor the mode of gradients."""
    machine(FA3="right")
    before = torch.random.get_rng_state()
    with torch.no_grad(), torch.autocast("cpu", torch.float16):
        use()
    assert torch.equal(torch.random.get_rng_state(), before)
    assert not choice._given_up


@pytest.mark.parametrize(
    ("dtype", "rule", "asked"),
    [
        (torch.bfloat16, AttentionRule(0.3), [((4, 2, 16, 16), False)]),
        (torch.float16, AttentionRule(0.3, window=5), [((4, 2, 16, 16), True)]),
        (torch.float32, AttentionRule(0.3), []),
        (torch.bfloat16, AttentionRule(0.3, softcap=5.0), []),
    ],
    ids=str,
)
def test_auto_asks_for_layers_of_flash_attention(dtype, rule, asked, monkeypatch):
    calls = []
    monkeypatch.setattr(choice, "use_newest_flash_attention", lambda device, dtype, *kind: calls.append(kind))
    with FakeTensorMode():
        tensors = [torch.empty(1, heads, 7, 16, dtype=dtype, device="cuda") for heads in (4, 2, 2)]
        chosen = choice.choose(*tensors, rule)
    assert calls == asked
    assert not asked or chosen is cascade.CASCADE
