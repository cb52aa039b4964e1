"""Requests of a harness to the model, as the run wants them sampled, and what the server answers."""

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
"""Version that vLLM reports after a start, before it received weights."""

_NOT_FINITE = -9999.0
"""The log-probability by which vLLM says NaN."""


@dataclass
class _Talk:
    """What is known of an episode's requests."""

    first_length: int
    written: int = 0
    ran_out: bool = False


@dataclass
class Sampled:
    """The requests of one round of episodes.

    Attributes:
        sampling: How the run samples.
        version: Version of the weights that must answer.
        limits: Limits on an episode, besides `sampling.max_new_tokens`.
        max_model_len: Longest sequence of model and server, prompt included; None is no limit.
        end_ids: Tokens that end a turn, in addition to the harness's.
        never: Tokens that are never sampled.
        vocab_size: Tokens from here on are refused, since they would kill the server; None if unknown.
    """

    sampling: SamplingConfig
    version: str
    limits: EpisodeLimits
    max_model_len: int | None = None
    end_ids: Sequence[int] = ()
    never: Sequence[int] = ()
    vocab_size: int | None = None
    _talks: dict[str, _Talk] = field(default_factory=dict)
    _asked: Counter[tuple[int, bytes]] = field(default_factory=Counter)
    _exchanges: set[bytes] = field(default_factory=set)

    def request(self, episode: str, asked: Mapping[str, Any]) -> dict[str, Any]:
        """The request to send to the server for one of the harness.

        Args:
            episode: Name of the episode.
            asked: The body of a request to `/inference/v1/generate`; its `sampling_params` hold the rollout's `seed`.

        Raises:
            ValueError: If the episode has no room for another token, or the request has images, or tokens that the
                model does not have.
        """
        token_ids = list(asked.get("token_ids") or [])
        self._check_tokens(token_ids, asked)
        talk = self._talks.setdefault(episode, _Talk(len(token_ids)))
        room = self._room(talk, len(token_ids))
        if room < 1:
            talk.ran_out = True
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

    def _room(self, talk: _Talk, length: int) -> int:
        limits = self.limits
        room = smallest(
            self.sampling.max_new_tokens - talk.written,
            limits.max_turn_tokens,
            None if self.max_model_len is None else self.max_model_len - length,
            None if limits.max_episode_tokens is None else talk.first_length + limits.max_episode_tokens - length,
        )
        assert room is not None
        return room

    def _seed(self, seed: int, token_ids: Sequence[int]) -> int:
        """Seed of a turn: of the rollout, what the model reads, and how often the rollout has asked with that before.

        With the rollout's seed alone, all its turns would get the same random numbers.
        """
        key = seed, digest(token_ids)
        self._asked[key] += 1
        return derive_seed(seed, key[1].hex(), self._asked[key])

    def answer(self, episode: str, token_ids: Sequence[int], answered: Mapping[str, Any]) -> dict[str, Any]:
        """The server's answer in the form that the library `renderers` reads.

        Args:
            episode: Name of the episode.
            token_ids: What was sent.
            answered: What the server answered.

        Raises:
            SamplerLostError: If the server has lost its weights.
            WeightsMismatchError: If other weights sampled some of the tokens.
            FloatingPointError: If the model's logits are not finite.
        """
        (choice,) = answered["choices"]
        for span in choice["weight_versions"] or [{"version": None}]:
            check_version(span["version"], self.version)
        if choice["finish_reason"] not in ("stop", "length"):
            raise SamplerLostError(f"the server ended a turn with finish reason {choice['finish_reason']!r}.")
        written = choice["token_ids"]
        logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        if not all(value is not None and _NOT_FINITE < value < math.inf for value in logprobs):  # false for NaN
            raise FloatingPointError(
                "the model's logits are not finite (NaN or infinite) in vLLM; check its weights and dtype."
            )
        tick(len(written))
        self._talks[episode].written += len(written)
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
        return episode in self._talks and self._talks[episode].ran_out

    def was_sampled(self, token_ids: Sequence[int]) -> bool:
        """Whether these tokens are exactly what the model read and wrote in one of the requests."""
        return digest(token_ids) in self._exchanges


def digest(token_ids: Sequence[int]) -> bytes:
    """Hash of token ids."""
    return hashlib.blake2b(array("q", token_ids).tobytes(), digest_size=16).digest()


def check_version(found: str | None, expected: str) -> None:
    """Refuse weights of another version.

    Raises:
        SamplerLostError: If the server has none, or others of this run (what a failed update has left).
        WeightsMismatchError: If it has those of another run.
    """
    if found == expected:
        return
    run, _, _ = expected.rpartition(":")
    if found is None or found == _NO_WEIGHTS or found.startswith(f"{run}:"):
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
