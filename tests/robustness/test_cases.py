"""The page of cases says what the tests say."""

from __future__ import annotations

from pathlib import Path

from tests.robustness import cases

PAGE = Path(__file__).parents[2] / "docs" / "robustness.md"


def test_the_page_is_that_of_the_tests() -> None:
    assert PAGE.read_text(encoding="utf-8") == cases.page(), "python -m tests.robustness.cases > docs/robustness.md"


def test_every_case_has_a_name_of_its_own() -> None:
    found = [one.trouble for one in cases.cases()]
    assert len(set(found)) == len(found)
