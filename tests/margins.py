"""How far solvers are apart on recorded steps, and beside published figures. By hand; prints the tables of the docs::

    python -m tests.margins --time-limit 5
    python -m tests.margins --monet

A cell is the extra time as a share of the step, as the referee counts it; "none" where the solver found nothing that
fits. Times are modelled (see :mod:`tests.recorded`): no step ran.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from budgetopt.solvers import InfeasibleError, Problem, load_problem, solve
from budgetopt.solvers.compare import compare, plain_peak
from tests.recorded import RECORDINGS, path_of

SHARES = (0.75, 0.5, 0.35, 0.25)
SOLVERS = ("auto", "regions", "ilp", "lp_rounding", "greedy", "knapsack", "chain", "layer", "sqrt")
MONET = {
    "resnet50": (15.06, {10.01: 3.2, 8.01: 5.6, 6.00: 9.3, 4.99: 12.0}),
    "unet": (14.32, {5.01: 11.5}),
    "mobilenet_v2": (14.46, {5.01: 8.7}),
    "vgg16": (14.12, {5.51: 9.1}),
}
"""GiB of the plain step, and percent of extra time at so many GiB: Shah et al., "Memory optimization for deep networks"
(2021), measured on its authors' GPU."""
GIB = 1 << 30


def margins(names: list[str], time_limit: float) -> None:
    """One line per recorded step and share."""
    print("| step | share | " + " | ".join(SOLVERS) + " | proven |\n" + "| --- " * (len(SOLVERS) + 3) + "|")
    for name in names:
        rows = compare(load_problem(path_of(name)), SHARES, SOLVERS, time_limit=time_limit)
        for share in SHARES:
            cells = [row for row in rows if row.share == share]
            said = ["none" if row.overhead is None else f"{row.overhead:.2%}" for row in cells]
            regions = next(row for row in cells if row.solver == "regions")
            gap = "" if regions.gap is None else f"{regions.gap:.1%}"
            print(f"| {name} | {share:.0%} | " + " | ".join(said) + f" | {gap} |", flush=True)


def monet(time_limit: float) -> None:
    """One line per published figure, at the same number of bytes and at the same share of the plain step's."""
    head = ("step", "GiB plain, theirs", "ours", "budget", "extra time, theirs", "ours", "ours at their share of plain")
    print("| " + " | ".join(head) + " |\n" + "| --- " * len(head) + "|")
    for name, (plain, figures) in MONET.items():
        problem = load_problem(path_of(name))
        ours = plain_peak(problem)
        for size, theirs in figures.items():
            same = [_overhead(problem, round(bytes_), time_limit) for bytes_ in (size * GIB, size / plain * ours)]
            said = f"{plain} | {ours / GIB:.2f} | {size} | {theirs}% | {same[0]} | {same[1]}"
            print(f"| {name} | {said} |", flush=True)


def _overhead(problem: Problem, budget: int, time_limit: float) -> str:
    try:
        found = solve(replace(problem, budget=budget), time_limit=time_limit)
    except InfeasibleError as error:
        return f"none; from {error.minimum / GIB:.2f} GiB on"
    return f"{found.cost_ns / problem.step_ns:.1%}"


def main() -> None:
    """Print what is asked for."""
    parser = argparse.ArgumentParser(description="Solvers beside each other on recorded steps.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(RECORDINGS)}; by default all")
    parser.add_argument("--time-limit", type=float, default=5.0, help="seconds for each answer (default: %(default)s)")
    parser.add_argument("--monet", action="store_true", help="the second table")
    options = parser.parse_args()
    if options.monet:
        monet(options.time_limit)
    else:
        margins(options.names or list(RECORDINGS), options.time_limit)


if __name__ == "__main__":
    main()
