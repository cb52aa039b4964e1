"""Steps under a graph against eager ones. On a CPU a recorder of operators stands in for CUDA."""

import contextlib
import copy
import functools
import itertools
import warnings
from types import SimpleNamespace
from weakref import WeakKeyDictionary

import pytest
import torch
from helpers.sampling_oracle import tiny_decoder
from helpers.static_steps import Tape, Watch, dense_runs
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from pl_grouprl.attention import shared_prefix
from pl_grouprl.rollout import HFRolloutEngine
from pl_grouprl.rollout.engine import StopStrings
from pl_grouprl.rollout.hf import attention, decode, step_graph
from pl_grouprl.rollout.hf.attention import sharing_prompts
from pl_grouprl.rollout.hf.decode import DecodeRow
from pl_grouprl.rollout.hf.kept import EncodedPrompt
from pl_grouprl.rollout.hf.prefill import NextTokenLogits, Prefix
from pl_grouprl.rollout.hf.static_batch import StaticBatch
from pl_grouprl.types import SamplingConfig

PROMPTS = [[1 + place % 20 for place in range(length)] for length in (40, 35, 32)]
SAMPLING = SamplingConfig(max_new_tokens=40, stop_token_ids=(3,))


@pytest.fixture
def eager(monkeypatch):
    """As on CUDA: attention without host numbers, and a look at the rows every 8 steps."""
    monkeypatch.setitem(decode.STEPS_PER_CHECK, "cpu", 8)
    monkeypatch.setattr(attention, "attend_runs", dense_runs)
    for name in ("_CAN_CAPTURE", "_LOGGED_REASONS"):
        monkeypatch.setattr(step_graph, name, WeakKeyDictionary())


@pytest.fixture
def graphs(eager, monkeypatch):
    """Starts capturing when called; returns all recorders that are made from then on."""

    def start(recorder=Tape):
        made = []
        monkeypatch.setitem(step_graph.CAPTURES, "cpu", lambda device: made.append(recorder()) or made[-1])
        return made

    return start


def sample(model, sampling=SAMPLING, *, count=14, keep=False, tokenizer=None, max_sequences=None, **options):
    engine = HFRolloutEngine(model, tokenizer, max_sequences=max_sequences)
    with engine.keep_caches() if keep else contextlib.nullcontext():
        groups = engine.generate(PROMPTS, sampling, num_generations=count, seed=0, **options)
        found = [(one.token_ids, one.logprobs, one.finish_reason) for group in groups for one in group]
        if keep:
            prompts = [[*prompt, *group[0].token_ids, 5, 6] for prompt, group in zip(PROMPTS, groups, strict=True)]
            groups = engine.generate(prompts, sampling, num_generations=2, seed=1)
            found += [(one.token_ids, one.logprobs, one.finish_reason) for group in groups for one in group]
    return found


@functools.cache
def wide(family):
    return tiny_decoder(family).double()


@pytest.fixture
def qwen3_eagerly(eager):
    """What the model samples without graphs."""
    return _sampled_by_qwen3()


@functools.cache
def _sampled_by_qwen3():
    return sample(wide("qwen3"))


@pytest.mark.parametrize("family", ["qwen3", "mistral", "lfm2"])  # plain, with windows, with states
def test_replays_are_bitwise_equal_to_eager_steps(family, graphs):
    model = wide(family)
    expected = sample(model)
    made = graphs()
    assert sample(model) == expected
    assert sum(tape.replays for tape in made) > 25
    (rows,) = [tape.rows for tape in made if tape.rows]
    assert rows[0] == 42 == 3 * 14
    assert len(rows) > 1 or family == "lfm2"
    for before, after in itertools.pairwise(rows):
        assert after <= 0.75 * before
        assert after == step_graph.bucket(after)


class Again(Tape):
    """Runs a step again, Python and all."""

    def capture(self, step):
        self.step = step

    def replay(self):
        self.replays += 1
        self.step()


