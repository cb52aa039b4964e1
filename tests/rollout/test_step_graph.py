"""Steps under a graph against eager ones. On a CPU a recorder of operators stands in for CUDA."""

import contextlib
import copy
import functools
import itertools
import warnings
from weakref import WeakKeyDictionary

import pytest
import torch
from helpers.sampling_oracle import tiny_decoder
from helpers.static_steps import Tape, Watch, dense_runs

from pl_grouprl.attention import shared_prefix
from pl_grouprl.rollout import HFRolloutEngine
from pl_grouprl.rollout.hf import attention, decode, step_graph
from pl_grouprl.rollout.hf.static_batch import StaticBatch
from pl_grouprl.types import SamplingConfig

PROMPTS = [[1 + place % 20 for place in range(length)] for length in (40, 35, 32)]
SAMPLING = SamplingConfig(max_new_tokens=40, stop_token_ids=(3,))


@pytest.fixture
def eager(monkeypatch):
    """As on CUDA: attention without host numbers, and a look at the rows every 8 steps."""
    monkeypatch.setitem(decode.STEPS_PER_CHECK, "cpu", 8)
    monkeypatch.setattr(attention, "attend_runs", dense_runs)
    for name in ("_CAN_CAPTURE", "_SAID"):
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


@pytest.mark.parametrize(
    "options",
    [
        {"sampling": SamplingConfig(max_new_tokens=30, temperature=0.0)},  # which all end at the limit
        {"sampling": SamplingConfig(max_new_tokens=40, temperature=0.8, top_k=9, top_p=0.9, stop_token_ids=(3, 4))},
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

    def moving(batch, logits):
        result = forward(batch, logits)
        states = batch.cache.layers[0].conv_states
        states[0] = states[0].clone()
        return result

    monkeypatch.setattr(StaticBatch, "forward", moving)
    made = graphs()
    with pytest.warns(UserWarning, match="aten.clone.default|a state gets other"):
        sample(model)
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
        for name, stub in stubs.items():
            monkeypatch.setattr(torch.cuda, name, stub)
        monkeypatch.setattr(step_graph, "_stream", lambda device: Stream())
        ended = lambda device, pool: calls.append(("end of allocation", device, pool))  # noqa: E731
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", ended)


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


def test_a_failed_capture_of_cuda_is_ended(monkeypatch):
    calls = Calls(monkeypatch, failing="end")

    def step():
        raise ValueError("the cause")

    with pytest.raises(ValueError, match="the cause"):
        step_graph.CUDACapture(torch.device("cuda")).capture(step)
    assert calls[1:] == [BEGIN, "end", ("end of allocation", 0, (0, 7))]
