"""Predicts a step on many GPUs from rates of one GPU: rollouts, the longest of them, scoring, update, weight transfer.

docs/scaling.md compares it with runs and with published steps.

Legend: P prompts of a batch, G rollouts of each, n GPUs, B sequences that one decodes at once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pl_grouprl.utilities.options import check_fields

GPUS_PER_NODE = 8

UTILIZATION = 0.4
"""Share of the data sheet's rates that a step reaches where none is measured, as in the step that NeMo-RL published."""


@dataclass(frozen=True)
class Rates:
    """Measured rates of a GPU, and lengths of completions.

    In 16-bit precisions, times and utilizations that are None default to 0.4 of the data sheet's rates; others have no
    default.

    Attributes:
        decode_step: Seconds of a decoding step of a single sequence; by default the weights are read, which is too
            short for engines that wait for the host, such as `HFRolloutEngine`.
        decode_sequence: Seconds that each further sequence adds to a decoding step; by default those of its operations
            and of reading its cache.
        scoring_mfu: `perf/mfu/scoring` of a run.
        update_mfu: `perf/mfu/update` of a run.
        transfer: Bytes per second at which weights reach all samplers (in StepModel and StepTimes, it is seconds).
        node: Bytes per second at which a GPU exchanges gradients within a node of 8.
        network: The same, across nodes.
        mean_length: Mean tokens of a completion; defaults to `sampling.max_new_tokens`.
        lengths: File with completions of a run, `completions.jsonl`, whose lengths to use.
    """

    decode_step: float | None = None
    decode_sequence: float | None = None
    scoring_mfu: float | None = None
    update_mfu: float | None = None
    transfer: float = 3e9
    node: float = 300e9
    network: float = 50e9
    mean_length: float | None = None
    lengths: str | None = None

    def __post_init__(self) -> None:
        given = {name: value for name, value in vars(self).items() if name != "lengths" and value is not None}
        check_fields(self, **{name: (value > 0, "above 0") for name, value in given.items()})


class Lengths:
    """A distribution of completion lengths.

    Args:
        longer: The probability that a completion has more than t tokens, for t from 0 to the longest length less 1.
    """

    def __init__(self, longer: Sequence[float]) -> None:
        self._longer = longer

    @classmethod
    def of_mean(cls, mean: float, limit: int) -> Lengths:
        """Completions that end after each token with the same chance, and at a limit: geometric, truncated.

        Args:
            mean: Mean length, of the truncated ones.
            limit: The longest length.

        Raises:
            ValueError: If the mean is not between 1 and the limit.
        """
        if not 1 <= mean <= limit:
            raise ValueError(f"mean_length is {mean:g}; it must be between 1 and the limit, {limit} tokens.")
        if mean == limit:
            return cls([1.0] * limit)
        low, high = 0.0, 1.0  # the chance to go on; the mean is 1 + q + q^2 + ... with `limit` terms
        for _ in range(60):
            q = (low + high) / 2
            low, high = (q, high) if (1 - q**limit) / (1 - q) < mean else (low, q)
        return cls([high**t for t in range(limit)])

    @classmethod
    def of_recorded(cls, lengths: Sequence[int]) -> Lengths:
        """The lengths of recorded completions; none is longer than their longest."""
        return cls([sum(length > t for length in lengths) / len(lengths) for t in range(max(lengths))])

    @classmethod
    def of(cls, rates: Rates, limit: int) -> Lengths:
        """What rates say, for completions of at most some tokens."""
        if rates.lengths is None:
            return cls.of_mean(rates.mean_length or limit, limit)
        lines = Path(rates.lengths).read_text(encoding="utf-8").splitlines()
        return cls.of_recorded([int(json.loads(line)["num_tokens"]) for line in lines])

    @property
    def mean(self) -> float:
        """Mean length in tokens."""
        return math.fsum(self._longer)

    def longest(self, count: int) -> float:
        """Expected length of the longest of some independent completions, in tokens."""
        return math.fsum(1 - (1 - longer) ** count for longer in self._longer)


