"""The commands ``problem`` and ``compare``: files in, a file, a table, JSON or a picture out."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import budgetopt
from budgetopt import Profile, _cli, _comparison, _plot, solvers
from budgetopt.solvers import Problem, Row, load_problem, save_problem
from tests.solvers.steps import chain, transformer

EXACT = ("keep", "recompute")
drawing = pytest.mark.skipif(find_spec("matplotlib") is None, reason="matplotlib is not installed")


def small() -> Problem:
    """60 bytes, and 50 for 1 ns more than its 8."""
    return replace(chain(4, 10).problem(), step_ns=8)


# -- files -------------------------------------------------------------------------------------------


class Block(nn.Module):
    """With a write in place, random numbers and statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 64)
        self.norm = nn.BatchNorm1d(64)
        self.drop = nn.Dropout(0.1)
        self.down = nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.drop(nn.functional.relu(self.norm(self.up(x)), inplace=True)))
        return x + y


@pytest.fixture(scope="module")
def profile() -> Profile:
    torch.manual_seed(0)
    return budgetopt.profile(nn.Sequential(*(Block() for _ in range(4))), torch.randn(256, 16), optimizer=None)


@pytest.fixture
def files(profile: Profile, tmp_path: Path) -> Path:
    """A folder with a profile, a plan and a problem."""
    profile.save(tmp_path / "profile.json")
    budgetopt.solve(profile, tight(profile), allow=EXACT, exclude=("1",), headroom=5000).save(tmp_path / "plan.json")
    save_problem(small(), tmp_path / "problem.json.gz")
    return tmp_path


def tight(profile: Profile) -> int:
    resident = profile.fixed.total
    return resident + round(0.8 * (profile.peak_bytes - resident)) + 5000 + 4096


def test_a_profile_s_problem_has_the_answer_that_solve_gives(profile: Profile) -> None:
    how: dict[str, Any] = {"allow": EXACT, "exclude": ("1",), "headroom": "1%", "between": False}
    plan = budgetopt.solve(profile, tight(profile), **how)
    found = solvers.solve(profile.problem(tight(profile), **how))
    assert plan.drops and (found.peak, found.cost_ns) == (plan.predicted.peak_bytes, plan.predicted.extra_ns)
    assert profile.problem(f"{tight(profile)}B", **how) == profile.problem(tight(profile), **how)
    with pytest.raises(budgetopt.InvalidBudgetError, match="budget='8' has no unit"):
        profile.problem("8")
    with pytest.raises(budgetopt.BudgetOptError, match="no layer '9'"):
        profile.problem("8GB", exclude=("9",))


