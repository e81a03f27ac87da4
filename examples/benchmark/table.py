"""The results of one model as a table."""

from __future__ import annotations

from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

CONTROL_LIMIT = 0.03
SAME_LOSS = 1e-5
COLUMNS = (
    "peak MB",
    "× plain",
    "quartiles",
    "gradients",
    "set-up s",
    "ours: peak MB",
    "× plain",
    "quartiles",
    "ours ÷ it",
)


def show(name: str, found: dict[str, Any]) -> None:
    """Print it: each peer, and ours at its peak on the same line."""
    table = Table(title=name, caption="step: forward + backward; ours: given the peer's peak as budget", box=SIMPLE)
    table.add_column("way", no_wrap=True)
    for column in COLUMNS:
        table.add_column(column, justify="right")
    table.add_row("plain", *_cells(found["plain"]))
    for way, row in found["shares"].items():
        table.add_row(way, *(["does not fit"] if row is None else _cells(row)))
    for way, row in found["peers"].items():
        if row is None:
            table.add_row(way, f"failed: {found['failed'][way]}")
        else:
            table.add_row(way, *_cells(row), *_ours(row, found["matched"][way]))
    console = Console(width=None if Console().is_terminal else 150)
    console.print(table)
    for way, text in found["failed"].items():
        console.print(f"{way}: {text}", markup=False)
    verdict = "VOID: run again on a quiet machine" if found["noise"] > CONTROL_LIMIT else "valid"
    console.print(f"control: {found['noise']:.1%} from plain (limit {CONTROL_LIMIT:.0%}): {verdict}\n")


def _cells(row: dict[str, Any]) -> list[str]:
    return [*_figures(row), _gradients(row), f"{row['prepare_ns'] / 1e9:.0f}"]


def _gradients(row: dict[str, Any]) -> str:
    """Where dropout draws other numbers, as in compiled code, the losses differ and gradients can't be compared."""
    if row["loss_error"] > SAME_LOSS:
        return "other draws"
    return "equal" if row["gradient_error"] == 0 else f"{row['gradient_error']:.0e}"


def _figures(row: dict[str, Any]) -> list[str]:
    low, high = row["quartiles"]
    return [f"{row['peak_bytes'] / 1e6:.1f}", f"{row['ratio']:.2f}", f"{low:.2f}-{high:.2f}"]


def _ours(peer: dict[str, Any], ours: dict[str, Any] | None) -> list[str]:
    if ours is None:
        return ["does not fit"]
    return [*_figures(ours), f"{ours['ratio'] / peer['ratio']:.2f}"]
