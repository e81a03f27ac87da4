"""The command line: read the arguments, run one command, write its answer, end with a status.

torch is loaded only by commands that run a model.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import textwrap
import traceback
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import TracebackType

from budgetopt import _interrupts, _stdout
from budgetopt._errors import BudgetOptError
from budgetopt._options import Commands

COMMANDS = (
    "demo",
    "fit",
    "profile",
    "solve",
    "show",
    "fits",
    "usage",
    "gain",
    "inspect",
    "report",
    "frontier",
    "compare",
    "measure",
    "largest_batch",
    "problem",
)
"""Modules in `_commands`, in the order in which ``--help`` shows them."""

INTERRUPTED = 130
"""128 + SIGINT, as shells have it."""

_PACKAGE = Path(__file__).parent
_LEADING = (
    __file__,
    *(str(_PACKAGE / name) for name in ("_entry.py", "_loop.py", "_commands")),
    import_module.__code__.co_filename,
    "<",
)
"""Frames of these files come before the user's code; "<": of the import system."""

_EPILOG = """\
module:build is a function in a module, here or installed, that returns
model, sample or model, sample, {"loss": my_loss, "optimizer": "sgd"} (also
"step"; as budgetopt.fit takes them).

  budgetopt fit my_model:build --budget 8GB -o plan.json
  budgetopt show plan.json
  budgetopt measure my_model:build --plan plan.json

The answer goes to stdout, all else to stderr. Exit status: 0; 1 after an
error, which is explained; 2 for wrong usage; 130 after Ctrl-C.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status: 0, 1 after an error that is told, 130 after Ctrl-C, 141 if nobody read.

    Raises:
        SystemExit: of argparse, 0 for help and 2 for wrong usage.
    """
    try:
        try:
            options = _parser().parse_args(arguments)
        except SystemExit:
            _stdout.write("")  # --help in a pipe that was closed
            raise
        with _interrupts.heeded(), _stdout.aside():
            answer = options.run(options)
        return 0 if _stdout.write(_text(answer, options)) else _stdout.CLOSED
    except BudgetOptError as error:
        return _told(f"{type(error).__name__}: {error}", 1)
    except KeyboardInterrupt:
        return _told("interrupted", INTERRUPTED)
    except Exception as error:
        traceback.print_exception(type(error), error, _theirs(error.__traceback__))
        said = "".join(traceback.format_exception_only(type(error), error)).splitlines()[0]
        return _told(f"{said} (not an error of budgetopt's: the traceback above says where it comes from)", 1)


def _told(text: str, status: int) -> int:
    print(f"budgetopt: {text}", file=sys.stderr)
    return status


def _text(answer: object, options: argparse.Namespace) -> str:
    """The answer and a newline; on a terminal, lines of words are folded at its width."""
    text = "" if answer is None else f"{answer}\n"
    if getattr(options, "json", False) or sys.stdout is None or not sys.stdout.isatty():
        return text
    width = shutil.get_terminal_size().columns
    return "".join(_folded(line, width) + "\n" for line in text.splitlines())


def _folded(line: str, width: int) -> str:
    if len(line) <= width:
        return line
    indent = " " * (len(line) - len(line.lstrip()))
    return textwrap.fill(line, width, subsequent_indent=f"{indent}  ", break_on_hyphens=False, replace_whitespace=False)


def _theirs(found: TracebackType | None) -> TracebackType | None:
    """Without the first frames, which only led to the command or to ``build()``."""
    at = found
    while at is not None:
        file = at.tb_frame.f_code.co_filename
        if not file.startswith(_LEADING):
            return at
        at = at.tb_next
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="budgetopt",
        description="Train PyTorch models under a memory budget.",
        epilog=_EPILOG,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=28),
    )
    parser.add_argument("--version", action="version", version=f"budgetopt {version('budgetopt')}")
    commands: Commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name in COMMANDS:
        import_module(f"budgetopt._commands.{name}").add(commands)
    return parser
