"""The pages: what they link to is there, their Python is Python, and the reference is that of the docstrings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from budgetopt.solvers import SOLVERS, Choice, InfeasibleError, minimum, simulate, solve
from tests import reference
from tests.solvers.steps import network

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)

pages = pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)


def _links(text: str) -> list[str]:
    return [link for link in _LINK.findall(_FENCED.sub("", text)) if "://" not in link]


def _anchors(path: Path) -> set[str]:
    """The names that GitHub gives to headings."""
    headings = _HEADING.findall(_FENCED.sub("", path.read_text(encoding="utf-8")))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pages
def test_links_lead_somewhere(page: Path) -> None:
    for link in _links(page.read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert ROOT in (target, *target.parents), link
        assert not anchor or anchor in _anchors(target), link


@pages
def test_python_is_python(page: Path) -> None:
    for block in _BLOCK.findall(page.read_text(encoding="utf-8")):
        compile(block, page.name, "exec")


def test_every_page_is_linked_from_the_readme() -> None:
    linked = {(ROOT / link.partition("#")[0]).resolve() for link in _links((ROOT / "README.md").read_text("utf-8"))}
    assert set(PAGES[1:]) <= linked


def test_modules_that_the_layout_names_are_there() -> None:
    text = (ROOT / "docs" / "contributing.md").read_text(encoding="utf-8")
    rows = [row for row in text.splitlines() if row.startswith("|")]
    named = {name for row in rows for name in re.findall(r"`((?:solvers/|budgetopt/)?\w+\.py)`", row)}
    assert len(named) > 50
    for name in named:
        assert any((ROOT / folder / name).exists() for folder in ("", "budgetopt", "solvers")), name


def test_the_reference_is_that_of_the_docstrings() -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert page == reference.page(), "python -m tests.reference > docs/api.md"


@pytest.fixture(scope="module")
def example() -> Iterator[str]:
    """The solver of docs/contributing.md, entered into the table as the page enters it."""
    text = (ROOT / "docs" / "contributing.md").read_text(encoding="utf-8")
    (block,) = (block for block in _BLOCK.findall(text) if "SOLVERS[" in block)
    before = set(SOLVERS)
    exec(compile(block, "contributing.md", "exec"), {})
    (name,) = SOLVERS.keys() - before
    yield name
    del SOLVERS[name]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_the_solver_on_the_page(example: str, seed: int, share: float) -> None:
    step = network(Random(seed), 2, 4, halves=False).problem()
    plain = simulate(step, [Choice.KEEP] * len(step.values)).peak
    least = minimum(step)[0]  # of so few choices, all were tried
    problem = replace(step, budget=least + round(share * (plain - least)))
    found, best = solve(problem, example), solve(problem, "exhaustive")
    seen = simulate(problem, found.choices)
    assert (seen.peak, seen.cost_ns) == (found.peak, found.cost_ns)
    assert best.cost_ns <= seen.cost_ns
    assert seen.peak <= problem.budget
    assert share < 1.0 or seen.cost_ns == 0


def test_the_solver_on_the_page_refuses_what_nothing_fits(example: str) -> None:
    step = network(Random(0), 2, 4, halves=False).problem()
    with pytest.raises(InfeasibleError):
        solve(replace(step, budget=minimum(step)[0] - 1), example)
