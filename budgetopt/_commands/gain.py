"""``budgetopt gain``"""

from __future__ import annotations

import argparse

from budgetopt import _options, _source

_EPILOG = """\
examples:
  budgetopt gain plan.json --more 2GB
  budgetopt gain my_model:build --budget 8GB --more 25%

JSON: more_bytes, now and then (each as of budgetopt fits), layers [{path, call,
recomputed_now, recomputed_then, fp16_now, fp16_then}].
"""


def add(commands: _options.Commands) -> None:
    """Say what the command takes."""
    parser = _options.command(
        commands,
        "gain",
        "what more memory would buy",
        "Compare the step under a budget and under a larger one: the time that is saved, and which layers are kept "
        "instead of recomputed. Only a model is run, to be profiled.",
        _EPILOG.replace("%", "%%"),
    )
    _source.add(parser)
    parser.add_argument(
        "--more", type=_options.size, required=True, metavar="SIZE", help="such as 2GB, or 25%% of the budget"
    )
    _options.budget(parser, required=False, default="the plan's own")
    _options.headroom(parser, "as planned, else none")
    _options.choices(parser, "as planned, else all", "as planned, else none")
    _options.solver(parser, 10.0, " for each budget")
    _options.json(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> object:
    """The two answers, and what is between them."""
    from budgetopt import gain
    from budgetopt._progress import progress

    _options.check(options)
    source = _source.read(options)
    with progress("solving for two budgets"):
        found = gain(source, options.more, options.budget, **_options.how(options))
    return found.model_dump_json(indent=2) if options.json else found
