"""What the command refuses before it imports vLLM."""

import subprocess
import sys

import pytest
import torch

from pl_grouprl.rollout.server.__main__ import main
from pl_grouprl.rollout.server.nccl import check_bucket, init_info


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
        "import sys\nfrom pl_grouprl.rollout.server.__main__ import main\n"
        "try:\n    main(['--help'])\nfinally:\n"
        "    print([name for name in ('vllm', 'fastapi', 'uvicorn', 'transformers') if name in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120).stdout
    assert "--tensor-parallel-size" in output
    assert output.strip().endswith("[]")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "trainer.example"])
def test_other_machines_need_a_token(capsys, host):
    message = refusal(capsys, "--host", host)
    assert f"--host is {host}" in message
    assert "pass --token or set PL_GROUPRL_TOKEN" in message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--port", "65536"], "--port is 65536; it must be from 0"),
        (["--max-bucket-mib", "0"], "--max-bucket-mib is 0; it must be at least 1"),
        (["--option", "logprobs_mode=raw_logprobs"], "--option sets logprobs_mode, which has a separate option"),
        (["--option", "quantization=fp8"], "--option sets quantization"),
        (["--option", "max_num_seqs=3"], "--option sets max_num_seqs"),
        (["--option", "data_parallel_size=2"], "--option sets data_parallel_size"),
        (["--option", 'speculative_config={"method": "ngram"}'], "--option sets speculative_config"),
        (["--option", "nonsense"], "'nonsense' is not like max_num_batched_tokens=8192"),
        (["--token", "a b\n"], "--token has characters not allowed in headers"),
        (["--token", ""], "--token has characters not allowed in headers"),
    ],
)
def test_options_are_checked(capsys, arguments, message):
    assert message in refusal(capsys, *arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_nccl_needs_a_gpu(capsys):
    assert "transfer is 'nccl', but this machine has no CUDA device" in refusal(capsys, "--transfer", "nccl")


def test_a_token_that_is_refused_is_not_shown(capsys, monkeypatch):
    monkeypatch.setenv("PL_GROUPRL_TOKEN", "sec ret\n")
    assert "sec" not in refusal(capsys)


def test_vllm_must_not_unpickle(capsys, monkeypatch):
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    assert "VLLM_ALLOW_INSECURE_SERIALIZATION is set" in refusal(capsys)


def test_buckets_that_are_broadcast():
    bucket = check_bucket(["a", "b"], ["bfloat16", "float32"], [[2, 3], []], 16)  # 12 and 4 bytes
    assert bucket == {"names": ["a", "b"], "dtype_names": ["bfloat16", "float32"], "shapes": [[2, 3], []]}
    with pytest.raises(ValueError, match="the bucket has 16 bytes; at most 15 are accepted"):
        check_bucket(["a", "b"], ["bfloat16", "float32"], [[2, 3], []], 15)
    with pytest.raises(ValueError, match="the bucket has 1 names, 2 dtypes and 1 shapes"):
        check_bucket(["a"], ["int8", "int8"], [[1]], 9)
    with pytest.raises(ValueError, match="dtypes has 'load'; choose from float32, "):
        check_bucket(["a"], ["load"], [[1]], 9)


def test_vllm_takes_what_workers_are_told():
    pytest.importorskip("vllm")
    import base64

    from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferUpdateInfo

    told = NCCLWeightTransferInitInfo(**init_info(base64.b64encode(bytes(range(128))).decode(), 3, 5))
    assert (told.nccl_unique_id_bytes, told.rank_offset, told.world_size) == (bytes(range(128)), 3, 5)
    NCCLWeightTransferUpdateInfo(**check_bucket(["a"], ["bfloat16"], [[2, 3]], 12))
