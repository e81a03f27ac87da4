"""Segments while they run: which values of several regions wait for one pass, and that pass.

A planned segment is a row of regions (:mod:`budgetopt.solvers.segments`). Its regions belong together by what they
hand on: a region that is given a value of a running segment joins it. Where none is given, it begins one of its own,
which costs a pass more and changes no bit.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from budgetopt._living import Living
from budgetopt._operators import PLAIN, is_plain, tensors
from budgetopt._values import Value


class Segment:
    """One run of a planned segment.

    Attributes:
        number: of the segment in the plan. outer: the one in which it lies. members: values that its pass stores;
            those that nobody waits for any more are gone. done: the pass is over.
        lock: of all calls in it, and in those around it.
    """

    __slots__ = ("__weakref__", "done", "lock", "members", "number", "outer")

    def __init__(self, number: int, outer: Segment | None) -> None:
        self.number = number
        self.outer = outer
        self.lock: Any = threading.RLock() if outer is None else outer.lock
        self.members: list[weakref.ref[Value]] = []
        self.done = False

    def around(self) -> Iterator[Segment]:
        """This one and those in which it lies, the outermost last."""
        segment: Segment | None = self
        while segment is not None:
            yield segment
            segment = segment.outer

    def waiting(self) -> list[Value]:
        """Values that the pass has to store."""
        for number in [number for number, value in _HANDED.items() if value.segment is self]:
            _HANDED.pop(number, None)
        found = [reference() for reference in self.members]
        return [value for value in found if value is not None and value.op is not None]


_HANDED: Living[Value] = Living()
"""Values that regions of running segments made. Between two regions, nobody else holds the value: it goes with its
storage, or when the pass is over."""


def hand_on(storages: Iterable[torch.UntypedStorage | None], known: dict[int, Value]) -> None:
    """A region's forward is over: let the next ones know the values of `known` that wait for a pass."""
    for storage in storages:
        value = known.get(id(storage))
        if storage is not None and value is not None and value.segment is not None and value.counter is not None:
            _HANDED.put(storage, value)


def handed(tensor: torch.Tensor, storage: torch.UntypedStorage) -> Value | None:
    """The value of another region that `tensor` shows, unless somebody wrote to it since."""
    value = _HANDED.get(id(storage))
    return value if value is not None and value.version == tensor._version else None


def join(chain: Sequence[int], arguments: Any) -> dict[int, Segment]:
    """The segments around a call that begins, by number: those of what it is given, or new ones.

    Args:
        chain: their numbers in the plan, outermost first. arguments: of the call.
    """
    running: dict[int, Segment] = {}
    plain = (t for t in tensors(arguments) if type(t) in PLAIN and is_plain(t))
    for tensor in plain if _HANDED else ():
        value = handed(tensor, tensor.untyped_storage())
        if value is not None and value.segment is not None:
            running |= {segment.number: segment for segment in value.segment.around()}
    joined: dict[int, Segment] = {}
    outer: Segment | None = None
    for number in chain:
        segment = running.get(number)
        if segment is None or segment.done or segment.outer is not outer:
            segment = Segment(number, outer)
        joined[number] = outer = segment
    return joined
