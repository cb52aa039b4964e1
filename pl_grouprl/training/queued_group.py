"""An entry of the queue of rollouts: a prompt, and once it is sampled, its group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pl_grouprl.training.distribution import rollout_state
from pl_grouprl.training.staleness import sampled_versions
from pl_grouprl.types import Prompt, Rollout, RolloutGroup
from pl_grouprl.utilities.distributed import derive_seed

Join = Callable[[Prompt, list[int], list[Rollout]], RolloutGroup]
"""Builds a group from (prompt, prompt tokens as sampled, rollouts)."""


@dataclass(eq=False)
class QueuedGroup:
    """A prompt and, once it is sampled, its group.

    Attributes:
        number: Number of the prompt batch that it belongs to.
        place: Its index among this rank's prompts of that batch.
        prompt: The prompt.
        attempt: How often it was sampled before and dropped as stale.
        version: Version of the weights when sampling started; None before that.
        syncs: Number of weight syncs before sampling started.
        group: The rollouts; None until they are finished.
        has_run_versions: Whether token versions were translated from the engine's numbering to the run's.
        oldest_token: The lowest of them; None before that.
    """

    number: int
    place: int
    prompt: Prompt
    attempt: int = 0
    version: int | None = None
    syncs: int = 0
    group: RolloutGroup | None = None
    has_run_versions: bool = False
    oldest_token: int | None = None

    @property
    def oldest(self) -> int:
        """Version of the oldest sampled token; that at the start of sampling while it is not known."""
        return (self.version or 0) if self.oldest_token is None else self.oldest_token

    def settle(self) -> None:
        """Note that the token versions are in the run's numbering."""
        assert self.group is not None
        versions = (version for rollout in self.group.rollouts for version in sampled_versions(rollout))
        self.oldest_token, self.has_run_versions = min(versions, default=self.version), True

    def state_dict(self, versions: Callable[[Rollout], list[int]]) -> dict[str, Any]:
        """The entry as plain containers, a finished group without its data columns.

        Args:
            versions: Returns the token versions of a rollout in the run's numbering.
        """
        plain = {"number": self.number, "place": self.place, "attempt": self.attempt}
        if self.group is None:
            return plain
        rollouts = [rollout_state(rollout) | {"weight_versions": versions(rollout)} for rollout in self.group.rollouts]
        return plain | {
            "version": self.version,
            "prompt": derive_seed(*self.prompt.token_ids),
            "prompt_ids": self.group.prompt_ids,
            "rollouts": rollouts,
        }


def restored_entry(saved: dict[str, Any], prompt: Prompt, join: Join) -> QueuedGroup:
    """Rebuild what `state_dict` returned; without the group if it is of another prompt.

    Args:
        saved: What it returned.
        prompt: The prompt at this place.
        join: Rebuilds a group.
    """
    entry = QueuedGroup(saved["number"], saved["place"], prompt, saved["attempt"])
    if saved.get("prompt") != derive_seed(*prompt.token_ids):
        return entry
    rollouts = [Rollout(**rollout) for rollout in saved["rollouts"]]
    group = join(prompt, saved["prompt_ids"], rollouts)
    entry.version, entry.group = saved["version"], group
    entry.settle()
    return entry