def test_in_float32_the_same_buckets_give_the_same_bits(graphs):
    model, replays = tiny_decoder("qwen3"), []
    for kind in (Again, Tape):
        step_graph._CAN_CAPTURE.pop(model, None)
        if kind is Again:  # there is nothing to compare
            step_graph._CAN_CAPTURE[model] = True
        made = graphs(kind)
        replays.append((sample(model), sum(tape.replays for tape in made) > 20))
    assert replays[0] == replays[1]
    assert replays[0][1]


@pytest.mark.parametrize(
    "options",
    [
        {"sampling": SamplingConfig(max_new_tokens=30, temperature=0.0)},  # which all end at the limit
        {"sampling": SamplingConfig(max_new_tokens=40, temperature=0.8, top_k=9, top_p=0.9, stop_token_ids=(3, 4))},
        {"sampling": SamplingConfig(max_new_tokens=40, repetition_penalty=1.3, stop_token_ids=(3,))},
        {"max_new_tokens": [5, 40, 30]},
        {"max_sequences": 20},
        {"keep": True},
    ],
    ids=str,
)
def test_all_that_ends_sequences_is_the_same(options, graphs):
    model, options = wide("qwen3"), dict(options)
    most = options.pop("max_sequences", None)

    def found():
        return sample(model, max_sequences=most, **options)

    expected, made = found(), graphs()
    assert found() == expected
    assert any(tape.replays for tape in made)


def test_stop_strings_end_sequences_once(graphs, letters):
    model = wide("qwen3")
    sampling = SamplingConfig(max_new_tokens=40, stop=("ab", "q", "x"))
    expected = sample(model, sampling, tokenizer=letters())
    assert {reason for *_, reason in expected} == {"stop", "length"}
    made = graphs()
    assert sample(model, sampling, tokenizer=letters()) == expected
    assert any(tape.replays for tape in made)


def test_a_patched_model_is_captured_too(qwen3_eagerly, graphs):
    model, made = wide("qwen3"), graphs()
    with shared_prefix(model, "cascade"):
        assert sample(model) == qwen3_eagerly
    assert any(tape.replays for tape in made)


def test_a_replay_asks_the_host_for_nothing(graphs, monkeypatch):
    model, seen = wide("qwen3"), []
    replay = Tape.replay

    def watched(tape):
        if len(seen) > 3:
            replay(tape)
            return
        with Watch() as watch:
            replay(tape)
        seen.append(len(watch.trace))

    monkeypatch.setattr(Tape, "replay", watched)
    graphs()
    sample(model)
    assert len(seen) == 4
    assert min(seen) > 100


def test_weights_may_change_between_calls(qwen3_eagerly, graphs):
    model = wide("qwen3")
    graphs()
    assert sample(model) == qwen3_eagerly
    with torch.no_grad():
        model.lm_head.weight[:5] *= -1
        found = sample(model)
        step_graph.CAPTURES.pop("cpu")
        assert found == sample(model) != qwen3_eagerly
        model.lm_head.weight[:5] *= -1


def test_few_steps_run_eagerly(graphs):
    model = wide("qwen3")
    sample(model, SamplingConfig(max_new_tokens=2))
    made = graphs()
    sample(model, SamplingConfig(max_new_tokens=step_graph.MIN_STEPS))
    assert not made


def test_states_of_rows_that_are_kept_run_eagerly(graphs):
    model = wide("lfm2")
    expected, made = sample(model, keep=True), graphs()
    assert sample(model, keep=True) == expected
    assert not any(tape.replays for tape in made)


