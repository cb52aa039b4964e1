"""Replies of a judge, cached in memory and optionally on disk."""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pl_grouprl.utilities.writes import OptionalWrites

_MOST_IN_MEMORY = 16_384
"""Number of replies kept in memory; the least recently used are dropped first."""


class ReplyCache:
    """Replies by the hash of their request.

    Args:
        folder: Where to keep a file per reply, for other ranks and later runs; None caches in memory only.
    """

    def __init__(self, folder: str | None) -> None:
        self._folder = None if folder is None else Path(folder).expanduser()
        self._memory: OrderedDict[str, str] = OrderedDict()
        self._writes: OptionalWrites | None = None

    def get(self, digest: str) -> str | None:
        """The reply, or None if it is not known; a damaged file counts as unknown."""
        reply = self._memory.get(digest)
        if reply is None and self._folder is not None:
            reply = _read(self._file(self._folder, digest))
        if reply is not None:
            self._remember(digest, reply)
        return reply

    def put(self, digest: str, reply: str) -> None:
        """Remember a reply. If it cannot be written to disk, warn once."""
        self._remember(digest, reply)
        if self._folder is None:
            return
        from pl_grouprl.utilities.writes import OptionalWrites, write_whole  # imports Lightning

        if self._writes is None:
            self._writes = OptionalWrites("Judge")
        with self._writes.to(f"cache_dir {self._folder}"):
            write_whole(self._file(self._folder, digest), json.dumps({"reply": reply}).encode())

    def _remember(self, digest: str, reply: str) -> None:
        self._memory[digest] = reply
        self._memory.move_to_end(digest)
        if len(self._memory) > _MOST_IN_MEMORY:
            self._memory.popitem(last=False)

    @staticmethod
    def _file(folder: Path, digest: str) -> Path:
        return folder / digest[:2] / f"{digest}.json"


def _read(file: Path) -> str | None:
    try:
        reply = json.loads(file.read_bytes())["reply"]
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return reply if isinstance(reply, str) else None
