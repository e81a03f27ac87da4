"""The executor's forward half: record one region's operators and decide what autograd may hold.

A :class:`Recorder` is entered for one call of one planned region. It sees every operator below
autograd (a dispatch mode) and everything that autograd saves (saved-tensor hooks). What may be
replayed is decided here, by rules on the operator at hand and never by a plan's keys: a plan that does
not fit the call can cost bytes or time, never correctness.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from budgetopt import _codec, _device, _torch
from budgetopt._handles import Half, HalfHandle, Handle, Kept, Outer
from budgetopt._operators import _INFOS, PLAIN, Info, describe, is_leaf_cast, is_plain, tensors, written_tensors
from budgetopt._script import Observer, Policy, Step
from budgetopt._values import Call, Counters, Geometry, Operator, Reference, Scratch, Value
from budgetopt.solvers.problem import Choice

_RECOMPUTE, _FP16, _KEEP = int(Choice.RECOMPUTE), int(Choice.FP16), int(Choice.KEEP)
SNAPSHOT_LIMIT = 1 << 16


class _Watched:
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


class _Key(weakref.ref):  # type: ignore[type-arg]
    """A weak reference to a storage that knows the number it is filed under."""

    __slots__ = ("number",)

    def __init__(self, storage: torch.UntypedStorage, callback: Callable[[Any], None], number: int) -> None:
        super().__init__(storage, callback)  # type: ignore[call-arg]
        self.number = number

    def __new__(cls, storage: torch.UntypedStorage, callback: Callable[[Any], None], number: int) -> _Key:
        return super().__new__(cls, storage, callback)


class _Known(dict[int, Value]):
    """The current value of every living storage that the region made, by the storage's identity.

    An entry goes with its storage: addresses are used again, and a value that nothing needs must not
    keep what its operator read.
    """

    __slots__ = ("__weakref__", "forget")

    def __init__(self) -> None:
        super().__init__()
        myself = weakref.ref(self)

        def forget(key: Any) -> None:
            known = myself()
            if known is not None:
                value = known.get(key.number)
                if value is not None and value.origin is key:
                    del known[key.number]

        self.forget = forget

    def add(self, storage: torch.UntypedStorage, op: Operator, slot: int, choice: int) -> Value:
        number = id(storage)
        value = self[number] = Value(op, slot, choice, _Key(storage, self.forget, number))
        return value


class Recorder(_torch.TorchDispatchMode):  # type: ignore[misc]
    """Records one call of one region; see the module's docstring.

    Attributes:
        broken: recording met something it does not understand; from there on everything is kept.
        matched: the operators so far are the planned ones. position: operators numbered so far.
        unmatched: values that no plan spoke of and that were dropped.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch.compile work inside the region instead of skipping every frame."""
        return True

    def __init__(self, policy: Policy, counters: Counters, observer: Observer | None = None) -> None:
        super().__init__()
        self.policy = policy
        self.observer = observer
        self.call = Call(counters, verify=policy.verify)
        self.known = _Known()
        self.outside: dict[int, weakref.ref[Value]] = {}
        self.outer = _torch.outer_hooks()
        self.busy = False
        self.broken = False
        self.position = 0
        self.unmatched = 0
        self.fell_back = 0
        self.script = policy.script
        self.matched = self.script is not None
        self.names = self.script.names if self.script is not None else []
        self.counts: dict[str, int] | None = None
        self.unsettled: list[Value] = []

    # -- operators -------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func` as it is, and note what running it again takes. Flat: this is the hot path."""
        info = _INFOS.get(func) or describe(func)
        if self.busy or self.broken or info.skip or (info.cast and is_leaf_cast(info, args)):
            return info.call(*args, **kwargs) if kwargs else info.call(*args)
        index = self.position
        self.position = index + 1
        if self.matched and index < len(self.names) and self.names[index] == info.name:
            step = self.script.steps[index]  # type: ignore[union-attr]
        else:
            step = self._by_key(info.name, index)
        if step is not None and not step.record and not info.written:
            return info.call(*args, **kwargs) if kwargs else info.call(*args)
        try:
            op = self._begin(info, index, step, args, kwargs)
        except Exception:
            self.broken, op = True, None
        out = info.call(*args, **kwargs) if kwargs else info.call(*args)
        if not self.broken:
            try:
                self._finish(info, op, step, args, kwargs, out)
            except Exception:
                self.broken = True
        return out

    def _by_key(self, name: str, index: int) -> Step | None:
        """The step of this operator by name and count, once the calls do not run in step any more."""
        if self.script is None:
            return None
        if self.counts is None:
            self.matched = False
            self.counts = {}
            for earlier in self.names[:index]:
                self.counts[earlier] = self.counts.get(earlier, 0) + 1
        nth = self.counts.get(name, 0)
        self.counts[name] = nth + 1
        return self.script.by_key.get((name, nth))

    def _begin(self, info: Info, index: int, step: Step | None, args: Any, kwargs: Any) -> Operator | None:
        """Note the arguments before the operator runs: a write changes what they are."""
        if self.unsettled:
            self.settle()
        if info.written:
            self._before_write(info, args, kwargs)
        if info.opaque or (step is not None and not step.replayable):
            return None
        op = Operator(info, index)
        if info.scratch(args):
            first, second = info.statistics()
            args = list(args)
            for position in (first, second):
                if args[position] is not None:
                    args[position] = Scratch(args[position])
        snapshot = self.policy.snapshot or (step is not None and step.snapshot)
        if not self._note_all(op, args, snapshot):
            return None
        noted = tuple(self._note(op, item, snapshot) for item in args)
        op.args = noted
        if kwargs:
            if not self._note_all(op, kwargs.values(), snapshot):
                return None
            op.kwargs = {name: self._note(op, item, snapshot) for name, item in kwargs.items()}
        if info.written and not self._writes_inside(info, args, kwargs):
            return None
        if info.random:
            device = next((t.device for t in tensors([args, kwargs])), None) or (kwargs or {}).get("device")
            own = (kwargs or {}).get("generator")
            device = torch.device(device or "cpu")
            op.rng = (device, (own if own is not None else _device.generator(device)).get_state())
        return op

    def _note_all(self, op: Operator, items: Any, snapshot: bool) -> bool:
        """Whether every tensor in `items` is one that we can refer to."""
        return all(type(t) in PLAIN and is_plain(t) for item in items for t in tensors(item))

    def _note(self, op: Operator, item: Any, snapshot: bool) -> Any:
        kind = type(item)
        if kind in PLAIN:
            value = self._value(item, snapshot)
            op.reads.append(value)
            return Reference(value, Geometry(item))
        if kind is list or kind is tuple:
            return kind(self._note(op, part, snapshot) for part in item)
        return item

    def _value(self, tensor: torch.Tensor, snapshot: bool = False) -> Value:
        storage = tensor.untyped_storage()
        value = self.known.get(id(storage))
        if value is not None:
            return value
        reference = self.outside.get(id(storage))
        value = reference() if reference is not None else None
        if value is None or value.version != tensor._version:
            value = self._from_outside(tensor, storage, snapshot)
            self.outside[id(storage)] = weakref.ref(value)
        return value

    def _from_outside(self, tensor: torch.Tensor, storage: torch.UntypedStorage, snapshot: bool) -> Value:
        """Hold what a replay will read from outside the region, with a way to see writes to it."""
        value = Value(None, 0, _KEEP, None)
        base = tensor._base if tensor._is_view() else tensor
        if snapshot and storage.nbytes() <= SNAPSHOT_LIMIT and type(base) is not torch.nn.Parameter:
            with _torch.unseen():
                value.hold = _torch.copy_storage(storage)
            value.version = tensor._version
            return value
        value.hold = storage
        # A parameter is its own counter; anything else could come to hold our record and so itself.
        value.counter = base if type(base) is torch.nn.Parameter else _torch.alias(tensor)
        value.version = tensor._version
        if self.observer is not None and value.counter is not base:
            self.observer.holding(storage, value.counter)
        return value

    def _writes_inside(self, info: Info, args: Any, kwargs: Any) -> bool:
        return all(id(t.untyped_storage()) in self.known for t in written_tensors(info, args, kwargs))

    def _before_write(self, info: Info, args: Any, kwargs: Any) -> None:
        """A kept version that is about to be overwritten lives on as a copy, for whoever reads it."""
        for tensor in written_tensors(info, args, kwargs):
            old = self.known.get(id(tensor.untyped_storage())) if type(tensor) in PLAIN else None
            if old is not None and old.hold is not None:
                with _torch.unseen():
                    old.hold, old.counter = _torch.copy_storage(old.hold), None

    def _finish(self, info: Info, op: Operator | None, step: Step | None, args: Any, kwargs: Any, out: Any) -> None:
        """File what the operator wrote and returned."""
        written = written_tensors(info, args, kwargs) if info.written else ()
        if op is None:
            for tensor in written:
                if type(tensor) in PLAIN:
                    self.known.pop(id(tensor.untyped_storage()), None)
        else:
            for tensor in written:
                self._file(info, op, step, tensor, new=False)
            if type(out) is torch.Tensor:
                self._file(info, op, step, out, new=True)
            else:
                for tensor in tensors(out):
                    self._file(info, op, step, tensor, new=True)
        if self.observer is not None:
            why = (
                ""
                if op is not None
                else info.opaque
                or (
                    "it writes to what the region did not make" if info.written else "an argument is not a plain tensor"
                )
            )
            self.observer.recorded(why, op is not None and op.rng is not None)

    def _file(self, info: Info, op: Operator, step: Step | None, tensor: torch.Tensor, *, new: bool) -> None:
        slot = len(op.outs)
        storage = tensor.untyped_storage()
        if new and (id(storage) in self.known or self._is_outside(storage) or storage.nbytes() == 0):
            op.outs.append(None)  # it returned one of its arguments, or a view of one
            return
        choice = _RECOMPUTE
        if step is not None:
            choice = step.choices.get(slot, _RECOMPUTE)
        else:
            choice = self.policy.unplanned(info, tensor)
        value = self.known.add(storage, op, slot, choice)
        op.outs.append(weakref.ref(value))
        if step is not None and slot in step.hold:
            value.keep(_torch.alias(tensor))
            if not new:
                self.unsettled.append(value)

    def _is_outside(self, storage: torch.UntypedStorage) -> bool:
        """Whether it is a storage that a recorded operator read from outside: that record holds it alive."""
        reference = self.outside.get(id(storage))
        return reference is not None and reference() is not None

    def settle(self) -> None:
        """A write counts up the version only after the operator returned: read it at the next occasion."""
        for value in self.unsettled:
            if value.counter is not None:
                value.version = value.counter._version
        self.unsettled.clear()

    # -- saved tensors ---------------------------------------------------------------------------

    def pack(self, tensor: torch.Tensor) -> Any:
        """The pack hook: what autograd holds instead of `tensor`."""
        if type(tensor) not in PLAIN or not is_plain(tensor):
            return self._keep(tensor)
        self.busy = True  # what packing runs is none of the region's operators
        try:
            with _torch.unseen():
                return self._pack(tensor)
        finally:
            self.busy = False

    def _pack(self, tensor: torch.Tensor) -> Any:
        if self.unsettled:
            self.settle()
        storage = tensor.untyped_storage()
        value = None if self.broken else self.known.get(id(storage))
        if value is None:
            return self._keep(tensor)
        choice = value.choice
        if choice == _RECOMPUTE and value.op is not None:
            packed: Any = Handle(value, tensor, self.call)
            if self.call.verify and value.digest is None:
                value.digest = _device.checksum(storage)
        elif choice == _FP16 and tensor.dtype in _codec.WIDE:
            half = value.half() if value.half is not None else None
            if half is None:
                half = Half(_codec.store(storage, tensor.dtype))
                value.half = weakref.ref(half)
            packed = HalfHandle(half, tensor, self.call)
        else:
            packed = self._keep(tensor, value)
        if self.observer is not None:
            packed = _Watched(packed, self.observer, self.observer.packed(storage))
        return packed

    def _keep(self, tensor: torch.Tensor, value: Value | None = None) -> Any:
        if not is_plain(tensor):
            alias = tensor.detach() if tensor.requires_grad else tensor
        else:
            alias = _torch.alias(tensor)
        if value is not None and value.hold is None:
            value.keep(alias)
        if self.observer is not None and value is not None:
            self.observer.holding(tensor.untyped_storage(), alias)
        if self.outer is not None:
            return Outer(self.outer[0](tensor), self.outer[1])
        return Kept(alias)
