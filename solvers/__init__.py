"""Which values to keep, recompute or store in fp16: the problem, the referee and the solvers. No torch."""

from .caching import Reserved, reserved
from .compare import Row, compare
from .errors import InfeasibleError, ProblemFileError, SolverError
from .files import load_problem, save_problem
from .memory import Simulation, decisions, fixed_keeps, minimum, normalise, simulate, window_peaks, windows
from .problem import OUTSIDE, Choice, Event, Kind, Operator, Problem, Region, Segment, Solution, Value
from .solve import SOLVERS, frontier, smallest, solve
from .whole import leanest
from .windows import Window

__all__ = [
    "OUTSIDE",
    "SOLVERS",
    "Choice",
    "Event",
    "InfeasibleError",
    "Kind",
    "Operator",
    "Problem",
    "ProblemFileError",
    "Region",
    "Reserved",
    "Row",
    "Segment",
    "Simulation",
    "Solution",
    "SolverError",
    "Value",
    "Window",
    "compare",
    "decisions",
    "fixed_keeps",
    "frontier",
    "leanest",
    "load_problem",
    "minimum",
    "normalise",
    "reserved",
    "save_problem",
    "simulate",
    "smallest",
    "solve",
    "window_peaks",
    "windows",
]
