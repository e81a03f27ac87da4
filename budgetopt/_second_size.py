"""The step once more at about half the batch, so that other batch sizes can be predicted from two points."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from budgetopt._passes import Pass
from budgetopt._sample import batch_of, first
from budgetopt._schema import Fixed, Smaller


def measure_smaller(
    sample: Any, memory: Pass, fixed: Fixed, run: Callable[[Any], Pass]
) -> tuple[int, Smaller | None, str]:
    """The batch size of `sample`, the step at a smaller one, and if there is none, why.

    Never an error: a model that rejects the smaller batch, or runs other operators on it, has one known size.

    Args:
        memory: the metered pass at full size. run: a metered pass over another sample.
    """
    batch = batch_of(sample)
    if batch < 2:
        return batch, None, "the sample's tensors do not share a first dimension of two or more"
    small = max(1, batch // 2)
    try:
        part = first(sample, small)
        other = run(part)
    except Exception as error:  # whatever the user's model or step raises
        return batch, None, f"the step does not run on {small} examples: {type(error).__name__}: {error}"
    try:
        if not _same_course(memory, other):
            return batch, None, f"it runs other operators on {small} examples"
        workspaces = tuple(o.workspace for o in _operators(other))
        share = -(-fixed.sample * small // batch)
        return batch, Smaller(batch=small, storages=tuple(other.tape.sizes), workspaces=workspaces, sample=share), ""
    finally:
        other.tape.release()


def _same_course(one: Pass, other: Pass) -> bool:
    """The same operators, storages and events; sizes may differ."""
    return (
        [d.name for d in one.tape.drafts] == [d.name for d in other.tape.drafts]
        and len(one.tape.sizes) == len(other.tape.sizes)
        and one.tape.handles == other.tape.handles
        and one.tape.events == other.tape.events
    )


def _operators(run: Pass) -> Any:
    return run.tape.operators(run.peak.spans if run.peak is not None else {})
