"""HTML from the templates in ``pages/``; every text in it is escaped. No torch."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from budgetopt._report import PROFILE_COLUMNS, profile_cells, profile_foot
from budgetopt._units import show_bytes, show_gap, show_ns

if TYPE_CHECKING:
    from jinja2 import Environment

    from budgetopt._schema import Profile


@cache
def _templates() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined  # late: only pages need it

    found = Environment(
        loader=PackageLoader("budgetopt", "pages"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters |= {"bytes": show_bytes, "gap": show_gap, "ns": show_ns}
    return found


def render(template: str, **values: Any) -> str:
    """The template with its values."""
    return _templates().get_template(template).render(**values)


def profile_html(profile: Profile) -> str:
    """What ``print(profile)`` says, as a table for notebooks."""
    head = "activations saved by forward, per layer (children included)"
    rows, foot = profile_cells(profile), profile_foot(profile)
    return render("table.html", head=head, columns=PROFILE_COLUMNS, rows=rows, words=(0, 1), foot=foot)
