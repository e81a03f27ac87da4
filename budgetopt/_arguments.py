"""What the caller asked for, checked before anything runs. Every error names the value and says what is legal.

No torch: what needs the model itself is checked where its device is looked up.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterable
from difflib import get_close_matches
from numbers import Real
from pathlib import Path
from typing import Any

from budgetopt._errors import BudgetOptError, InvalidBudgetError
from budgetopt._units import parse_bytes, show_bytes

CHOICES = ("keep", "recompute", "fp16")


def choices(allow: Iterable[str]) -> tuple[str, ...]:
    """`allow` as a tuple of choices that exist."""
    if isinstance(allow, str) or not isinstance(allow, Collection):
        raise BudgetOptError(f"allow={allow!r}: give a tuple of choices out of {', '.join(CHOICES)}")
    unknown = [choice for choice in allow if choice not in CHOICES]
    if unknown:
        raise BudgetOptError(f"allow: no such choice {unknown[0]!r}; there are {', '.join(CHOICES)}")
    return tuple(allow)


def layers(exclude: Iterable[str], paths: Collection[str], argument: str = "exclude") -> tuple[str, ...]:
    """`exclude` as a tuple of paths out of `paths`, the names of the model's modules."""
    if isinstance(exclude, str) or not isinstance(exclude, Collection):
        raise BudgetOptError(f"{argument}={exclude!r}: give a tuple of names out of model.named_modules()")
    for path in exclude:
        if path not in paths:
            near = _near(str(path), paths)
            hint = f"did you mean {' or '.join(map(repr, near))}?" if near else "names are those of named_modules()"
            raise BudgetOptError(f"{argument}: the model has no layer {path!r}; {hint}")
    return tuple(exclude)


def _near(path: str, paths: Collection[str]) -> list[str]:
    """Up to three names like `path`: a slip of the pen, or the same last part under another parent."""
    same = [p for p in paths if p and p.split(".")[-1] == path.split(".")[-1]]
    return list(dict.fromkeys([*get_close_matches(path, paths, cutoff=0.7), *same]))[:3]


def further_samples(samples: Iterable[Any]) -> list[Any]:
    """`samples` as a list; a batch in its place would be taken apart."""
    if not isinstance(samples, (list, tuple)):
        raise BudgetOptError(f"samples={type(samples).__name__}: give a list of further batches, [batch, batch]")
    return list(samples)


def number(value: Any, argument: str, legal: str, low: float, high: float = math.inf) -> float:
    """`value`, if it is a number from `low` to `high`; `legal` says in words what is."""
    # NaN is in no range.
    if isinstance(value, bool) or not isinstance(value, Real) or not low <= float(value) <= high:
        raise BudgetOptError(f"{argument}={value!r}: give {legal}")
    return float(value)


def function(value: Any, argument: str, call: str) -> None:
    """Raise unless `value` is None or can be called; `call` shows how it will be."""
    if value is not None and not callable(value):
        raise BudgetOptError(f"{argument}={value!r} can't be called: give a function, {call}")


def headroom_bytes(value: int | str, budget: int) -> int:
    """Bytes to take off `budget`: at least 0, and less than all of it."""
    if value == 0 and not isinstance(value, bool):
        return 0
    found = parse_bytes(value, total=budget, free=None, argument="headroom")
    if found >= budget:
        raise InvalidBudgetError(
            f"headroom={value!r} leaves nothing of the budget of {show_bytes(budget)}: give less, '5%' say"
        )
    return found


def plan_path(plan: str | os.PathLike[str] | None) -> Path | None:
    """Where the plan is read from or will be written to, checked as far as that goes without writing."""
    if plan is None:
        return None
    if not isinstance(plan, (str, os.PathLike)) or not os.fspath(plan):
        raise BudgetOptError(f"plan={plan!r}: give the path of a JSON file, such as 'plan.json'")
    path = Path(plan)
    if path.is_dir():
        raise BudgetOptError(f"plan={str(plan)!r} is a folder: give a file in it, such as {str(path / 'plan.json')!r}")
    if not path.exists() and not (path.parent.is_dir() and os.access(path.parent, os.W_OK)):
        raise BudgetOptError(f"can't write the plan {str(plan)!r}: choose a folder that exists and can be written to")
    return path
