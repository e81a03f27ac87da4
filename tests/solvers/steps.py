"""Recorded steps for the tests, made from a short description of a forward pass.

The backward pass is the plain one: operators in reverse order, each unpacks what it saved, makes the
gradients of its inputs, lets go of its handles and of the gradient of its output.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random

from budgetopt.solvers.problem import OUTSIDE, Event, Kind, Operator, Problem, Region, Segment, Value


@dataclass
class Step:
    """Collects a problem piece by piece; everything is counted, nothing is guessed."""

    resident: int = 0
    storages: list[int] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    operators: list[Operator] = field(default_factory=list)
    handles: list[int] = field(default_factory=list)
    regions: list[Region] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    def problem(self, budget: int = 1 << 60) -> Problem:
        return Problem(
            budget=budget,
            resident=self.resident,
            storages=tuple(self.storages),
            values=tuple(self.values),
            operators=tuple(self.operators),
            handles=tuple(self.handles),
            regions=tuple(self.regions),
            events=tuple(self.events),
        )

    def event(self, kind: Kind, index: int = 0) -> None:
        self.events.append(Event(kind, index))

    def enter(self, record_ns: int = 0, kind: str = "") -> int:
        self.regions.append(Region(record_ns, kind))
        self.event(Kind.ENTER, len(self.regions) - 1)
        return len(self.regions) - 1

    def make(
        self,
        region: int,
        size: int,
        reads: tuple[int, ...] = (),
        time: int = 1,
        workspace: int = 0,
        rng: int = 0,
        replayable: bool = True,
        droppable: bool = True,
        half: int = 0,
        codec: int = 0,
    ) -> int:
        """Run an operator that makes one storage with one value; the value."""
        storage, value = len(self.storages), len(self.values)
        self.storages.append(size)
        operator = len(self.operators)
        self.values.append(
            Value(storage, region, operator, droppable=droppable and region != OUTSIDE, half_bytes=half, codec_ns=codec)
        )
        self.operators.append(
            Operator(region, time, (storage,), workspace, reads, (value,), rng_bytes=rng, replayable=replayable)
        )
        self.event(Kind.RUN, operator)
        return value

    def overwrite(self, value: int, reads: tuple[int, ...] = (), time: int = 1) -> int:
        """Run an operator that writes ``value``'s storage in place; the new version."""
        old = self.values[value]
        self.values[value] = Value(old.storage, old.region, old.operator, old.previous, False, old.droppable)
        new, operator = len(self.values), len(self.operators)
        self.values.append(Value(old.storage, old.region, operator, previous=value, droppable=old.droppable))
        self.operators.append(Operator(old.region, time, (), 0, (value, *reads), (new,)))
        self.event(Kind.RUN, operator)
        return new

    def backward(self, births: int = 0, workspace: int = 0) -> int:
        """Run an operator of the backward pass that makes one storage of ``births`` bytes; the storage."""
        storage, operator = len(self.storages), len(self.operators)
        self.storages.append(births)
        self.operators.append(Operator(births=(storage,), workspace=workspace))
        self.event(Kind.RUN, operator)
        return storage

    def save(self, value: int) -> int:
        self.handles.append(value)
        self.event(Kind.PACK, len(self.handles) - 1)
        return len(self.handles) - 1

    def die(self, value: int) -> None:
        self.event(Kind.DIE, self.values[value].storage)


def chain(layers: int, size: int, time: int = 1, record_ns: int = 0, half: int = 0, codec: int = 0) -> Step:
    """One region: x -> v1 -> v2 ... each saved, x from outside; gradients of ``size`` bytes in the backward."""
    step = Step()
    x = step.make(OUTSIDE, size)
    g = step.enter(record_ns)
    made, handles = [], []
    previous = x
    for _ in range(layers):
        v = step.make(g, size, (previous,), time, half=half, codec=codec)
        handles.append(step.save(v))
        if previous != x:
            step.die(previous)
        made.append(v)
        previous = v
    step.event(Kind.EXIT, g)
    step.die(previous)
    step.event(Kind.FORWARD_END)
    gradient = None
    for h in reversed(handles):
        step.event(Kind.UNPACK, h)
        new = step.backward(size)
        if gradient is not None:
            step.event(Kind.DIE, gradient)
        gradient = new
        step.event(Kind.HANDLE_DIE, h)
    step.die(x)
    step.event(Kind.BACKWARD_END)
    return step


