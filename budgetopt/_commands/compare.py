"""``budgetopt compare``"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from budgetopt import _options, _source

if TYPE_CHECKING:
    from budgetopt.solvers import Problem

_EPILOG = """\
examples:
  budgetopt compare plan.json --plot margins.png
  budgetopt compare my_model:build --device h200 --solvers regions greedy
  budgetopt compare step.json.gz --shares 0.5 0.3 --json

JSON: resident_bytes, plain_peak_bytes, step_ns (0: not known), rows [{solver,
share, budget, status, seconds, peak, cost_ns, overhead, gap, minimum, note}].
Bytes and nanoseconds are integers.
"""


def add(commands: _options.Commands) -> None:
    """Say what the command takes."""
    parser = _options.command(
        commands,
        "compare",
        "what each solver makes of each budget",
        "Give the same step and the same budgets to every solver, and print what the answers cost. Only a model is "
        "run, to be profiled. Progress goes to stderr, the table to stdout.",
        _EPILOG,
    )
    parser.add_argument(
        "source",
        help="a problem, a profile or a plan that was saved (its budget is not used), or module:build, which is "
        f"profiled: {_options.MODEL}",
    )
    _options.device(parser)
    parser.add_argument("--solvers", nargs="+", metavar="NAME", help="who is asked (default: all)")
    parser.add_argument(
        "--shares",
        nargs="+",
        type=_share,
        metavar="S",
        help="budgets, as shares of the bytes that keeping everything takes on top of what is resident "
        "(default: 0.75 0.5 0.35 0.25)",
    )
    _options.choices(parser, "as planned, else all", "as planned, else none")
    _options.limits(parser, 10.0, " for each answer")
    _options.json(parser)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw overhead against budget: .png, .svg or .pdf")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> object:
    """The rows, as a table or JSON."""
    from budgetopt import _comparison, _plot

    names, how = _comparison.checked(options.solvers, options.backend, options.time_limit, options.gap)
    if options.plot:
        _plot.ready(options.plot)
    compared = _comparison.compare(_step(options), options.shares, names, how)
    if options.plot:
        _plot.draw(compared, options.plot)
    return compared.as_json() if options.json else compared


def _step(options: argparse.Namespace) -> Problem:
    """The step that is in a file, or that of a model."""
    from budgetopt import _given
    from budgetopt._problem import to_problem

    if not _source.is_model(options):
        return _given.problem(Path(options.source), options.allow, options.exclude)
    from budgetopt._arguments import CHOICES

    profile = _source.profiled(options)
    return to_problem(profile, 0, allow=options.allow or CHOICES, exclude=options.exclude or ())


def _share(text: str) -> float:
    number = float(text)
    if not 0 < number <= 1:
        raise argparse.ArgumentTypeError(f"{text}: give a share of more than 0, and at most 1")
    return number