def test_a_profile_as_a_problem(profile: Profile, files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("out.json", "out.json.gz"):
        arguments = ["--budget", "1MB", "--headroom", "1%", "--allow", "keep", "fp16", "--exclude", "0", "2.up"]
        assert run("problem", files / "profile.json", *arguments, "-o", files / name) == 0
        expected = profile.problem("1MB", headroom="1%", allow=("keep", "fp16"), exclude=("0", "2.up"))
        assert load_problem(files / name) == expected
    assert capsys.readouterr() == ("", "")


def test_a_plan_as_a_problem_asks_what_the_plan_was_asked(profile: Profile, files: Path) -> None:
    assert run("problem", files / "plan.json", "-o", files / "out.json") == 0
    expected = profile.problem(tight(profile), allow=EXACT, exclude=("1",), headroom=5000)
    assert load_problem(files / "out.json") == expected
    assert run("problem", files / "plan.json", "--budget", "1GB", "--allow", "fp16", "-o", files / "out.json") == 0
    expected = profile.problem("1GB", allow=("fp16",), exclude=("1",), headroom=5000)
    assert load_problem(files / "out.json") == expected


def run(*arguments: object) -> int:
    return _cli.main([str(argument) for argument in arguments])


WRONG: list[tuple[list[str], str]] = [
    (["problem", "profile.json", "-o", "out.json"], "is a profile, which has no budget: give --budget 8GB"),
    (["problem", "profile.json", "--budget", "8", "-o", "out.json"], "budget='8' has no unit"),
    (["problem", "profile.json", "--budget", "8GB", "-o", "no/out.json"], "can't write 'no/out.json': No such file"),
    (["problem", "profile.json", "--budget", "8GB", "--exclude", "9", "-o", "out.json"], "no layer '9'"),
    (["problem", "problem.json.gz", "--budget", "8GB", "-o", "out.json"], "is a problem already: give the profile"),
    (["problem", "missing.json", "--budget", "8GB", "-o", "out.json"], "can't read 'missing.json': No such file"),
    (["compare", "missing.json"], "can't read 'missing.json': No such file"),
    (["compare", "cut.json", "--plot", "out.png"], "'cut.json' is no JSON: Unterminated string"),
    (["compare", "cut.json.gz", "--plot", "out.png"], "'cut.json.gz' is no problem that this version of budgetopt"),
    (["compare", "other.json"], "'other.json' is not of budgetopt. Give a profile that Profile.save wrote"),
    (["compare", "list.json"], "'list.json' is not of budgetopt"),
    (["compare", "newer.json"], "version: Input should be 1, not 2"),
    (["compare", "newer_profile.json"], "'newer_profile.json' is not a Profile that this version"),
    (["compare", "problem.json.gz", "--allow", "keep"], "leave out --allow and --exclude"),
    (["compare", "profile.json", "--allow", "zip"], "no such choice 'zip'"),
    (["compare", "problem.json.gz", "--solvers", "magic"], "solver='magic' is not one of auto"),
    (["compare", "problem.json.gz", "--backend", "gurobi"], "backend='gurobi' is not one of"),
    (["compare", "problem.json.gz", "--time-limit", "nan"], "time_limit=nan: give seconds"),
    (["compare", "problem.json.gz", "--gap", "2"], "gap=2.0: give a number from 0"),
    (["compare", "problem.json.gz", "--plot", "out.gif"], "'out.gif': give a name that ends in .png, .svg, .pdf"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG)
def test_what_is_wrong_is_told_and_nothing_is_written(
    arguments: list[str], message: str, files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (files / "cut.json").write_bytes((files / "profile.json").read_bytes()[:300].rpartition(b'"')[0])
    (files / "cut.json.gz").write_bytes((files / "problem.json.gz").read_bytes()[:-20])
    (files / "other.json").write_text('{"name": "x"}')
    (files / "list.json").write_text("[]")
    (files / "newer.json").write_text('{"format": "budgetopt problem", "version": 2}')
    (files / "newer_profile.json").write_text((files / "profile.json").read_text().replace(": 1,", ": 2,", 1))
    before = {path: path.read_bytes() for path in files.iterdir()}
    monkeypatch.chdir(files)
    assert run(*arguments) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("budgetopt: ") and message in err and err.count("\n") == 1
    assert {path: path.read_bytes() for path in files.iterdir()} == before


@pytest.mark.parametrize(
    "arguments",
    [
        ["problem", "profile.json", "--budget", "8GB"],
        ["compare"],
        *(["compare", "problem.json.gz", "--shares", share] for share in ("0", "1.01", "nan", "half")),
    ],
)
def test_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        _cli.main(arguments)
    out, err = capsys.readouterr()
    assert out == "" and "usage: budgetopt" in err


# -- the answer --------------------------------------------------------------------------------------


def test_the_table(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    big = transformer(8).problem()
    save_problem(big, files / "big.json")
    how = ["--shares", "0.9", "0.02", "--solvers", "ilp", "greedy", "exhaustive", "ilp", "--time-limit", "1"]
    assert run("compare", files / "big.json", *how) == 0
    out, err = capsys.readouterr()
    assert err == ""
    names = ("ilp", "greedy", "exhaustive")  # the first word of a line, or the one after the budget
    lines = {name: [line for line in out.splitlines() if name in line.split()[:4]] for name in names}
    assert [len(found) for found in lines.values()] == [2, 2, 2]
    assert "(0.9)" in lines["ilp"][0] and "(0.02)" in lines["ilp"][1]
    assert all("no answer; more than 200000 choices to try" in line for line in lines["exhaustive"])
    assert all("nothing fits: the smallest peak found is" in lines[name][1] for name in ("ilp", "greedy"))
    assert "not proven" in lines["greedy"][0] and " us " in lines["greedy"][0]
    assert "the step's time is not known" in out and max(map(len, out.splitlines())) <= 120


def test_the_same_as_json(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("compare", files / "problem.json.gz", "--json", "--shares", repr(5 / 6), "--solvers", "exhaustive") == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert err == "" and {k: found[k] for k in found if k != "rows"} == {
        "resident_bytes": 0,
        "plain_peak_bytes": 60,
        "step_ns": 8,
    }
    (row,) = found["rows"]
    assert Row(**row) == Row("exhaustive", 5 / 6, 50, "optimal", row["seconds"], 50, 1, 1 / 8, 0.0)


@pytest.mark.parametrize(
    ("name", "options", "problem"),
    [
        ("profile.json", [], lambda profile: profile.problem(10**9)),
        ("profile.json", ["--allow", "recompute"], lambda profile: profile.problem(10**9, allow=EXACT)),
        ("plan.json", [], lambda profile: profile.problem(10**9, allow=EXACT, exclude=("1",))),
        ("plan.json", ["--exclude", "2"], lambda profile: profile.problem(10**9, allow=EXACT, exclude=("2",))),
    ],
)
def test_a_profile_and_a_plan_compared(
    name: str,
    options: list[str],
    problem: Callable[[Profile], Problem],
    profile: Profile,
    files: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run("compare", files / name, "--json", "--shares", "0.9", "--solvers", "greedy", *options) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    (expected,) = solvers.compare(problem(profile), (0.9,), ("greedy",))
    assert Row(**row) == replace(expected, seconds=row["seconds"])


def test_no_torch(files: Path) -> None:
    code = f"import sys, runpy; sys.argv = ['budgetopt', 'compare', {str(files / 'profile.json')!r}, "
    code += "'--solvers', 'greedy']; from budgetopt._cli import main; print(main(), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert done.stdout.splitlines()[-1] == "0 False" and done.stderr == ""


# -- the picture -------------------------------------------------------------------------------------


@drawing
@pytest.mark.parametrize(("name", "start"), [("out.png", b"\x89PNG\r\n"), ("out.svg", b"<?xml"), ("out.pdf", b"%PDF")])
def test_the_picture(name: str, start: bytes, files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    how = ["--shares", "0.9", "0.1", "--solvers", "greedy", "ilp", "--json"]
    assert run("compare", files / "problem.json.gz", "--plot", files / name, *how) == 0
    assert (files / name).read_bytes().startswith(start)
    out, err = capsys.readouterr()
    assert err == "" and len(json.loads(out)["rows"]) == 4


@drawing
def test_a_picture_of_what_was_given(tmp_path: Path) -> None:
    """The text is in the SVG as it was given, glyph by glyph, under the comment that names it."""
    steps = ((0.9, 1), (0.89, 2), (0.5, 100))
    rows = [Row("ilp", share, round(share * 1e9), "optimal", 0.1, 1, ns, ns / 1000, 0.0) for share, ns in steps]
    rows.append(Row("greedy", 0.1, 10**8, "infeasible", 0.1, minimum=2))
    _plot.draw(_comparison.Compared(0, 10**9, 1000, rows), tmp_path / "out.svg")
    shown = (tmp_path / "out.svg").read_text()
    for text in (
        "ilp",
        "greedy",
        "(1 of 1 not answered)",
        "100 MB",
        "500 MB",
        "890 MB",
        "extra time, % of the plain step",
    ):
        assert f"<!-- {text} -->" in shown, text
    assert "<!-- 900 MB -->" not in shown  # no room beside 890 MB
    assert "<!-- 10 -->" in shown and "<!-- 0.1 -->" in shown  # from 0.1 to 10: logarithmic


def test_without_matplotlib_nothing_is_solved(
    files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_plot, "find_spec", lambda name: None)
    monkeypatch.setattr(solvers, "compare", None)
    assert run("compare", files / "problem.json.gz", "--plot", files / "out.png") == 1
    out, err = capsys.readouterr()
    assert out == "" and 'needs matplotlib, which is not installed: pip install "budgetopt[plot]"' in err
    assert not (files / "out.png").exists()


# -- models ------------------------------------------------------------------------------------------

_BUILD = """
import torch
from torch import nn

def build():
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(4))
    return nn.Sequential(*layers), torch.randn(256, 16)

def with_loss():
    model, x = build()
    return model, x, {"loss": lambda out: out.pow(2).mean(), "optimizer": "sgd"}

def alone():
    return build()[0]

def misspelt():
    return *build(), {"los": None}

number = 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_model.py").write_text(_BUILD)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "my_model", raising=False)


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize("name", ["my_model:build", "my_model:with_loss"])
@pytest.mark.parametrize("device", [None, "h200"])
def test_a_model_is_compared(name: str, device: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = [] if device is None else ["--device", device]
    before = list(sys.path)
    assert _cli.main(["compare", name, "--solvers", "greedy", "ilp", "--shares", "0.8", "--json", *chosen]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["solver"] for row in found["rows"]] == ["greedy", "ilp"]
    assert all(row["peak"] <= row["budget"] for row in found["rows"])
    assert found["resident_bytes"] < found["plain_peak_bytes"] and sys.path == before


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("my_model:alone", "returned a Sequential"),
        ("my_model:misspelt", "unknown options los"),
        ("my_model:number", "is no function"),
        ("my_model:absent", "has no 'absent'"),
        ("no_model:build", "no module 'no_model'"),
        ("my_model", "can't read 'my_model'"),
    ],
)
def test_what_is_no_model(name: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _cli.main(["compare", name]) == 1
    captured = capsys.readouterr()
    assert said in captured.err and not captured.out


def test_a_file_has_a_device_of_its_own(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _cli.main(["compare", str(files / "profile.json"), "--device", "t4"]) == 1
    assert "--device t4 is for a model" in capsys.readouterr().err
