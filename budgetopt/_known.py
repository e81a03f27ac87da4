"""What a recorder keeps in mind: the values of living storages, and handles that tell of their life."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from budgetopt._script import Observer
from budgetopt._values import Value


class Watched:
    """A handle that tells an observer of its life."""

    __slots__ = ("inner", "number", "observer")

    def __init__(self, inner: Any, observer: Observer, number: int) -> None:
        self.inner, self.observer, self.number = inner, observer, number

    def unpack(self) -> torch.Tensor:
        tensor: torch.Tensor = self.inner.unpack()
        self.observer.unpacked(self.number, tensor.untyped_storage())
        return tensor

    def __del__(self) -> None:
        self.observer.died(self.number)


class Known(dict[int, Value]):
    """The current value of every living storage that the region made, by the storage's identity.

    An entry goes with its storage: addresses are used again, and a value that nothing needs must not
    keep what its operator read.

    Attributes:
        forget: callback for weak references to storages. watched: those references, with the entry's number.
    """

    __slots__ = ("__weakref__", "forget", "watched")

    def __init__(self) -> None:
        super().__init__()
        self.watched: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        myself = weakref.ref(self)

        def forget(reference: Any) -> None:
            known = myself()  # a strong link back would close a circle
            if known is not None:
                known.pop(known.watched.pop(id(reference))[1], None)

        self.forget = forget
