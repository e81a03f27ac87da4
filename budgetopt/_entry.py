"""A model that a command is given by name, as ``module:build``: a function that returns it and a sample."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
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


def build(name: str) -> Built:
    """Import the module, from the folder one is in or from what is installed, and call the function in it.

    Args:
        name: ``module:build``, both dotted if need be.

    Raises:
        BudgetOptError: there is no such module or function, or it returns something else. What the module or the
            function itself raises is left as it is.
    """
    module_name, _, path = name.partition(":")
    found: Any = _module(module_name)
    for attribute in path.split("."):
        if not hasattr(found, attribute):
            raise BudgetOptError(f"{name!r}: {module_name!r} has no {path!r}")
        found = getattr(found, attribute)
    if not callable(found):
        raise BudgetOptError(f"{name!r} is no function. {_RETURNS}")
    return _checked(name, found())


def profiled(name: str, device: str | None) -> Profile:
    """The profile of what ``build()`` gives; `device`: as :func:`budgetopt.profile` takes it.

    Raises:
        BudgetOptError: as :func:`build` and :func:`budgetopt.profile`.
    """
    built = build(name)
    return profile(built.model, built.sample, device=device, **built.options)


def _module(name: str) -> Any:
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # something that the module itself imports
        raise BudgetOptError(f"there is no module {error.name!r}, neither in {here!r} nor installed") from error
    finally:
        sys.path.remove(here)


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
