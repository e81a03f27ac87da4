"""``budgetopt report``"""

from __future__ import annotations

import argparse
from pathlib import Path

from budgetopt import _options

_EPILOG = """\
examples:
  budgetopt report plan.json -o report.html
  budgetopt report plan.json -o report.html --frontier 8
  budgetopt report plan.json -o report.html --plot memory.png
"""


def add(commands: _options.Commands) -> None:
    """Say what the command takes."""
    parser = _options.command(
        commands,
        "report",
        "a saved plan as a page for the browser",
        "Write one page that needs no network: memory over the step, predicted and measured, under the budget; what "
        "happens to each layer; what uses the memory. Nothing is run.",
        _EPILOG,
    )
    parser.add_argument("plan", type=Path, help="a plan that budgetopt fit or solve has saved")
    _options.output(parser, "the page (HTML)", required=True)
    parser.add_argument(
        "--frontier",
        type=_options.two_or_more,
        default=0,
        metavar="N",
        help="solve for N other budgets, too, and show what each byte buys (default: don't)",
    )
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw memory over the step as well: .png, .svg or .pdf"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Files only."""
    from budgetopt import _given, _page, _plot
    from budgetopt._progress import progress

    _options.writable(options.output)
    if options.plot:
        _plot.ready(options.plot)
    plan = _given.plan(options.plan)
    with progress(f"solving for {options.frontier} budgets" if options.frontier else "writing the page"):
        _page.write_report(plan, options.output, options.frontier)
    if options.plot:
        plan.plot(options.plot)