def network(rng: Random, regions: int, operators: int, halves: bool = True, sizes: int = 40) -> Step:
    """A random model: regions in a row, each with branches, writes in place, random and blocked operators.

    A region's last output is what the next one reads, so it is not droppable, but crossing; its backward is the plain
    one.
    """
    step = Step(resident=rng.randint(0, 20))
    previous = step.make(OUTSIDE, rng.randint(1, sizes))
    tape: list[list[int]] = []
    for _ in range(regions):
        g = step.enter(rng.randint(0, 3))
        local, saved = [previous], set[int]()
        for _ in range(operators):
            reads = tuple(rng.sample(local, min(len(local), rng.randint(1, 2))))
            target = reads[0]
            if step.values[target].region == g and target not in saved and rng.random() < 0.2:
                made = step.overwrite(target, reads[1:], rng.randint(1, 9))
                local.remove(target)
            else:
                made = _random_operator(step, rng, g, reads, halves, sizes)
            local.append(made)
            tape.append([step.save(v) for v in (made, *reads) if step.values[v].last and rng.random() < 0.5])
            saved.update(step.handles[h] for h in tape[-1])
            if len(local) > 2 and rng.random() < 0.5:
                step.die(local.pop(rng.randrange(1, len(local) - 1)))
        step.event(Kind.EXIT, g)
        for v in (previous, *local[1:-1]):
            step.die(v)
        previous = local[-1]
        last = step.values[previous]
        step.values[previous] = replace(last, droppable=False, crossing=True)
    if rng.random() < 0.1:  # fp16 alone is allowed
        step.operators = [replace(operator, replayable=False) for operator in step.operators]
    _random_backward(step, rng, tape, previous, sizes)
    return step


def rows(rng: Random, regions: int) -> list[Segment]:
    """Random segments: each in another one, or beside it."""
    found: list[Segment] = []
    waiting = [(0, regions)]
    while waiting:
        start, stop = waiting.pop()
        if start >= stop:
            continue
        first = rng.randrange(start, stop)
        last = rng.randrange(first, stop)
        if (start, stop) != (first, last + 1) or Segment(first, last) not in found:
            found.append(Segment(first, last))
        waiting += [(last + 1, stop), (first, last)] if rng.random() < 0.6 else []
    return found


def _random_operator(step: Step, rng: Random, g: int, reads: tuple[int, ...], halves: bool, sizes: int) -> int:
    size = rng.randint(1, sizes)
    half = size // 2 if halves and rng.random() < 0.3 else 0
    return step.make(
        g,
        size,
        reads,
        time=rng.randint(1, 9),
        workspace=rng.choice((0, 0, rng.randint(1, 9))),
        rng=rng.choice((0, 0, 0, 1)),
        replayable=rng.random() < 0.95,
        half=half,
        codec=rng.randint(1, 9),
    )


def _random_backward(step: Step, rng: Random, tape: list[list[int]], output: int, sizes: int) -> None:
    walk_back(step, tape, output, lambda: rng.randint(1, sizes), lambda: rng.choice((0, rng.randint(1, 9))))


def walk_back(
    step: Step, tape: list[list[int]], output: int, size: Callable[[], int], workspace: Callable[[], int] = int
) -> None:
    """The plain backward pass: ``tape`` has the handles that each operator's backward asks for, in order."""
    step.event(Kind.FORWARD_END)
    step.die(output)
    gradient = step.backward(size())
    for handles in reversed(tape):
        for h in handles:
            step.event(Kind.UNPACK, h)
        new = step.backward(size(), workspace())
        step.event(Kind.DIE, gradient)
        gradient = new
        for h in handles:
            step.event(Kind.HANDLE_DIE, h)
    step.event(Kind.DIE, gradient)
    step.event(Kind.BACKWARD_END)


