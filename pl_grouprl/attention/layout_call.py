"""A packed row's layout, and all else that the layers of one decoder call share."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from torch import Tensor, nn

from pl_grouprl.attention.prefix_states import PrefixStates
from pl_grouprl.attention.row_shards import RowShards
from pl_grouprl.packing import SharedPrefixLayout


@dataclass
class LayoutCall:
    """A layout, passed through one forward of a decoder.

    Attributes:
        layout: The forest of the packed row.
        reached: Identities of the modules that followed it: attention, and stateful layers.
        ran: For each of those, the kind of layer and what ran it.
        only: Kind of the layers that run the chosen backend, while others run the reference; None for all layers.
        shards: How the row is split over ranks; None if this rank has all of it.
        states: States of the prefilled tokens; if there are none, records those of the row's tokens.
        columns_T: Columns of the tokens in the caller's rows, for layers that count them; None uses positions.
        dense: Whether layers get a dense mask, because they compute with it, instead of a marker.
    """

    layout: SharedPrefixLayout
    reached: set[int] = field(default_factory=set)
    ran: dict[int, tuple[str, str]] = field(default_factory=dict)
    only: str | None = None
    shards: RowShards | None = None
    states: PrefixStates | None = None
    columns_T: Tensor | None = None
    dense: bool = False

    def note(self, module: nn.Module, kind: str, runner: str) -> None:
        """Note that a module followed the layout: its kind of layer, and what ran it."""
        self.reached.add(id(module))
        self.ran[id(module)] = (kind, runner)

    def kinds(self) -> dict[str, tuple[str, int]]:
        """For each kind of layer, what ran it and the number of layers."""
        counts = Counter(self.ran.values())
        return {kind: (backend, counts[kind, backend]) for kind, backend in sorted(counts)}
