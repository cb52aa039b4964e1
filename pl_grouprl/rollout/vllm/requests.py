"""Converts requests to vLLM and its answers, one sequence each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pl_grouprl.models.router_replay import NOT_RECORDED
from pl_grouprl.rollout.engine import StopStrings
from pl_grouprl.types import FinishReason, Rollout, SamplingConfig

if TYPE_CHECKING:
    from vllm import SamplingParams

_TEMPERATURES = (0.01, 2.0)
"""Minimum and maximum temperature of vLLM, which silently raises lower ones."""

NOT_FINITE = -9999.0
"""Log-probability that vLLM's server reports in place of one that is not finite."""

_NEVER = -100.0
"""Logit bias of tokens that are never sampled: vLLM's minimum, a probability of e^-100."""


def sampling_options(
    sampling: SamplingConfig, *, end_ids: Sequence[int], never: Sequence[int] = (), seed: int
) -> dict[str, Any]:
    """Arguments of vLLM's `SamplingParams` for one sequence, as plain values.

    vLLM applies min-p before top-k and top-p, transformers after them: combining them may give different tokens.

    Args:
        sampling: How to sample. Stop strings are not passed on; `Completion` finds them.
        end_ids: Tokens that end the sequence.
        never: Tokens that are not sampled.
        seed: Seed of the sequence's random stream, in [0, 2^63).

    Raises:
        ValueError: If vLLM does not support the temperature.
    """
    check_temperature(sampling)
    return {
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "seed": seed,
        "logprobs": 0,  # of the sampled token only
        "stop_token_ids": list(end_ids),
        "ignore_eos": True,  # end_ids includes the end token
        "detokenize": False,
        "logit_bias": dict.fromkeys(never, _NEVER) or None,
    }


def sampling_params(sampling: SamplingConfig, **options: Any) -> SamplingParams:
    """`sampling_options` for a vLLM in this process."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    kind = RequestOutputKind.DELTA if sampling.stop else RequestOutputKind.FINAL_ONLY
    return SamplingParams(**sampling_options(sampling, **options), output_kind=kind)


def check_temperature(sampling: SamplingConfig) -> None:
    """Check that vLLM supports the temperature.

    Raises:
        ValueError: If it does not.
    """
    least, greatest = _TEMPERATURES
    if sampling.temperature != 0 and not least <= sampling.temperature <= greatest:
        raise ValueError(
            f"SamplingConfig.temperature is {sampling.temperature}, which vLLM does not support; set it to 0 "
            f"(greedy) or from {least} to {greatest}, or sample with HFRolloutEngine."
        )


class Completion:
    """Assembles a sequence from vLLM's outputs.

    Args:
        stop: Strings that end it.

    Attributes:
        routed_experts: The experts of its tokens in each decoder layer, prompt included, shape [tokens, layers, experts
            per token], from vLLM's last output; None if vLLM returned none.
    """

    def __init__(self, stop: StopStrings) -> None:
        self._stop = stop
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._finish_reason: FinishReason | None = None
        self.routed_experts: np.ndarray | None = None

    def add(self, token_ids: Sequence[int], logprobs: Sequence[float], finish_reason: str | None) -> bool:
        """Add what is new in an output of vLLM.

        Args:
            token_ids: New tokens.
            logprobs: The log-probability of each.
            finish_reason: Why the sequence has ended; None if it has not.

        Returns:
            Whether a stop string ended the sequence, so vLLM must be told.
        """
        for token, logprob in zip(token_ids, logprobs, strict=True):
            self._token_ids.append(token)
            self._logprobs.append(logprob)
            if self._stop and self._stop.found([self._token_ids[-self._stop.window :]])[0]:
                self._finish_reason = "stop"
                return finish_reason is None
        if finish_reason is not None:
            if finish_reason not in ("stop", "length"):
                raise RuntimeError(f"vLLM ended a sequence with finish reason {finish_reason!r}; see its log.")
            self._finish_reason = finish_reason  # type: ignore[assignment]
        return False

    def rollout(self, num_prompt_tokens: int = 0, mixtures: Sequence[int] | None = None) -> Rollout:
        """The sequence, without text.

        Args:
            num_prompt_tokens: Tokens of its prompt.
            mixtures: Layers whose experts are recorded; None if none are.

        Raises:
            FloatingPointError: If the model's logits were not finite.
            ValueError: If experts are to be recorded, but vLLM returned none.
        """
        if not all(map(math.isfinite, self._logprobs)):
            raise FloatingPointError(
                "the model's logits are not finite (NaN or infinite) in vLLM; check its weights, and whether the "
                "engine's dtype can hold its activations (try bfloat16 or float32 in place of float16)."
            )
        record = None
        if mixtures is not None:
            if self.routed_experts is None:
                raise ValueError(
                    "router_replay is on, but vLLM returned no routed_experts; start it with "
                    "--enable-return-routed-experts."
                )
            found, count = self.routed_experts.astype(np.int16), num_prompt_tokens + len(self._token_ids)
            record = torch.full((count, len(mixtures), found.shape[-1]), NOT_RECORDED, dtype=torch.int16)
            known = torch.from_numpy(found)[: count - 1, mixtures]
            record[: len(known)] = known
        return Rollout(self._token_ids, self._logprobs, finish_reason=self._finish_reason, routed_experts=record)


def new_tokens(output: Any) -> tuple[list[int], list[float], str | None]:
    """What `Completion.add` takes, of a `CompletionOutput` of vLLM."""
    token_ids = [int(token) for token in output.token_ids]
    logprobs = zip(token_ids, output.logprobs or (), strict=True)
    return token_ids, [float(found[token].logprob) for token, found in logprobs], output.finish_reason
