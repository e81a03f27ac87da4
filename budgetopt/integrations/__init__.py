"""One line for other people's training loops, where nothing of yours runs between `prepare` and the first step.

:func:`fit_trainer` for transformers' ``Trainer``, :class:`BudgetCallback` for Lightning's. The libraries are optional:
each name loads when it is asked for. Loops that you write yourself need nothing of this: call ``budgetopt.fit``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from budgetopt._errors import BudgetOptError

if TYPE_CHECKING:
    from budgetopt.integrations._lightning import BudgetCallback
    from budgetopt.integrations._trainer import fit_trainer

_WHERE = {"fit_trainer": ("_trainer", "transformers"), "BudgetCallback": ("_lightning", "lightning")}
"""The module of each name, and the extra with the libraries that it needs."""

__all__ = ["BudgetCallback", "fit_trainer"]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'budgetopt.integrations' has no attribute {name!r}")
    module, extra = _WHERE[name]
    try:
        return getattr(import_module(f"budgetopt.integrations.{module}"), name)
    except ModuleNotFoundError as error:
        raise BudgetOptError(
            f"budgetopt.integrations.{name} needs {error.name}, which is not installed: "
            f"pip install 'budgetopt[{extra}]', or pip install {error.name}"
        ) from error


def __dir__() -> list[str]:
    return list(__all__)
