"""``budgetopt frontier``"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from budgetopt import _options
from budgetopt._errors import BudgetOptError

if TYPE_CHECKING:
    from budgetopt import Profile

_EPILOG = """\
examples:
  budgetopt frontier plan.json
  budgetopt frontier my_model:build --points 12 --plot frontier.png
  budgetopt frontier my_model:build --device h200 --json

JSON: source, plain_peak_bytes, resident_bytes, step_ns, points [{budget_bytes,
peak_bytes, peak_at, extra_ns, overhead, gap, solver}]. Bytes and nanoseconds
are integers; overhead and gap are shares of one.
"""


def add(commands: _options.Commands) -> None:
    """Say what the command takes."""
    parser = _options.command(
        commands,
        "frontier",
        "what each byte of budget buys",
        "Solve for budgets from the smallest feasible one to that of keeping everything, and print what each costs in "
        "time. Only a model is run, to be profiled.",
        _EPILOG,
    )
    parser.add_argument(
        "source", help=f"a profile or a plan that was saved, or module:build, which is profiled: {_options.MODEL}"
    )
    parser.add_argument("--points", type=_two_or_more, default=8, metavar="N", help="budgets, two or more (default: 8)")
    _options.device(parser)
    _options.optimizer(parser)
    _options.choices(parser, "as planned, else all", "as planned, else none")
    _options.solver(parser, 2.0, " for each budget")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw overhead against budget: .png, .svg or .pdf")
    _options.json(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> object:
    """The points, as a table or JSON."""
    from budgetopt import _as_json, _plot, frontier
    from budgetopt._progress import progress
    from budgetopt._report import frontier_table

    _options.check(options)
    if options.plot:
        _plot.ready(options.plot)
    profile, asked = _profile(options)
    with progress(f"solving for {options.points} budgets"):
        points = frontier(profile, points=options.points, **{**asked, **_options.how(options)})
    if options.plot:
        _plot.draw_frontier(profile, points, options.plot)
    return _as_json.frontier(profile, points, options.source) if options.json else frontier_table(profile, points)


def _profile(options: argparse.Namespace) -> tuple[Profile, dict[str, Any]]:
    """The profile that is in a file, with what its plan was asked, or that of a model."""
    from budgetopt import _given

    if not _given.is_function(options.source):
        for name in ("device", "optimizer"):
            if getattr(options, name) is not None:
                raise BudgetOptError(
                    f"--{name} {getattr(options, name)} is for a model (module:build); the file has its own"
                )
        asked = _given.question(Path(options.source))
        return asked.profile, {"allow": asked.allow, "exclude": asked.exclude}
    from budgetopt._entry import profiled
    from budgetopt._progress import progress

    with progress(f"profiling one step of {options.source}"):
        return profiled(options.source, options.device, options.optimizer), {}


def _two_or_more(text: str) -> int:
    number = int(text)
    if number < 2:
        raise argparse.ArgumentTypeError(f"{text}: give two or more, the smallest budget and keep-everything are two")
    return number
