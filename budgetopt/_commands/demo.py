"""``budgetopt demo``"""

from __future__ import annotations

import argparse
from pathlib import Path

from budgetopt import _options


def add(commands: _options.Commands) -> None:
    """Say what the command takes."""
    parser = _options.command(
        commands,
        "demo",
        "train a small GPT plain and under two budgets, side by side",
        "Train a small GPT on the text of Python's own documentation, plain and under two memory budgets with the same "
        "seeds. Progress goes to stderr, the table to stdout.",
    )
    parser.add_argument(
        "--steps", type=_options.positive, default=20, metavar="N", help="training steps (default: %(default)s)"
    )
    parser.add_argument("--plan-dir", type=Path, metavar="DIR", help="keep the plans there (default: a new folder)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> object:
    """The table of what was measured."""
    from budgetopt._demo import demo  # late: --help and --version need no torch

    return demo(steps=options.steps, plan_dir=options.plan_dir)
