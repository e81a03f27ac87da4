"""The linear program over patterns: what a byte is worth at each moment, and a bound of every answer.

    min sum of cost(p) y[g, p]   with   sum over p of y[g, p] = 1   for every region g, and for every moment w
    what the regions around hold + sum over p of (bytes that p needs at w) y[g, p]   <=   budget.

Moments are the two windows of each region and the gap inside it. The duals mu[w] >= 0 are prices of bytes.
For any prices, the sum over regions of the cheapest (cost + priced bytes), less the price of the budget, is a
lower bound of the cost of every choice that the referee accepts (Lagrange); with the prices of this program,
and the regions' own programs as the judges of the cheapest, it is the bound that this solver proves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pulp

from .backends import Outcome, run
from .errors import SolverError
from .nest import Node, outside_in
from .patterns import Pattern, Prices

_SCALE = 100.0  # the budget, in units of the program


class Worth(NamedTuple):
    """Prices in nanoseconds per byte, or in bytes per byte where time does not count.

    Attributes:
        windows: of the two windows of each region. gaps: of the gap inside each node, the root included.
        held: of what each region holds: the sum over all windows and gaps inside it.
        cost: of the best mixture of the known patterns, in nanoseconds or bytes. time: what a nanosecond is worth.
        engine: who answered, with a note after a fallback.
    """

    windows: dict[Node, tuple[float, float]]
    gaps: dict[Node, float]
    held: dict[Node, float]
    cost: float
    time: float
    engine: str

    def prices(self, node: Node) -> Prices:
        """Of one region's bytes."""
        return Prices(self.held[node], *self.windows[node], self.time)

    @property
    def of_budget(self) -> float:
        """What a byte of the budget is worth: the sum over all moments."""
        return sum(self.gaps.values()) + sum(map(sum, self.windows.values()))

    @property
    def constant(self) -> float:
        """The part of the bound that no choice and no budget changes: gaps and shifts, less what may count twice."""
        total = sum(price * (node.gap - node.double_gap) for node, price in self.gaps.items())
        for node, pair in self.windows.items():
            total += sum(p * (shift - double) for p, shift, double in zip(pair, node.shift, node.double, strict=True))
        return total


class Master:
    """The program over the patterns that are known of each node.

    Args:
        budget: bytes. lowest: look for the smallest budget instead, of which `budget` is an estimate.
    """

    def __init__(self, root: Node, budget: int, backend: str, lowest: bool = False) -> None:
        self._root, self._budget, self._backend, self._lowest = root, budget, backend, lowest
        self._nodes = outside_in(root)
        self._columns: dict[Node, list[Pattern]] = {node: [] for node in self._nodes if node.part is not None}

    def add(self, node: Node, pattern: Pattern) -> bool:
        """Whether the pattern is new to the node."""
        new = pattern not in self._columns[node]
        if new:
            self._columns[node].append(pattern)
        return new

    def worth(self, seconds: float) -> Worth | None:
        """Solve; None if no mixture of the patterns fits, or no engine answers in time."""
        program = _Linear(self._root, self._nodes, self._columns, self._budget, self._lowest)
        try:
            outcome = run(program.pulp, self._backend, seconds, 0.0)
        except SolverError:
            return None
        return program.worth(outcome) if outcome.found else None


class _Linear:
    def __init__(
        self, root: Node, nodes: Sequence[Node], columns: dict[Node, list[Pattern]], budget: int, lowest: bool
    ) -> None:
        self.pulp = pulp.LpProblem("patterns", pulp.LpMinimize)
        self._nodes, self._budget, self._scale = nodes, budget, _SCALE / max(1, budget)
        self._count = self._height = 0
        self._lowest = self._new() if lowest else None
        self._unit = float(max([1, *(p.cost_ns for some in columns.values() for p in some)]))
        self._rows: dict[str, tuple[Node, int]] = {}  # by name: windows 0 and 1, gap 2
        outer: dict[Node, pulp.LpVariable | None] = {root: None}
        self._costs: dict[pulp.LpVariable, float] = {}
        for node in nodes:
            around = outer[node]
            if node.part is not None:
                around = self._node(node, columns[node], around)
            self._at_most(node, 2, {around: 1.0} if around is not None else {}, node.gap)
            for child in node.inside:
                outer[child] = around
        if self._lowest is not None:
            self._costs, self._unit = {self._lowest: 1.0}, 1.0 / self._scale
        self.pulp.setObjective(pulp.LpAffineExpression(self._costs))

    def worth(self, outcome: Outcome) -> Worth:
        """Duals of the rows as prices: none is below zero, and bytes held are worth what all inside them is."""
        unit = self._unit * self._scale  # ns per byte, for one unit of cost per unit of bytes
        mu = {place: max(0.0, -outcome.prices.get(name, 0.0)) * unit for name, place in self._rows.items()}
        windows = {node: (mu.get((node, 0), 0.0), mu.get((node, 1), 0.0)) for node in self._nodes if node.part}
        gaps = {node: mu.get((node, 2), 0.0) for node in self._nodes}
        held: dict[Node, float] = {}
        for node in reversed(self._nodes):
            held[node] = gaps[node] + sum(held[child] + sum(windows[child]) for child in node.inside)
        objective = sum(share * outcome.values[x.name] for x, share in self._costs.items())
        return Worth(windows, gaps, held, objective * self._unit, float(self._lowest is None), outcome.engine)

    def _node(
        self,
        node: Node,
        patterns: list[Pattern],
        around: pulp.LpVariable | None,
    ) -> pulp.LpVariable:
        chosen = {self._new(): pattern for pattern in patterns}
        self._costs |= {y: pattern.cost_ns / self._unit for y, pattern in chosen.items() if pattern.cost_ns}
        self._row(dict.fromkeys(chosen, 1.0), pulp.LpConstraintEQ, 1.0)
        before = {around: 1.0} if around is not None else {}
        for window, shift in enumerate(node.shift):
            # Shifts may be below zero, and coefficients of about the same size are best: take them to the right.
            terms = {y: (p.forward, p.backward)[window] * self._scale for y, p in chosen.items()}
            self._at_most(node, window, {**before, **terms}, shift)
        total = self._new()
        held = {y: -p.held * self._scale for y, p in chosen.items()}
        self._row({total: 1.0, **{x: -1.0 for x in before}, **held}, pulp.LpConstraintEQ, 0.0)
        return total

    def _at_most(self, node: Node, kind: int, terms: dict[pulp.LpVariable, float], constant: int) -> None:
        size = self._budget - constant
        if self._lowest is not None:
            terms, size = {**terms, self._lowest: -1.0}, -constant
        if terms:
            name = self._row(terms, pulp.LpConstraintLE, size * self._scale)
            self._rows[name] = node, kind

    def _new(self) -> pulp.LpVariable:
        self._count += 1
        return self.pulp.add_variable(f"x{self._count}", 0)

    def _row(self, terms: dict[pulp.LpVariable, float], sense: int, right: float) -> str:
        self._height += 1
        name = f"c{self._height}"
        kept = {x: size for x, size in terms.items() if size}
        self.pulp.addConstraint(pulp.LpConstraint(pulp.LpAffineExpression(kept), sense, rhs=right), name)
        return name
