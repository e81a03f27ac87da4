"""Plans for tests: any choice at all as a plan, and a child process that measures one on other data."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from budgetopt import Plan, Profile, apply
from budgetopt._answer import to_plan
from budgetopt._problem import to_problem
from budgetopt.solvers import Choice, Segment, Solution, simulate
from tests.models import Built, fresh_batch
from tests.outside_meter import peak_bytes, resident_bytes

ROOT = Path(__file__).parents[1]
ALL = ("keep", "recompute", "fp16")


def forced_plan(profile: Profile, choose: Callable[[int], Choice], segments: Sequence[Segment] = ()) -> Plan:
    """The plan that makes choice ``choose(value)`` wherever it is legal."""
    problem = to_problem(profile, 1 << 50)
    found = simulate(problem, [choose(v) for v in range(len(problem.values))], segments)
    solution = Solution(found.choices, found.peak, found.peak_event, found.cost_ns, segments=found.segments)
    return to_plan(profile, problem, solution, budget=1 << 50, headroom=0, allow=ALL, exclude=())


def measured_elsewhere(builder: str, arguments: Sequence[Any], plan: Plan, folder: Path) -> int:
    """Peak above resident (bytes) of ``tests.models.<builder>(*arguments)`` under `plan`.

    Measured in a fresh process, on a batch of other data, by the meter that shares no code with budgetopt.
    """
    path = folder / "plan.json"
    plan.save(path)
    done = subprocess.run(
        [sys.executable, "-m", "tests.plans", builder, json.dumps(list(arguments)), str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[-1])


def above_resident(built: Built, plan: Plan) -> int:
    """What the plan's prediction says of the peak above the resident bytes."""
    return plan.predicted.peak_bytes - resident_bytes(*built)


def _main(builder: str, arguments: str, path: str) -> None:
    model, sample = getattr(import_module("tests.models"), builder)(*json.loads(arguments))
    apply(model, Plan.load(path))
    print(peak_bytes(model, fresh_batch(sample, 77)))


if __name__ == "__main__":
    _main(*sys.argv[1:])
