"""Problems as files: what is read equals what was written, and whatever else is in a file is told, not followed."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from budgetopt.solvers import (
    Choice,
    Event,
    Kind,
    Operator,
    Problem,
    ProblemFileError,
    Region,
    Value,
    load_problem,
    save_problem,
    simulate,
    solve,
)
from tests.solvers.steps import chain, layers, network, transformer

SAME_FOLDER = [HealthCheck.function_scoped_fixture]  # every example overwrites the file of the one before
NAMES = ("problem.json", "problem.json.gz")


def drawn(seed: int, name: str, budget: int, step_ns: int) -> Problem:
    """A random step with all that a problem can say: halves, crossing values, names of kinds."""
    rng = Random(seed)
    problem = network(rng, rng.randint(1, 4), rng.randint(1, 6)).problem(budget)
    values = tuple(replace(v, halved=v.crossing and v.half_bytes > 0) for v in problem.values)
    regions = tuple(replace(region, kind=name) for region in problem.regions)
    return replace(problem, values=values, regions=regions, step_ns=step_ns)


def written(problem: Problem, path: Path) -> dict[str, Any]:
    """The file as JSON, to be spoiled."""
    save_problem(problem, path)
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@given(
    seed=st.integers(0, 10_000),
    name=st.text(st.characters(exclude_categories=["Cs"])),
    budget=st.integers(-(1 << 63), (1 << 63) - 1),
    step_ns=st.integers(0, 1 << 52),
    file=st.sampled_from(NAMES),
)
@settings(max_examples=60, deadline=None, suppress_health_check=SAME_FOLDER)
def test_what_is_read_equals_what_was_written(
    seed: int, name: str, budget: int, step_ns: int, file: str, tmp_path: Path
) -> None:
    problem = drawn(seed, name, budget, step_ns)
    save_problem(problem, tmp_path / file)
    found = load_problem(tmp_path / file)
    assert found == problem
    assert all(type(event) is Event and type(event.kind) is Kind for event in found.events)
    save_problem(found, tmp_path / f"again-{file}")
    assert (tmp_path / file).read_bytes() == (tmp_path / f"again-{file}").read_bytes()


def test_a_file_has_a_list_for_every_field_and_no_time_of_its_own(tmp_path: Path) -> None:
    problem = transformer(2, halves=True).problem()
    found = written(problem, tmp_path / "problem.json")
    for name, kind in (("values", Value), ("operators", Operator), ("regions", Region)):
        assert list(found[name]) == [field.name for field in fields(kind)]
    assert list(found["events"]) == ["kind", "index"]
    assert set(found) == {field.name for field in fields(Problem)} | {"format", "version"}
    save_problem(problem, tmp_path / "problem.json.gz")
    data = (tmp_path / "problem.json.gz").read_bytes()
    assert data[4:8] == bytes(4)  # where gzip has the time
    assert gzip.decompress(data) == (tmp_path / "problem.json").read_bytes()
    os.rename(tmp_path / "problem.json.gz", tmp_path / "named-otherwise")
    assert load_problem(str(tmp_path / "named-otherwise")) == problem


def test_what_was_read_has_the_same_answer(tmp_path: Path) -> None:
    problem = replace(layers(4, half=5, codec=1), budget=190)
    save_problem(problem, tmp_path / "problem.json")
    assert solve(load_problem(tmp_path / "problem.json")) == solve(problem)


def set_to(*place: Any) -> Callable[[dict[str, Any]], None]:
    """A change: the last argument at the place that those before it name."""
    *path, key, new = place

    def change(found: dict[str, Any]) -> None:
        target: Any = found
        for part in path:
            target = target[part]
        target[key] = new

    return change


def swap_events(one: int, other: int) -> Callable[[dict[str, Any]], None]:
    def change(found: dict[str, Any]) -> None:
        for column in found["events"].values():
            column[one], column[other] = column[other], column[one]

    return change


# layers(2), counted by hand. Values: x, then a, b, y of each region; operator i makes value i and storage i; three
# more operators, of the backward pass, make a storage each. Handles: x, a, b and y, a, b. Events: 0 RUN x; 1 ENTER 0;
# 2 PACK x; 3 RUN a; 4 PACK a; 5 RUN b; 6 PACK b; 7 RUN y; 8 EXIT 0; 9-11 DIE of a, b, x; 12 ENTER 1.
SPOILED: list[tuple[Callable[[dict[str, Any]], None], str]] = [
    (set_to("version", 2), r"version: Input should be 1, not 2"),
    (set_to("format", "budgetopt profile"), r"format: Input should be 'budgetopt problem', not 'budgetopt profile'"),
    (set_to("extra", 1), r"extra: Extra inputs are not permitted"),
    (set_to("values", "extra", []), r"values\.extra: Extra inputs are not permitted"),
    (lambda found: found.pop("resident"), r"resident: Field required"),
    (lambda found: found["values"].pop("halved"), r"values\.halved: Field required"),
    (lambda found: found["values"]["last"].pop(), r"values: .*different lengths: 7 of storage.* 6 of last"),
    (set_to("budget", 1 << 63), r"budget: Input should be less than 9223372036854775808"),
    (set_to("resident", -1), r"resident: Input should be greater than or equal to 0, not -1"),
    (set_to("resident", 1.0), r"resident: Input should be a valid integer, not 1\.0"),
    (set_to("step_ns", "1"), r"step_ns: Input should be a valid integer, not '1'"),
    (set_to("storages", 3, True), r"storages\[3\]: Input should be a valid integer, not True"),
    (set_to("values", "last", 2, 1), r"values\.last\[2\]: Input should be a valid boolean, not 1"),
    (set_to("storages", 3, 1 << 53), r"storages\[3\]: Input should be less than 9007199254740992"),
    (set_to("storages", 3, (1 << 53) - 1), r"all bytes together: \d+ is 9007199254740992 or more"),
    (set_to("operators", "time_ns", [(1 << 52) - 1] * 10), r"all nanoseconds together"),
    (set_to("values", "storage", 3, 99), r"values\.storage\[3\]: 99 is none of the \d+ storages"),
    (set_to("values", "storage", 3, -1), r"values\.storage\[3\]: -1 is none of the"),
    (set_to("values", "region", 3, 2), r"values\.region\[3\]: 2 is none of the 2 regions"),
    (set_to("values", "operator", 3, 50), r"values\.operator\[3\]: 50 is none of the 10 operators"),
    (set_to("values", "previous", 3, 7), r"values\.previous\[3\]: 7 is none of the 7 values"),
    (set_to("values", "operator", 3, 2), r"values\.operator\[3\]: operator 2 does not write value 3"),
    (set_to("values", "region", 3, 1), r"values\.region\[3\]: operator 3, which makes it, runs in another region"),
    (set_to("values", "operator", 3, -1), r"values\.region\[3\]: no operator makes the value"),
    (set_to("values", "previous", 3, 2), r"values\.previous\[3\]: value 2 is no earlier version of storage 3"),
    (set_to("operators", "region", 9, 2), r"operators\.region\[9\]: 2 is none of the 2 regions"),
    (set_to("operators", "births", 2, [40]), r"operators\.births\[2\]: 40 is none of the"),
    (set_to("operators", "births", 2, [1]), r"operators\.births\[2\]: storage 1 is born twice"),
    (set_to("operators", "reads", 2, [7]), r"operators\.reads\[2\]: 7 is none of the 7 values"),
    (set_to("operators", "reads", 2, [2]), r"operators\.reads\[2\]: value 2 is not made before operator 2"),
    (set_to("operators", "writes", 2, [-1]), r"operators\.writes\[2\]: -1 is none of the 7 values"),
    (set_to("operators", "writes", 2, [2, 1]), r"operators\.writes\[2\]: value 1 is not made by operator 2"),
    (set_to("operators", "writes", 2, [2, 2]), r"operators\.writes\[2\]: a value is named twice"),
    (set_to("handles", 4, 7), r"handles\[4\]: 7 is none of the 7 values"),
    (set_to("events", "kind", 4, 9), r"events\.kind\[4\]: Input should be less than or equal to 8, not 9"),
    (set_to("events", "index", 4, 6), r"events\.index\[4\]: 6 is none of the 6 handles"),
    (set_to("events", "index", 12, 2), r"events\.index\[12\]: 2 is none of the 2 regions"),
    (set_to("events", "index", 5, 1), r"events\[5\]: a second RUN of 1"),
    (set_to("events", "index", 4, 0), r"events\[4\]: a second PACK of 0"),
    (set_to("events", "kind", 4, 4), r"events\[4\]: UNPACK of 1 before its PACK"),
    (set_to("events", "kind", 1, 6), r"events\[1\]: EXIT of 0 before its ENTER"),
    (swap_events(3, 9), r"events\[9\]: RUN of operator 1, but a storage that it makes has died"),
    (swap_events(3, 5), r"events\[5\]: RUN of operator 1 after operator 2"),
    (swap_events(8, 12), r"events\[8\]: ENTER of region 1 inside region 0"),
]


@pytest.mark.parametrize(("spoil", "match"), SPOILED)
def test_what_makes_no_sense_is_told_with_its_place(
    spoil: Callable[[dict[str, Any]], None], match: str, tmp_path: Path
) -> None:
    path = tmp_path / "problem.json"
    found = written(layers(2), path)
    spoil(found)
    path.write_text(json.dumps(found))
    with pytest.raises(ProblemFileError, match=match) as error:
        load_problem(path)
    assert repr(str(path)) in str(error.value) and "Write it anew" in str(error.value)


def test_a_handle_is_not_asked_for_after_its_death(tmp_path: Path) -> None:
    found = written(chain(1, 10).problem(), tmp_path / "problem.json")
    kinds = found["events"]["kind"]
    unpack, death = kinds.index(Kind.UNPACK), kinds.index(Kind.HANDLE_DIE)
    swap_events(unpack, death)(found)
    (tmp_path / "problem.json").write_text(json.dumps(found))
    with pytest.raises(ProblemFileError, match=rf"events\[{death}\]: UNPACK of handle 0, which has died"):
        load_problem(tmp_path / "problem.json")


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"", "Invalid JSON: EOF"),
        (b"{", "Invalid JSON: EOF"),
        (b"[" * 100_000, "Invalid JSON: recursion limit"),
        (b"\xff\xfe", "Invalid JSON"),
        (b"null", "the file: Input should be an object"),
        (b"{}", "format: Field required"),
        (gzip.compress(b"{}", mtime=0), "format: Field required"),
        (gzip.compress(b"{}" * 500, mtime=0)[:-9], "end-of-stream"),
        (gzip.compress(b"{}", mtime=0)[:-8] + bytes(8), "CRC"),
        (b"\x1f\x8b\x08", "."),
        (b"\x1f\x8b nothing of the kind", "."),
    ],
)
def test_what_is_no_problem_at_all(data: bytes, match: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(data)
    with pytest.raises(ProblemFileError, match=f"file' is no problem that this version .*{match}.*Write it anew"):
        load_problem(tmp_path / "file")


def test_no_file_and_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ProblemFileError, match=r"can't read '.*missing.json': No such file"):
        load_problem(tmp_path / "missing.json")
    with pytest.raises(ProblemFileError, match=r"can't read '.*': Is a directory"):
        load_problem(tmp_path)
    with pytest.raises(ProblemFileError, match=r"can't write '.*problem.json': No such file.*Choose a folder"):
        save_problem(layers(1), tmp_path / "missing" / "problem.json")
    assert not list(tmp_path.iterdir())


@given(
    seed=st.integers(0, 500),
    file=st.sampled_from(NAMES),
    flips=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=4),
)
@settings(max_examples=300, deadline=None, suppress_health_check=SAME_FOLDER)
def test_flipped_bytes_are_an_error_or_a_problem(
    seed: int, file: str, flips: list[tuple[float, int]], tmp_path: Path
) -> None:
    path = tmp_path / file
    save_problem(drawn(seed, "kind", 1000, 100), path)
    data = bytearray(path.read_bytes())
    for place, byte in flips:
        data[int(place * len(data))] = byte
    path.write_bytes(data)
    follow(path)


@given(seed=st.integers(0, 500), change=st.randoms(use_true_random=False))
@settings(max_examples=300, deadline=None, suppress_health_check=SAME_FOLDER)
def test_changed_numbers_are_an_error_or_a_problem(seed: int, change: Random, tmp_path: Path) -> None:
    path = tmp_path / "problem.json"
    found = written(drawn(seed, "kind", 1000, 100), path)
    columns = [column for part in found.values() if isinstance(part, dict) for column in part.values() if column]
    column = change.choice([*columns, *(part for part in found.values() if isinstance(part, list) and part)])
    at = change.randrange(len(column))
    if isinstance(column[at], list):
        column[at] = [*column[at][:-1], change.randint(0, 8)]
    else:
        column[at] = change.choice([column[change.randrange(len(column))], change.randint(-1, 8)])
    path.write_text(json.dumps(found))
    follow(path)


def follow(path: Path) -> None:
    """Where a file is read, the referee and a solver get along with it."""
    try:
        problem = load_problem(path)
    except ProblemFileError as error:
        assert repr(str(path)) in str(error)
        return
    kept = simulate(problem, [Choice.KEEP] * len(problem.values))
    simulate(problem, [Choice.RECOMPUTE] * len(problem.values))
    assert solve(replace(problem, budget=kept.peak), "greedy").peak <= kept.peak


def test_what_cannot_be_read_back_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "problem.json"
    path.write_text("old")
    good = layers(2)
    spoiled: list[tuple[dict[str, Any], str]] = [
        ({"handles": (*good.handles, 7)}, r"handles\[6\]: 7 is none of the 7 values"),
        ({"storages": ("10",)}, r"storages\[0\]: Input should be a valid integer, not '10'"),
        ({"step_ns": object()}, "not JSON serializable"),
        ({"values": (None,)}, "no attribute"),
        ({"budget": float("inf")}, "not JSON compliant"),
    ]
    for change, match in spoiled:
        with pytest.raises(ProblemFileError, match=rf"problem\.json': the problem makes no sense: .*{match}"):
            save_problem(replace(good, **change), path)
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["problem.json"]


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "problem.json"
    save_problem(layers(1), path)
    before = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(ProblemFileError, match=r"can't write '.*': No space left on device"):
        save_problem(layers(2), path)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["problem.json"]
