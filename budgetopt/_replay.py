"""Make dropped values again: run, below autograd, the recorded operators that they need."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from budgetopt import _device, _torch
from budgetopt._operators import tensors, written_tensors
from budgetopt._switches import Switches, current, switch
from budgetopt._values import Call, Operator, Reference, Scratch, Value, look

if TYPE_CHECKING:
    from budgetopt._segments import Segment

POISON = 0xA5
"""Filled into what a replayed ``empty`` returns while verifying: stale bytes could match by accident."""

Buffers = dict[int, torch.UntypedStorage]


def replay(target: Value, call: Call) -> torch.UntypedStorage:
    """Run, in forward order, the operators that `target` needs and that nothing at hand replaces.

    Values made on the way stay while handles wait for them; everything else goes as soon as its last
    reader ran.

    Raises:
        RuntimeError: a tensor that a replay reads was written to in between, as plain autograd raises.
    """
    work = _Replay([target], call)
    work.run_all()
    return work.private[id(target)]


def ready(segment: Segment, call: Call) -> None:
    """Run the passes of a segment and of those around it that have not been run, the outermost first.

    A pass stores what waits for it. Nothing else that is made on the way stays.

    Raises:
        RuntimeError: as :func:`replay`; the pass then counts as not run.
    """
    if segment.outer is not None and not segment.outer.done:
        ready(segment.outer, call)
    work = _Replay(segment.waiting(), call, passing=True)
    work.run_all()
    for value in work.targets:
        value.store(work.bytes_of(value))
    segment.done = True
    segment.members.clear()


class _Replay:
    """One replay: what to run, who still reads what, and the buffers in its hands.

    `private` buffers were made by this replay and may be written; `borrowed` ones are somebody's. `passing`: it is a
    segment's pass.
    """

    __slots__ = ("borrowed", "call", "needed", "passing", "private", "readers", "targets")

    def __init__(self, targets: list[Value], call: Call, *, passing: bool = False) -> None:
        self.targets = targets
        self.call = call
        self.passing = passing
        self.private: Buffers = {}
        self.borrowed: Buffers = {}
        self.readers = {id(target): 1 for target in targets}
        self.needed = self._find()

    def _find(self) -> list[Operator]:
        """The operators to run, in forward order; counts how many of them read each value."""
        needed: dict[int, Operator] = {}
        stack = list(self.targets)
        while stack:
            value = stack.pop()
            storage = value.available()
            if storage is not None:
                value.check()
                self.borrowed[id(value)] = storage
                continue
            op = value.op
            if op is None:
                raise RuntimeError("budgetopt lost a value that a replay reads; please report this")
            if id(op) in needed:
                continue
            needed[id(op)] = op
            for read in op.reads:
                self.readers[id(read)] = self.readers.get(id(read), 0) + 1
                stack.append(read)
        return sorted(needed.values(), key=_in_forward)

    def run_all(self) -> None:
        """Run them, in an environment that is put back as it was."""
        grad, dtype = torch.is_grad_enabled(), torch.get_default_dtype()
        before = current()
        try:
            _torch.replaying(self._run_needed, before)
        finally:
            switch(before)
            torch.set_grad_enabled(grad)
            if torch.get_default_dtype() is not dtype:
                torch.set_default_dtype(dtype)
        self.call.counters.replayed += len(self.needed)

    def _run_needed(self, switches: Switches) -> None:
        for op in self.needed:
            if op.call.switches != switches:
                switches = op.call.switches
                switch(switches)
            self.run(op)

    def run(self, op: Operator) -> None:
        """Run one operator again and settle who holds what afterwards.

        Flat on purpose: the order of these steps is what the referee's prediction of the peak relies on.
        """
        writable = self._writable(op)
        args, kwargs = self._materialise(op.args, writable), self._materialise(op.kwargs, writable)
        if torch.is_grad_enabled() is not op.grad:
            torch.set_grad_enabled(op.grad)
        if torch.get_default_dtype() is not op.dtype:
            torch.set_default_dtype(op.dtype)
        out = _execute(op, args, kwargs)
        if self.call.verify and op.info.empty:
            _device.fill(out.untyped_storage(), POISON)
        storages = _results(op, args, kwargs, out)
        del args, kwargs, out, writable
        for read in op.reads:
            self._read(read)
        for slot, reference in enumerate(op.outs):
            value = reference() if reference is not None else None
            if value is not None:
                self._made(value, storages[slot], op)

    def _read(self, value: Value) -> None:
        self.readers[id(value)] -= 1
        if self.readers[id(value)] == 0:
            self.private.pop(id(value), None)
            self.borrowed.pop(id(value), None)

    def _made(self, value: Value, storage: torch.UntypedStorage, op: Operator) -> None:
        if value.digest is not None:
            self.call.counters.proven += 1
            if _device.checksum(storage) != value.digest:
                op.call.failures.add((op.index, value.slot))
            value.digest = None
        if value.available() is not None:
            return  # another result of the operator was wanted; the copy at hand stays
        if value.pending > 0 and not self.passing:
            value.made = storage
        if self.readers.get(id(value), 0) > 0:
            self.private[id(value)] = storage
            self.call.counters.made_bytes += storage.nbytes()

    def _writable(self, op: Operator) -> Buffers:
        """A buffer that may be written for every version that `op` overwrites: its own, or a clone."""
        writable: Buffers = {}
        for reference in _references([_argument(op, position, name) for position, name in op.info.written]):
            value = reference[0]
            storage = self.private.get(id(value))
            waited = value.pending > 0 and not self.passing
            if storage is None or waited or self.readers[id(value)] > 1:
                storage = _torch.copy_storage(self.bytes_of(value))
            writable[id(value)] = storage
        return writable

    def bytes_of(self, value: Value) -> torch.UntypedStorage:
        """Of what it made or found."""
        storage = self.private.get(id(value))
        return self.borrowed[id(value)] if storage is None else storage

    def _materialise(self, tree: Any, writable: Buffers) -> Any:
        """Arguments with tensors in the place of references."""
        kind = type(tree)
        if kind is tuple:
            value, seen = tree
            storage = writable.get(id(value))
            return look(seen, self.bytes_of(value) if storage is None else storage)
        if kind is list:
            return [self._materialise(item, writable) for item in tree]
        if kind is dict:
            return {name: self._materialise(item, writable) for name, item in tree.items()}
        if kind is Scratch:
            return torch.zeros(tree.shape, dtype=tree.dtype, device=tree.device)
        return tree


def _in_forward(op: Operator) -> tuple[int, int]:
    return op.call.number, op.index


def _argument(op: Operator, position: int, name: str) -> Any:
    return op.args[position] if position < len(op.args) else op.kwargs.get(name)


def _references(tree: Any) -> list[Reference]:
    if isinstance(tree, tuple):
        return [tree]
    if isinstance(tree, list):
        return [found for item in tree for found in _references(item)]
    return []


def _execute(op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run it; a random one from the generator state it had, on a private generator where it takes one.

    Restoring the global stream instead races with every other thread that draws.
    """
    if op.rng is None:
        return op.info.call(*args, **kwargs)
    device, state = op.rng
    if op.info.generator:
        generator = torch.Generator(device)
        generator.set_state(state)
        names = op.info.arguments[: len(args)]
        if "generator" in names:
            swapped = [generator if name == "generator" else a for name, a in zip(names, args, strict=True)]
            return op.info.call(*swapped, **kwargs)
        return op.info.call(*args, **{**kwargs, "generator": generator})
    stream = _device.generator(device)
    before = stream.get_state()
    stream.set_state(state)
    try:
        return op.info.call(*args, **kwargs)
    finally:
        stream.set_state(before)


def _results(op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[torch.UntypedStorage]:
    """The storages that the operator wrote and returned, in the order of its slots."""
    found = [t.untyped_storage() for t in written_tensors(op.info, args, kwargs)]
    return found + [t.untyped_storage() for t in tensors(out)]
