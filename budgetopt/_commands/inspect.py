"""``budgetopt inspect``"""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from budgetopt import _options

if TYPE_CHECKING:
    from budgetopt._findings import Waste

_EPILOG = """\
examples:
  budgetopt inspect train.py --epochs 1
  budgetopt inspect --calls 50 train.py
  budgetopt inspect -m my_package.train

Options of budgetopt come before the script, all after it are the script's.
JSON: script, models [{model, calls,
findings [{kind, bytes, calls, what, mend}]}].
"""


def add(commands: _options.Commands) -> None:
    """Say what the command takes."""
    parser = _options.command(
        commands,
        "inspect",
        "what a training script wastes",
        "Run a training script as it is, and name the usual waste of its loop, in bytes and with the line that mends "
        "it: losses or outputs that are kept, validation without no_grad, gradients set to zero, a generation cache "
        "in training, fragmentation. What the script prints goes to stderr. After Ctrl-C or an error, too, "
        "what was found so far is printed (to stderr).",
        _EPILOG,
    )
    parser.add_argument("-m", "--module", action="store_true", help="the script is a module, as for python -m")
    parser.add_argument(
        "--calls",
        type=_options.positive,
        metavar="N",
        help="end the script after N calls of its models (default: when it ends)",
    )
    _options.json(parser, "lines")
    parser.add_argument("script", help="a Python file that trains")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its own arguments")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> object:
    """What was found."""
    from budgetopt import _loop

    loop = _loop.Loop(options.calls)
    try:
        _loop.run(loop, options.script, options.arguments, options.module)
    except BaseException:
        if loop.report():
            print(_lines(loop.report()), file=sys.stderr)
        raise
    if not options.json:
        return _lines(loop.report())
    models = [{"model": name, "calls": waste.calls, "findings": _findings(waste)} for name, waste in loop.report()]
    return json.dumps({"script": options.script, "models": models}, indent=2)


def _lines(found: list[tuple[str, Waste]]) -> str:
    if not found:
        return "nothing seen, the script called no module that has parameters"
    return "\n".join(f"{name}: {waste}" for name, waste in found)


def _findings(waste: Waste) -> list[dict[str, object]]:
    return [one.model_dump() | {"what": one.what, "mend": one.mend} for one in waste.findings]
