"""The referee's special cases, each on the smallest step that has it, worked out by hand."""

from __future__ import annotations

from dataclasses import replace

from budgetopt.solvers.memory import CODEC_WORKSPACE, decisions, fixed_keeps, minimum, normalise, simulate, windows
from budgetopt.solvers.problem import OUTSIDE, Choice, Kind, Problem, Value

from .steps import Step, chain

K, R, H = Choice.KEEP, Choice.RECOMPUTE, Choice.FP16


def _backward(step: Step, *handles: int) -> None:
    """Unpack all, then let go of all."""
    step.event(Kind.FORWARD_END)
    for kind in (Kind.UNPACK, Kind.HANDLE_DIE):
        for h in handles:
            step.event(kind, h)


def _in_place(save_first: bool) -> Problem:
    """x(1) -> a(100, v0); z = f(a v0) (10), saved; a is overwritten (v1), saved; v0 saved too if asked."""
    step = Step()
    x = step.make(OUTSIDE, 1)
    g = step.enter()
    a = step.make(g, 100, (x,), time=2)
    handles = [step.save(a)] if save_first else []
    z = step.make(g, 10, (a,), time=3)
    handles.append(step.save(z))
    a1 = step.overwrite(a, time=5)
    handles.append(step.save(a1))
    step.event(Kind.EXIT, g)
    step.die(a)
    step.die(z)
    _backward(step, *handles)
    return step.problem()


def test_a_write_in_place_goes_on_in_the_private_buffer() -> None:
    problem = _in_place(save_first=False)
    # Events: x ENTER a z PACK a1 PACK EXIT DIE DIE FORWARD_END UNPACK(z) UNPACK(a1) DIE(z) DIE(a1).
    # Unpack z: a v0 and z, 1+110, then a v0 goes. Unpack a1: a v0 again (+100), overwritten where it is.
    dropped = simulate(problem, [K, R, R, R])
    assert dropped.peaks == (1, 1, 101, 111, 111, 111, 111, 111, 11, 1, 1, 111, 111, 101, 1)
    assert dropped.cost_ns == (2 + 3) + (2 + 5)


def test_a_write_in_place_clones_a_buffer_that_somebody_waits_for() -> None:
    problem = _in_place(save_first=True)
    # Unpack v0: +100. Unpack z from it: +10. Unpack a1: v0's handle waits, so a clone: +100.
    dropped = simulate(problem, [K, R, R, R])
    assert dropped.peaks[12:] == (101, 111, 211, 111, 101, 1)
    assert dropped.cost_ns == 2 + 3 + 5


def test_an_earlier_version_cannot_be_kept() -> None:
    problem = _in_place(save_first=False)
    assert normalise(problem, [K, K, K, K]) == (K, R, K, K)
    assert decisions(problem) == (2, 3)


def test_what_reads_a_lost_earlier_version_is_kept() -> None:
    problem = _in_place(save_first=False)
    first = replace(problem.operators[1], replayable=False)
    blocked = replace(problem, operators=(problem.operators[0], first, *problem.operators[2:]))
    assert fixed_keeps(blocked) == {0, 1, 2, 3}
    assert simulate(blocked, [R] * 4).cost_ns == 0


def test_a_made_value_stays_for_its_second_handle() -> None:
    step = Step()
    x = step.make(OUTSIDE, 1)
    g = step.enter()
    a = step.make(g, 10, (x,), time=4)
    first, second = step.save(a), step.save(a)
    step.event(Kind.EXIT, g)
    step.die(a)
    step.event(Kind.FORWARD_END)
    for h in (first, second):
        step.event(Kind.UNPACK, h)
        step.event(Kind.HANDLE_DIE, h)
    dropped = simulate(step.problem(), [K, R])
    assert dropped.peaks[-4:] == (11, 11, 11, 1)
    assert dropped.cost_ns == 4


def test_all_outputs_of_an_operator_are_born_again() -> None:
    step = Step()
    x = step.make(OUTSIDE, 1)
    g = step.enter()
    a = step.make(g, 10, (x,), time=4)
    step.storages.append(1000)  # a second output of the same operator, kept by choice and saved as well
    step.values.append(Value(len(step.storages) - 1, g, 1))
    step.operators[1] = replace(step.operators[1], births=(1, 2), writes=(1, 2))
    both = [step.save(a), step.save(2)]
    step.event(Kind.EXIT, g)
    step.die(a)
    step.die(2)
    _backward(step, *both)
    problem = step.problem()
    # The kept output lives throughout; the replay of the other makes it once more for a moment.
    dropped = simulate(problem, [K, R, K])
    assert dropped.peaks[-4:] == (1 + 1000 + 1010, 1011, 1011 - 10, 1)
    # Both dropped: one replay makes both, and both stay.
    dropped = simulate(problem, [K, R, R])
    assert dropped.peaks[-4:] == (1011, 1011, 1001, 1)
    assert dropped.cost_ns == 4


def test_generator_state_is_held_for_a_possible_replay_only() -> None:
    step = Step()
    x = step.make(OUTSIDE, 1)
    g = step.enter()
    a = step.make(g, 10, (x,), rng=5)
    h = step.save(a)
    step.event(Kind.EXIT, g)
    step.die(a)
    _backward(step, h)
    problem = step.problem()
    assert simulate(problem, [K, R]).peaks == (1, 1, 16, 16, 16, 6, 6, 16, 1)
    assert simulate(problem, [K, K]).peaks == (1, 1, 11, 11, 11, 11, 11, 11, 1)