class StepTimes(NamedTuple):
    """Predicted seconds of a step.

    Attributes:
        rollouts: Sampling if no completion were longer than the mean.
        longest: What the longest completion adds.
        scoring: Passes without gradient.
        update: Forward, backward, and the exchange of gradients.
        transfer: Weights on their way to the samplers.
        step: The step; with staleness less than the sum, since servers and trainers work side by side.
    """

    rollouts: float
    longest: float
    scoring: float
    update: float
    transfer: float
    step: float


@dataclass(frozen=True)
class StepModel:
    """What a step needs, from which to predict it on any number of GPUs.

    Whole groups are distributed, so the GPU with most of them decides: ceil(P / n) of P.

    Attributes:
        prompts: P.
        num_generations: G.
        lengths: Lengths of completions.
        decode_step: Seconds of a decoding step of a single sequence.
        decode_sequence: Seconds by which another sequence prolongs it.
        scoring: Seconds to score the batch on one GPU.
        update: Seconds to train the batch on one GPU.
        gradient_bytes: Bytes of gradients that GPUs exchange for a batch of rollouts.
        transfer: Seconds to send the weights to samplers on other GPUs.
        own_weights: Whether samplers on the trainers' GPUs use the trainers' own weights.
        max_sequences: Sequences that a GPU decodes at once; no limit if None.
        node: As in `Rates`.
        network: As in `Rates`.
    """

    prompts: int
    num_generations: int
    lengths: Lengths
    decode_step: float
    decode_sequence: float
    scoring: float
    update: float
    gradient_bytes: float = 0.0
    transfer: float = 0.0
    own_weights: bool = True
    max_sequences: int | None = None
    node: float = math.inf
    network: float = math.inf

    def rollouts(self, samplers: int) -> tuple[float, float]:
        """Seconds of sampling, and what the longest completion adds.

        A decoding step of B sequences takes `decode_step + (B - 1) decode_sequence`, and sequences leave as they end:
        the second term sums up to all tokens, the first counts steps, as many as the longest completion has tokens. If
        not all sequences fit, new ones take the places of finished ones.
        """
        sequences = math.ceil(self.prompts / samplers) * self.num_generations
        at_once = min(sequences, self.max_sequences or sequences)
        mean, floor = self.lengths.mean, self.decode_step - self.decode_sequence
        work = mean * (floor * sequences / at_once + self.decode_sequence * sequences)
        return work, floor * (self.lengths.longest(self.prompts * self.num_generations) - mean)

    def training(self, gpus: int, per_node: int = GPUS_PER_NODE) -> tuple[float, float]:
        """Seconds of scoring, and of the update with its exchange of gradients."""
        share = math.ceil(self.prompts / gpus) / self.prompts
        rate = self.node if gpus <= per_node else self.network
        exchange = 2 * (gpus - 1) / gpus * self.gradient_bytes / rate  # reduce, then broadcast, in rings
        return self.scoring * share, self.update * share + exchange

    def predict(self, gpus: int, servers: int = 0, max_staleness: int = 0, per_node: int = GPUS_PER_NODE) -> StepTimes:
        """Predict a step.

        Args:
            gpus: GPUs that train, and sample if there are no servers.
            servers: GPUs that only sample.
            max_staleness: With k and servers, the longest completion may take as long as k steps, and each step waits
                for servers or trainers, whichever takes longer.
            per_node: GPUs that train on a node.
        """
        (work, wait), (scoring, update) = self.rollouts(servers or gpus), self.training(gpus, per_node)
        transfer = 0.0 if self.own_weights and not servers else self.transfer
        step = work + wait + scoring + update
        if servers and max_staleness:
            step = max(work, (work + wait) / max_staleness, scoring + update)
        return StepTimes(work, wait, scoring, update, transfer, step + transfer)
