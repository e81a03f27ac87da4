"""The MILP engines behind PuLP, with their traps fenced in: CBC (ships with PuLP) and HiGHS (highspy).

* PuLP's ``status`` calls an interrupted solve optimal; only ``sol_status`` tells.
* highspy prints its banner when a model is made, before any option can forbid it: file descriptors 1
  and 2 are pointed elsewhere for that moment.
* HiGHS keeps threads, and in a process that was forked since it waits for them forever: it forgets them there.
* CBC splits its command line at spaces, so it gets a directory of its own whose path has none.
* About one CBC call in a hundred stalls for ten seconds: it runs as a process that is killed in time.
  ``threads`` is never passed to it.
* CBC may call a model with large byte coefficients infeasible: the caller scales, and every answer is
  checked again in integers by the referee.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from time import monotonic
from typing import Any

import pulp

from .errors import SolverError

_GRACE = 0.5  # seconds that a CBC process may run past its own limit
_CBC_GAP = 0.9  # of the gap asked for, so that a bound that is put that far below the answer is still within it
_CBC_DIGITS = 0.0005  # CBC prints its bound with three decimals


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an engine says: a value per variable (by name) if ``found``, and a proven bound of the objective.

    ``proven`` is False where a limit stopped it. ``engine`` names it, with a note after a fallback.
    ``prices``: the dual of each row (by name), where no variable is integer.
    """

    found: bool
    proven: bool
    values: dict[str, float]
    bound: float
    engine: str
    prices: dict[str, float] = field(default_factory=dict)


def run(program: pulp.LpProblem, backend: str, time_limit: float, gap: float) -> Outcome:
    """Minimise ``program`` with the first engine that answers.

    ``backend`` is ``"highs"``, ``"cbc"`` or ``"auto"`` (HiGHS if installed, else CBC). An engine that is
    missing or broken is replaced by the other one; an infeasible verdict of CBC is checked with HiGHS.

    Raises:
        SolverError: an unknown name, or no engine works.
    """
    deadline = monotonic() + time_limit
    failures: list[str] = []
    outcome = None
    bound = 0.0
    for name in order(backend):
        try:
            outcome = ENGINES[name](program, max(0.1, deadline - monotonic()), gap)
        except (SolverError, pulp.PulpError, OSError, ImportError, subprocess.SubprocessError, ValueError) as error:
            failures.append(f"{name} failed: {_short(error)}")
            continue
        bound = max(bound, outcome.bound)
        if outcome.found or name == "highs":
            break
    if outcome is None:
        raise SolverError("no MILP engine answered: " + "; ".join(failures))
    note = f" ({'; '.join(failures)})" if failures else ""
    return replace(outcome, bound=bound, engine=outcome.engine + note)


def order(backend: str) -> list[str]:
    """Names of engines to try, in order; a name that is not a backend raises ``SolverError``."""
    names = {"auto": ["highs", "cbc"], "highs": ["highs", "cbc"], "cbc": ["cbc", "highs"]}
    if backend not in names:
        raise SolverError(f"backend {backend!r} is not one of {', '.join(sorted(names))}")
    installed = has_highs()
    if backend == "highs":
        return names[backend]  # asked for by name: its absence is worth a note
    return [name for name in names[backend] if name != "highs" or installed]


def has_highs() -> bool:
    """Whether highspy is installed."""
    return find_spec("highspy") is not None


def _short(error: BaseException) -> str:
    if isinstance(error, subprocess.TimeoutExpired):
        return "it did not stop in time"
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:120]


def _highs(program: pulp.LpProblem, time_limit: float, gap: float) -> Outcome:
    if not has_highs():
        raise ImportError("highspy is not installed")
    _forget_threads_of_the_parent()

    class Quiet(pulp.HiGHS):  # type: ignore[misc]  # PuLP has no types for it
        def createAndConfigureSolver(self, lp: pulp.LpProblem) -> None:  # PuLP's name
            with _silence():
                super().createAndConfigureSolver(lp)

    program.solve(Quiet(msg=False, timeLimit=time_limit, gapRel=gap))
    bound = float(program.solverModel.getInfo().mip_dual_bound)
    return _outcome(program, bound, "HiGHS")


_process = os.getpid()
"""The process in which HiGHS may have threads."""


