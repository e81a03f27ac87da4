"""The nodes that a recorded forward leaves behind: values, and the operators that make them again.

Links go one way only, handle → value → operator → values it read, so that reference counting alone
frees everything as soon as autograd lets go of the last handle, with the garbage collector off.
A value is one *version* of one storage; a write in place makes a new value whose operator reads the
previous one.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from budgetopt import _torch
from budgetopt._operators import Info
from budgetopt._switches import current

if TYPE_CHECKING:
    from budgetopt._handles import Half
    from budgetopt._segments import Segment


Geometry = tuple[Any, Any, Any, torch.dtype, int]
"""How a tensor looks at its storage: shape, stride, offset, dtype, and bits (1: negative, 2: conjugate)."""

_NEGATIVE, _CONJUGATE = 1, 2


def geometry(tensor: torch.Tensor) -> Geometry:
    """The geometry of `tensor`."""
    bits = tensor.is_neg() | tensor.is_conj() << 1
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, bits


def look(seen: Geometry, storage: torch.UntypedStorage) -> torch.Tensor:
    """A tensor of the geometry `seen` over `storage`."""
    shape, stride, offset, dtype, bits = seen
    device = storage.device
    if device.type == "meta":
        tensor = _torch.look_modelled(storage, dtype, (shape, stride, offset))
    else:
        tensor = torch.empty(0, dtype=dtype, device=device).set_(storage, offset, shape, stride)
    if bits & _CONJUGATE:
        tensor = tensor.conj()
    return _torch.neg_view(tensor) if bits & _NEGATIVE else tensor


class Saved:
    """What was dropped, and whether its storage was written to since: plain autograd raises then.

    Writes inside the region are seen by the recorder; a storage that outlives the region's forward gets
    its version counter watched from there on; one that does not can't be written any more.
    """

    __slots__ = ("counter", "tensor", "version", "written")

    counter: torch.Tensor | None
    tensor: weakref.ref[torch.Tensor] | None
    version: int
    written: bool

    def saved_as(self, tensor: torch.Tensor) -> None:
        """Autograd saved `tensor`; remember who knows the version counter (a view's base does)."""
        base = tensor._base
        self.tensor = weakref.ref(tensor if base is None else base)

    def written_to(self, tensor: torch.Tensor, pieces: bool) -> None:
        """The region writes to `tensor`, of the same storage.

        That is an error only where the version counter is the same too: pieces of an ``unsafe_split`` share
        a storage, but a write to one is none to the others.
        """
        base = tensor._base
        if not pieces or (self.tensor is not None and self.tensor() is (tensor if base is None else base)):
            self.written = True

    def watch(self) -> None:
        """The region's forward ended and the storage is still there."""
        tensor = self.tensor() if self.tensor is not None else None
        if tensor is not None and not self.written:
            self.counter = _torch.counter(tensor)
            self.version = self.counter._version

    def check_saved(self, seen: Geometry) -> None:
        """Raise as plain autograd does, if it was written to."""
        if self.written or (self.counter is not None and self.counter._version != self.version):
            now = self.version + 1 if self.counter is None else self.counter._version
            raise modified(seen[0], now, self.version)


class Value(Saved):
    """One version of one storage, as a region's record knows it.

    Attributes:
        op: the operator that makes it again; None for what comes from outside and for what is kept.
        hold: its bytes, while they are kept. counter, version: to see that nobody wrote to them since.
        made: its bytes, made again and still waited for. weak: the same, while autograd holds them.
        coded: another region made it and stored it in fp16.
        segment: whose pass stores it, if one does: until then it is made again for whoever wants it.
        pending: handles that wait for it. pieces: ``unsafe_split`` cut it into tensors with counters of their own.
    """

    __slots__ = (
        "__weakref__",
        "choice",
        "coded",
        "digest",
        "half",
        "hold",
        "made",
        "op",
        "pending",
        "pieces",
        "segment",
        "slot",
        "weak",
    )

    def __init__(self, op: Operator | None, slot: int, choice: int) -> None:
        self.op = op
        self.slot = slot
        self.choice = choice
        self.hold: torch.UntypedStorage | None = None
        self.tensor = None
        self.counter = None
        self.version = 0
        self.written = False
        self.made: torch.UntypedStorage | None = None
        self.weak: weakref.ref[torch.UntypedStorage] | None = None
        self.pending = 0
        self.pieces = False
        self.half: weakref.ref[Half] | None = None
        self.digest: int | None = None
        self.segment: Segment | None = None
        self.coded: Half | None = None

    def store(self, storage: torch.UntypedStorage) -> None:
        """Hold these bytes, made again: nobody else can write to them, and its operator is needed no more."""
        self.hold = storage
        self.op = None

    def keep(self, alias: torch.Tensor) -> None:
        """Hold its bytes by an alias that shares the version counter; its operator is needed no more."""
        self.hold = alias.untyped_storage()
        self.counter = alias
        self.version = alias._version
        self.op = None

    def available(self) -> torch.UntypedStorage | None:
        """Its bytes, if they are there: kept, made again, in fp16 between regions, or still in autograd's hands."""
        if self.hold is not None:
            return self.hold
        if self.made is not None:
            return self.made
        if self.coded is not None:
            return self.coded.storage()
        return self.weak() if self.weak is not None else None

    def check(self) -> None:
        """Raise if kept bytes were written to since they were recorded."""
        if self.segment is None and self.counter is not None and self.counter._version != self.version:
            raise modified(self.counter.shape, self.counter._version, self.version)


Reference = tuple[Value, Geometry]
"""A tensor argument of a recorded operator."""


class Scratch:
    """A batch norm's running statistic: a replay updates zeros of this shape instead."""

    __slots__ = ("device", "dtype", "shape")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device


class Operator:
    """A recorded operator: all that running it again needs. `index` counts the operators of its call."""

    __slots__ = ("args", "call", "dtype", "grad", "index", "info", "kwargs", "outs", "reads", "rng")

    def __init__(self, info: Info, call: Call, index: int, grad: bool, dtype: torch.dtype) -> None:
        self.info = info
        self.call = call
        self.index = index
        self.args: list[Any] = []
        self.kwargs: dict[str, Any] = {}
        self.reads: list[Value] = []
        self.outs: list[weakref.ref[Value] | None] = []
        self.grad = grad
        self.dtype = dtype
        self.rng: tuple[torch.device, torch.Tensor] | None = None


@dataclass
class Counters:
    """What the executor did since a plan was installed or the counters were last cleared.

    Attributes:
        calls: forwards of planned regions. differing: those whose operators were not the planned ones.
        bypassed: forwards under torch.func or where hooks are forbidden. broken: where recording gave up.
        matched, unmatched: operators of differing calls that were found in the plan, or not, after the first
            difference. replayed: operators run again. made_bytes: bytes made again. proven: values that verifying
            compared with what was dropped.
    """

    calls: int = 0
    differing: int = 0
    bypassed: int = 0
    broken: int = 0
    matched: int = 0
    unmatched: int = 0
    replayed: int = 0
    made_bytes: int = 0
    proven: int = 0


_calls = itertools.count()


class Call:
    """One forward of one region: what its handles share.

    Attributes:
        failures: while verifying, replayed values that were not bit for bit the dropped ones, by
            (operator index, slot).
        used: a backward pass asked for something. abandoned: what to call if that never happens.
        number: counts all calls, in the order of their forwards. segment: the innermost one around it.
        switches: under which it ran.
    """

    __slots__ = ("abandoned", "counters", "failures", "lock", "number", "segment", "switches", "used", "verify")

    def __init__(self, counters: Counters, *, verify: bool = False, segment: Segment | None = None) -> None:
        self.number = next(_calls)
        self.segment = segment
        self.lock = threading.RLock() if segment is None else segment.lock
        self.verify = verify
        self.counters = counters
        self.switches = current()
        self.failures: set[tuple[int, int]] = set()
        self.used = False
        self.abandoned: Callable[[], None] | None = None

    def __del__(self) -> None:
        abandoned = getattr(self, "abandoned", None)  # Ctrl-C may come before it is whole
        if abandoned is not None and not self.used:
            abandoned()


MODIFIED = "one of the variables needed for gradient computation has been modified by an inplace operation: "


def modified(shape: Any, version: int, expected: int) -> RuntimeError:
    """The error that plain autograd raises."""
    return RuntimeError(
        f"{MODIFIED}a tensor of shape {list(shape)} is at version {version}; expected version {expected} instead."
    )
