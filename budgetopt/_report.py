"""What people read: the line that `fit` prints, and tables of profiles and plans. No torch."""

from __future__ import annotations

import io
import random
import shutil
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from budgetopt._units import show_bytes, show_gap, show_ns

if TYPE_CHECKING:
    from rich.table import Table

    from budgetopt._plan import Plan
    from budgetopt._schema import FrontierPoint, Profile

WIDTH = 120
"""Columns of a table, if the terminal does not have fewer."""
NARROW = 60
"""Columns without which a table can't be read."""
NAME = 34
"""Columns for the names of layers, before others are folded."""


def fit_line(plan: Plan, *, reused: bool, notes: list[str]) -> str:
    """One line: budget, peak, overhead, exact or the fp16 error, what fell back."""
    predicted, measured = plan.predicted, plan.measured
    size = show_bytes(measured.peak_bytes if measured else predicted.peak_bytes)
    peak = f"peak {size}" if measured else f"predicted peak {size}"
    parts = [f"{show_bytes(plan.budget_bytes)} budget, {peak} (plain {show_bytes(predicted.plain_peak_bytes)})"]
    if not plan.drops:
        parts.append("everything fits, the model is not touched")
    else:
        parts.append(f"about {predicted.overhead:+.1%} step time")
        parts.append(exactness(plan))
    if predicted.reserved_bytes or (measured and measured.reserved_bytes):
        parts.append(_reserved(plan))
    if plan.drops:
        parts.append(f"{plan.solver}, gap {show_gap(plan.gap)}")
    if reused:
        parts.append("saved plan reused")
    return "budgetopt: " + "; ".join([*parts, *notes])


def _reserved(plan: Plan) -> str:
    predicted = f"predicted {show_bytes(plan.predicted.reserved_bytes)}" if plan.predicted.reserved_bytes else ""
    if plan.measured is None or not plan.measured.reserved_bytes:
        return f"{predicted} reserved by the allocator"
    return f"the allocator reserved {show_bytes(plan.measured.reserved_bytes)}" + (
        f" ({predicted})" if predicted else ""
    )


def exactness(plan: Plan) -> str:
    """What is known of the gradients."""
    if not plan.halves:
        return "gradients exact"
    if plan.measured is None:
        return "fp16, neither the gradient error nor the peak is measured: it may be over the prediction"
    error = plan.measured.grad_error
    return "fp16, gradient error not measured" if error is None else f"fp16, gradient error {error:.1e}"


PROFILE_COLUMNS = ("layer", "class", "activations", "forward")


def profile_cells(profile: Profile) -> list[tuple[str, ...]]:
    """A row of text for each layer that saves something: activation bytes and forward time, children included."""
    total = max((layer.activation_bytes for layer in profile.layers), default=0)
    return [
        (layer.path or "(model)", layer.kind, show_bytes(layer.activation_bytes), show_ns(layer.forward_ns))
        for layer in profile.layers
        if layer.activation_bytes * 200 >= total > 0
    ]


def profile_table(profile: Profile) -> str:
    """One row per layer that saves something, and what else there is to say of the step."""
    table = new_table("activations saved by forward, per layer (children included)")
    add_columns(table, PROFILE_COLUMNS, profile_cells(profile), ("class",))
    return text_of(table) + "\n".join(profile_foot(profile))


def profile_foot(profile: Profile) -> list[str]:
    """What else there is to say of the step, a line each."""
    fixed = ", ".join(f"{kind} {show_bytes(size)}" for kind, size in profile.fixed.model_dump().items() if size)
    foot = [f"fixed: {fixed}", f"plain peak {show_bytes(profile.peak_bytes)}"]
    if profile.optimizer_workspace:
        foot.append(f"the optimizer's step needs {show_bytes(profile.optimizer_workspace)} on top of its state")
    if profile.not_replayable:
        foot.append(f"not replayable, so kept: {len(profile.not_replayable)} operators")
    if profile.modelled:
        foot.append(
            f"modelled on {profile.modelled}, not run: times are a roofline's, operators' own memory is not known"
        )
    if profile.scaled_from:
        foot.append(scaled_note(profile))
    if profile.loss_guessed:
        foot.append("the loss was guessed as the sum of the outputs' means: its own memory is not in these figures")
    return foot


def frontier_table(profile: Profile, points: Sequence[FrontierPoint]) -> str:
    """One row per budget: what the cheapest plan takes there, and what sets its peak."""
    table = new_table("what each byte of budget buys")
    for name in ("budget", "share", "peak", "overhead", "gap"):
        table.add_column(name, no_wrap=True, justify="right")
    table.add_column("peak at")
    above = profile.peak_bytes - profile.fixed.total
    for point in points:
        share = (point.budget_bytes - profile.fixed.total) / above if above else 1.0
        sizes = [show_bytes(point.budget_bytes), f"{share:.3f}", show_bytes(point.peak_bytes)]
        table.add_row(*sizes, f"{point.overhead:.2%}", show_gap(point.gap), point.peak_at)
    return text_of(table) + (
        f"share: of the {show_bytes(above)} that keeping everything takes on top of the "
        f"{show_bytes(profile.fixed.total)} resident\n"
        f"overhead: extra time as a share of a plain step ({show_ns(profile.step_ns)}); gap: proven distance from the "
        "cheapest choice"
    )


def scaled_note(profile: Profile) -> str:
    """From what a profile was scaled whose own batch did not fit."""
    sizes = " and ".join(str(size) for size in profile.scaled_from)
    return f"the batch of {profile.batch} did not fit while profiling: scaled from batches of {sizes}"


@contextmanager
def _same_random() -> Iterator[None]:
    """rich draws from Python's `random` as it is imported, and the user's numbers must not move."""
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)


def new_table(title: str) -> Table:
    """An empty table."""
    with _same_random():
        from rich.box import SIMPLE  # late: fit needs none of it
        from rich.table import Table

        return Table(box=SIMPLE, title=title)


def add_columns(table: Table, names: Iterable[str], rows: Sequence[Sequence[str]], words: Collection[str]) -> None:
    """Columns and rows: `words` to the left, numbers whole and to the right. The first, names of layers, is not cut."""
    longest = max((len(row[0]) for row in rows), default=0)
    for number, name in enumerate(names):
        if number == 0:
            table.add_column(name, overflow="fold", min_width=min(NAME, longest))
        else:
            table.add_column(name, justify="left" if name in words else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)


def columns() -> int:
    """How wide tables are: as the terminal, within reason; elsewhere, in a file or a notebook, as wide as they get."""
    if sys.stdout is None or not sys.stdout.isatty():
        return WIDTH
    return max(NARROW, min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns))


def text_of(table: Table) -> str:
    """The table as text."""
    buffer = io.StringIO()
    with _same_random():
        from rich.console import Console

        Console(file=buffer, width=columns()).print(table)
    return buffer.getvalue()
