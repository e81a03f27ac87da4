"""``budgetopt solve``"""

from __future__ import annotations

import argparse
from pathlib import Path

from budgetopt import _options
from budgetopt._errors import BudgetOptError

_EPILOG = """\
examples:
  budgetopt profile my_model:build -o profile.json
  budgetopt solve profile.json --budget 8GB -o plan.json
  budgetopt solve plan.json --budget 6GB --json

The plan is not tried out: budgetopt.fit(model, sample, "8GB",
plan="plan.json") does that when it first uses it.

JSON: as of budgetopt fit; measured is null.
"""


def add(commands: _options.Commands) -> None:
    """Say what the command takes."""
    parser = _options.command(
        commands,
        "solve",
        "make a plan from a saved profile, without the model",
        "Decide what to keep, recompute or store in fp16 so that the profiled step fits the budget. Prints the plan as "
        "a table. Nothing is run, and no torch is needed.",
        _EPILOG,
    )
    parser.add_argument("file", type=Path, help="a profile that was saved, or a plan, which has its profile in it")
    _options.budget(parser)
    _options.output(parser, "save the plan there")
    _options.choices(parser, "as planned, all for a profile", "as planned, none for a profile")
    _options.headroom(parser, "as planned, none for a profile")
    _options.solver(parser)
    _options.json(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> object:
    """The plan."""
    from budgetopt import _as_json, _given, solve
    from budgetopt._progress import progress

    _options.check(options)
    _options.writable(options.output)
    if options.output is not None and options.output.exists() and options.output.samefile(options.file):
        raise BudgetOptError(f"-o {str(options.output)!r} is the file that is read: give another name")
    asked = _given.question(options.file)
    how = {"allow": asked.allow, "exclude": asked.exclude, "headroom": asked.headroom, **_options.how(options)}
    with progress(f"solving for {options.budget}"):
        plan = solve(asked.profile, options.budget, **how)
    if options.output is not None:
        plan.save(options.output)
    return _as_json.plan(plan, options.output) if options.json else plan
