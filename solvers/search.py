"""One budget: patterns picked, judged, and made anew while the prices of bytes say that others would help."""

from __future__ import annotations

from collections.abc import Sequence
from operator import add
from time import monotonic

from .catalogue import Catalogue, Corrections
from .greedy import polish
from .lp_rounding import Relaxed, relaxed
from .memory import Simulation, minimum, simulate
from .nest import Node, outside_in, outside_windows
from .patterns import Pattern
from .problem import Choice, Problem

_CONVERGED = 0.2  # of the gap asked for, between the cost of the best mixture and its bound
_FILLS = 3  # rounds of looking beside the patterns that were picked
_RELAXED = 0.5  # of the time that is left, for the whole step as one program
_ROUNDS = 12  # of prices and new patterns at most
_TRIED = 100_000  # events replayed in search of a small peak, before patterns are asked
_CORRECTIONS = 2  # rounds with the referee at most


class Search:
    """One budget."""

    def __init__(self, problem: Problem, catalogue: Catalogue, backend: str, deadline: float, gap: float) -> None:
        self._problem, self._catalogue, self._backend = problem, catalogue, backend
        self._deadline, self._gap = deadline, gap
        self._picked: dict[Node, Pattern] = {}
        self._rounded: Simulation | None = None

    def solve(self, patience: float, until: float) -> Simulation:
        """Recursion, prices, new patterns, until the bound is met or nothing helps; then the referee's rounds.

        Args:
            patience: seconds beyond the deadline to look for a choice that fits, where none is known.
            until: ``time.monotonic()`` after which a choice that fits is made no better.
        """
        self._catalogue.until(self._deadline)
        best = self._pick()
        for lower in (self._lower, self._lowest, self._descend):
            if best.peak > self._problem.budget:
                best = min(best, lower(patience), self._pick(), key=self._rank)
        if best.peak > self._problem.budget:
            return best
        self._deadline = min(self._deadline, until)
        self._catalogue.until(self._deadline)
        refinements = (self._estimate, self._relax, self._price, self._neighbours)
        for refine, rounds in zip(refinements, (_ROUNDS, 1, _ROUNDS, _FILLS), strict=True):
            for _ in range(rounds):
                if self._good(best) or monotonic() > self._deadline or not refine(best):
                    break
                best = min(best, self._pick(), self._rounded or best, key=self._rank)
        return best if self._good(best) else polish(self._problem, best, self._deadline)

    # Something that fits

    def _lower(self, patience: float) -> Simulation:
        """A small peak, found in a few tries."""
        return self._learnt(low(self._problem, self._deadline))

    def _lowest(self, patience: float) -> Simulation:
        """The smallest peak that patterns make."""
        picked = self._catalogue.lowest(self._backend, self._deadline + patience, self._problem.budget)
        self._catalogue.until(self._deadline)
        return simulate(self._problem, self._catalogue.choices(picked))

    def _descend(self, patience: float) -> Simulation:
        """A small peak, found in all the time that is left."""
        return self._learnt(minimum(self._problem, deadline=self._deadline)[1])

    def _learnt(self, choices: Sequence[Choice]) -> Simulation:
        self._catalogue.learn(choices)
        return simulate(self._problem, choices)

    # One round

    def _rank(self, found: Simulation) -> tuple[int, int]:
        return found.rank(self._problem.budget)

    def _good(self, found: Simulation) -> bool:
        return found.cost_ns - self._catalogue.bound_ns(self._problem.budget) <= self._gap * found.cost_ns

    def _pick(self) -> Simulation:
        """The best patterns for the budget, or for the smallest one that has any, in the referee's eyes.

        Where the referee counts something else in a window or a gap than the regions alone do, that is corrected, and
        they are picked again, twice at most.
        """
        less: Corrections = {}
        best: Simulation | None = None
        for _ in range(1 + _CORRECTIONS):
            picked = self._catalogue.recursion(less, self._problem.budget).within(self._problem.budget)
            found = simulate(self._problem, self._catalogue.choices(picked))
            if best is None or self._rank(found) < self._rank(best):
                best, self._picked = found, picked
            seen = self._differences(picked, found)
            if seen == less or not any(map(any, seen.values())):
                break
            less = seen
        assert best is not None
        return best

    def _differences(self, picked: dict[Node, Pattern], found: Simulation) -> Corrections:
        """What the referee counts in both windows and in the gap of each node, less what the regions alone count."""
        around = {self._catalogue.root: 0}
        seen: Corrections = {}
        for node in outside_in(self._catalogue.root):
            held = around[node]
            forward = backward = 0
            if node.part is not None:
                pattern = picked[node]
                spans = node.part.forward, node.part.backward
                peaks = (max(found.peaks[span.start : span.stop]) for span in spans)
                counted = map(add, node.shift, (pattern.forward, pattern.backward))
                forward, backward = (peak - held - own for peak, own in zip(peaks, counted, strict=True))
                held += pattern.held
            seen[node] = forward, backward, outside_windows(node, found.peaks) - held - node.gap
            around |= dict.fromkeys(node.inside, held)
        return seen

    # Prices

    def _neighbours(self, best: Simulation) -> bool:
        """Look beside the patterns that were picked: with the bytes that are left, and with fewer."""
        left = self._problem.budget - best.peak
        workshops = self._catalogue.workshops
        places = dict.fromkeys((workshops[node], pattern.held) for node, pattern in self._picked.items())
        found = [workshop.within(size) for workshop, held in places for size in (held + left, held - 1) if size >= 0]
        return any(found)

    def _estimate(self, best: Simulation) -> bool:
        """As :meth:`_price`, faster, with less of a bound."""
        return self._price(best, exact=False)

    def _relax(self, best: Simulation) -> bool:
        """A bound by the whole step as one program of shares, and the patterns that rounding those means."""
        found = Relaxed()
        until = monotonic() + _RELAXED * max(0.0, self._deadline - monotonic())
        for seen in relaxed(self._problem, self._backend, until, found):
            if self._rounded is None or self._rank(seen) < self._rank(self._rounded):
                self._rounded = seen
        self._catalogue.proven(self._problem.budget, found.bound_ns)
        if self._rounded is not None:
            self._rounded = polish(self._problem, self._rounded, until)
            self._catalogue.learn(self._rounded.choices)
        return self._rounded is not None

    def _price(self, best: Simulation, exact: bool = True) -> bool:
        """Prove a bound with the prices of bytes, and make the patterns that they ask for; whether there are any."""
        worth = self._catalogue.worth(self._problem.budget, self._picked, self._backend, self._deadline)
        if worth is None:
            return False
        total, new = self._catalogue.price(worth, exact)
        total -= worth.of_budget * self._problem.budget
        # What is left between the two is what whole patterns cost more than mixtures: no pattern helps there.
        return new and worth.cost - total > _CONVERGED * self._gap * worth.cost


def low(problem: Problem, deadline: float) -> tuple[Choice, ...]:
    """A small peak, found in a few tries: the patterns will find the smallest."""
    return minimum(problem, max(4, _TRIED // (len(problem.events) + 1)), deadline)[1]
