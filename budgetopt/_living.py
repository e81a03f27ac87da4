"""What is known of storages that regions hand to each other, for as long as those live."""

from __future__ import annotations

import weakref
from typing import Any, Generic, TypeVar

import torch

Item = TypeVar("Item")


class Living(dict[int, Item], Generic[Item]):
    """By the identity of a storage. An entry goes with its storage: addresses are used again."""

    __slots__ = ("watched",)

    def __init__(self) -> None:
        super().__init__()
        self.watched: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}

    def put(self, storage: torch.UntypedStorage, item: Item) -> None:
        """Remember until the storage dies."""
        reference = weakref.ref(storage, self._forget)
        self.watched[id(reference)] = reference, id(storage)
        self[id(storage)] = item

    def _forget(self, reference: Any) -> None:
        self.pop(self.watched.pop(id(reference))[1], None)
