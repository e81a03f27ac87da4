"""Options that several commands take, each with its unit and its default."""

from __future__ import annotations

import argparse
import os
import textwrap
from pathlib import Path
from typing import Any, TypeAlias

from budgetopt._errors import BudgetOptError

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

MODEL = "a function, here or installed, that returns model, sample or model, sample, {'loss': ...}"


def command(commands: Commands, name: str, short: str, long: str, epilog: str = "") -> argparse.ArgumentParser:
    """A new command: `short` is for the list of commands, `long` for its own help, `epilog` has the examples as is."""
    return commands.add_parser(
        name,
        help=short,
        description=textwrap.fill(long, 78),
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def model(parser: argparse.ArgumentParser) -> None:
    """The model by name."""
    parser.add_argument("model", metavar="module:build", help=MODEL)


def optimizer(parser: argparse.ArgumentParser) -> None:
    """The optimizer that is counted."""
    parser.add_argument(
        "--optimizer",
        metavar="NAME",
        help="whose state is counted: adamw, sgd, sgd+momentum ... or none (default: what build() gives, else adamw)",
    )


def device(parser: argparse.ArgumentParser) -> None:
    """Another device than the model's."""
    parser.add_argument(
        "--device",
        metavar="NAME",
        help="model the step on a100, h100, h200, rtx4090, t4 or cpu instead of running it (default: run it)",
    )


def budget(parser: argparse.ArgumentParser, *, also: str = "", required: bool = True, default: str = "") -> None:
    """The budget. `also`: what else it may be."""
    unit = f"such as 8GB or 8GiB, or bytes{also}"
    parser.add_argument(
        "--budget",
        type=size,
        metavar="SIZE",
        required=required,
        help=f"{unit} (default: {default})" if default else unit,
    )


def headroom(parser: argparse.ArgumentParser, default: str = "none") -> None:
    """What is taken off the budget."""
    parser.add_argument(
        "--headroom",
        type=size,
        metavar="SIZE",
        help=f"taken off the budget first: 500MB, or 5%% of it (default: {default})",
    )


def choices(parser: argparse.ArgumentParser, default: str, excluded: str = "none") -> None:
    """What may be chosen, and where; None if not given."""
    parser.add_argument(
        "--allow",
        nargs="+",
        metavar="CHOICE",
        help=f"of keep, recompute, fp16; gradients are exact without fp16 (default: {default})",
    )
    parser.add_argument(
        "--exclude", nargs="+", metavar="LAYER", help=f"layers to leave alone, by their names (default: {excluded})"
    )


def solver(parser: argparse.ArgumentParser, seconds: float = 10.0, per: str = "") -> None:
    """Method, engine, limits."""
    parser.add_argument(
        "--solver", default="auto", metavar="NAME", help="auto, regions, ilp, greedy ... (default: auto)"
    )
    limits(parser, seconds, per)


def limits(parser: argparse.ArgumentParser, seconds: float, per: str) -> None:
    """Engine, time and distance."""
    parser.add_argument("--backend", default="auto", metavar="NAME", help="auto, cbc or highs (default: auto)")
    parser.add_argument(
        "--time-limit",
        type=float,
        default=seconds,
        metavar="SECONDS",
        help=f"to solve{per} (default: {seconds:g})",
    )
    parser.add_argument(
        "--gap",
        type=float,
        default=0.01,
        metavar="SHARE",
        help="distance from the least extra time that will do, from 0 to 1 (default: 0.01)",
    )


def output(parser: argparse.ArgumentParser, what: str, *, required: bool = False) -> None:
    """Where the result is saved."""
    parser.add_argument("-o", "--output", type=Path, required=required, metavar="FILE", help=what)


def json(parser: argparse.ArgumentParser, instead_of: str = "the table") -> None:
    """JSON instead of what people read."""
    parser.add_argument("--json", action="store_true", help=f"print JSON instead of {instead_of}")


def how(options: argparse.Namespace) -> dict[str, Any]:
    """The options of :func:`choices` and :func:`solver` as arguments by name, those left out that were not given."""
    given = {name: getattr(options, name, None) for name in ("allow", "exclude", "headroom")}
    solving = {name: getattr(options, name) for name in ("solver", "backend", "time_limit", "gap")}
    return {**{name: value for name, value in given.items() if value is not None}, **solving}


def check(options: argparse.Namespace) -> None:
    """What can be seen to be wrong before a model is built.

    Raises:
        BudgetOptError: budget, choice, solver or limit is no legal one.
    """
    from budgetopt._arguments import CHOICES, choices
    from budgetopt._solve import solver_options
    from budgetopt._units import parse_bytes

    if getattr(options, "budget", None) is not None:
        parse_bytes(options.budget, total=1 << 60, free=1 << 60)  # what a share is of, only the device can tell
    choices(options.allow or CHOICES)
    solver_options(options.solver, options.backend, options.time_limit, options.gap)


def writable(path: Path | None) -> None:
    """Raise unless a file can be written there, before the work that it is for."""
    if path is None:
        return
    if path.is_dir():
        raise BudgetOptError(f"-o {str(path)!r} is a folder: give a file in it")
    if not (path.parent.is_dir() and os.access(path.parent, os.W_OK)):
        raise BudgetOptError(f"can't write {str(path)!r}: choose a folder that exists and can be written to")


def size(text: str) -> int | str:
    """Bytes: figures alone are taken as such, as ``--json`` prints them, if there are too many for gigabytes."""
    return int(text) if text.isascii() and text.isdigit() and len(text) > 3 else text


def positive(text: str) -> int:
    """A whole number of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: give at least 1")
    return number


def two_or_more(text: str) -> int:
    """A number of budgets: of the smallest one, of keeping everything, and of some between."""
    number = int(text)
    if number < 2:
        raise argparse.ArgumentTypeError(f"{text}: give two or more, the smallest budget and keep-everything are two")
    return number
