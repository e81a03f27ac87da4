"""``budgetopt problem``"""

from __future__ import annotations

import argparse
from pathlib import Path

from budgetopt import _options

_EPILOG = """\
examples:
  budgetopt problem profile.json --budget 8GB -o step.json.gz
  budgetopt problem plan.json -o step.json
"""


def add(commands: _options.Commands) -> None:
    """Say what the command takes."""
    parser = _options.command(
        commands,
        "problem",
        "write what the solvers are asked to a file",
        "Write the problem of fitting a recorded step to a budget: sizes, times and what reads what, and no names. "
        "Nothing is run, nothing is printed.",
        _EPILOG,
    )
    parser.add_argument("file", type=Path, help="a profile or a plan that was saved")
    _options.budget(parser, required=False, default="the plan's own; a profile has none")
    _options.headroom(parser, "as planned, none for a profile")
    _options.choices(parser, "as planned, all for a profile", "as planned, none for a profile")
    _options.output(parser, "JSON; compressed if its name ends in .gz", required=True)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> object:
    """Nothing but the file."""
    from budgetopt._comparison import write_problem

    write_problem(
        options.file,
        options.output,
        options.budget,
        allow=options.allow,
        exclude=options.exclude,
        headroom=options.headroom,
    )
    return None
