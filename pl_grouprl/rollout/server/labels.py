"""Labels of the weights on servers: the run that sent them, and their version."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pl_grouprl.sync.sampler import SamplerLostError, WeightsMismatchError

_FRESH = "default"
"""vLLM's label before any weights were sent."""


@dataclass(frozen=True)
class Labels:
    """The labels of one run's weights.

    Attributes:
        run: The run's id, the same on all ranks.
    """

    run: str

    def of(self, version: int) -> str:
        """Label of a version that was sent and verified."""
        return f"{self.run}:{version}"

    @property
    def updating(self) -> str:
        """Label during an update, when nothing is sampled."""
        return f"{self.run}:updating"

    @property
    def lost(self) -> str:
        """Label after a failed update."""
        return f"{self.run}:lost"

    def version(self, label: str, min_version: int, url: str) -> int | None:
        """The version of a label; None during an update of this run.

        Args:
            label: A server's label.
            min_version: The oldest version that is accepted.
            url: The server, for errors.

        Raises:
            SamplerLostError: If the server was restarted, or an update has failed.
            WeightsMismatchError: If the weights are another trainer's, or older than `min_version`.
        """
        found = f"the sampling server at {url} has weights {label!r}, not {self.of(min_version)!r}."
        if label in (_FRESH, self.lost):
            raise SamplerLostError(f"{found} It was restarted, or has lost an update.")
        run, _, version = str(label).rpartition(":")
        if run != self.run:
            raise WeightsMismatchError(
                f"{found} Does another trainer use this server? Give each trainer its own servers."
            )
        if label == self.updating:
            return None
        if not version.isdigit():
            raise WeightsMismatchError(f"{found} No version of this run is called that.")
        if int(version) < min_version:
            raise WeightsMismatchError(f"{found} They are older than those of this run.")
        return int(version)

    def of_tokens(self, spans: Iterable[Mapping[str, Any]] | None, count: int, min_version: int, url: str) -> list[int]:
        """The version of each token of a sequence.

        Args:
            spans: vLLM's `weight_versions`: `version`, `start` and `end` of consecutive tokens.
            count: Tokens of the sequence; further ones are left out.
            min_version: See `version`.
            url: See `version`.

        Raises:
            SamplerLostError: See `version`.
            WeightsMismatchError: See `version`; also if the spans do not cover the tokens.
        """
        versions: list[int] = []
        for span in spans or ():
            version = self.version(span["version"], min_version, url)
            if version is None or span["start"] != len(versions):
                break
            versions += [version] * (span["end"] - span["start"])
        if len(versions) < count:
            raise WeightsMismatchError(
                f"the sampling server at {url} does not report which weights sampled its tokens: {spans!r}."
            )
        return versions[:count]
