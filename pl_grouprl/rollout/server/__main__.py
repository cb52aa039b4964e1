"""Start a sampling server: `python -m pl_grouprl.rollout.server --model PATH_OR_NAME`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence

from pl_grouprl.rollout.server.auth import check_host
from pl_grouprl.rollout.server.protocol import TOKEN_VARIABLE, check_token
from pl_grouprl.rollout.vllm.arguments import DECIDED_ALWAYS
from pl_grouprl.utilities.optional import check_vllm_system


def make_parser() -> argparse.ArgumentParser:
    """The command line. Options that are None are left to vLLM."""
    parser = argparse.ArgumentParser(
        prog="python -m pl_grouprl.rollout.server",
        description="Samples with vLLM for a trainer (VLLMServerRolloutEngine), which sends the weights.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--model", required=True, help="folder or name of the policy's model")
    add("--host", default="127.0.0.1", help="address to listen on; any but loopback needs a token")
    add("--port", type=int, default=8000, help="port to listen on")
    add("--token", help=f"token that every request must carry; the environment variable {TOKEN_VARIABLE} keeps it "
    "out of the process list")  # fmt: skip
    add("--transfer", choices=("http", "nccl"), default="http", help="how weights arrive; nccl needs GPUs")
    add("--max-bucket-mib", type=int, default=8192, help="largest bucket of weights that is accepted, in MiB")
    add("--dtype", default="auto", help="dtype of weights and activations; auto is the one in the model's config")
    add("--tensor-parallel-size", type=int, default=1, help="GPUs that share the model")
    add("--gpu-memory-utilization", type=float, help="fraction of each GPU's memory that vLLM may use")
    add("--max-model-len", type=int, help="maximum length of prompt plus completion")
    add("--max-num-seqs", type=int, help="most sequences decoded at once")
    add("--enforce-eager", action="store_true", help="no CUDA graphs and no compilation")
    add("--seed", type=int, default=0, help="seed of vLLM's random numbers outside sequences")
    add("--load-format", choices=("auto", "dummy"), default="auto",
        help="dummy starts without reading weights: the trainer sends them anyway")  # fmt: skip
    add("--option", action="append", default=[], metavar="NAME=JSON", type=_option,
        help="further argument of vLLM's AsyncEngineArgs, such as max_num_batched_tokens=8192")  # fmt: skip
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a server until it is stopped, or its engine dies.

    Returns:
        The exit code: 0, or 1 if the engine died.
    """
    parser = make_parser()
    options = parser.parse_args(arguments)
    from_environment = os.environ.pop(TOKEN_VARIABLE, None)  # vLLM's processes do not inherit it
    options.token = options.token if options.token is not None else from_environment
    try:
        _check(options)
    except ValueError as error:
        parser.error(str(error))
    if options.transfer == "nccl":
        from pl_grouprl.rollout.server.nccl import check_device

        try:
            check_device()
        except ValueError as error:
            parser.error(str(error))
    from pl_grouprl.rollout.server.serve import run

    return run(options)


def _check(options: argparse.Namespace) -> None:
    check_vllm_system("the sampling server")
    check_token(options.token, "--token")
    check_host(options.host, options.token)
    if not 0 <= options.port < 65536:
        raise ValueError(f"--port is {options.port}; it must be from 0 (any that is free) to 65535.")
    if options.max_bucket_mib < 1:
        raise ValueError(f"--max-bucket-mib is {options.max_bucket_mib}; it must be at least 1.")
    if os.environ.get("VLLM_ALLOW_INSECURE_SERIALIZATION", "0") not in ("", "0"):
        raise ValueError("VLLM_ALLOW_INSECURE_SERIALIZATION is set, with which vLLM unpickles messages; unset it.")
    known = {name for name in vars(options) if name != "option"} | DECIDED_ALWAYS.keys()
    for name, _ in options.option:
        if name in known:
            raise ValueError(f"--option sets {name}, which has a separate option or is decided by the server; drop it.")


def _option(text: str) -> tuple[str, object]:
    name, divider, value = text.partition("=")
    if not (divider and name.isidentifier()):
        raise argparse.ArgumentTypeError(f"{text!r} is not like max_num_batched_tokens=8192")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


if __name__ == "__main__":
    sys.exit(main())
