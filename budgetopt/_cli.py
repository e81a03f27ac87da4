"""The command line. Reads arguments here; torch is loaded only by what needs it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from budgetopt._errors import BudgetOptError

if TYPE_CHECKING:
    from budgetopt.solvers import Problem

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status: 0, 1 after an error that is explained, 2 for wrong usage."""
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
    except BudgetOptError as error:
        print(f"budgetopt: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


def _demo(options: argparse.Namespace) -> None:
    from budgetopt._demo import demo  # late: --help and --version need no torch

    demo(steps=options.steps, plan_dir=options.plan_dir)


def _largest_batch(options: argparse.Namespace) -> None:
    from budgetopt._plan import Plan

    print(Plan.load(options.plan).largest_batch(options.budget, replan=not options.as_planned))


def _problem(options: argparse.Namespace) -> None:
    from budgetopt._comparison import write_problem

    write_problem(
        options.file,
        options.output,
        options.budget,
        allow=options.allow,
        exclude=options.exclude,
        headroom=options.headroom,
    )


def _compare(options: argparse.Namespace) -> None:
    from budgetopt import _comparison, _plot

    names, how = _comparison.checked(options.solvers, options.backend, options.time_limit, options.gap)
    if options.plot:
        _plot.ready(options.plot)
    compared = _comparison.compare(_step(options), options.shares, names, how)
    if options.plot:
        _plot.draw(compared, options.plot)
    print(compared.as_json() if options.json else compared)


def _step(options: argparse.Namespace) -> Problem:
    """The step that is in a file, or that of a model."""
    from budgetopt import _given
    from budgetopt._problem import to_problem

    if not _given.is_function(options.source):
        if options.device is not None:
            raise BudgetOptError(f"--device {options.device} is for a model (module:build); the file has its own")
        return _given.problem(Path(options.source), options.allow, options.exclude)
    from budgetopt._arguments import CHOICES
    from budgetopt._entry import profiled

    profile = profiled(options.source, options.device)
    return to_problem(profile, 0, allow=options.allow or CHOICES, exclude=options.exclude or ())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="budgetopt", description="Train PyTorch models under a memory budget.")
    parser.add_argument("--version", action="version", version=f"budgetopt {version('budgetopt')}")
    commands = parser.add_subparsers(title="commands", required=True)
    _demo_command(commands)
    _largest_batch_command(commands)
    _problem_command(commands)
    _compare_command(commands)
    return parser


def _demo_command(commands: Commands) -> None:
    show = commands.add_parser(
        "demo",
        help="train a small GPT plain and under two budgets, side by side",
        description="Train a small GPT on the text of Python's own documentation, plain and under two memory "
        "budgets with the same seeds. Progress goes to stderr, the table to stdout.",
    )
    show.add_argument("--steps", type=_positive, default=20, metavar="N", help="training steps (default: %(default)s)")
    show.add_argument("--plan-dir", type=Path, metavar="DIR", help="keep the plans there (default: a new folder)")
    show.set_defaults(run=_demo)


def _largest_batch_command(commands: Commands) -> None:
    batch = commands.add_parser(
        "largest-batch",
        help="how big a batch fits a budget, from a saved plan",
        description="Print the largest batch whose predicted peak fits the budget, from the sizes in a saved plan; "
        "0 if not even one example fits. Nothing is run.",
    )
    batch.add_argument("plan", type=Path, help="a plan that budgetopt.fit(..., plan=PATH) has saved")
    batch.add_argument("--budget", metavar="SIZE", help='such as "8GB" or "8GiB" (default: the plan\'s own)')
    batch.add_argument("--as-planned", action="store_true", help="under this plan; default: under the best plan")
    batch.set_defaults(run=_largest_batch)


def _problem_command(commands: Commands) -> None:
    write = commands.add_parser(
        "problem",
        help="write what the solvers are asked to a file, from a saved profile or plan",
        description="Write the problem of fitting a recorded step to a budget: sizes, times and what reads what, and "
        "no names. Nothing is run.",
    )
    write.add_argument("file", type=Path, help="a profile or a plan that was saved")
    write.add_argument("--budget", metavar="SIZE", help='such as "8GB" or "8GiB" (default: the plan\'s own)')
    write.add_argument("--headroom", metavar="SIZE", help="taken off the budget (default: as in the plan, else none)")
    _what_may_be_chosen(write)
    write.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FILE", help="JSON; compressed if its name ends in .gz"
    )
    write.set_defaults(run=_problem)


def _compare_command(commands: Commands) -> None:
    table = commands.add_parser(
        "compare",
        help="what each solver makes of each budget",
        description="Give the same step and the same budgets to every solver, and print what the answers cost. "
        "Only a model is run, to be profiled. Progress goes to stderr, the table to stdout.",
    )
    table.add_argument(
        "source",
        help="a problem, a profile or a plan that was saved (its budget is not used), or module:build, a function "
        "that returns model, sample or model, sample, {'loss': ...}: that model is profiled",
    )
    table.add_argument(
        "--device", metavar="NAME", help="model the step on a100, h100, h200, rtx4090, t4 or cpu instead"
    )
    table.add_argument("--solvers", nargs="+", metavar="NAME", help="(default: all)")
    table.add_argument(
        "--shares",
        nargs="+",
        type=_share,
        metavar="S",
        help="budgets, as shares of the bytes that keeping everything takes on top of what is resident "
        "(default: 0.75 0.5 0.35 0.25)",
    )
    _what_may_be_chosen(table)
    table.add_argument("--time-limit", type=float, default=10.0, metavar="SECONDS", help="per answer (default: 10)")
    table.add_argument("--gap", type=float, default=0.01, help="distance from the best that will do (default: 0.01)")
    table.add_argument("--backend", default="auto", metavar="NAME", help="auto, cbc or highs (default: auto)")
    table.add_argument("--json", action="store_true", help="print JSON: bytes, nanoseconds, shares of one")
    table.add_argument("--plot", type=Path, metavar="FILE", help="draw overhead against budget: .png, .svg or .pdf")
    table.set_defaults(run=_compare)


def _what_may_be_chosen(command: argparse.ArgumentParser) -> None:
    command.add_argument("--allow", nargs="+", metavar="CHOICE", help="of keep, recompute, fp16 (default: as planned)")
    command.add_argument("--exclude", nargs="+", metavar="LAYER", help="layers to leave alone (default: as planned)")


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: give at least 1")
    return number


def _share(text: str) -> float:
    number = float(text)
    if not 0 < number <= 1:
        raise argparse.ArgumentTypeError(f"{text}: give a share of more than 0, and at most 1")
    return number
