"""``budgetopt frontier``"""

from __future__ import annotations

import argparse
from pathlib import Path

from budgetopt import _options, _source

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
    _source.add(parser)
    parser.add_argument(
        "--points", type=_options.two_or_more, default=8, metavar="N", help="budgets, two or more (default: 8)"
    )
    _options.choices(parser, "as planned, else all", "as planned, else none")
    _options.solver(parser, 2.0, " for each budget")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw overhead against budget: .png, .svg or .pdf")
    _options.json(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> object:
    """The points, as a table or JSON."""
    from budgetopt import _as_json, _given, _plot, frontier
    from budgetopt._progress import progress
    from budgetopt._report import frontier_table

    _options.check(options)
    if options.plot:
        _plot.ready(options.plot)
    asked = _given.asked(_source.read(options))
    profile, settings = asked.profile, {"allow": asked.allow, "exclude": asked.exclude}
    with progress(f"solving for {options.points} budgets"):
        points = frontier(profile, points=options.points, **{**settings, **_options.how(options)})
    if options.plot:
        _plot.draw_frontier(profile, points, options.plot)
    return _as_json.frontier(profile, points, options.source) if options.json else frontier_table(profile, points)
