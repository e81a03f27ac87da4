"""A model that a command is given by name, as ``module:build``: a function that returns it and a sample."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from budgetopt._errors import BudgetOptError
from budgetopt._profile import profile
from budgetopt._schema import Profile

_RETURNS = "Let it return model, sample or model, sample, options, where options is a dict such as {'loss': my_loss}."


class Built(NamedTuple):
    """What ``build()`` gave.

    Attributes:
        options: more arguments for :func:`budgetopt.profile`: step, loss, optimizer.
    """

    model: torch.nn.Module
    sample: Any
    options: dict[str, Any]


def build(name: str, optimizer: str | None = None) -> Built:
    """Import the module, from the folder one is in or from what is installed, and call the function in it.

    Args:
        name: ``module:build``, both dotted if need be.
        optimizer: takes the place of the one in the options; ``"none"`` is none.

    Raises:
        BudgetOptError: there is no such module or function, or it returns something else. What the module or the
            function itself raises is left as it is.
    """
    module_name, _, path = name.partition(":")
    if not module_name or not path:
        raise BudgetOptError(f"{name!r} names no function: give module:build. {_RETURNS}")
    with _here():
        built = _called(name, module_name, path)
    if optimizer is not None:
        built.options["optimizer"] = None if optimizer == "none" else optimizer
    return built


def _called(name: str, module_name: str, path: str) -> Built:
    found: Any = _module(module_name)
    for attribute in path.split("."):
        if not hasattr(found, attribute):
            raise BudgetOptError(f"{name!r}: {module_name!r} has no {path!r}")
        found = getattr(found, attribute)
    if not callable(found):
        raise BudgetOptError(f"{name!r} is no function. {_RETURNS}")
    try:
        return _checked(name, found())
    except SystemExit as end:
        raise BudgetOptError(f"{name!r} ended the program, sys.exit({end.code!r}). {_RETURNS}") from end


def profiled(name: str, device: str | None, optimizer: str | None = None) -> Profile:
    """The profile of what ``build()`` gives; `device`: as :func:`budgetopt.profile` takes it.

    Raises:
        BudgetOptError: as :func:`build` and :func:`budgetopt.profile`.
    """
    built = build(name, optimizer)
    return profile(built.model, built.sample, device=device, **built.options)


@contextmanager
def _here() -> Iterator[None]:
    """The folder one is in comes first while modules are looked for, those that ``build()`` imports as well."""
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        yield
    finally:
        if here in sys.path:
            sys.path.remove(here)


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except SystemExit as end:
        raise BudgetOptError(f"{name!r} ended the program as it was imported: keep that under __main__") from end
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # something that the module itself imports
        raise BudgetOptError(f"there is no module {error.name!r}, neither in {os.getcwd()!r} nor installed") from error


def _checked(name: str, found: Any) -> Built:
    if not isinstance(found, tuple) or len(found) not in (2, 3) or not isinstance(found[0], torch.nn.Module):
        kind = f"a tuple of {len(found)}" if isinstance(found, tuple) else f"a {type(found).__name__}"
        raise BudgetOptError(f"{name!r} returned {kind}. {_RETURNS}")
    options = found[2] if len(found) == 3 else {}
    if not isinstance(options, Mapping):
        raise BudgetOptError(f"{name!r}: its third result is a {type(options).__name__}. {_RETURNS}")
    unknown = sorted(set(map(str, options)) - {"step", "loss", "optimizer"})
    if unknown:
        raise BudgetOptError(f"{name!r}: unknown options {', '.join(unknown)}; known are step, loss, optimizer")
    return Built(found[0], found[1], dict(options))
