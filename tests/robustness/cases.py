"""The register of troubles: what each test is about, and what comes of it; ``docs/robustness.md`` is made of it.

::

    @case("State", "batch norm updates its statistics twice", "exact", threads="pytorch#96136")
    def test_batch_norm_counts_once(...): ...

``python -m tests.robustness.cases`` prints the page; ``test_cases.py`` holds it to this.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

Outcome = Literal["exact", "fallback", "refused", "as plain"]
"""exact: planned as it stands, bit for bit; fallback: kept, or not planned, exact, and said; refused: a clear error;
as plain: raises or behaves just as the plain model does."""

FOLDER = Path(__file__).parent
GROUPS = (
    "State",
    "Randomness",
    "Autocast and dtypes",
    "Odd tensors",
    "In place",
    "Flips",
    "Autograd",
    "Calls and modules",
    "Distributed",
    "Prediction",
    "Company",
    "Engines",
)

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Case:
    """One trouble.

    Attributes:
        threads: where people told of it. file, line, test: who tests it.
    """

    group: str
    trouble: str
    outcome: Outcome
    threads: str
    file: str
    line: int
    test: str


_FOUND: dict[tuple[str, str], Case] = {}  # by file and test: a file may be imported under two names


def case(group: str, trouble: str, outcome: Outcome, *, threads: str = "") -> Callable[[F], F]:
    """Enter a test into the register."""
    assert group in GROUPS, group

    def enter(test: F) -> F:
        file = Path(test.__code__.co_filename).relative_to(FOLDER.parent).as_posix()
        line = test.__code__.co_firstlineno
        _FOUND[file, test.__name__] = Case(group, trouble, outcome, threads, file, line, test.__name__)
        return test

    return enter


def cases() -> list[Case]:
    """All of them, in the order of the files and of what is in them."""
    for path in sorted([*FOLDER.glob("test_*.py"), FOLDER / "elsewhere.py"]):
        importlib.import_module(f"tests.robustness.{path.stem}")
    return sorted(_FOUND.values(), key=lambda one: (one.file, one.line))


def page() -> str:
    """The table, by group."""
    lines = [(FOLDER / "head.md").read_text(encoding="utf-8").rstrip(), ""]
    for group in GROUPS:
        found = [one for one in cases() if one.group == group]
        if found:
            lines += [f"## {group}", "", "| trouble | outcome | test | told in |", "| --- | --- | --- | --- |"]
            lines += [f"| {c.trouble} | {c.outcome} | `{c.file}::{c.test}` | {c.threads} |" for c in found]
            lines.append("")
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    print(importlib.import_module("tests.robustness.cases").page(), end="")
