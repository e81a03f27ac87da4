"""What can go wrong in a solver. Imports nothing; the public edge maps these to its own errors."""

from __future__ import annotations


class SolverError(Exception):
    """A solver cannot answer: an unknown name, a problem too large for it, no engine left."""


class ProblemFileError(SolverError):
    """A problem can't be read from a file, or written to one; the message names the file, the place and the way out."""


class InfeasibleError(SolverError):
    """No choice was found whose peak is within the budget.

    Attributes:
        minimum: bytes of the smallest peak found (:func:`budgetopt.solvers.memory.minimum`).
        choices: the choice per value that reaches it, as the integers of ``Choice``. segments: those it needs, as
            (first, last) region.
    """

    def __init__(
        self, minimum: int, choices: tuple[int, ...], budget: int, segments: tuple[tuple[int, int], ...] = ()
    ) -> None:
        super().__init__(f"no choice fits into {budget} bytes; the smallest peak found is {minimum} bytes")
        self.minimum = minimum
        self.choices = choices
        self.segments = segments