class Broken(Tape):
    """Fails in the middle of a step."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if len(self.calls) == 150:
            raise RuntimeError("no memory for the graph")
        return super().__torch_dispatch__(func, types, args, kwargs)


def test_a_failed_capture_is_said_once_and_steps_go_on(qwen3_eagerly, graphs):
    model, expected, made = wide("qwen3"), qwen3_eagerly, graphs(Broken)
    with pytest.warns(UserWarning, match="because capture failed: no memory for the graph"):
        assert sample(model) == expected
    assert len([tape for tape in made if tape.calls]) == 1
    count = len(made)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sample(model) == expected
    assert len(made) == count


def test_numbers_from_the_host_are_found(graphs):
    model = wide("llama4_text")  # scales its queries by the number of cached tokens
    expected, made = sample(model), graphs()
    with pytest.warns(UserWarning, match=r"aten.add.Tensor gets other shapes, addresses or numbers from the host"):
        assert sample(model) == expected
    assert not any(tape.replays for tape in made)


def test_states_that_move_are_found(graphs, monkeypatch):
    model, forward = wide("lfm2"), StaticBatch.forward
    expected = sample(model)

    def moving(batch, logits):
        result = forward(batch, logits)
        states = batch.cache.layers[0].conv_states
        states[0] = states[0].clone()
        return result

    monkeypatch.setattr(StaticBatch, "forward", moving)
    made = graphs()
    with pytest.warns(UserWarning, match="a state gets another address"):
        assert sample(model) == expected
    assert not any(tape.replays for tape in made)


def test_hooks_are_refused_but_for_those_that_do_nothing(graphs, caplog):
    model = copy.deepcopy(wide("qwen3"))
    model.enable_input_require_grads()
    assert step_graph.why_not_captured(model) is None
    calls = []
    handle = model.model.layers[1].register_forward_hook(lambda *args: calls.append(1))
    made = graphs()
    with caplog.at_level("INFO"):
        sample(model)
        sample(model)
    assert not made
    assert len(calls) > 50
    said = [record.message for record in caplog.records if "without a CUDA graph" in record.message]
    assert len(said) == 1
    assert "model.layers.1 has a forward hook" in said[0]
    handle.remove()
    sample(model)
    assert any(tape.replays for tape in made)


def test_weights_elsewhere_are_refused(monkeypatch):
    model = copy.deepcopy(wide("qwen3"))
    model.lm_head.to("meta")
    assert "sharded or quantized" in step_graph.why_not_captured(model)
    monkeypatch.setattr(step_graph, "is_whole", lambda model: True)
    assert "several devices" in step_graph.why_not_captured(model)


def test_buckets():
    assert [step_graph.bucket(count) for count in (1, 2, 3, 9, 32, 33, 256, 257)] == [1, 2, 4, 16, 32, 64, 256, 320]
    graph = step_graph.StepGraph(torch.nn.Linear(1, 1), None, list)
    assert graph.rows_to_keep(64, 32, 16) == 32
    assert graph.rows_to_keep(64, 32, 15) == 64  # too few steps are left
    assert graph.rows_to_keep(64, 49, 100) == 64  # would stay 64
    assert graph.rows_to_keep(40, 31, 100) == 40  # 32 are more than three quarters of 40
    assert graph.rows_to_keep(43, 31, 100) == 32
    graph._failed = True
    assert graph.rows_to_keep(64, 49, 3) == 49


class Calls(list):
    """Records calls in place of `torch.cuda`'s."""

    def __init__(self, monkeypatch, failing=()):
        super().__init__()
        calls = self

        class Stream:
            device, device_index = torch.device("cuda", 0), 0

            def __init__(self, name="own"):
                self.name = name

            def wait_stream(self, other):
                calls.append(f"{self.name} waits for {other.name}")

        class Graph:
            def capture_begin(self, pool, **options):
                calls.append(("begin", pool, options))

            def capture_end(self):
                calls.append("end")
                if "end" in failing:
                    raise RuntimeError("a consequence")

            def pool(self):
                if "end" in failing:
                    raise RuntimeError("without a preceding successful capture")

            def replay(self):
                calls.append("replay")

        class Pool:
            id = (0, 7)

        @contextlib.contextmanager
        def on(stream):
            calls.append(f"enter {stream.name}")
            yield
            calls.append(f"leave {stream.name}")

        stubs = {
            "device": lambda device: contextlib.nullcontext(),
            "MemPool": Pool,
            "CUDAGraph": Graph,
            "current_stream": lambda device: Stream("current"),
            "stream": on,
        }
        generator = SimpleNamespace(clone_state=lambda: "clone", graphsafe_set_state=calls.append)
        stubs |= {"default_generators": [generator], "empty_cache": lambda: calls.append("empty")}
        for name, stub in stubs.items():
            monkeypatch.setattr(torch.cuda, name, stub)
        monkeypatch.setattr(step_graph, "_stream", lambda device: Stream())
        for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
            monkeypatch.setattr(torch._C, name, lambda device, pool, name=name: calls.append((name, device, pool)))


