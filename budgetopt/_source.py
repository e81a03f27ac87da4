"""What a command asks about: a saved profile or plan, or a model by name, which is profiled; only that needs torch."""

from __future__ import annotations

import argparse
from pathlib import Path

from budgetopt import _given, _options
from budgetopt._errors import BudgetOptError
from budgetopt._plan import Plan
from budgetopt._progress import progress
from budgetopt._schema import Profile


def add(parser: argparse.ArgumentParser) -> None:
    """The argument, and what is only for a model."""
    parser.add_argument(
        "source", help=f"a profile or a plan that was saved, or module:build, which is profiled: {_options.MODEL}"
    )
    _options.device(parser)
    _options.optimizer(parser)


def read(options: argparse.Namespace) -> Plan | Profile:
    """What is in the file, or the profile of the model.

    Raises:
        BudgetOptError: see :func:`budgetopt._given.saved` and :func:`budgetopt.profile`; or an option is for a model.
    """
    if not _given.is_function(options.source):
        for name in ("device", "optimizer"):
            if getattr(options, name) is not None:
                raise BudgetOptError(
                    f"--{name} {getattr(options, name)} is for a model (module:build); the file has its own"
                )
        return _given.saved(Path(options.source))
    from budgetopt._entry import profiled

    with progress(f"profiling one step of {options.source}"):
        return profiled(options.source, options.device, options.optimizer)
