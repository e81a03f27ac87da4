"""What every solver gets and gives: integers only (bytes, nanoseconds), no torch, no names.

A :class:`Problem` is one recorded training step (an event list) together with what may be decided
about it. A :class:`Solution` is one choice per value, already replayed by the referee
(:mod:`budgetopt.solvers.memory`), which alone says what the peak and the cost of a choice are.

Words. A *value* is one version of one storage, as a planned region's forward makes it (views are not
values). A value that autograd saves has *handles*, one per saving. An *operator* is one dispatched
call. A *region* is the unit in which the executor records: replays never cross its border.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

OUTSIDE = -1
"""Region of an operator or a value that no planned region makes; also "no such value / operator"."""


class Choice(IntEnum):
    """What happens to one value between the forward and the backward pass."""

    KEEP = 0
    RECOMPUTE = 1
    FP16 = 2


class Kind(IntEnum):
    """The kinds of event in a recorded step; the comment says what :attr:`Event.index` counts."""

    RUN = 0  # operator: its births, then its workspace on top of them, then the workspace freed
    DIE = 1  # storage: the last reference is gone that is neither autograd's saved one nor ours
    PACK = 2  # handle: autograd saves a value of a planned region
    HANDLE_DIE = 3  # handle: autograd lets go of it
    UNPACK = 4  # handle: the backward pass asks for it
    ENTER = 5  # region: its forward begins
    EXIT = 6  # region: its forward ends
    FORWARD_END = 7
    BACKWARD_END = 8


class Event(NamedTuple):
    """One event; the list of them is the step in the order in which it happened."""

    kind: Kind
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody wants here


class Segment(NamedTuple):
    """Regions ``first`` to ``last``: what they keep is stored when they are run again (:mod:`.segments`)."""

    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Value:
    """One version of one storage, made inside a region.

    Attributes:
        storage: index into :attr:`Problem.storages`, the bytes of this value when kept or made again.
        region: the region whose forward makes it, or ``OUTSIDE``.
        operator: the operator that writes this version (``OUTSIDE`` if none was recorded).
        previous: the version this one overwrote in place, or ``OUTSIDE`` if the operator made the
            storage. A write in place also *reads* its previous version.
        last: nothing overwrites it; only the last version of a storage can be kept or fp16.
        droppable: ``RECOMPUTE`` and ``FP16`` may be chosen. False for what is not replayable, what
            another region reads or saves, what the user's code holds anyway, and what is excluded.
        half_bytes: bytes in fp16; 0 where fp16 is not offered.
        codec_ns: time to store to fp16 and load back, once each.
        crossing: not droppable only because other regions read or save it. Such a value is kept, but a
            segment that holds all those regions may store it late; or it is stored in fp16, if that is
            offered: then replays of other regions read it so, too.
        halved: a crossing value is in fp16 whatever is chosen.
    """

    storage: int
    region: int
    operator: int
    previous: int = OUTSIDE
    last: bool = True
    droppable: bool = True
    half_bytes: int = 0
    codec_ns: int = 0
    crossing: bool = False
    halved: bool = False


@dataclass(frozen=True, slots=True)
class Operator:
    """One dispatched call, of the forward or the backward pass.

    Attributes:
        region: where it ran; ``OUTSIDE`` for the backward pass and for what no region holds.
        time_ns: what running it once more costs.
        births: the storages it makes, in the recorded step.
        workspace: bytes it needs on top of inputs and births, freed when it returns.
        reads: values it reads, previous versions of what it overwrites included.
        writes: values it makes; every one is born again when it is replayed.
        rng_bytes: bytes of generator state that must be held, from its run on, for its replay.
        replayable: False means that what it writes is kept, or at most stored in fp16 (where no
            operator that is replayable reads it).
    """

    region: int = OUTSIDE
    time_ns: int = 0
    births: tuple[int, ...] = ()
    workspace: int = 0
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    rng_bytes: int = 0
    replayable: bool = True


@dataclass(frozen=True, slots=True)
class Region:
    """The unit in which the executor records.

    Attributes:
        record_ns: cost of recording it, paid as soon as one of its values is not kept.
        kind: equal for regions with the same operators, sizes and edges.
    """

    record_ns: int = 0
    kind: str = ""


@dataclass(frozen=True, slots=True)
class Problem:
    """A recorded step, what may be decided about it, and the budget.

    Attributes:
        budget: bytes that the peak of the step must not exceed.
        resident: bytes that are there before, during and after (parameters, buffers, gradients alive
            at the start, reserved optimizer state, sample, headroom).
        storages: bytes of each storage.
        values: in the order in which they are made.
        operators: in the order in which they ran.
        handles: the value that each handle saves.
        regions: in the order in which their forwards began.
        events: the step.
        step_ns: time of the plain step, the reference that overhead is counted from.
    """

    budget: int
    resident: int
    storages: tuple[int, ...]
    values: tuple[Value, ...]
    operators: tuple[Operator, ...]
    handles: tuple[int, ...]
    regions: tuple[Region, ...]
    events: tuple[Event, ...]
    step_ns: int = 0


@dataclass(frozen=True, slots=True)
class Solution:
    """One choice per value, and what the referee says of it.

    Attributes:
        choices: one per value; ``RECOMPUTE`` for an unsaved value means "make it when a replay reads
            it", which is free if none does.
        peak: bytes, resident included. peak_event: index into :attr:`Problem.events`.
        cost_ns: replays, codecs and recording.
        bound_ns: proven lower bound of the cost of every choice whose peak, as the referee counts it, is within the
            budget (0: nothing proven), without segments and without fp16 of what crosses regions. Its proof is an
            engine's, within that engine's tolerances.
        status: ``"optimal"`` (within the gap), ``"feasible"`` (limit reached) or ``"heuristic"``.
        solver: name of the method and the engine, with a note where a fallback answered.
        window_peaks: highest bytes in each window (see :func:`budgetopt.solvers.memory.windows`).
        segments: rows of regions that are run again as one.
    """

    choices: tuple[Choice, ...]
    peak: int
    peak_event: int
    cost_ns: int
    bound_ns: int = 0
    status: str = "heuristic"
    solver: str = ""
    window_peaks: tuple[int, ...] = field(default=(), repr=False)
    segments: tuple[Segment, ...] = ()

    @property
    def gap(self) -> float:
        """Proven relative distance from the cheapest choice within the budget; 1.0 where nothing is proven."""
        if self.cost_ns == 0:
            return 0.0
        return max(0.0, (self.cost_ns - self.bound_ns) / self.cost_ns)
