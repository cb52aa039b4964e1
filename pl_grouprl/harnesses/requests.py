"""Translates a harness's requests into those of the run, and the server's answers back."""

from __future__ import annotations

import hashlib
import math
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pl_grouprl.episodes.limits import EpisodeLimits, smallest
from pl_grouprl.rollout.vllm.requests import check_temperature, sampling_options
from pl_grouprl.sync.sampler import SamplerLostError, WeightsMismatchError
from pl_grouprl.types import SamplingConfig
from pl_grouprl.utilities.distributed import derive_seed
from pl_grouprl.utilities.progress import tick

_NO_WEIGHTS = "default"
"""Version that vLLM reports before it has received weights."""

_NOT_FINITE = -9999.0
"""Log-probability that vLLM reports in place of one that is not finite."""


@dataclass
class _Usage:
    """The tokens of an episode so far.

    Attributes:
        first_length: Length of the first prompt.
        written: Number of tokens that the model wrote.
        ran_out: Whether a request was refused for lack of room.
    """

    first_length: int
    written: int = 0
    ran_out: bool = False


@dataclass
class RoundRequests:
    """The requests of one round of episodes.

    Attributes:
        sampling: How the run samples.
        version: Version of the weights that must sample all tokens.
        limits: Limits on an episode, besides `sampling.max_new_tokens`.
        max_model_len: Longest sequence that model and server take, prompt included; None is no limit.
        end_ids: Tokens that end a turn, in addition to the harness's.
        never: Tokens that are never sampled.
        vocab_size: Token ids from here on are refused, because they would crash the server; None if unknown.
    """

    sampling: SamplingConfig
    version: str
    limits: EpisodeLimits
    max_model_len: int | None = None
    end_ids: Sequence[int] = ()
    never: Sequence[int] = ()
    vocab_size: int | None = None
    _usage: dict[str, _Usage] = field(default_factory=dict)
    _asked: Counter[tuple[int, bytes]] = field(default_factory=Counter)
    _exchanges: set[bytes] = field(default_factory=set)

    def request(self, episode: str, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Translate a request of the harness into the one to send to the server.

        Args:
            episode: Name of the episode.
            asked: The body of a request to `/inference/v1/generate`; its `sampling_params` hold the rollout's `seed`.

        Raises:
            ValueError: If the episode has no room for another token, or the request has images, or tokens that the
                model does not have.
        """
        token_ids = list(asked.get("token_ids") or [])
        self._check_tokens(token_ids, asked)
        usage = self._usage.setdefault(episode, _Usage(len(token_ids)))
        room = self._room(usage, len(token_ids))
        if room < 1:
            usage.ran_out = True
            raise ValueError(f"the run's limits leave the episode no room for a token after {len(token_ids)}")
        params = asked["sampling_params"]
        sent = sampling_options(
            replace(self.sampling, max_new_tokens=room),
            end_ids=self._end_ids(params),
            never=self.never,
            seed=self._seed(params["seed"], token_ids),
        )
        return {"token_ids": token_ids, "sampling_params": sent}

    def _check_tokens(self, token_ids: Sequence[int], asked: Mapping[str, Any]) -> None:
        if asked.get("features") or asked.get("content_parts"):
            raise ValueError("the harness sent images or other media, but only text can be trained")
        if not token_ids or min(token_ids) < 0 or max(token_ids) >= (self.vocab_size or math.inf):
            raise ValueError(
                f"the harness sent {len(token_ids)} token ids, the largest {max(token_ids, default=None)}, but the "
                f"model has vocab_size={self.vocab_size}; use the tokenizer that belongs to the model"
            )

    def _end_ids(self, params: Mapping[str, Any]) -> list[int]:
        ids = {*self.end_ids, *params.get("stop_token_ids", ())}
        return sorted(token for token in ids if token < (self.vocab_size or math.inf))

    def _room(self, usage: _Usage, length: int) -> int:
        limits = self.limits
        room = smallest(
            self.sampling.max_new_tokens - usage.written,
            limits.max_turn_tokens,
            None if self.max_model_len is None else self.max_model_len - length,
            None if limits.max_episode_tokens is None else usage.first_length + limits.max_episode_tokens - length,
        )
        assert room is not None
        return room

    def _seed(self, seed: int, token_ids: Sequence[int]) -> int:
        """Seed of a turn, from the rollout's seed, the tokens that the model reads, and how often they were sent.

        With the rollout's seed alone, all its turns would get the same random numbers.
        """
        key = seed, digest(token_ids)
        self._asked[key] += 1
        return derive_seed(seed, key[1].hex(), self._asked[key])

    def answer(self, episode: str, token_ids: Sequence[int], answered: Mapping[str, Any]) -> dict[str, Any]:
        """The server's answer in the form that the library `renderers` reads.

        Args:
            episode: Name of the episode.
            token_ids: The tokens that were sent.
            answered: The server's answer.

        Raises:
            SamplerLostError: If the server has lost its weights, or broke off the turn.
            WeightsMismatchError: If other weights sampled some of the tokens.
            FloatingPointError: If the model's logits are not finite.
        """
        (choice,) = answered["choices"]
        for span in choice["weight_versions"] or ():
            check_version(span["version"], self.version)
        if choice["finish_reason"] not in ("stop", "length"):
            raise SamplerLostError(f"the server ended a turn with finish reason {choice['finish_reason']!r}.")
        if not choice["weight_versions"]:
            raise WeightsMismatchError("the server does not report which weights sampled its tokens.")
        written = choice["token_ids"]
        logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        if not all(value is not None and _NOT_FINITE < value < math.inf for value in logprobs):  # false for NaN
            raise FloatingPointError(
                "the model's logits are not finite (NaN or infinite) in vLLM; check its weights and dtype."
            )
        tick(len(written))
        self._usage[episode].written += len(written)
        self._exchanges.add(digest([*token_ids, *written]))
        content = [
            {"token": f"token_id:{token}", "logprob": value, "top_logprobs": []}
            for token, value in zip(written, logprobs, strict=True)
        ]
        return {
            "request_id": answered.get("request_id", ""),
            "choices": [{**choice, "logprobs": {"content": content}}],
        }

    def ran_out(self, episode: str) -> bool:
        """Whether a request of the episode was refused because it had no room."""
        return episode in self._usage and self._usage[episode].ran_out

    def was_sampled(self, token_ids: Sequence[int]) -> bool:
        """Whether the tokens are exactly what the model read and wrote in one of the requests."""
        return digest(token_ids) in self._exchanges


def digest(token_ids: Sequence[int]) -> bytes:
    """Hash of token ids."""
    return hashlib.blake2b(array("q", token_ids).tobytes(), digest_size=16).digest()


def check_version(found: str, expected: str) -> None:
    """Refuse weights of another version.

    Raises:
        SamplerLostError: If the server has no weights, or others of this run (after a failed update).
        WeightsMismatchError: If it has weights of another run.
    """
    if found == expected:
        return
    run, _, _ = expected.rpartition(":")
    if found == _NO_WEIGHTS or found.startswith(f"{run}:"):
        raise SamplerLostError(f"the server has weights {found!r}, but {expected!r} is expected.")
    raise WeightsMismatchError(
        f"the server has weights of version {found!r}, but {expected!r} is expected. Does another trainer use this "
        "server? Give each trainer its own servers."
    )


def check_sampling(sampling: SamplingConfig) -> None:
    """Refuse sampling options that cannot be passed on to a harness's turns.

    Raises:
        ValueError: Names the option and the remedy.
    """
    check_temperature(sampling)
    if sampling.stop:
        raise ValueError(
            f"SamplingConfig.stop is {list(sampling.stop)} together with a harness, whose turns end with end tokens "
            "only; use stop_token_ids, or let the environment end the episode."
        )
