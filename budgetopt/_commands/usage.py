"""``budgetopt usage``"""

from __future__ import annotations

import argparse

from budgetopt import _options, _source

_EPILOG = """\
examples:
  budgetopt usage my_model:build
  budgetopt usage plan.json --depth 4

JSON: peak_bytes, peak_at, parameters, gradients, optimizer_state,
optimizer_step, buffers, sample, activations, replays, temporaries (these add up
to peak_bytes), model {path, kind, bytes, own_bytes, layers}, modelled.
"""


def add(commands: _options.Commands) -> None:
    """Say what the command takes."""
    parser = _options.command(
        commands,
        "usage",
        "what uses the memory",
        "Print what a step's memory consists of at its peak: parameters, gradients, optimizer state, activations by "
        "layer. Of a plan: of the planned step. Only a model is run, to be profiled.",
        _EPILOG,
    )
    _source.add(parser)
    parser.add_argument(
        "--depth",
        type=_options.positive,
        default=3,
        metavar="N",
        help="how far down layers are listed (default: 3)",
    )
    _options.json(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> object:
    """The parts."""
    from budgetopt import usage

    found = usage(_source.read(options), depth=options.depth)
    return found.model_dump_json(indent=2) if options.json else found
