"""Converts requests to vLLM and its answers, one sequence each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pl_grouprl.rollout.stopping import StopStrings
from pl_grouprl.types import FinishReason, Rollout, SamplingConfig

if TYPE_CHECKING:
    from vllm import SamplingParams

_TEMPERATURES = (0.01, 2.0)
"""Minimum and maximum temperature of vLLM, which silently raises lower ones."""

_NEVER = -100.0
"""Logit bias of tokens that are never sampled: vLLM's minimum, a probability of e^-100."""


def sampling_params(
    sampling: SamplingConfig, *, end_ids: Sequence[int], never: Sequence[int] = (), seed: int
) -> SamplingParams:
    """Sampling parameters of vLLM for one sequence.

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
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=seed,
        logprobs=0,  # of the sampled token only
        stop_token_ids=list(end_ids),
        ignore_eos=True,  # end_ids includes the end token
        detokenize=False,
        logit_bias=dict.fromkeys(never, _NEVER) or None,
        output_kind=RequestOutputKind.DELTA if sampling.stop else RequestOutputKind.FINAL_ONLY,
    )


def check_temperature(sampling: SamplingConfig) -> None:
    """Refuse a temperature that vLLM does not support.

    Raises:
        ValueError: Gives the supported range.
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
    """

    def __init__(self, stop: StopStrings) -> None:
        self._stop = stop
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._finish_reason: FinishReason | None = None

    def add(self, output: Any) -> bool:
        """Add what is new in an output of vLLM.

        Args:
            output: A `CompletionOutput`.

        Returns:
            Whether a stop string ended the sequence, so vLLM must be told.
        """
        for token, logprobs in zip(output.token_ids, output.logprobs or (), strict=True):
            self._token_ids.append(int(token))
            self._logprobs.append(float(logprobs[token].logprob))
            if self._stop and self._stop.found([self._token_ids[-self._stop.window :]])[0]:
                self._finish_reason = "stop"
                return output.finish_reason is None
        if output.finish_reason is not None:
            self._finish_reason = _finish_reason(output.finish_reason)
        return False

    def rollout(self) -> Rollout:
        """The sequence, without text.

        Raises:
            FloatingPointError: If the model's logits were not finite.
        """
        if not all(map(math.isfinite, self._logprobs)):
            raise FloatingPointError(
                "the model's logits are not finite (NaN or infinite) in vLLM; check its weights, and whether the "
                "engine's dtype can hold its activations (try bfloat16 or float32 in place of float16)."
            )
        return Rollout(self._token_ids, self._logprobs, finish_reason=self._finish_reason)


def _finish_reason(reason: str) -> FinishReason:
    if reason not in ("stop", "length"):
        raise RuntimeError(f"vLLM ended a sequence with finish reason {reason!r}; see its log.")
    return reason  # type: ignore[return-value]
