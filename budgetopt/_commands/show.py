"""``budgetopt show``"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from budgetopt import _options

_EPILOG = """\
examples:
  budgetopt show plan.json
  budgetopt show plan.json --layer transformer.h.3.mlp
  budgetopt show profile.json --json

JSON: a plan's as of budgetopt fit, a profile's as of budgetopt profile; with
--layer: file, layer, explanation.
"""


def add(commands: _options.Commands) -> None:
    """Say what the command takes."""
    parser = _options.command(
        commands,
        "show",
        "what is in a saved plan or profile",
        "Print a plan as a table of what happens to each layer, a profile as one of what each layer saves and takes. "
        "Nothing is run.",
        _EPILOG,
    )
    parser.add_argument("file", type=Path, help="a plan or a profile that was saved")
    parser.add_argument(
        "--layer",
        metavar="NAME",
        help="of a plan: what happens to each value of this layer, and why (default: all layers)",
    )
    _options.json(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> object:
    """The plan, the profile, or the explanation of a layer."""
    from budgetopt import _as_json, _given
    from budgetopt._plan import Plan

    if options.layer is not None:
        text = _given.plan(options.file).explain(options.layer)
        document = {"file": str(options.file), "layer": options.layer, "explanation": text}
        return json.dumps(document, indent=2) if options.json else text
    found = _given.saved(options.file)
    if not options.json:
        return found
    return _as_json.plan(found, options.file) if isinstance(found, Plan) else _as_json.profile(found, options.file)