BEGIN = ("begin", (0, 7), {"capture_error_mode": "thread_local"})


def test_order_of_calls_of_cuda(monkeypatch):
    calls = Calls(monkeypatch)
    capture = step_graph.CUDACapture(torch.device("cuda"))
    capture.warm_up(lambda: calls.append("step"))
    assert calls == ["own waits for current", "enter own", "step", "leave own", "current waits for own"]
    calls.clear()
    capture.capture(lambda: calls.append("step"))
    capture.replay()
    assert calls == ["enter own", BEGIN, "step", "end", "leave own", "replay"]


@pytest.mark.parametrize("failing", ["", "end"])
def test_a_failed_capture_of_cuda_is_ended(failing, monkeypatch):
    """Its share of the pool is given up: by the graph if that has ended, as after an error in Python, or else here."""
    calls = Calls(monkeypatch, failing)

    def step():
        raise ValueError("the cause")

    with pytest.raises(ValueError, match="the cause"):
        step_graph.CUDACapture(torch.device("cuda")).capture(step)
    released = [("_cuda_releasePool", 0, (0, 7))] if failing else []
    assert calls[1:] == [BEGIN, "end", ("_cuda_endAllocateToPool", 0, (0, 7)), *released, "clone"]


def test_a_capture_that_finds_no_memory_empties_the_cache_and_tries_again(monkeypatch):
    calls = Calls(monkeypatch)

    def step():
        calls.append("step")
        if calls.count("step") == 1:
            raise torch.OutOfMemoryError

    step_graph.CUDACapture(torch.device("cuda")).capture(step)
    assert [call for call in calls if call in ("step", "empty", "end")] == ["step", "end", "empty", "step", "end"]


# Kernels of a step.


