"""What autograd holds instead of a tensor, and how each kind becomes a tensor again."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from budgetopt import _codec, _torch
from budgetopt._living import Living
from budgetopt._replay import ready, replay
from budgetopt._values import MODIFIED, Call, Geometry, Saved, Value, look, modified


class Half(Saved):
    """A value stored in fp16: decoded once, and again after autograd let the copy go.

    Attributes:
        stays: replays of other regions read it, too: what is decoded stays until nobody needs the value any more.
    """

    __slots__ = ("__weakref__", "decoded", "pending", "stays", "stored", "weak")

    def __init__(self, stored: _codec.Stored) -> None:
        self.stored = stored
        self.tensor = None
        self.counter = None
        self.version = 0
        self.written = False
        self.decoded: torch.UntypedStorage | None = None
        self.weak: weakref.ref[torch.UntypedStorage] | None = None
        self.pending = 0
        self.stays = False

    def storage(self) -> torch.UntypedStorage:
        """The decoded bytes."""
        found = self.decoded
        if found is None and self.weak is not None:
            found = self.weak()
        if found is None:
            found = _torch.replaying(_codec.load, self.stored)
            self.weak = weakref.ref(found)
        if self.pending > 0 or self.stays:
            self.decoded = found
        return found

    def let_go(self) -> None:
        """A handle less waits for it."""
        self.pending -= 1
        if self.pending <= 0 and not self.stays:
            self.decoded = None


_HALVES: Living[Half] = Living()
"""What regions hand to each other in fp16."""


def hand_on_half(storage: torch.UntypedStorage, half: Half) -> None:
    """A region's forward is over: let the next ones know that it stored this in fp16, for them as well."""
    half.stays = True
    half.watch()
    if half.counter is not None:
        _HALVES.put(storage, half)


def handed_half(tensor: torch.Tensor, storage: torch.UntypedStorage) -> Half | None:
    """What another region stored of `tensor` in fp16, unless somebody wrote to it since."""
    half = _HALVES.get(id(storage)) if _HALVES else None
    if half is None or half.stored.dtype is not tensor.dtype:
        return None
    return None if half.written or half.version != tensor._version else half


class Kept:
    """What autograd holds for a value that is kept."""

    __slots__ = ("alias", "version")

    def __init__(self, alias: torch.Tensor) -> None:
        self.alias = alias
        self.version = alias._version

    def unpack(self) -> torch.Tensor:
        """The tensor, unless somebody wrote to it."""
        if self.alias._version != self.version:
            raise modified(self.alias.shape, self.alias._version, self.version)
        return self.alias


class Foreign:
    """A tensor without a version counter, held as it is."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def unpack(self) -> torch.Tensor:
        """The tensor."""
        return self.tensor


class Outer:
    """What autograd holds where the user's own hooks are in force around ours."""

    __slots__ = ("hook", "packed")

    def __init__(self, packed: Any, hook: Any) -> None:
        self.packed = packed
        self.hook = hook

    def unpack(self) -> torch.Tensor:
        """As the outer hook says."""
        tensor: torch.Tensor = self.hook(self.packed)
        return tensor


class _Waiting:
    """The part that handles of dropped and of fp16 values share: the version check, and being waited for."""

    __slots__ = ("call", "done", "geometry", "source")

    def __init__(self, source: Any, seen: Geometry, call: Call) -> None:
        self.source = source
        self.geometry = seen
        self.call = call
        source.pending += 1
        self.done = False

    def unsettled(self) -> bool:
        """Whether somebody still counts on it; not where Ctrl-C came before it was whole."""
        try:
            return not self.done
        except AttributeError:
            return False


class Handle(_Waiting):
    """What autograd holds for a value that is made again."""

    __slots__ = ()

    def unpack(self) -> torch.Tensor:
        """The tensor, made again unless it is still there."""
        value: Value = self.source
        with self.call.lock:
            self.call.used = True
            self.source.check_saved(self.geometry)
            segment = value.segment or self.call.segment
            if segment is not None and not segment.done:
                ready(segment, self.call)
            storage = value.available()
            if storage is None:
                storage = replay(value, self.call)
            if not self.done:
                self.done = True
                self._let_go(storage)
            return _look(self.geometry, storage)

    def _let_go(self, storage: torch.UntypedStorage) -> None:
        value: Value = self.source
        value.pending -= 1
        if value.hold is None:
            value.weak = weakref.ref(storage)
            value.made = storage if value.pending > 0 else None

    def __del__(self) -> None:
        if self.unsettled():
            self.done = True
            self.source.pending -= 1
            if self.source.pending <= 0:
                self.source.made = None


class HalfHandle(_Waiting):
    """What autograd holds for a value stored in fp16."""

    __slots__ = ()

    def unpack(self) -> torch.Tensor:
        """The tensor, decoded."""
        with self.call.lock:
            self.call.used = True
            self.source.check_saved(self.geometry)
            storage = self.source.storage()
            if not self.done:
                self.done = True
                self.source.let_go()
            return _look(self.geometry, storage)

    def __del__(self) -> None:
        if self.unsettled():
            self.done = True
            self.source.let_go()


def _look(seen: Geometry, storage: torch.UntypedStorage) -> torch.Tensor:
    return look(seen, storage) if _torch.calm() else _torch.replaying(look, seen, storage)


def unpack(path: str, packed: Any) -> torch.Tensor:
    """The unpack hook of the region at `path`: all that our pack returns knows how to become a tensor again."""
    try:
        tensor: torch.Tensor = packed.unpack()
    except RuntimeError as error:
        if str(error).startswith(MODIFIED):
            error.args = (f"{error} The forward of {path or 'the model'} saved or read it.",)
        raise
    return tensor
