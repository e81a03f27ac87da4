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
from budgetopt._handles import Foreign, Half, HalfHandle, Handle, Kept, Outer, hand_on_half, handed_half
from budgetopt._known import Known, Watched
from budgetopt._numbering import Numbering
from budgetopt._operators import INFOS, PLAIN, Info, describe, is_leaf_cast, is_plain, ranks, tensors, written_tensors
from budgetopt._script import Observer, Policy, Step
from budgetopt._segments import Segment, hand_on, handed
from budgetopt._values import Call, Counters, Operator, Scratch, Value, geometry
from budgetopt.solvers.problem import Choice

_Tensor, _Parameter = torch.Tensor, torch.nn.Parameter
_grad_enabled, _default_dtype = torch.is_grad_enabled, torch.get_default_dtype
_RECOMPUTE, _FP16, _KEEP = int(Choice.RECOMPUTE), int(Choice.FP16), int(Choice.KEEP)
SNAPSHOT_LIMIT = 1 << 16


@_torch.bare
class Recorder(_torch.TorchDispatchMode):  # type: ignore[misc]
    """Records one call of one region; see the module's docstring.

    Attributes:
        broken: recording met something it does not understand; from there on everything is kept.
        matched: the operators so far are the planned ones. position: operators numbered so far.
        off: nothing is recorded now: broken, or code that is not the region's runs.
        segments: those around the call, by number, outermost first.
        stream: tells the current stream, where there are several; a region that changes it is kept from there on.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled functions inside the region run uncompiled: what their kernels write is seen by nobody."""
        return False

    def __init__(
        self,
        policy: Policy,
        counters: Counters,
        observer: Observer | None = None,
        stream: Callable[[], int] | None = None,
        segments: dict[int, Segment] | None = None,
    ) -> None:
        super().__init__()
        self.policy = policy
        self.observer = observer
        self.stream = stream
        self.home = 0 if stream is None else stream()
        self.segments = segments or {}
        innermost = next(reversed(self.segments.values()), None)
        self.call = Call(counters, verify=policy.verify, segment=innermost)
        self.known = Known()
        self.outside: dict[int, weakref.ref[Value]] = {}
        self.copied: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.outer = _torch.outer_hooks()
        self.broken = False
        self.off = False
        self.snapshot = False
        self.position = 0
        self.script = policy.script
        self.matched = self.script is not None
        self.names = self.script.names if self.script is not None else []
        self.steps = self.script.steps if self.script is not None else []
        self.planned = len(self.names)
        self.numbering: Numbering | None = None
        self.unsettled: list[Value] = []
        self.between: list[tuple[Value, weakref.ref[torch.Tensor]]] = []

    # -- operators -------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func` as it is, and note what running it again takes. Flat: this is the hot path."""
        info = INFOS.get(func) or describe(func)
        if info.skip or self.off or (info.cast and is_leaf_cast(info, args)):
            return info.call(*args, **kwargs) if kwargs else info.call(*args)
        if self.stream is not None and self.stream() != self.home:
            self.broken = self.off = True  # what runs on two streams is not replayed on one
            return info.call(*args, **kwargs) if kwargs else info.call(*args)
        index = self.position
        self.position = index + 1
        if self.matched and index < self.planned and self.names[index] == info.name:
            step: Step | None = self.steps[index]
        else:
            step = self._by_key(info.name, index, args)
        if step is not None and not (step.record or info.written or info.pieces):
            return info.call(*args, **kwargs) if kwargs else info.call(*args)
        try:
            op = self._begin(info, index, step, args, kwargs)
        except Exception:
            self.broken = self.off = True
            return info.call(*args, **kwargs) if kwargs else info.call(*args)
        out = info.call(*args, **kwargs) if kwargs else info.call(*args)
        try:
            if type(out) is _Tensor and op is not None and not info.written:
                self._file(info, op, step, out)
            else:
                self._finish(info, op, step, args, kwargs, out)
            if self.observer is not None:
                self.observer.recorded(_why_not(info) if op is None else "", op is not None and op.rng is not None)
        except Exception:
            self.broken = self.off = True
        return out

    def _by_key(self, name: str, index: int, args: Any) -> Step | None:
        """The step of this operator by name, ranks and count, once the calls do not run in step any more."""
        if self.script is None:
            return None
        if self.numbering is None:
            self.matched = False
            self.numbering = Numbering()
            for earlier in zip(self.names[:index], self.script.ranks, strict=False):
                self.numbering.next(earlier)
        key = (name, ranks(args))
        step = self.script.by_key.get((*key, self.numbering.next(key)))
        self.call.counters.matched += step is not None
        self.call.counters.unmatched += step is None
        return step

    def _begin(self, info: Info, index: int, step: Step | None, args: Any, kwargs: Any) -> Operator | None:
        """Note the arguments before the operator runs: a write changes what they are.

        Returns None for an operator that is not replayable.
        """
        if self.unsettled:
            self.settle()
        if info.written and not self._prepare_write(info, args, kwargs):
            return None
        if info.opaque or (step is not None and not step.replayable):
            return None
        op = Operator(info, self.call, index, _grad_enabled(), _default_dtype())
        self.snapshot = self.policy.snapshot or (step is not None and step.snapshot)
        if info.batch_norm and info.scratch(args):
            args = _with_scratch(info, args)
        noted, reads, known = op.args, op.reads, self.known
        try:
            for item in args:
                kind = type(item)
                if kind is _Tensor or kind is _Parameter:
                    storage = item.untyped_storage()
                    number = id(storage)
                    value = known[number] if number in known else self._outside(item, storage)
                    dtype = item.dtype
                    bits = item.is_neg() | (dtype.is_complex and item.is_conj()) << 1
                    item = (value, (item.shape, item.stride(), item.storage_offset(), dtype, bits))
                    reads.append(value)
                elif kind is list or kind is tuple or isinstance(item, _Tensor):
                    item = self._note(op, item)
                noted.append(item)
            if kwargs:
                op.kwargs = {name: self._note(op, item) for name, item in kwargs.items()}
        except (_NotPlain, NotImplementedError):  # a sparse tensor has no storage to show
            return None
        if info.random:
            op.rng = _random_state(args, kwargs or {})
            return None if op.rng is None else op
        return op

    def _note(self, op: Operator, item: Any) -> Any:
        """A reference in the place of a tensor, also inside a list. Arguments never are tuples, so those mean one."""
        kind = type(item)
        if kind in PLAIN:
            storage = item.untyped_storage()
            value = self.known.get(id(storage)) or self._outside(item, storage)
            op.reads.append(value)
            return value, geometry(item)
        if kind is list:
            return [self._note(op, part) for part in item]
        if kind is tuple or isinstance(item, _Tensor):
            raise _NotPlain
        return item

    def _outside(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> Value:
        """What the region did not make: held for the replay, with a way to see writes to it."""
        reference = self.outside.get(id(storage))
        value = reference() if reference is not None else None
        if value is not None and value.version == tensor._version:
            return value
        if not is_plain(tensor):
            raise _NotPlain
        value = self._handed(tensor, storage)
        if value is not None:
            self.outside[id(storage)] = weakref.ref(value)
            return value
        value = Value(None, 0, _KEEP)
        value.version = tensor._version
        value.coded = handed_half(tensor, storage)
        if value.coded is not None:
            self.outside[id(storage)] = weakref.ref(value)
            return value
        base = tensor._base if tensor._is_view() else tensor
        if type(base) is _Parameter:
            value.hold, value.counter = storage, base
        elif self.snapshot and storage.nbytes() <= SNAPSHOT_LIMIT:
            with _torch.unseen():
                value.hold = _torch.copy_storage(storage)
            self._watch_copied(storage)
        else:
            # Holding the tensor itself could close a circle through its grad_fn.
            value.hold, value.counter = storage, _torch.alias_below(tensor)
            if self.observer is not None:
                self.observer.holding(storage, value.counter)
        self.outside[id(storage)] = weakref.ref(value)
        return value

    def _handed(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> Value | None:
        """What another region of the same segment made, and what may be made again as its own values may."""
        value = handed(tensor, storage) if self.segments else None
        if value is None or value.segment is None:
            return None
        return value if self.segments.get(value.segment.number) is value.segment else None

    def _watch_copied(self, storage: torch.UntypedStorage) -> None:
        """Forget a copied storage when it dies: only its copy is held, so its identity may be used again."""
        outside, number = self.outside, id(storage)
        self.copied[number] = weakref.ref(storage, lambda _: outside.pop(number, None))

    def _prepare_write(self, info: Info, args: Any, kwargs: Any) -> bool:
        """Whether all that is written was made here. A held version lives on as a copy for its readers."""
        inside = True
        for tensor in written_tensors(info, args, kwargs):
            old = self.known.get(id(tensor.untyped_storage())) if type(tensor) in PLAIN else None
            inside = inside and old is not None
            if old is None:
                old = self._read_from_outside(tensor)
            if old is not None:
                half = old.half() if old.half is not None else None
                (old if half is None else half).written_to(tensor, old.pieces)
            if old is not None and old.hold is not None:
                with _torch.unseen():
                    old.hold, old.counter = _torch.copy_storage(old.hold), None
        return inside

    def _read_from_outside(self, tensor: torch.Tensor) -> Value | None:
        """The version about to be overwritten, if a replay reads it: other operators than planned may do so."""
        reference = self.outside.get(id(tensor.untyped_storage())) if type(tensor) in PLAIN else None
        value = reference() if reference is not None else None
        return None if value is None or value.counter is None else value

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
            for tensor in tensors(out):
                self._file(info, op, step, tensor)

    def _file(self, info: Info, op: Operator, step: Step | None, tensor: torch.Tensor, *, new: bool = True) -> None:
        """File one result under its storage. Flat: this is the hot path."""
        storage = tensor.untyped_storage()
        number = id(storage)
        if new:
            if number in self.known or (number in self.outside and self.outside[number]() is not None):
                op.outs.append(None)  # it returned one of its arguments, or a view of one
                if info.pieces and number in self.known:
                    self.known[number].pieces = True
                return
            reference = weakref.ref(storage, self.known.forget)
            self.known.watched[id(reference)] = reference, number
        slot = len(op.outs)
        if step is not None:
            value = Value(op, slot, step.choices.get(slot, _RECOMPUTE))
        else:
            value = Value(op, slot, self.policy.unplanned(info, tensor))
        if not new and number in self.known:
            value.pieces = self.known[number].pieces
        self.known[number] = value
        op.outs.append(weakref.ref(value))
        if step is not None and step.late is not None and slot in step.late:
            self._wait(value, tensor, self.segments.get(step.late[slot]))
        if step is not None and slot in step.between:
            self.between.append((value, weakref.ref(tensor)))
        if step is not None and slot in step.hold:
            value.keep(_torch.alias_below(tensor))
            if self.observer is not None and value.counter is not None:
                self.observer.holding(storage, value.counter)
            if not new:
                self.unsettled.append(value)

    def _wait(self, value: Value, tensor: torch.Tensor, segment: Segment | None) -> None:
        """The pass of a segment stores the value."""
        value.segment = segment
        value.saved_as(tensor)
        if segment is not None:
            segment.members.append(weakref.ref(value))

    def ended(self) -> None:
        """The region's forward is over: from here on, writes are seen by version counters alone."""
        self.settle()
        for value, reference in self.between:
            self._hand_on_half(value, reference())
        for value in self.known.values():
            half = value.half() if value.half is not None else None
            (value if half is None else half).watch()
        if self.segments:
            hand_on([reference() for reference, _ in self.known.watched.values()], self.known)
        self.known.clear()
        self.outside.clear()

    def _hand_on_half(self, value: Value, tensor: torch.Tensor | None) -> None:
        """What is left of a value that the plan wants in fp16 between regions, and that nobody wrote to since."""
        storage = tensor.untyped_storage() if tensor is not None and tensor.dtype in _codec.WIDE else None
        if tensor is not None and storage is not None and self.known.get(id(storage)) is value:
            hand_on_half(storage, self._half(value, tensor, storage))

    def settle(self) -> None:
        """A write counts up the version only after the operator returned: read it at the next occasion."""
        for value in self.unsettled:
            if value.counter is not None:
                value.version = value.counter._version
        self.unsettled.clear()

    # -- saved tensors ---------------------------------------------------------------------------

    def pack(self, tensor: torch.Tensor) -> Any:
        """The pack hook: what autograd holds instead of `tensor`. Flat: this is the hot path."""
        if self.unsettled:
            self.settle()
        kind = type(tensor)
        if kind is _Parameter and self.outer is None:
            return Kept(tensor)  # a leaf can't come to hold our record: it needs no alias
        if kind not in PLAIN or tensor.layout is not torch.strided or self.off:
            return self._keep(tensor, None)
        storage = tensor.untyped_storage()
        value = self.known.get(id(storage)) or self._handed(tensor, storage)
        if value is None:
            half = handed_half(tensor, storage)
            if half is not None:
                return HalfHandle(half, geometry(tensor), self.call)
            return self._keep_crossing(tensor, storage)
        if value.op is not None and value.op.info.empty:
            packed: Any = self._keep(tensor, value)  # nobody was seen to write to it, and yet autograd wants it
        elif value.choice == _RECOMPUTE and value.op is not None:
            dtype = tensor.dtype
            bits = tensor.is_neg() | (dtype.is_complex and tensor.is_conj()) << 1
            seen = (tensor.shape, tensor.stride(), tensor.storage_offset(), dtype, bits)
            packed = Handle(value, seen, self.call)
            if value.tensor is None:
                value.saved_as(tensor)
            if self.call.verify and value.digest is None and value.slot not in value.op.info.unwritten:
                with _torch.unseen():
                    value.digest = _device.checksum(storage)
        elif value.choice == _FP16 and tensor.dtype in _codec.WIDE:
            packed = HalfHandle(self._half(value, tensor, storage), geometry(tensor), self.call)
        else:
            packed = self._keep(tensor, value)
        if self.observer is not None:
            packed = Watched(packed, self.observer, self.observer.packed(storage))
        return packed

    def _half(self, value: Value, tensor: torch.Tensor, storage: torch.UntypedStorage) -> Half:
        half = value.half() if value.half is not None else None
        if half is None:
            with _torch.unseen():
                half = Half(_codec.store(storage, tensor.dtype))
            half.saved_as(tensor)
            value.half = weakref.ref(half)
        return half

    def _foreign_alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """A subclass detaches itself, so that its type survives; that is none of the region's operators."""
        self.off = True
        try:
            return tensor.detach()
        finally:
            self.off = self.broken

    def _keep_crossing(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> Any:
        """Another region made it, or none: an observer wants to know of the former."""
        packed = self._keep(tensor, None)
        if self.observer is None or not isinstance(packed, Kept) or not self.observer.crossing(storage):
            return packed
        self.observer.holding(storage, packed.alias)
        return Watched(packed, self.observer, self.observer.packed(storage))

    def _keep(self, tensor: torch.Tensor, value: Value | None) -> Any:
        if tensor.is_inference():
            return Foreign(tensor)
        alias = _torch.alias(tensor) if type(tensor) in PLAIN else self._foreign_alias(tensor)
        if value is not None and value.hold is None:
            value.keep(alias)
        if self.observer is not None and value is not None:
            self.observer.holding(tensor.untyped_storage(), alias)
        if self.outer is not None:
            self.off = True  # what the outer hook runs is none of the region's operators
            try:
                return Outer(self.outer[0](tensor), self.outer[1])
            finally:
                self.off = self.broken
        return Kept(alias)


class _NotPlain(Exception):
    """An argument is a tensor that can't be told from its storage alone."""


def _with_scratch(info: Info, args: Any) -> list[Any]:
    """A batch norm's arguments with its running statistics left out."""
    changed = list(args)
    for position in info.statistics():
        if changed[position] is not None:
            changed[position] = Scratch(changed[position])
    return changed


def _random_state(args: Any, kwargs: dict[str, Any]) -> tuple[torch.device, torch.Tensor] | None:
    """Where a random operator draws, and the state of the generator that it draws from; None if that is unknown."""
    found = next((t.device for t in tensors([args, kwargs])), kwargs.get("device") or torch.device("cpu"))
    device = torch.device(found)
    if not _device.supported(device):
        return None
    own = next((a for a in (*args, *kwargs.values()) if isinstance(a, torch.Generator)), None)
    return device, (own if own is not None else _device.generator(device)).get_state()


def _why_not(info: Info) -> str:
    if info.opaque:
        return info.opaque
    if info.written:
        return "it writes to what the region did not make"
    other = ", or it draws on a device whose random state can't be read" if info.random else ""
    return f"an argument is not a plain tensor{other}"
