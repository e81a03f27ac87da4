"""The command line: ``budgetopt demo``. Reads arguments here; torch is loaded only by what needs it."""

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
    from budgetopt._demo import demo  # late: --help and --version need no torch

    try:
        demo(steps=options.steps, plan_dir=options.plan_dir)
    except BudgetOptError as error:
        print(f"budgetopt: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


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
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: give at least 1")
    return number
