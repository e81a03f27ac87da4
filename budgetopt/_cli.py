"""The command line. Reads arguments here; torch is loaded only by what needs it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from budgetopt._errors import BudgetOptError


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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="budgetopt", description="Train PyTorch models under a memory budget.")
    parser.add_argument("--version", action="version", version=f"budgetopt {version('budgetopt')}")
    commands = parser.add_subparsers(title="commands", required=True)
    show = commands.add_parser(
        "demo",
        help="train a small GPT plain and under two budgets, side by side",
        description="Train a small GPT on the text of Python's own documentation, plain and under two memory "
        "budgets with the same seeds. Progress goes to stderr, the table to stdout.",
    )
    show.add_argument("--steps", type=_positive, default=20, metavar="N", help="training steps (default: %(default)s)")
    show.add_argument("--plan-dir", type=Path, metavar="DIR", help="keep the plans there (default: a new folder)")
    show.set_defaults(run=_demo)
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
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: give at least 1")
    return number
