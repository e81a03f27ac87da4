"""``budgetopt fits``"""

from __future__ import annotations

import argparse

from budgetopt import _options, _source

_EPILOG = """\
examples:
  budgetopt fits my_model:build --budget 8GB
  budgetopt fits my_model:build --budget 80GB --device h100
  budgetopt fits profile.json --budget 8GB --allow keep recompute

JSON: answer (plain, planned or no), budget_bytes, headroom_bytes,
plain_peak_bytes, peak_bytes, overhead, extra_ns, halves, minimum_bytes, set_by.
"""


def add(commands: _options.Commands) -> None:
    """Say what the command takes."""
    parser = _options.command(
        commands,
        "fits",
        "will it fit, and at what cost",
        "Say whether a training step fits a budget: as it is, with a plan and at what cost in time, or not, and what "
        "the smallest budget is. The exit status is 0 for each of these. Only a model is run, to be profiled.",
        _EPILOG,
    )
    _source.add(parser)
    _options.budget(parser)
    _options.headroom(parser, "as planned, else none")
    _options.choices(parser, "as planned, else all", "as planned, else none")
    _options.solver(parser)
    _options.json(parser, "a sentence")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> object:
    """The answer."""
    from budgetopt import fits
    from budgetopt._progress import progress

    _options.check(options)
    source = _source.read(options)
    with progress("solving"):
        found = fits(source, options.budget, **_options.how(options))
    return found.model_dump_json(indent=2) if options.json else found
