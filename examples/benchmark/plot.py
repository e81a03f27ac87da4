"""The results as a picture: step time against peak, a panel a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

MARKS = {"checkpoint": "s", "selective": "D", "compile": "^"}


def draw(found: dict[str, Any], path: Path) -> None:
    """Write it; the format is that of the file's name."""
    models = found["models"]
    columns = min(2, len(models))
    rows = -(-len(models) // columns)
    figure = Figure(figsize=(5.5 * columns, 3.6 * rows + 0.6), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False)
    for axes, (name, model) in zip(panels.flat, models.items(), strict=False):
        _panel(axes, name, model)
    for axes in panels.flat[len(models) :]:
        axes.remove()
    handles, labels = panels.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)


def _panel(axes: Any, name: str, model: dict[str, Any]) -> None:
    ours = sorted(
        (row["peak_bytes"] / 1e6, row["ratio"])
        for row in (*model["matched"].values(), *model["shares"].values())
        if row
    )
    axes.plot([peak for peak, _ in ours], [ratio for _, ratio in ours], "o-", color="C3", label="budgetopt", zorder=3)
    axes.plot(model["plain"]["peak_bytes"] / 1e6, 1.0, "k*", markersize=11, label="plain")
    for number, (way, row) in enumerate(model["peers"].items()):
        if row:
            color = f"C{(0, 1, 2, 4, 5, 6, 7, 8, 9)[number % 9]}"
            axes.plot(row["peak_bytes"] / 1e6, row["ratio"], MARKS[way.split()[0].rstrip(",:")], color=color, label=way)
    axes.set_title(name)
    axes.set_xlabel("measured peak, MB")
    axes.set_ylabel("step time ÷ plain")
    axes.grid(alpha=0.3)
