"""``budgetopt largest-batch``"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from budgetopt import _options

_EPILOG = """\
examples:
  budgetopt largest-batch plan.json
  budgetopt largest-batch plan.json --budget 24GB

JSON: plan, largest_batch.
"""


def add(commands: _options.Commands) -> None:
    """Say what the command takes."""
    parser = _options.command(
        commands,
        "largest-batch",
        "how big a batch fits a budget, from a saved plan",
        "Print the largest batch whose predicted peak fits the budget, from the sizes in a saved plan; 0 if not even "
        "one example fits. Nothing is run.",
        _EPILOG,
    )
    parser.add_argument("plan", type=Path, help="a plan that budgetopt fit or solve has saved")
    _options.budget(parser, required=False, default="the plan's own")
    parser.add_argument("--as-planned", action="store_true", help="under this plan (default: under the best plan)")
    _options.json(parser, "the number")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> object:
    """The number of examples."""
    from budgetopt import _given
    from budgetopt._progress import progress

    plan = _given.plan(options.plan)
    with progress("looking for the largest batch"):
        found = plan.largest_batch(options.budget, replan=not options.as_planned)
    return json.dumps({"plan": str(options.plan), "largest_batch": found}, indent=2) if options.json else found
