"""The files of this machine that a program in the sandbox can read: the system's libraries and Python."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")


@dataclass
class FileView:
    """Files and folders to mount, and symbolic links to make, by their absolute paths.

    Attributes:
        mounts: Real files and folders, none inside another.
        links: Symbolic links on the way to them, with their targets.
    """

    mounts: list[str] = field(default_factory=list)
    links: dict[str, str] = field(default_factory=dict)

    def add(self, path: str) -> None:
        """Add a path with every symbolic link on the way to it; skip it if it does not exist."""
        here = Path("/")
        for place, part in enumerate(Path(path).parts[1:], start=2):
            here = Path(os.path.normpath(here / part))
            if here.is_symlink():
                if str(here) not in self.links:
                    self.links[str(here)] = os.readlink(here)
                rest = Path(path).parts[place:]
                self.add(os.path.normpath(here.parent.joinpath(os.readlink(here), *rest)))
                return
        if here.exists():
            self.mounts.append(str(here))

    def outermost(self) -> FileView:
        """The same view without mounts and links that lie inside another mount."""
        kept: list[str] = []
        for path in sorted(set(self.mounts)):
            if not _inside(path, kept):
                kept.append(path)
        return FileView(kept, {link: target for link, target in self.links.items() if not _inside(link, kept)})


def interpreter_view() -> FileView:
    """What this Python needs: the system's libraries, its own folder and that of its virtual environment.

    Raises:
        ValueError: If that would expose a home folder or the whole machine.
    """
    view = FileView()
    for path in (*_SYSTEM, *_DEVICES, sys.base_prefix, sys.prefix, sys.executable):
        view.add(path)
    view = view.outermost()
    forbidden = {"/", "/root", "/home", os.path.expanduser("~")}
    if shown := forbidden.intersection(view.mounts):
        raise ValueError(f"this Python is installed in {sorted(shown)}, so programs could read all files there")
    return view


def _inside(path: str, folders: Iterable[str]) -> bool:
    return any(path == folder or path.startswith(folder.rstrip("/") + "/") for folder in folders)
