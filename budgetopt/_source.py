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
    return profiled(options) if is_model(options) else _given.saved(Path(options.source))


def is_model(options: argparse.Namespace) -> bool:
    """Whether the source is a model by name; if not, no option may be given that is for one.

    Raises:
        BudgetOptError: one was.
    """
    if _given.is_function(options.source):
        return True
    for name in ("device", "optimizer"):
        given = getattr(options, name, None)
        if given is not None:
            raise BudgetOptError(f"--{name} {given} is for a model (module:build); the file has its own")
    return False


def profiled(options: argparse.Namespace) -> Profile:
    """The profile of the model that the source names."""
    from budgetopt import _entry

    with progress(f"profiling one step of {options.source}"):
        return _entry.profiled(options.source, options.device, getattr(options, "optimizer", None))
