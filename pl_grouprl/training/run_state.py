"""Checkpoint parts: what a run saves besides weights, optimizer and position in the data."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import Any, Protocol

from pl_grouprl.utilities.distributed import gather_plain


class Stateful(Protocol):
    """Has a state made of plain containers, numbers, strings and tensors."""

    def state_dict(self) -> Any:
        """Return the state."""

    def load_state_dict(self, state: Any) -> None:
        """Restore the state, or refuse it."""


class Attributes:
    """Saves and restores some attributes of an object."""

    def __init__(self, owner: Any, *names: str) -> None:
        self.owner = owner
        self.names = names

    def state_dict(self) -> dict[str, Any]:
        """Return their values by name."""
        return {name: getattr(self.owner, name) for name in self.names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set those that the state has."""
        for name in self.names:
            if name in state:
                setattr(self.owner, name, state[name])


class ConsistencyCheck:
    """A fact that is recorded in a checkpoint and compared when it is loaded.

    Args:
        current: Returns the fact as it is now.
        compare: Takes the recorded and the current fact; raises or warns if they conflict. None only records it.
    """

    def __init__(self, current: Callable[[], Any], compare: Callable[[Any, Any], None] | None = None) -> None:
        self.current = current
        self.compare = compare

    def state_dict(self) -> Any:
        """Return the current fact."""
        return self.current()

    def load_state_dict(self, state: Any) -> None:
        """Compare the recorded fact with the current one."""
        if self.compare is not None:
            self.compare(state, self.current())


class PerRankState:
    """State that differs between ranks; a checkpoint holds a list of all ranks' states.

    Args:
        run: Its device is where ranks communicate.
        save: Returns this rank's state.
        load: Takes the states of all saved ranks, however many there were.
    """

    def __init__(self, run: Any, save: Callable[[], Any], load: Callable[[list[Any]], None]) -> None:
        self.run = run
        self.save = save
        self.load = load

    def state_dict(self) -> list[Any]:
        """Gather all ranks' states; every rank must call it."""
        return gather_plain(self.save(), self.run.device)

    def load_state_dict(self, state: list[Any]) -> None:
        """Restore this rank's state."""
        self.load(state)


def save_parts(parts: Mapping[str, Stateful]) -> dict[str, Any]:
    """Save parts by name; all ranks call it."""
    return {name: part.state_dict() for name, part in parts.items()}


def load_parts(parts: Mapping[str, Stateful], state: Mapping[str, Any], leave_out: Container[str]) -> None:
    """Load parts in their order.

    Args:
        parts: Parts by name. One that an older checkpoint lacks is left as it is.
        state: What `save_parts` returned.
        leave_out: Parts that start over.
    """
    for name, part in parts.items():
        if name in state and name not in leave_out:
            part.load_state_dict(state[name])
