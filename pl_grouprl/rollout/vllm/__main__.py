"""Start a sampling server: `python -m pl_grouprl.rollout.vllm --model PATH_OR_NAME`.

The server is vLLM's. This command prepares its options and environment, then replaces itself with it.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pl_grouprl.rollout.vllm.access import TOKEN_VARIABLE, check_host, check_token
from pl_grouprl.rollout.vllm.reaper import start_reaper
from pl_grouprl.rollout.vllm.settings import DECIDED_BY_SERVER, FOLDER_VARIABLE, common_arguments
from pl_grouprl.utilities import optional

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")

_SHORT = {"-q": "quantization", "-dp": "data_parallel_size", "-sc": "speculative_config"}
"""Short options of vLLM that users may not set."""


def make_parser() -> argparse.ArgumentParser:
    """The command line. Options that it does not know go to vLLM."""
    parser = argparse.ArgumentParser(
        prog="python -m pl_grouprl.rollout.vllm",
        description="Starts vLLM's server for a trainer (VLLMServerRolloutEngine), which sends the weights.",
        epilog="All other options are those of `vllm serve`, such as --dtype bfloat16, --tensor-parallel-size 2, "
        "--gpu-memory-utilization 0.8, --max-model-len 4096, --enable-lora --max-lora-rank 16 for adapters that are "
        "sent without their base, or --load-format dummy, which starts without reading weights: the trainer sends them "
        "anyway.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--model", required=True, help="folder or name of the policy's model")
    add("--host", default="127.0.0.1", help="address to listen on; any but loopback needs a token")
    add("--port", type=int, default=8000, help="port to listen on")
    add("--token", help=f"token that every request must carry; the environment variable {TOKEN_VARIABLE} keeps it "
    "out of the process list")  # fmt: skip
    add("--transfer", choices=("file", "nccl"), default="file", help="how weights arrive; nccl needs GPUs")
    add("--weights-folder", help="folder for files of weights, which the trainer's machine has under the same path; "
    "shared memory by default")  # fmt: skip
    add("--print", action="store_true", help="print vLLM's command and its environment instead of running it")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Replace this process with vLLM's server, or print its command."""
    parser = make_parser()
    options, further = parser.parse_known_args(arguments)
    options.token = options.token if options.token is not None else os.environ.get(TOKEN_VARIABLE) or None
    try:
        _check(options, further)
    except (ValueError, ModuleNotFoundError) as error:
        parser.error(str(error))
    decided = common_arguments(transfer="nccl" if options.transfer == "nccl" else "pl_grouprl")
    decided |= {"enable_scale_out": True, "disable_uvicorn_access_log": True}
    decided["middleware"] = "pl_grouprl.rollout.vllm.access.TokenAuth"
    model = Path(options.model)  # a name on the Hub is assumed to have a tokenizer, which lets vLLM also serve chats
    has_tokenizer = not model.is_dir() or any((model / name).exists() for name in _TOKENIZER_FILES)
    if not has_tokenizer and "--tokenizer" not in {option.partition("=")[0] for option in further}:
        decided["skip_tokenizer_init"] = True
    parsed = {"model": options.model, "host": options.host, "port": options.port}
    command = [sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry"]
    command += [*_flags(parsed), *further, *_flags(decided)]
    environment = {"VLLM_SERVER_DEV_MODE": "1"}
    if any(option.replace("_", "-") == "--enable-lora" for option in further):
        environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"  # adapters of a running server
    if options.print:
        shown = [f"{name}={value}" for name, value in environment.items()]
        shown += [f'{TOKEN_VARIABLE}="${TOKEN_VARIABLE}"'] if options.token else []
        print(" ".join(shown), shlex.join(command))
        return
    memory = "/dev/shm"  # noqa: S108 (the folder in it has a unique name); containers often have 64 MiB of it
    has_room = os.path.isdir(memory) and shutil.disk_usage(memory).free >= 1 << 30
    folder = tempfile.mkdtemp(prefix="pl-grouprl-", dir=options.weights_folder or (memory if has_room else None))
    environment[FOLDER_VARIABLE] = folder
    if options.token:
        environment[TOKEN_VARIABLE] = options.token
    start_reaper(folder)
    os.execve(command[0], command, {**os.environ, **environment})  # noqa: S606 (vLLM, with checked options)


def _check(options: argparse.Namespace, further: Sequence[str]) -> None:
    optional.check_vllm_system("the sampling server")
    check_token(options.token, "--token")
    check_host(options.host, options.token)
    if os.environ.get("VLLM_ALLOW_INSECURE_SERIALIZATION", "0") not in ("", "0"):
        raise ValueError("VLLM_ALLOW_INSECURE_SERIALIZATION is set, which makes vLLM unpickle messages; unset it.")
    for option in further:
        # vLLM takes abbreviations, the prefix `--no-`, and values that follow a short option without a blank.
        if option.startswith("--"):
            name = option.removeprefix("--").partition("=")[0].partition(".")[0].replace("-", "_").removeprefix("no_")
            found = [decided for decided in DECIDED_BY_SERVER if name and decided.startswith(name)]
        else:
            found = [decided for short, decided in _SHORT.items() if option.startswith(short)]
        if found:
            raise ValueError(f"{option.partition('=')[0]} is decided by {DECIDED_BY_SERVER[found[0]]}; omit it.")
    if options.transfer == "nccl":
        from pl_grouprl.rollout.vllm.fleet import check_device

        check_device()
    optional.require(optional.VLLM_AVAILABLE, "the sampling server", "vllm")


def _flags(arguments: dict[str, Any]) -> list[str]:
    flags: list[str] = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            flags += [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return flags


if __name__ == "__main__":
    main()
