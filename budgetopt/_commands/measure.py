"""``budgetopt measure``"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from budgetopt import _options
from budgetopt._errors import BudgetOptWarning

if TYPE_CHECKING:
    from budgetopt import Measurement, Plan

_EPILOG = """\
examples:
  budgetopt measure my_model:build
  budgetopt measure my_model:build --plan plan.json --steps 10

JSON: plan, budget_bytes and predicted_peak_bytes (null without a plan),
peak_bytes, resident_bytes, step_ns, reserved_bytes, context_bytes, losses.
Bytes and nanoseconds are integers.
"""


def add(commands: _options.Commands) -> None:
    """Say what the command takes."""
    parser = _options.command(
        commands,
        "measure",
        "the real peak and step time of a model, plain or planned",
        "Build the model, run real steps of it (forward and backward; the optimizer's state is counted), and print the "
        "largest peak and the median time.",
        _EPILOG,
    )
    _options.model(parser)
    parser.add_argument("--plan", type=Path, metavar="FILE", help="a saved plan to run it under (default: plain)")
    parser.add_argument("--steps", type=_options.positive, default=3, metavar="N", help="steps to run (default: 3)")
    _options.optimizer(parser)
    _options.json(parser, "two lines")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> object:
    """What the steps took."""
    from budgetopt import _as_json, _given
    from budgetopt._progress import progress

    plan = None if options.plan is None else _given.plan(options.plan)

    from budgetopt import apply, measure
    from budgetopt._entry import build

    built = build(options.model, options.optimizer)
    if plan is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", BudgetOptWarning)  # that nobody measured it, which comes next
            apply(built.model, plan)
    with progress(f"running {options.steps} steps"):
        found = measure(built.model, built.sample, steps=options.steps, **{"optimizer": "adamw", **built.options})
    return _as_json.measurement(found, plan, options.plan) if options.json else _lines(found, plan, options.steps)


def _lines(found: Measurement, plan: Plan | None, steps: int) -> str:
    from budgetopt._units import show_bytes, show_ns

    peak = f"peak {show_bytes(found.peak_bytes)}, of which {show_bytes(found.resident_bytes)} resident"
    if plan is not None:
        verdict = "within" if found.peak_bytes <= plan.budget_bytes else "over"
        predicted = show_bytes(plan.predicted.peak_bytes)
        peak += f"; predicted {predicted}, {verdict} the plan's budget of {show_bytes(plan.budget_bytes)}"
    if found.reserved_bytes:
        peak += f"; the allocator reserved {show_bytes(found.reserved_bytes)}"
    return f"{peak}\nstep {show_ns(found.step_ns)}, median of {steps}"
