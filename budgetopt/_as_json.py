"""What ``--json`` prints: one document, whose sizes are bytes and times nanoseconds, as exact integers. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from budgetopt._plan import Plan
from budgetopt._schema import FrontierPoint, Measurement, Profile

_NOT_IN_A_PLAN: Any = {
    "version": True,
    "profile_data": True,
    "fingerprint": True,
    "regions": {"__all__": {"operators", "ranks", "record", "blocked", "snapshot"}},
}
"""What only the executor reads, and the profile."""


def plan(found: Plan, file: object) -> str:
    """A plan: budget, prediction, measurement, and every decision."""
    return _text({"file": _name(file), **_fields(found, exclude=_NOT_IN_A_PLAN)})


def profile(found: Profile, file: object) -> str:
    """A profile: the whole step's figures, and those of every layer."""
    kept = (
        "peak_bytes step_ns fixed optimizer_workspace batch scaled_from modelled loss_guessed environment "
        "not_replayable layers"
    )
    fields = _fields(found, include=set(kept.split()))
    return _text({"file": _name(file), "resident_bytes": found.fixed.total, **{k: fields[k] for k in kept.split()}})


def frontier(found: Profile, points: Sequence[FrontierPoint], source: str) -> str:
    """The points of a frontier, and the step that they are about."""
    head = {"source": source, "plain_peak_bytes": found.peak_bytes, "resident_bytes": found.fixed.total}
    return _text({**head, "step_ns": found.step_ns, "points": [_fields(point) for point in points]})


def measurement(found: Measurement, planned: Plan | None, file: object) -> str:
    """A measurement, beside what the plan in `file` says, if there is one."""
    said = {
        "plan": _name(file),
        "budget_bytes": planned and planned.budget_bytes,
        "predicted_peak_bytes": planned and planned.predicted.peak_bytes,
    }
    return _text({**said, **_fields(found)})


def _fields(found: BaseModel, **which: Any) -> dict[str, Any]:
    """By way of pydantic's text, which has null for what JSON has no number for, such as infinity."""
    fields: dict[str, Any] = json.loads(found.model_dump_json(**which))
    return fields


def _name(file: object) -> str | None:
    return None if file is None else str(file)


def _text(document: Mapping[str, Any]) -> str:
    return json.dumps(document, indent=2)
