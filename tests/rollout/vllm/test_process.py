"""What vLLM changes in a trainer's process is put back, and the trainer's modes do not reach vLLM."""

import gc
import os
import random
import signal
from contextlib import contextmanager
from operator import attrgetter

import numpy as np
import pytest
import torch
from helpers.tiny_models import tiny_model

from pl_grouprl.rollout.vllm.instance import EngineProcess
from pl_grouprl.rollout.vllm.settings import REPLACED_FUNCTIONS, engine_arguments, engine_environment

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def nothing_is_frozen():
    """The number of frozen objects can be compared only if there are none."""
    gc.unfreeze()


def seen() -> dict:
    """All there is once in a process that vLLM is known to change, or might."""
    return {
        **{name: attrgetter(name)(torch) for name in REPLACED_FUNCTIONS},
        "environment": dict(os.environ),
        "python": random.getstate(),
        "numpy": np.random.get_state()[1].tolist(),
        "torch": torch.get_rng_state().tolist(),
        "threads": torch.get_num_threads(),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "precision": torch.get_float32_matmul_precision(),
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "frozen": gc.get_freeze_count(),
        "collects": gc.isenabled(),
        "gradients": torch.is_grad_enabled(),
        "affinity": os.sched_getaffinity(0),
    }


@contextmanager
def unusual_trainer():
    """Settings that differ from vLLM's."""
    precision = torch.get_float32_matmul_precision()
    handler = signal.signal(signal.SIGTERM, lambda signum, frame: None)
    torch.set_float32_matmul_precision("high")
    torch.set_default_dtype(torch.bfloat16)
    os.environ["LOCAL_RANK"] = "3"
    try:
        with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
            yield
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.set_default_dtype(torch.float32)
        signal.signal(signal.SIGTERM, handler)
        del os.environ["LOCAL_RANK"]


def test_vllms_state_is_its_own_between_its_calls():
    """What it has set it finds again, and the trainer never sees it."""
    process = EngineProcess(CPU, {"RANK": "5"})
    before = seen()
    with process.inside():
        assert os.environ["RANK"] == "5"
        os.environ["LD_PRELOAD"] = "libnothing.so"
        os.environ.pop("HF_HUB_OFFLINE")
        random.seed(0), np.random.seed(0), torch.manual_seed(0)
        torch.set_float32_matmul_precision("medium")
        with process.inside():  # changes nothing
            torch.set_num_threads = print
    assert seen() == before
    torch.rand(3)
    with process.inside():
        assert os.environ["LD_PRELOAD"] == "libnothing.so"
        assert "HF_HUB_OFFLINE" not in os.environ
        assert torch.set_num_threads is print
        assert torch.initial_seed() == 0
        assert torch.get_float32_matmul_precision() == "medium"


def test_the_trainer_is_put_back_after_an_error():
    process = EngineProcess(CPU, {})
    before = seen()
    with pytest.raises(ValueError, match="Seed must be"), process.inside():
        np.random.seed(-1 if torch.manual_seed(0) else 0)
    assert seen() == before
    with process.inside():
        assert torch.initial_seed() == 0


def test_number_of_threads_is_put_back():
    """Also where torch.set_num_threads has been made to do nothing."""
    process = EngineProcess(CPU, {})
    before = torch.get_num_threads()
    with process.inside():
        torch.set_num_threads(before + 1)
        torch.set_num_threads = print
    assert torch.get_num_threads() == before
    with process.inside():
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before


def test_a_precision_of_each_backend_is_put_back():
    """Torch refuses to name one precision then."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = "tf32"
        with EngineProcess(CPU, {}).inside():
            torch.set_float32_matmul_precision("highest")
            assert matmul.fp32_precision != "tf32"
        assert matmul.fp32_precision == "tf32"
        with pytest.raises(RuntimeError):
            torch.get_float32_matmul_precision()
    finally:
        matmul.fp32_precision = before
        torch.set_float32_matmul_precision("highest")


def test_modes_of_the_trainer_do_not_reach_vllm():
    with unusual_trainer():
        with EngineProcess(CPU, {}).inside():
            product = torch.ones(2, 2) @ torch.ones(2, 2)
            assert product.dtype == torch.float32
            assert not product.is_inference()
            assert not torch.is_grad_enabled()
        assert torch.is_autocast_enabled("cpu")
        assert torch.is_inference_mode_enabled()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tiny_model("qwen3", head_dim=32).save_pretrained(path)
    return path


def build(folder):
    """An engine of its own, as an `EngineProcess` builds it."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    options = {"dtype": "float32", "enforce_eager": True, "max_model_len": 64, "kv_cache_memory_bytes": 2**26}
    arguments = EngineArgs(model=str(folder), skip_tokenizer_init=True, **options, **engine_arguments(1))
    return LLMEngine.from_engine_args(arguments)


def sample(engine) -> list[int]:
    from vllm import SamplingParams

    engine.add_request("0", {"prompt_token_ids": [3, 4]}, SamplingParams(seed=1, max_tokens=4, detokenize=False))
    tokens = []
    while engine.has_unfinished_requests():
        tokens = [list(output.outputs[0].token_ids) for output in engine.step()] or tokens
    return tokens[-1]


@pytest.mark.vllm
def test_an_engine_leaves_the_process_as_it_was(folder):
    """From the start to the end; only the process group of one that it needs stands until then."""
    process = EngineProcess(CPU, engine_environment(CPU))
    with unusual_trainer():
        before = seen()
        engine = process.start(lambda: build(folder))
        assert seen() == before
        assert torch.distributed.get_world_size() == 1
        with process.inside():
            sampled = sample(engine)
        assert seen() == before
        process.stop(engine)
        assert seen() == before
        assert not torch.distributed.is_initialized()
    with process.inside():
        assert not torch.is_autocast_enabled("cpu")
    assert len(sampled) == 4


@pytest.mark.vllm
def test_the_trainers_process_group_outlives_engines(folder):
    """One that fails, one that is collected as garbage, one that is stopped."""
    process = EngineProcess(CPU, engine_environment(CPU))
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(Exception, match="nowhere"):
            process.start(lambda: build("/nowhere"))
        assert torch.distributed.is_initialized()
        process.start(lambda: build(folder))
        gc.collect()
        assert torch.distributed.is_initialized()
        process.stop(None)
        engine = process.start(lambda: build(folder))
        with process.inside():
            assert len(sample(engine)) == 4
        process.stop(engine)
        assert torch.distributed.is_initialized()
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.vllm
def test_no_process_group_remains_of_an_engine_that_fails():
    with pytest.raises(Exception, match="nowhere"):
        EngineProcess(CPU, engine_environment(CPU)).start(lambda: build("/nowhere"))
    assert not torch.distributed.is_initialized()
