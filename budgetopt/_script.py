"""What a recorder is told, and whom it tells: the planned course of a call, the policy, the observer."""

from __future__ import annotations

from typing import Protocol

import torch

from budgetopt._operators import Info


class Step:
    """What a plan says of one operator.

    Attributes:
        choices: choice per slot (a slot is a written argument or a returned tensor, in that order).
        hold: slots to hold although autograd does not save them, because replays read them.
        record: a planned replay may need the operator. replayable: profiling found no reason against.
        snapshot: copy the small outside tensors that it reads, since the step writes to them.
    """

    __slots__ = ("choices", "hold", "record", "replayable", "snapshot")

    def __init__(
        self,
        choices: dict[int, int],
        *,
        hold: tuple[int, ...] = (),
        record: bool = True,
        replayable: bool = True,
        snapshot: bool = False,
    ) -> None:
        self.choices = choices
        self.hold = hold
        self.record = record
        self.replayable = replayable
        self.snapshot = snapshot


class Script:
    """The planned course of one call of a region: its operators in order and a step for each.

    An operator is known by its name and how often that name came before in the call, so that one
    operator more or less does not shift everything behind it.
    """

    def __init__(self, names: list[str], steps: list[Step]) -> None:
        self.names = names
        self.steps = steps
        self.by_key: dict[tuple[str, int], Step] = {}
        count: dict[str, int] = {}
        for name, step in zip(names, steps, strict=True):
            nth = count.get(name, 0)
            count[name] = nth + 1
            self.by_key[name, nth] = step


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

    def entered(self) -> None:
        """The region's forward begins."""

    def left(self) -> None:
        """It ends."""

    def recorded(self, why_not: str, rng: bool) -> None:
        """The last operator was numbered; `why_not` says why it is not replayable; `rng`: it draws."""

    def holding(self, storage: torch.UntypedStorage, alias: torch.Tensor) -> None:
        """We hold `storage` through `alias`."""

    def packed(self, storage: torch.UntypedStorage) -> int:
        """Autograd saved a value that is a decision; returns the handle's number."""

    def unpacked(self, handle: int, storage: torch.UntypedStorage) -> None:
        """The backward pass asked for a handle and got `storage`."""

    def died(self, handle: int) -> None:
        """Autograd let go of a handle."""
