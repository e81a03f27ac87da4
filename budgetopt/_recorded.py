"""From a pass over the step to a profile: what its tape wrote down, in the words of the schema."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from budgetopt._calibrate import Costs
from budgetopt._passes import Pass
from budgetopt._schema import Environment, Fixed, OperatorRecord, Profile, RegionRecord

CALL_NS = 12_000
"""Entering and leaving a recorded region, per call."""


def recorded(
    run: Pass,
    operators: list[OperatorRecord],
    *,
    environment: Environment,
    fingerprint: dict[str, Any],
    fixed: Fixed,
    costs: Costs,
    codec_ns: Callable[[int], int],
) -> Profile:
    """The profile of one pass; batch sizes, layers and the peak are not in it yet.

    Args:
        operators: those of the pass, with the times they are to have. costs: nanoseconds of our own work.
        codec_ns: nanoseconds to store and load so many bytes in fp16.
    """
    return Profile(
        environment=environment,
        fingerprint=fingerprint,
        fixed=fixed,
        regions=tuple(_regions(run, costs)),
        operators=tuple(operators),
        storages=tuple(run.tape.sizes),
        values=tuple(run.tape.value_records(codec_ns)),
        handles=tuple(run.tape.handles),
        events=tuple(run.tape.events),
        replay_ns=costs.replay_ns,
        step_ns=sum(o.time_ns for o in operators),
        not_replayable={f"{o.module}: {o.name}": o.blocked for o in operators if o.blocked and not o.backward},
    )


def operators_of(run: Pass) -> list[OperatorRecord]:
    """The operators of a pass, with their workspace where it was metered."""
    return run.tape.operators(run.peak.spans if run.peak is not None else {})


def _regions(run: Pass, costs: Costs) -> list[RegionRecord]:
    calls = run.calls
    return [
        RegionRecord(
            path=path,
            call=call,
            operators=tuple(numbered),
            record_ns=CALL_NS + costs.record_ns * len(numbered),
            shape=shape,
        )
        for path, call, shape, numbered in zip(calls.paths, calls.numbers(), calls.shapes, calls.numbered, strict=True)
    ]