def _forget_threads_of_the_parent() -> None:
    """A fork copies HiGHS's list of its threads, but not the threads."""
    global _process
    if _process != os.getpid():
        import highspy  # it need not be installed

        highspy.Highs.resetGlobalScheduler(False)  # without waiting for them
        _process = os.getpid()


@contextmanager
def _silence() -> Iterator[None]:
    """Point file descriptors 1 and 2 at nothing. Kept to the one call that needs it: it is process-wide."""
    with open(os.devnull, "wb") as nothing:
        saved = {fd: os.dup(fd) for fd in (1, 2) if _is_open(fd)}
        try:
            for fd in saved:
                os.dup2(nothing.fileno(), fd)
            yield
        finally:
            for fd, old in saved.items():
                os.dup2(old, fd)
                os.close(old)


def _is_open(fd: int) -> bool:
    """A service may run with its output closed."""
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def cbc_path() -> str:
    """The CBC that PuLP brings."""
    return str(pulp.PULP_CBC_CMD.pulp_cbc_path)


def _cbc(program: pulp.LpProblem, time_limit: float, gap: float) -> Outcome:
    ratio = _CBC_GAP * gap
    with _directory() as folder:
        mps, solution = folder / "model.mps", folder / "model.sol"
        variables, names, rows, _ = program.writeMPS(str(mps), rename=1)
        command = [cbc_path(), str(mps), "-sec", f"{time_limit:.2f}", "-ratio", str(ratio), "-timeMode", "elapsed"]
        command += ["-solve", "-printingOptions", "all", "-solution", str(solution)]
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=time_limit + _GRACE, check=True
        )
        if not solution.exists():
            raise SolverError("CBC left no solution file")
        reader = _quietly(pulp.PULP_CBC_CMD, msg=False)
        status, values, _, prices, _, sol_status = reader.readsol_MPS(str(solution), program, variables, names, rows)
    program.assignVarsVals(values)
    program.assignConsPi(prices)
    program.assignStatus(status, sol_status)
    return _outcome(program, cbc_bound(done.stdout, program, ratio), "CBC")


def _quietly(make: Callable[..., Any], **arguments: Any) -> Any:
    """PuLP 3.3 warns about its own bundled CBC; the bound ``pulp<4`` makes that ours to ignore."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make(**arguments)


@contextmanager
def _directory() -> Iterator[Path]:
    """A private directory whose path has no space."""
    parents = [tempfile.gettempdir(), "/tmp", "/var/tmp", os.getcwd()]
    parent = next((p for p in parents if " " not in p and os.access(p, os.W_OK)), None)
    if parent is None:
        raise SolverError("CBC needs a writable directory whose path has no space; set TMPDIR to one")
    with tempfile.TemporaryDirectory(prefix="budgetopt-", dir=parent) as folder:
        yield Path(folder)


def cbc_bound(log: str, program: pulp.LpProblem, gap: float) -> float:
    """The printed bound, and never above what the answer and the gap that CBC was given allow.

    CBC prints a bound only where it stopped before the two met, and it throws away what is better than its
    best answer by less than the gap: so an answer that it calls optimal need not be.
    """
    proven = program.sol_status == pulp.constants.LpSolutionOptimal
    printed = re.search(r"^Lower bound:\s+(\S+)", log, re.MULTILINE)
    if not printed and not proven:
        return 0.0
    bounds = [float(printed.group(1)) - _CBC_DIGITS] if printed else []
    if proven or program.sol_status == pulp.constants.LpSolutionIntegerFeasible:
        bounds.append(float(pulp.value(program.objective) or 0.0) * (1 - gap))
    return min(bounds)


def _outcome(program: pulp.LpProblem, bound: float, engine: str) -> Outcome:
    proven = program.sol_status == pulp.constants.LpSolutionOptimal
    found = proven or program.sol_status == pulp.constants.LpSolutionIntegerFeasible
    values = {v.name: float(v.varValue or 0.0) for v in program.variables()} if found else {}
    finite = bound if abs(bound) < 1e30 else 0.0
    prices = {} if program.isMIP() or not found else {row.name: float(row.pi or 0.0) for row in program.constraints()}
    return Outcome(found, proven, values, max(0.0, finite), engine, prices)


ENGINES: dict[str, Callable[[pulp.LpProblem, float, float], Outcome]] = {"highs": _highs, "cbc": _cbc}
"""Engines by name, with one signature: program, seconds, relative gap."""
