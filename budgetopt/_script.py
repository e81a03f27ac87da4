"""What a recorder is told, and whom it tells: the planned course of a call, the policy, the observer."""

from __future__ import annotations

from typing import Protocol

import torch

from budgetopt._numbering import Numbering
from budgetopt._operators import Info


class Step:
    """What a plan says of one operator.

    Attributes:
        choices: choice per slot (a slot is a written argument or a returned tensor, in that order).
        hold: slots to hold although autograd does not save them, because replays read them.
        between: slots in fp16 that other regions read, too.
        late: slots that the pass of a segment stores, with the segment's number.
        record: a planned replay may need the operator. replayable: profiling found no reason against.
        snapshot: copy the small outside tensors that it reads, since the step writes to them.
    """

    __slots__ = ("between", "choices", "hold", "late", "record", "replayable", "snapshot")

    def __init__(
        self,
        choices: dict[int, int],
        *,
        hold: tuple[int, ...] = (),
        between: tuple[int, ...] = (),
        late: dict[int, int] | None = None,
        record: bool = True,
        replayable: bool = True,
        snapshot: bool = False,
    ) -> None:
        self.choices = choices
        self.hold = hold
        self.between = between
        self.late = late
        self.record = record
        self.replayable = replayable
        self.snapshot = snapshot


class Script:
    """The planned course of one call of a region: its operators in order and a step for each.

    An operator is known by its name, the ranks of its tensor arguments, and how often the two came before in
    the call, so that one operator more or less does not shift everything behind it: a mask that is added to
    scores of four dimensions is no residual connection of three. `segments`: numbers of those around the call,
    outermost first.
    """

    def __init__(self, names: list[str], ranks: list[str], steps: list[Step], segments: tuple[int, ...] = ()) -> None:
        self.segments = segments
        self.names = names
        self.ranks = ranks
        self.steps = steps
        numbering = Numbering()
        self.by_key = {
            (name, rank, numbering.next((name, rank))): step
            for name, rank, step in zip(names, ranks, steps, strict=True)
        }


class Policy(Protocol):
    """What decides about values: a plan, or the profiler's rule.

    Attributes:
        script: the planned course of the call, if there is one. verify: check every replayed value.
        snapshot: copy every small outside tensor that is read, whatever the script says.
    """

    script: Script | None
    verify: bool
    snapshot: bool

    def unplanned(self, info: Info, tensor: torch.Tensor) -> int:
        """The choice for a value that no plan speaks of."""


class Observer(Protocol):
    """Who wants to know what happens: the profiler. Every method is called right after the fact."""

    def entered(self, shape: tuple[int, ...]) -> None:
        """The region's forward begins; `shape` is that of its first tensor argument."""

    def left(self) -> None:
        """It ends."""

    def recorded(self, why_not: str, rng: bool) -> None:
        """The last operator was numbered; `why_not` says why it is not replayable; `rng`: it draws."""

    def holding(self, storage: torch.UntypedStorage, alias: torch.Tensor) -> None:
        """We hold `storage` through `alias`."""

    def crossing(self, storage: torch.UntypedStorage) -> bool:
        """Whether another region made what `storage` holds now."""

    def packed(self, storage: torch.UntypedStorage) -> int:
        """Autograd saved a value that is a decision; returns the handle's number."""

    def unpacked(self, handle: int, storage: torch.UntypedStorage) -> None:
        """The backward pass asked for a handle and got `storage`."""

    def died(self, handle: int) -> None:
        """Autograd let go of a handle."""
