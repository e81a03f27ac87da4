"""The plain heuristic: give up what frees most bytes per second where the peak is, then take back what fits.

Deterministic: work is counted in simulated events, and the clock only ends a solve that is out of time.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic
from typing import NamedTuple

from .answer import answer
from .memory import Simulation, minimum, simulate
from .problem import Choice, Problem, Solution
from .timeline import Timeline, first_unpacks, timeline, useful

_WORK = 1_000_000  # events simulated by one descent or one polish, at most: about a second each


class Move(NamedTuple):
    """One value's change: bytes freed where the peak is (or taken, when polishing), and time lost (saved)."""

    value: int
    choice: Choice
    size: int
    time_ns: int


def greedy(problem: Problem, backend: str = "auto", time_limit: float = 10.0, gap: float = 0.01) -> Solution:
    """A good choice in a second or two; ``backend`` and ``gap`` are unused.

    Raises:
        InfeasibleError: nothing was found within the budget.
    """
    return answer(problem, search(problem, monotonic() + time_limit), "greedy")


def search(problem: Problem, deadline: float) -> Simulation:
    """Descend from keeping all; where that does not arrive, climb from the smallest peak known.

    The answer is over the budget if even that is.
    """
    found = descend(problem, simulate(problem, start(problem)), deadline)
    if found.peak > problem.budget:
        found = min(found, simulate(problem, minimum(problem, deadline=deadline)[1]), key=lambda s: s.peak)
    return polish(problem, found, deadline)


def start(problem: Problem) -> list[Choice]:
    """Keep what is saved; what is not saved is made on the way."""
    return [Choice.KEEP if saved else Choice.RECOMPUTE for saved in timeline(problem).saved]


def descend(problem: Problem, found: Simulation, deadline: float) -> Simulation:
    """Free bytes at the peak until it is within the budget, or until nothing there can be given up.

    A part of the excess at a time, because each step changes what the next one costs.
    """
    tries = _tries(problem, 12, 200)
    while found.peak > problem.budget and tries and monotonic() < deadline:
        tries -= 1
        excess = found.peak - problem.budget
        moves = _sorted(_releases(problem, found))
        wanted = excess if tries < 6 or 50 * excess < problem.budget else excess // 4
        taken = _until(moves, max(1, wanted))
        if not taken:
            break
        found = simulate(problem, _changed(found.choices, taken))
    return found


def polish(problem: Problem, found: Simulation, deadline: float) -> Simulation:
    """Take back what saves most time per byte, as long as the referee sees it fit.

    Tries all moves at once, then halves down to what fits; a single move that does not fit is skipped, and
    after every success twice as many are tried.
    """
    tries = _tries(problem, 16, 300)
    moves = _sorted(_returns(problem, found)) if found.peak <= problem.budget else []
    at, step = 0, len(moves)
    while at < len(moves) and tries and monotonic() < deadline:
        tries -= 1
        tried = simulate(problem, _returned(found.choices, moves[at : at + step]))
        if tried.peak <= problem.budget and tried.cost_ns <= found.cost_ns:
            found, at, step = tried, at + step, 2 * step
        elif step == 1:
            at += 1
        else:
            step = min(step, len(moves) - at) // 2 or 1
    return found


def _tries(problem: Problem, least: int, most: int) -> int:
    return max(least, min(most, _WORK // (len(problem.events) + 1)))


def _sorted(moves: list[Move]) -> list[Move]:
    """Bytes per nanosecond when freeing; the same order backwards is time per byte when taking back."""
    return sorted(moves, key=lambda m: (-m.size / (m.time_ns + 1), m.value, m.choice))


def _until(moves: list[Move], wanted: int) -> list[Move]:
    taken: list[Move] = []
    values: set[int] = set()
    for move in moves:
        if wanted <= 0:
            break
        if move.value not in values:
            values.add(move.value)
            taken.append(move)
            wanted -= move.size
    return taken


def _changed(choices: Sequence[Choice], moves: Sequence[Move]) -> list[Choice]:
    changed = list(choices)
    for move in moves:
        changed[move.value] = move.choice
    return changed


def _returned(choices: Sequence[Choice], moves: Sequence[Move]) -> list[Choice]:
    """Apply moves, but none that gives up what another one keeps."""
    changed = list(choices)
    for move in moves:
        if changed[move.value] != Choice.KEEP:
            changed[move.value] = move.choice
    return changed


def _releases(problem: Problem, found: Simulation) -> list[Move]:
    """Changes that free bytes at the peak: something is stored there, and not asked for yet."""
    line, at = timeline(problem), found.peak_event
    unpacked = first_unpacks(problem)[0]
    recorded = _recorded(problem, line, found.choices)
    read = {u for i, times in enumerate(found.replays) if times for u in line.inner[i]}
    moves = []
    for v in line.decided:
        value, choice = problem.values[v], found.choices[v]
        size, die = problem.storages[value.storage], line.die_at[value.storage]
        if choice == Choice.RECOMPUTE or not line.packed_at[v] <= at < min(unpacked[v], line.released_at[v]):
            continue
        record = 0 if value.region in recorded else problem.regions[value.region].record_ns
        stored = value.half_bytes if choice == Choice.FP16 else (size if die <= at else 0)
        if stored and v not in line.coded:
            moves.append(Move(v, Choice.RECOMPUTE, stored, record + remake_ns(problem, line, found, v)))
        if choice == Choice.KEEP and 0 < value.half_bytes < stored:
            # Replays want exact inputs: what one of them reads has to be made again beside its half copy.
            again = remake_ns(problem, line, found, v) if v in read else 0
            moves.append(Move(v, Choice.FP16, stored - value.half_bytes, record + value.codec_ns + again))
    return moves


def _returns(problem: Problem, found: Simulation) -> list[Move]:
    """Changes that save time at the price of bytes."""
    line = timeline(problem)
    moves = []
    for v in (*useful(problem)[0], *sorted(line.shared)):
        value, choice = problem.values[v], found.choices[v]
        size = problem.storages[value.storage]
        if choice == Choice.KEEP or not (line.saved[v] or found.replays[value.operator]):
            continue
        spent = value.codec_ns if choice == Choice.FP16 else remake_ns(problem, line, found, v, shared=False)
        moves.append(Move(v, Choice.KEEP, size, spent))
        if choice == Choice.RECOMPUTE and value.half_bytes and line.saved[v] and value.codec_ns < spent:
            moves.append(Move(v, Choice.FP16, value.half_bytes, spent - value.codec_ns))
    # Time per byte, so the order that _sorted gives is turned around by swapping the two.
    return [Move(m.value, m.choice, m.time_ns, m.size) for m in moves]


def _recorded(problem: Problem, line: Timeline, choices: Sequence[Choice]) -> set[int]:
    return {
        value.region
        for value, choice, saved in zip(problem.values, choices, line.saved, strict=True)
        if saved and choice != Choice.KEEP
    }


def remake_ns(problem: Problem, line: Timeline, found: Simulation, v: int, shared: bool = True) -> int:
    """Time to make ``v`` from what is kept; operators that are replayed anyway are free if ``shared``."""
    seen: set[int] = set()
    waiting = [v]
    total = 0
    while waiting:
        i = problem.values[waiting.pop()].operator
        if i in seen:
            continue
        seen.add(i)
        if not (shared and found.replays[i]):
            total += problem.operators[i].time_ns
        waiting += [u for u in line.inner[i] if found.choices[u] != Choice.KEEP]
    return total
