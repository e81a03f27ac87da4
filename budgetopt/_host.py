"""The main memory that this process may have: the machine's, and what a container allows.

A container is a Linux control group, version 1 or 2. A group's limit holds for all that is below it, so
every group from the process's own up to the root of what is mounted is asked.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class _Files(NamedTuple):
    limit: str
    usage: str
    reclaimable: str


_VERSIONS = {
    "cgroup2": _Files("memory.max", "memory.current", "inactive_file"),
    "cgroup": _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""By the type of the file system: names of files, and the line of memory.stat with cached bytes that can go."""


def total(root: Path = Path("/")) -> int | None:
    """Bytes of the machine, or of the smallest limit below that; None where nothing tells.

    `root` is where /proc and the mounted groups are looked up.
    """
    machine = _meminfo(root, "MemTotal") or _pages("SC_PHYS_PAGES")
    return _smallest([machine, *(limit for limit, _ in _groups(root))])


def free(root: Path = Path("/")) -> int | None:
    """Bytes that can still be taken, on the machine and within every limit; cached files count as free."""
    machine = _meminfo(root, "MemAvailable") or _pages("SC_AVPHYS_PAGES")
    return _smallest([machine, *(max(0, limit - used) for limit, used in _groups(root))])


def _smallest(found: list[int | None]) -> int | None:
    return min((n for n in found if n is not None), default=None)


def _meminfo(root: Path, name: str) -> int | None:
    """A line of Linux's /proc/meminfo, in bytes."""
    for line in _read(root / "proc/meminfo").splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) * 1024
    return None


def _pages(name: str) -> int | None:
    """Bytes of so many pages; None where the system does not tell (macOS, Windows)."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf(name)
    except (AttributeError, ValueError, OSError):
        return None


def _groups(root: Path) -> Iterator[tuple[int, int]]:
    """(limit, bytes in use) of every group above the process that has a limit."""
    own = dict(_own_paths(_read(root / "proc/self/cgroup")))
    for kind, inside, mounted in _mounts(_read(root / "proc/self/mountinfo")):
        files = _VERSIONS[kind]
        for folder in _upwards(root / mounted.lstrip("/"), own.get(kind, "/"), inside):
            limit, used = _number(folder / files.limit), _number(folder / files.usage)
            if limit is not None and used is not None:
                yield limit, max(0, used - _stat(folder, files.reclaimable))


def _own_paths(text: str) -> Iterator[tuple[str, str]]:
    """The process's group by version; lines are number:controllers:path, version 2 has number 0 and no names."""
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield "cgroup2", path
        elif "memory" in controllers.split(","):
            yield "cgroup", path


def _mounts(text: str) -> Iterator[tuple[str, str, str]]:
    """(type, the group that is mounted, where) of the mounts that may limit memory."""
    for line in text.splitlines():
        mount, _, system = line.partition(" - ")
        fields, about = mount.split(), system.split()
        if about and (about[0] == "cgroup2" or (about[0] == "cgroup" and "memory" in about[-1].split(","))):
            yield about[0], fields[3], fields[4]


def _upwards(top: Path, own: str, inside: str) -> Iterator[Path]:
    """Folders from the process's own group up to `top`; in a container the group itself is often what is mounted."""
    below = own[len(inside.rstrip("/")) :] if (own + "/").startswith(inside.rstrip("/") + "/") else ""
    folder = top / below.lstrip("/")
    while folder != top:
        yield folder
        folder = folder.parent
    yield top


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    """The file's number; None for no file and for "max", no limit."""
    text = _read(path).strip()
    return int(text) if text.isdigit() else None


def _stat(folder: Path, name: str) -> int:
    for line in _read(folder / "memory.stat").splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0
