"""What the command refuses before it imports vLLM."""

import shlex
import subprocess
import sys

import pytest
import torch

from pl_grouprl.rollout.vllm.__main__ import main
from pl_grouprl.rollout.vllm.fleet import init_info


@pytest.fixture(autouse=True)
def _no_token(monkeypatch):
    monkeypatch.delenv("PL_GROUPRL_TOKEN", raising=False)
    monkeypatch.delenv("VLLM_ALLOW_INSECURE_SERIALIZATION", raising=False)


def refusal(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        main(["--model", "m", *arguments])
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_help_imports_no_vllm():
    code = (
        "import sys\nfrom pl_grouprl.rollout.vllm.__main__ import main\n"
        "try:\n    main(['--help'])\nfinally:\n"
        "    print([name for name in ('vllm', 'fastapi', 'uvicorn') if name in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120).stdout
    assert "--transfer" in output
    assert output.strip().endswith("[]")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        *((["--host", host], "--host") for host in ("0.0.0.0", "::", "10.1.2.3", "trainer.example")),  # without a token
        (["--logprobs-mode", "raw_logprobs"], "--logprobs-mode"),
        (["--logprobs_mode=raw_logprobs"], "--logprobs_mode"),
        (["--logprobs-m", "raw_logprobs"], "--logprobs-m"),
        (["--no-enable-prefix-caching"], "--no-enable-prefix-caching"),
        (["--quantization", "fp8"], "--quantization"),
        (["-q", "fp8"], "-q"),
        (["-qfp8"], "-qfp8"),
        (["-sc.method=ngram"], "-sc.method"),
        (["--data-parallel-size", "2"], "--data-parallel-size"),
        (["--speculative-config.method", "ngram"], "--speculative-config.method"),
        (["--spec-method", "ngram"], "--spec-method"),
        (["--hos", "0.0.0.0"], "--hos"),
        (["--uds", "/tmp/socket"], "--uds"),
        (["--config", "file.yaml"], "--config"),
        (["--api-key", "k"], "--api-key"),
        (["--lora-dtype", "bfloat16"], "--lora-dtype"),
        (["--token", "a b\n"], "--token"),
        (["--token", ""], "--token"),
    ],
)
def test_options_are_checked(capsys, arguments, named):
    assert f"{named} is " in refusal(capsys, *arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_nccl_needs_a_gpu(capsys):
    assert "--transfer is 'nccl', but this machine has no CUDA device" in refusal(capsys, "--transfer", "nccl")


def test_a_missing_vllm_is_named(capsys, monkeypatch):
    monkeypatch.setattr("pl_grouprl.utilities.optional.VLLM_AVAILABLE", False)
    assert "'pl-grouprl[vllm]'" in refusal(capsys, "--print")


def test_vllm_must_not_unpickle(capsys, monkeypatch):
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    assert "VLLM_ALLOW_INSECURE_SERIALIZATION is set" in refusal(capsys)


@pytest.fixture
def on_gpus(monkeypatch):
    """As if vLLM were there."""
    monkeypatch.setattr("pl_grouprl.utilities.optional.VLLM_AVAILABLE", True)
    monkeypatch.setattr("pl_grouprl.rollout.vllm.settings.runs_on_cpu", lambda: False)


def printed(capsys, *arguments):
    main(["--model", *arguments, "--print"])
    return shlex.split(capsys.readouterr().out)


def test_the_command_that_is_printed(capsys, on_gpus, tmp_path):
    words = printed(capsys, str(tmp_path), "--port", "8123", "--max-num-seqs", "32", "--dtype", "bfloat16")
    assert words[0] == "VLLM_SERVER_DEV_MODE=1"
    options = words[words.index("--model") :]
    assert options[:10] == [
        *("--model", str(tmp_path), "--host", "127.0.0.1", "--port", "8123"),
        *("--max-num-seqs", "32", "--dtype", "bfloat16"),
    ]
    for pair in (
        ("--logprobs-mode", "processed_logprobs"),
        ("--weight-transfer-config", '{"backend": "pl_grouprl"}'),
        ("--worker-extension-cls", "pl_grouprl.rollout.vllm.worker.WeightReceiver"),
        ("--middleware", "pl_grouprl.rollout.vllm.access.TokenAuth"),
        ("--generation-config", "vllm"),
    ):
        assert options[options.index(pair[0]) + 1] == pair[1]
    assert {"--enable-scale-out", "--enable-prefix-caching", "--skip-tokenizer-init"} <= {*options}


def test_adapters_of_a_running_server(capsys, on_gpus, tmp_path):
    allowed = "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
    assert allowed not in printed(capsys, str(tmp_path))
    words = printed(capsys, str(tmp_path), "--enable-lora", "--max-lora-rank", "16")
    assert words[1] == allowed
    assert words[words.index("--enable-lora") + 1 :][:2] == ["--max-lora-rank", "16"]


def test_a_tokenizer_is_loaded_if_there_is_one(capsys, on_gpus, tmp_path):
    (tmp_path / "tokenizer.json").touch()
    assert "--skip-tokenizer-init" not in printed(capsys, str(tmp_path))
    assert "--skip-tokenizer-init" not in printed(capsys, "Qwen/Qwen3-0.6B")
    for option in (["--tokenizer", "other"], ["--tokenizer=other"]):
        assert "--skip-tokenizer-init" not in printed(capsys, str(tmp_path / "model"), *option)


def test_vllm_takes_what_workers_are_told():
    pytest.importorskip("vllm")
    import base64

    from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferUpdateInfo

    told = NCCLWeightTransferInitInfo(**init_info(base64.b64encode(bytes(range(128))).decode(), 3, 5))
    assert (told.nccl_unique_id_bytes, told.rank_offset, told.world_size) == (bytes(range(128)), 3, 5)
    NCCLWeightTransferUpdateInfo(names=["a"], dtype_names=["bfloat16"], shapes=[[2, 3]])


def test_tokens_in_the_environment(capsys, on_gpus, tmp_path, monkeypatch):
    monkeypatch.setenv("PL_GROUPRL_TOKEN", "")  # is none
    assert printed(capsys, str(tmp_path))[0] == "VLLM_SERVER_DEV_MODE=1"
    assert "there is no token" in refusal(capsys, "--host", "0.0.0.0")
    monkeypatch.setenv("PL_GROUPRL_TOKEN", "secret")
    words = printed(capsys, str(tmp_path), "--host", "0.0.0.0")
    assert "PL_GROUPRL_TOKEN=$PL_GROUPRL_TOKEN" in words
    assert "secret" not in " ".join(words)
    monkeypatch.setenv("PL_GROUPRL_TOKEN", "sec ret\n")
    assert "sec" not in refusal(capsys)