# One transformer layer: name, bytes in units of the hidden state, time, what it reads, which of those (or of
# its own output) autograd saves. "x" is the layer's input; masks are made by random operators of their own.
_LAYER: tuple[tuple[str, float, int, tuple[str, ...], tuple[str, ...]], ...] = (
    ("norm1", 1, 3, ("x",), ("x",)),
    ("qkv", 3, 30, ("norm1",), ("norm1",)),
    ("scores", 2, 12, ("qkv",), ("qkv",)),
    ("softmax", 2, 6, ("scores",), ("softmax",)),
    ("mask1", 0.5, 5, ("softmax",), ()),
    ("attend", 2, 4, ("softmax", "mask1"), ("mask1",)),
    ("mix", 1, 12, ("attend", "qkv"), ("attend", "qkv")),
    ("project", 1, 10, ("mix",), ("mix",)),
    ("mask2", 0.25, 3, ("project",), ()),
    ("drop2", 1, 2, ("project", "mask2"), ("mask2",)),
    ("add1", 1, 2, ("x", "drop2"), ()),
    ("norm2", 1, 3, ("add1",), ("add1",)),
    ("expand", 4, 40, ("norm2",), ("norm2",)),
    ("gelu", 4, 8, ("expand",), ("expand",)),
    ("contract", 1, 40, ("gelu",), ("gelu",)),
    ("mask3", 0.25, 3, ("contract",), ()),
    ("drop3", 1, 2, ("contract", "mask3"), ("mask3",)),
    ("out", 1, 2, ("add1", "drop3"), ()),
)


def transformer(layers: int, unit: int = 1 << 20, halves: bool = False) -> Step:
    """A stack of equal transformer layers; a region each, whose output is not droppable."""
    step = Step(resident=20 * unit)
    x = step.make(OUTSIDE, unit)
    tape: list[tuple[list[int], int]] = []
    for _ in range(layers):
        g = step.enter(record_ns=5000, kind="layer")
        made = {"x": x}
        for name, size, time, reads, saves in _LAYER:
            bytes_ = int(size * unit)
            made[name] = step.make(
                g,
                bytes_,
                tuple(made[read] for read in reads),
                time=10_000 * time,
                workspace=unit // 8,
                rng=16 * name.startswith("mask"),
                droppable=name != "out",
                half=bytes_ // 2 if halves and not name.startswith("mask") else 0,
                codec=20_000,
            )
            tape.append(([step.save(made[save]) for save in saves], bytes_))
            step.events.extend(
                Event(Kind.DIE, step.values[made[read]].storage)
                for read in reads
                if read != "x" and not any(read in later[3] for later in _LAYER[len(made) - 1 :])
            )
        step.event(Kind.EXIT, g)
        step.die(x)
        x = made["out"]
    step.event(Kind.FORWARD_END)
    step.die(x)
    gradient = step.backward(unit)
    for handles, size in reversed(tape):
        for h in handles:
            step.event(Kind.UNPACK, h)
        new = step.backward(size)
        step.event(Kind.DIE, gradient)
        gradient = new
        for h in handles:
            step.event(Kind.HANDLE_DIE, h)
    step.event(Kind.DIE, gradient)
    step.event(Kind.BACKWARD_END)
    return step


def layers(count: int, half: int = 0, codec: int = 0) -> Problem:
    """x_k = x_{k-1} + f(x_{k-1}): the stream of 10 bytes, two values of 10 bytes inside; its plain backward.

    Args:
        half: bytes of the stream in fp16. codec: nanoseconds of that.
    """
    step = Step(resident=100)
    x = step.make(OUTSIDE, 10)
    tape = []
    for _ in range(count):
        g = step.enter(kind="layer")
        handles = [step.save(x)]
        a = step.make(g, 10, (x,), time=3)
        handles.append(step.save(a))
        b = step.make(g, 10, (a,), time=2)
        handles.append(step.save(b))
        y = step.make(g, 10, (x, b), time=5)
        step.values[y] = replace(step.values[y], droppable=False, crossing=True, half_bytes=half, codec_ns=codec)
        step.event(Kind.EXIT, g)
        for value in (a, b, x):
            step.die(value)
        tape.append(handles[::-1])
        x = y
    walk_back(step, tape, x, lambda: 10)
    return step.problem()
