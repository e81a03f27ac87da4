"""What a command is given: a problem, a profile or a plan in a file, told apart by what is in it, or a model by name.

No torch; a model's name is only recognised here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from budgetopt import solvers
from budgetopt._arguments import CHOICES
from budgetopt._errors import BudgetOptError
from budgetopt._plan import Plan
from budgetopt._problem import to_problem
from budgetopt._schema import Profile
from budgetopt.solvers.problem import Problem

_GZIP = b"\x1f\x8b"  # of these, only problems are compressed


def is_function(text: str) -> bool:
    """Whether it has the form ``module:build``, and is no file."""
    return _FUNCTION.fullmatch(text) is not None and not Path(text).exists()


@dataclass(frozen=True)
class Question:
    """A profile and what was asked of it: by the plan that it came with, or nothing yet.

    Attributes:
        budget, headroom: bytes; None and 0 without a plan. allow, exclude: as :func:`budgetopt.solve` takes them.
    """

    profile: Profile
    budget: int | None = None
    headroom: int | str = 0
    allow: Sequence[str] = CHOICES
    exclude: Sequence[str] = ()


def question(path: Path) -> Question:
    """The profile in the file, or in the plan in the file.

    Raises:
        BudgetOptError: the file can't be read, or it holds neither.
    """
    kind = _kind(path)
    if kind == "problem":
        raise BudgetOptError(f"{str(path)!r} is a problem already: give the profile or the plan that it was made from")
    if kind == "profile":
        return Question(Profile.load(path))
    return asked(Plan.load(path))


def asked(found: Profile | Plan) -> Question:
    """What a plan was asked, and its profile; of a profile, nothing yet.

    Raises:
        BudgetOptError: it is neither.
    """
    if isinstance(found, Plan):
        return Question(found.profile, found.budget_bytes, found.headroom_bytes, found.allow, found.exclude)
    if isinstance(found, Profile):
        return Question(found)
    raise BudgetOptError(
        f"{found!r} is neither a Profile nor a Plan: make one with budgetopt.profile(model, sample) or budgetopt.fit"
    )


def saved(path: Path) -> Plan | Profile:
    """The plan or the profile in the file.

    Raises:
        BudgetOptError: the file can't be read, or it holds neither.
    """
    kind = _kind(path)
    if kind == "problem":
        raise BudgetOptError(f"{str(path)!r} is a problem, which has no names: give a plan or a profile")
    return Plan.load(path) if kind == "plan" else Profile.load(path)


def plan(path: Path) -> Plan:
    """The plan in the file.

    Raises:
        BudgetOptError: the file can't be read, or holds no plan; it says what it is.
    """
    kind = _kind(path)
    if kind != "plan":
        raise BudgetOptError(f"{str(path)!r} is a {kind}, and a plan is wanted: one that fit or solve has written")
    return Plan.load(path)


def problem(path: Path, allow: Sequence[str] | None, exclude: Sequence[str] | None) -> Problem:
    """The problem in the file, or that of the profile or plan in it; its budget is of no account.

    Args:
        allow, exclude: as :func:`budgetopt.solve` takes them; None for what the plan was asked, if it is one.

    Raises:
        BudgetOptError: the file can't be read, or is none of them, or it says already what may be chosen.
    """
    if _kind(path) != "problem":
        asked = question(path)
        allow = asked.allow if allow is None else allow
        return to_problem(asked.profile, 0, allow=allow, exclude=asked.exclude if exclude is None else exclude)
    if allow is not None or exclude is not None:
        raise BudgetOptError(
            f"{str(path)!r} is a problem, which says already what may be chosen: leave out --allow and --exclude, or "
            "give the profile"
        )
    try:
        return solvers.load_problem(path)
    except solvers.ProblemFileError as error:
        raise BudgetOptError(str(error)) from error


def _kind(path: Path) -> str:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BudgetOptError(f"can't read {str(path)!r}: {error.strerror}") from error
    if data.startswith(_GZIP):
        return "problem"
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BudgetOptError(f"{str(path)!r} is no JSON: {error}. {_LEGAL}") from error
    for key, kind in _KEYS.items():
        if isinstance(found, dict) and key in found:
            return kind
    raise BudgetOptError(f"{str(path)!r} is not of budgetopt. {_LEGAL}")


_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_KEYS = {"format": "problem", "profile_data": "plan", "fingerprint": "profile"}
"""What only one of them has; a plan has a fingerprint, too, and is asked for first."""
_LEGAL = "Give a profile that Profile.save wrote, a plan that fit or Plan.save wrote, or a problem's file."
