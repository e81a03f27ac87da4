"""The step at a smaller batch: it runs first, tells the full one how to run, and lets other sizes be predicted."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import Any

from budgetopt._out_of_memory import is_out_of_memory
from budgetopt._passes import Pass
from budgetopt._recorded import operators_of
from budgetopt._sample import first
from budgetopt._schema import Smaller
from budgetopt.solvers.problem import Kind


def sizes_below(batch: int) -> tuple[int, int]:
    """Two smaller batches that run before one of `batch`: an eighth and a quarter, or more; 0 where there is none.

    Not one example where it need not be: then other operators run, for there is nothing to copy or to broadcast.
    """
    small = max(min(2, batch // 2), batch // 8)
    middle = max(small + 1, batch // 4)
    return small, middle if middle < batch else 0


def pass_at(sample: Any, batch: int, small: int, run: Callable[[Any], Pass]) -> tuple[Pass | None, str]:
    """A pass over the first `small` examples, or why there is none.

    Only running out of memory is an error: a model that rejects the smaller batch has one known size.

    Args:
        batch: that of `sample`; 0 where its tensors share none. run: a metered pass over another sample.
    """
    if batch < 2:
        return None, "the sample's tensors do not share a first dimension of two or more"
    try:
        return run(first(sample, small)), ""
    except Exception as error:  # whatever the user's model or step raises
        if is_out_of_memory(error):
            raise
        return None, f"the step does not run on {small} examples: {type(error).__name__}: {error}"


def compared(memory: Pass, other: Pass, small: int, sample_bytes: int) -> tuple[Smaller | None, str]:
    """The pass at the batch of `small`, as it goes into the profile of the one at full size, or why it does not."""
    if not _same_course(memory, other):
        return None, f"it runs other operators on {small} examples"
    workspaces = tuple(o.workspace for o in operators_of(other))
    found = Smaller(batch=small, storages=tuple(other.tape.sizes), workspaces=workspaces, sample=sample_bytes)
    return found, ""


def _same_course(one: Pass, other: Pass) -> bool:
    """The same operators, storages and events; sizes may differ."""
    return (
        [d.name for d in one.tape.drafts] == [d.name for d in other.tape.drafts]
        and len(one.tape.sizes) == len(other.tape.sizes)
        and one.tape.handles == other.tape.handles
        and _course(one.tape.events) == _course(other.tape.events)
    )


def _course(events: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """The events, with deaths that follow each other in one order: which comes first hangs on who held them."""
    groups = groupby(events, key=lambda event: event[0] in (Kind.DIE, Kind.HANDLE_DIE))
    return [sorted(together) if deaths else list(together) for deaths, together in groups]
