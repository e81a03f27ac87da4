"""Regions judged alone, how they nest, and the recursion over them, each against something that knows the answer."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product
from random import Random
from time import monotonic

import pytest

from budgetopt.solvers import OUTSIDE, Choice, InfeasibleError, Kind, Problem, Solution, minimum, simulate, solve
from budgetopt.solvers.answer import given
from budgetopt.solvers.catalogue import Catalogue
from budgetopt.solvers.choices import count
from budgetopt.solvers.master import Master
from budgetopt.solvers.nest import Node, Option, Recursion, measure, nest, outside_in, outside_windows
from budgetopt.solvers.parts import parts
from budgetopt.solvers.patterns import Prices, Workshop
from budgetopt.solvers.regions import points
from budgetopt.solvers.stages import stages

from .steps import Step, chain, network, transformer

FOREVER = monotonic() + 10_000
"""A deadline, as time.monotonic() counts, that no test meets."""


def _keep_all(problem: Problem) -> int:
    return simulate(problem, [Choice.KEEP] * len(problem.values)).peak


def _some(problem: Problem, random: Random) -> list[Choice]:
    return [random.choice(list(Choice)) for _ in problem.values]


@pytest.mark.parametrize("halves", [False, True])
def test_regions_alone_add_up_to_the_step(halves: bool) -> None:
    problem = transformer(4, halves=halves).problem()
    found = parts(problem)
    assert found is not None and len(found) == len({v.region for v in problem.values} - {OUTSIDE})
    root = nest(found)
    assert root is not None
    shops = {node: Workshop(node.part, "highs", FOREVER) for node in outside_in(root) if node.part}
    measure(root, stages(problem).fixed, [shop.bare for shop in shops.values()], [0] * len(problem.events))
    random = Random(0)
    for _ in range(20):
        step = simulate(problem, _some(problem, random))
        held, cost = {root: 0}, 0
        for node in outside_in(root):
            around = held[node]
            if node.part is not None:
                pattern = shops[node].score([step.choices[v] for v in node.part.values])
                cost += pattern.cost_ns
                spans = node.part.forward, node.part.backward
                for span, shift, peak in zip(spans, node.shift, (pattern.forward, pattern.backward), strict=True):
                    assert around + shift + peak == max(step.peaks[span.start : span.stop])
                around += pattern.held
            held |= dict.fromkeys(node.inside, around)
        assert cost == step.cost_ns


def _masked(layers: int) -> Problem:
    """Regions whose replays all read one mask, which is there until the forward pass ends; the loss is the peak."""
    step = Step()
    mask = step.make(OUTSIDE, 1000)
    saved = []
    for _ in range(layers):
        g = step.enter()
        first = step.make(g, 100, (mask,), 5)
        second = step.make(g, 70, (first, mask), 3)
        saved.append([(first, step.save(first)), (second, step.save(second))])
        for v in (first, second):
            step.die(v)
        step.event(Kind.EXIT, g)
    step.die(mask)
    step.die(step.make(OUTSIDE, 1500))
    step.event(Kind.FORWARD_END)
    for pairs in reversed(saved):
        for _, handle in reversed(pairs):
            step.event(Kind.UNPACK, handle)
            step.event(Kind.HANDLE_DIE, handle)
    step.event(Kind.BACKWARD_END)
    return step.problem()


def test_what_several_replays_read_counts_once() -> None:
    problem = _masked(4)
    catalogue = Catalogue.of(problem, "highs", FOREVER)
    assert catalogue is not None
    random = Random(1)
    most = [Choice.RECOMPUTE] * len(problem.values)
    for choices in [most, *(_some(problem, random) for _ in range(50))]:
        step = simulate(problem, choices)
        held = {catalogue.root: 0}
        for node in outside_in(catalogue.root):
            around = held[node]
            if node.part is not None:
                pattern = catalogue.workshops[node].score([step.choices[v] for v in node.part.values])
                for window in range(2):
                    span = (node.part.forward, node.part.backward)[window]
                    counted = around + node.shift[window] - node.double[window]
                    assert counted + (pattern.forward, pattern.backward)[window] <= max(step.peaks[slice(*span)])
                around += pattern.held
            counted = around + node.gap - node.double_gap
            between = outside_windows(node, step.peaks)
            assert counted <= between or not between  # no event is there
            if step.choices == tuple(most) and not node.inside:
                assert counted == between  # all hold it, so each has a fourth of it
            held |= dict.fromkeys(node.inside, around)


@pytest.mark.parametrize("layers", [3, 4])
def test_the_bound_of_what_several_replays_read_meets_the_best(layers: int) -> None:
    problem = _masked(layers)
    low, high = minimum(problem)[0], _keep_all(problem)
    for budget in range(low, high, 37):
        found = solve(replace(problem, budget=budget), "regions", gap=0.0)
        best = solve(replace(problem, budget=budget), "exhaustive")
        assert found.bound_ns <= best.cost_ns == found.cost_ns


def test_equal_layers_are_one_kind() -> None:
    kinds = {part.alone for part in parts(transformer(12).problem()) or ()}
    assert len(kinds) <= 3  # the first and the last layer have other neighbours


def _overlapping() -> Problem:
    """Two regions whose backward windows begin in the order of their forwards: they do not nest."""
    step = Step()
    handles = []
    for _ in range(2):
        g = step.enter()
        v = step.make(g, 10, time=3)
        handles.append(step.save(v))
        step.die(v)
        step.event(Kind.EXIT, g)
    step.die(step.make(OUTSIDE, 20))
    step.event(Kind.FORWARD_END)
    for kind in (Kind.UNPACK, Kind.HANDLE_DIE):
        for h in handles:
            step.event(kind, h)
    return step.problem(30)


def test_what_does_not_nest_is_one_program() -> None:
    problem = _overlapping()
    found = parts(problem)
    assert found is not None and nest(found) is None
    solution = solve(problem, "regions")
    assert solution.solver.startswith("ilp") and solution.cost_ns == solve(problem, "exhaustive").cost_ns


def _tree(random: Random) -> tuple[Node, dict[Node, list[Option]]]:
    """Five nodes, each inside an earlier one or the root, with three options of which one holds nothing."""
    root = Node(None, gap=random.randrange(20))
    nodes = [root]
    part = parts(chain(1, 10).problem())
    assert part
    for _ in range(5):
        node = Node(part[0], gap=random.randrange(30))
        random.choice(nodes).inside.append(node)
        nodes.append(node)
    options = {}
    for node in nodes[1:]:
        need = random.randrange(10, 30)
        options[node] = [Option(0, random.randrange(10, 20), need + 10)]
        options[node] += [Option(random.randrange(9), random.randrange(10), need + random.randrange(15))]
        options[node] += [Option(random.randrange(5, 12), 0, need)]
    return root, options


def _need(node: Node, held: int, picked: dict[Node, Option]) -> int:
    """Bytes that a node and all inside it need beside what is held around them."""
    own = 0
    if node.part is not None:
        own = held + picked[node].need
        held += picked[node].held
    return max([own, held + node.gap, *(_need(child, held, picked) for child in node.inside)])


def test_the_recursion_finds_the_cheapest_of_all_combinations() -> None:
    for seed in range(40):
        root, options = _tree(Random(seed))
        combined = [dict(zip(options, some, strict=True)) for some in product(*options.values())]
        scores = [(_need(root, 0, picked), sum(option.cost_ns for option in picked.values())) for picked in combined]
        for limit in (None, 70):
            gaps = {node: node.gap for node in outside_in(root)}
            recursion = Recursion(root, options, gaps) if limit is None else Recursion(root, options, gaps, limit)
            for budget in range(min(need for need, _ in scores), limit or 130, 7):
                best = min(cost for need, cost in scores if need <= budget)
                numbers = recursion.picks(budget)
                picked = {node: options[node][number] for node, number in numbers.items()}
                assert sum(option.cost_ns for option in picked.values()) == best
                assert _need(root, 0, picked) <= budget
        assert recursion.least == min(need for need, _ in scores)
        with pytest.raises(ValueError, match="nothing fits"):
            recursion.picks(recursion.least - 1)


@pytest.mark.parametrize("backend", ["cbc", "highs"])
def test_prices_tell_what_a_byte_is_worth(backend: str) -> None:
    # Six equal layers: mixtures of keeping and dropping fit exactly, whole patterns hardly ever.
    step = chain(6, 10, time=30)
    problem = step.problem((minimum(step.problem())[0] + _keep_all(step.problem())) // 2)
    catalogue = Catalogue.of(problem, backend, FOREVER)
    assert catalogue is not None
    picked = catalogue.recursion().within(problem.budget)
    worth = catalogue.worth(problem.budget, picked, backend, FOREVER)
    assert worth is not None
    best = solve(problem, "exhaustive").cost_ns
    assert 0 < worth.cost <= best and worth.of_budget > 0
    total, _ = catalogue.price(worth, exact=True)
    assert total - worth.of_budget * problem.budget == pytest.approx(worth.cost, rel=5e-3)
    assert catalogue.bound_ns(problem.budget) <= best


def test_a_bound_holds_for_every_budget() -> None:
    proven = 0
    for seed in range(60):
        random = Random(seed)
        step = network(random, random.randint(2, 4), random.randint(2, 4), halves=bool(seed % 2))
        low, high = minimum(step.problem())[0], _keep_all(step.problem())
        if count(step.problem()) > 500 or high - low < 4:
            continue
        budgets = [low + (high - low) * quarter // 4 for quarter in range(4)]
        for budget, solution in zip(budgets, list(map(given, points(step.problem(), budgets, "highs"))), strict=True):
            best = solve(step.problem(budget), "exhaustive")
            assert solution.peak <= budget
            assert solution.bound_ns <= best.cost_ns <= solution.cost_ns
            proven += solution.bound_ns > 0
    assert proven >= 20


@pytest.mark.parametrize("solver", ["regions", "frontier"])
def test_more_memory_never_costs_more(solver: str) -> None:
    step = transformer(4)
    low, high = minimum(step.problem())[0], _keep_all(step.problem())
    budgets = [low + (high - low) * part // 5 for part in range(6)]
    if solver == "frontier":
        found = list(map(given, points(step.problem(), budgets, "highs")))
    else:
        found = [solve(step.problem(budget), solver, "highs") for budget in budgets]
    for less, more in pairwise(found):
        assert more.cost_ns <= less.cost_ns * 1.01


def test_small_problems_are_mostly_solved_to_the_optimum() -> None:
    ours, best = [], []
    for seed in range(30):
        random = Random(seed)
        step = network(random, random.randint(1, 3), random.randint(2, 5))
        if count(step.problem()) > 1000:
            continue
        low, high = minimum(step.problem())[0], _keep_all(step.problem())
        for percent in (0, 30, 60):
            problem = step.problem(low + (high - low) * percent // 100)
            ours.append(solve(problem, "regions", gap=0.001).cost_ns)
            best.append(solve(problem, "exhaustive").cost_ns)
    assert sum(a == b for a, b in zip(ours, best, strict=True)) >= 0.9 * len(ours)
    assert sum(ours) <= 1.03 * sum(best)


def test_patterns_are_exact_and_none_is_worse_than_another() -> None:
    part = (parts(transformer(3, halves=True).problem()) or [])[1]
    shop = Workshop(part, "highs", FOREVER)
    shop.begin(None)
    assert len(shop.patterns) > 10
    for pattern in shop.patterns:
        assert shop.score(pattern.choices) == pattern
    for a, b in product(shop.patterns, repeat=2):
        assert a is b or any(x < y for x, y in zip(a[:4], b[:4], strict=True))
    prices = Prices(1e-6, 0.0, 1e-6)
    bound = shop.price(prices, exact=True).bound
    assert bound <= min(prices.of(pattern)[0] for pattern in shop.patterns) <= bound * 1.02


def test_a_master_program_without_a_mixture_has_no_prices() -> None:
    problem = chain(3, 10).problem(1)
    catalogue = Catalogue.of(problem, "highs", FOREVER)
    assert catalogue is not None
    master = Master(catalogue.root, 1, "highs")
    for node, shop in catalogue.workshops.items():
        for pattern in shop.patterns:
            master.add(node, pattern)
    assert master.worth(5.0) is None


def test_what_one_program_of_all_does_not_find_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small step is one program, too, where patterns prove too little: what that says is no worse than silence."""
    problem = transformer(4).problem()
    low, high = minimum(problem)[0], _keep_all(problem)
    problem = replace(problem, budget=(low + high) // 2)

    def finds_nothing(*_: object) -> Solution:
        raise InfeasibleError(low, (), problem.budget)

    monkeypatch.setattr("budgetopt.solvers.regions.ilp", finds_nothing)
    found = solve(problem, "regions", gap=0.0)
    assert found.peak <= problem.budget
