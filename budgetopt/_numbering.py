"""Tell equal things in a sequence apart by counting them. No torch."""

from __future__ import annotations

from collections.abc import Hashable


class Numbering:
    """Numbers the occurrences of every key: the first is 0, the next 1 …"""

    def __init__(self) -> None:
        self._seen: dict[Hashable, int] = {}

    def next(self, key: Hashable) -> int:
        """The number of this occurrence of `key`."""
        number = self._seen.get(key, 0)
        self._seen[key] = number + 1
        return number