class Kernels(TorchDispatchMode):
    """Counts operators that compute or copy; none may read or make a tensor on the host."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        assert all(one.is_meta for one in tree_leaves((args, kwargs, out)) if isinstance(one, torch.Tensor)), func
        views = any(one.alias_info is not None and not one.alias_info.is_write for one in func._schema.returns)
        allocates = str(func).removeprefix("aten.").startswith(("empty", "new_empty", "_unsafe_view", "detach"))
        self.count += not (views or allocates)
        return out


def test_kernels_of_a_step_of_qwen3_0_6b(monkeypatch):
    sizes = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16}
    config = AutoConfig.for_model("qwen3", vocab_size=151_936, num_key_value_heads=8, head_dim=128, **sizes)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        cache = attention.new_cache(model)
        for layer in cache.layers:
            layer.update(*(torch.empty(8, 8, 512, 128, dtype=torch.bfloat16) for _ in range(2)))
            layer.readers.append(True)
        prefix = Prefix(cache, torch.empty(8, 151_936), [512] * 8, [512] * 8, [EncodedPrompt(512) for _ in range(8)])
    rows = [DecodeRow(prefix, number // 8, (number // 8, number % 8), 128) for number in range(64)]
    batch = StaticBatch(rows, SamplingConfig(), end_ids=[1], stop=StopStrings(None, ()), seed=0)
    monkeypatch.setattr(attention, "merge", lambda out, *_: out.add_(1))  # one kernel on CUDA
    counts, sample_tokens = [], decode.sample_tokens
    for sampler in (sample_tokens, lambda logits_BV, *_: torch.max(logits_BV, -1)[::-1]):  # the other is one, too
        monkeypatch.setattr(decode, "sample_tokens", sampler)
        with sharing_prompts(model), torch.no_grad(), Kernels() as kernels:
            batch._step(NextTokenLogits(model))
        counts.append(kernels.count)
    assert counts[0] <= 1_760
    assert counts[1] <= 1_730


# On a GPU.


class Repeated(step_graph.CUDACapture):
    """Runs a step again where a graph would be replayed."""

    def capture(self, step):
        self.step = step

    def replay(self):
        self.step()


class Careful(Repeated):
    """Forbids steps to wait for the device."""

    def replay(self):
        torch.cuda.set_sync_debug_mode("error")
        try:
            self.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def on_gpu(monkeypatch):
    """Samples with the captures of a class, which are noted."""
    monkeypatch.setattr(step_graph, "_CAN_CAPTURE", WeakKeyDictionary())

    def sample_on_gpu(model, kind, *args, **options):
        made = []
        step_graph._CAN_CAPTURE.pop(model, None)
        if issubclass(kind, Repeated):  # there is nothing to compare
            step_graph._CAN_CAPTURE[model] = True
        monkeypatch.setitem(step_graph.CAPTURES, "cuda", lambda device: made.append(kind(device)) or made[-1])
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="Rollouts go on without")
            found = sample(model, *args, **options)
        assert made
        return found, [len(capture._graphs) for capture in made]

    return sample_on_gpu


def half(family="qwen3"):
    return tiny_decoder(family).to("cuda", torch.bfloat16)


LONG = SamplingConfig(max_new_tokens=66, stop_token_ids=(3,))


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["qwen3", "mistral", "gpt2", "lfm2", "qwen3_moe", "qwen3_5_text"])
def test_graphs_are_bitwise_equal_to_eager_steps_on_gpu(family, on_gpu):
    model = half(family)
    expected, _ = on_gpu(model, Repeated, LONG)
    found, graphs = on_gpu(model, step_graph.CUDACapture, LONG)
    assert found == expected
    assert max(graphs) > (family == "qwen3")  # several buckets


@pytest.mark.gpu
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingConfig(max_new_tokens=30, temperature=0.0),
        SamplingConfig(max_new_tokens=30, temperature=0.7, top_p=0.9),  # sorts the vocabulary
        SamplingConfig(max_new_tokens=30, top_k=5, min_p=0.05),
        SamplingConfig(max_new_tokens=30, repetition_penalty=1.3),
    ],
    ids=str,
)
@pytest.mark.parametrize("count", [14, 50])  # rows below and above 128 are sorted by different kernels
def test_samplers_are_captured_on_gpu(sampling, count, on_gpu):
    model = half()
    expected, _ = on_gpu(model, Repeated, sampling, count=count)
    found, graphs = on_gpu(model, step_graph.CUDACapture, sampling, count=count)
    assert found == expected
    assert max(graphs) > 0


@pytest.mark.gpu
def test_a_step_does_not_wait_for_the_gpu(on_gpu):
    on_gpu(half(), Careful, LONG)


@pytest.mark.gpu
def test_calls_of_other_shapes_and_weights_on_gpu(on_gpu):
    model = half()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
    other = torch.cuda.CUDAGraph()
    source = torch.ones(8, 8, device="cuda")
    torch.mm(source, source)
    with torch.cuda.graph(other):  # lives on while ours go
        result = torch.mm(source, source)
    before = []
    for count in (14, 20, 14):
        expected, _ = on_gpu(model, Repeated, LONG, count=count)
        found, _ = on_gpu(model, step_graph.CUDACapture, LONG, count=count)
        assert found == expected
        assert found not in before
        before.append(found)
        for weight in model.parameters():
            weight.grad = torch.ones_like(weight)
        optimizer.step()
        result.zero_()
        other.replay()
        assert result.eq(8).all()


@pytest.mark.gpu
def test_memory_is_given_back_on_gpu(on_gpu):
    model, used = half(), []
    for _ in range(3):
        on_gpu(model, step_graph.CUDACapture, LONG)
        torch.cuda.empty_cache()
        used.append(torch.cuda.memory_reserved())
    assert used[2] == used[1]
