"""``budgetopt profile``"""

from __future__ import annotations

import argparse

from budgetopt import _options

_EPILOG = """\
examples:
  budgetopt profile my_model:build
  budgetopt profile my_model:build -o profile.json
  budgetopt profile my_model:build --device h200 -o h200.json

JSON: file, resident_bytes, peak_bytes, step_ns, fixed {parameter, buffer,
gradient, optimizer, sample}, optimizer_workspace, batch, scaled_from,
modelled, loss_guessed, environment, not_replayable, layers [{path, kind,
activation_bytes, forward_ns}]. Bytes and nanoseconds are integers.
"""


def add(commands: _options.Commands) -> None:
    """Say what the command takes."""
    parser = _options.command(
        commands,
        "profile",
        "measure one training step, layer by layer",
        "Build the model and measure one training step of it: what each layer saves for its backward pass, and how "
        "long it takes. Prints a table.",
        _EPILOG,
    )
    _options.model(parser)
    _options.output(parser, "save the profile there, for budgetopt solve, frontier and compare")
    _options.device(parser)
    _options.optimizer(parser)
    _options.json(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> object:
    """The profile."""
    _options.writable(options.output)

    from budgetopt import _as_json
    from budgetopt._entry import profiled
    from budgetopt._progress import progress

    with progress(f"profiling one step of {options.model}"):
        found = profiled(options.model, options.device, options.optimizer)
    if options.output is not None:
        found.save(options.output)
    return _as_json.profile(found, options.output) if options.json else found