def _halves(size: int) -> Step:
    """x -> a (offered in fp16) -> b, both saved; then b and a are asked for."""
    step = Step()
    x = step.make(OUTSIDE, 1)
    g = step.enter(record_ns=1000)
    a = step.make(g, size, (x,), time=7, half=size // 2, codec=9)
    handles = [step.save(a)]
    b = step.make(g, 1, (a,), time=8)
    handles.append(step.save(b))
    step.event(Kind.EXIT, g)
    step.die(a)
    step.die(b)
    _backward(step, *reversed(handles))
    return step


def test_fp16_holds_half_and_decodes_once() -> None:
    problem = _halves(100).problem()
    # 0 x, ENTER, a, PACK a: +50, workspace 100 on top; b, PACK, EXIT, a dies, b dies (kept);
    # FORWARD_END, UNPACK b, UNPACK a: +100 decoded, b's handle, a's handle: half and decoded copy go.
    solved = simulate(problem, [K, H, K])
    assert solved.peaks == (1, 1, 101, 251, 152, 152, 152, 52, 52, 52, 52, 152, 151, 1)
    assert solved.cost_ns == 9 + 1000


def test_a_replay_makes_an_fp16_value_again() -> None:
    solved = simulate(_halves(100).problem(), [K, H, R])
    # UNPACK b: a (exact) and b on top of x and the half copy; a goes again. Then decode a.
    assert solved.peaks[-4:] == (1 + 50 + 100 + 1, 152, 151, 1)
    assert solved.cost_ns == 9 + 7 + 8 + 1000


def test_fp16_holds_nothing_for_its_own_handles() -> None:
    step = _halves(100)
    step.event(Kind.DIE, 0)
    step.events.insert(4, step.events.pop())  # the user lets go of x once a is made
    problem = step.problem()
    assert simulate(problem, [K, H, K]).peaks[-1] == 0
    assert simulate(problem, [K, H, K]).peaks[4] == 150
    assert simulate(problem, [K, H, R]).peaks[4] == 151  # b's replay needs a, which needs x


def test_the_codec_workspace_is_capped() -> None:
    size = 3 * CODEC_WORKSPACE
    assert simulate(_halves(size).problem(), [K, H, K]).peaks[3] == 1 + size + size // 2 + CODEC_WORKSPACE


def test_fp16_where_it_is_not_offered_is_keep_and_unsaved_is_recompute() -> None:
    step = _halves(100)
    assert normalise(step.problem(), [H, H, H]) == (K, H, K)
    step.handles[0] = 2
    assert normalise(step.problem(), [H, H, H]) == (K, R, K)


def test_fp16_alone_is_open_to_what_cannot_be_made_again() -> None:
    problem = _halves(100).problem()
    blocked = replace(problem, operators=tuple(replace(operator, replayable=False) for operator in problem.operators))
    assert decisions(blocked) == (1,)
    assert normalise(blocked, [R, R, R]) == (K, K, K)
    assert normalise(blocked, [H, H, H]) == (K, H, K)
    assert simulate(blocked, [K, H, K]) == simulate(problem, [K, H, K])
    # As soon as something replayable reads it, exact bits may be asked for, so it is kept.
    reader = replace(blocked, operators=(*blocked.operators[:2], problem.operators[2], *blocked.operators[3:]))
    assert decisions(reader) == (2,)


def test_what_the_user_holds_counts_once_and_is_free_to_keep() -> None:
    step = Step()
    x = step.make(OUTSIDE, 1)
    g = step.enter()
    a = step.make(g, 10, (x,), droppable=False)
    h = step.save(a)
    step.event(Kind.EXIT, g)
    _backward(step, h)
    step.die(a)
    assert simulate(step.problem(), [R, R]).peaks == (1, 1, *[11] * 6, 1)


def test_a_value_of_another_region_is_held_by_its_reader() -> None:
    step = Step()
    first = step.enter()
    a = step.make(first, 100, droppable=False)
    step.event(Kind.EXIT, first)
    second = step.enter()
    b = step.make(second, 10, (a,), time=3)
    h = step.save(b)
    step.event(Kind.EXIT, second)
    step.die(a)
    step.die(b)
    _backward(step, h)
    problem = step.problem()
    assert simulate(problem, [K, R]).peaks == (0, 100, 100, 100, 110, 110, 110, 110, 100, 100, 110, 0)
    assert simulate(problem, [K, K]).peaks == (0, 100, 100, 100, 110, 110, 110, 10, 10, 10, 10, 0)


def test_a_replay_needs_its_workspace_again() -> None:
    step = Step(resident=1)
    g = step.enter()
    a = step.make(g, 10, workspace=40)
    b = step.make(g, 20, (a,), workspace=5)
    h = step.save(b)
    step.event(Kind.EXIT, g)
    step.die(a)
    step.die(b)
    _backward(step, h)
    # Made a with 40 on top: 51; then b with 5 on top: 36. After it b alone.
    assert simulate(step.problem(), [R, R]).peaks[-2:] == (51, 1)


def test_windows_cut_at_regions() -> None:
    problem = chain(layers=2, size=10).problem()
    # x | ENTER v1 P v2 P DIE EXIT | DIE FORWARD_END | UNPACK ... last HANDLE_DIE | DIE BACKWARD_END
    assert [tuple(w) for w in windows(problem)] == [
        (0, 1, OUTSIDE, False),
        (1, 8, 0, False),
        (8, 10, OUTSIDE, False),
        (10, 17, 0, True),
        (17, 19, OUTSIDE, False),
    ]


def test_minimum_is_reached_by_its_choice() -> None:
    problem = _halves(100).problem()
    peak, choices = minimum(problem)
    assert simulate(problem, choices).peak == peak
    # a alone needs 101 in the forward, and b beside it 102: no choice is better, and dropping reaches it.
    assert peak == 102


def test_an_empty_step_is_resident() -> None:
    assert simulate(Step(resident=7).problem(), []).peak == 7
