"""The commands ``fit``, ``profile``, ``solve``, ``show``, ``frontier``, ``measure``: files, output, errors, Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import warnings
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import budgetopt
from budgetopt import Plan, Profile, _cli, _fit, _interrupts, _options, _stdout
from tests.models import mlp_stack

BUILD = """
import os
import sys
import torch
from tests.models import mlp_stack

def build():
    print("said by build")
    os.write(1, b"written by build\\n")
    return mlp_stack(3, 16, 64)

def with_options():
    import beside
    return *mlp_stack(3, 16, 64), {"loss": lambda out: out.pow(2).mean(), "optimizer": "sgd"}

def hung_up():
    raise BrokenPipeError(32, "Broken pipe")

def broken():
    return [][3]

def ending():
    sys.exit(3)

def misfit():
    return mlp_stack(1, 16, 4)[0], torch.randn(4, 5)

class Loud(torch.nn.Linear):
    def forward(self, x):
        print("forward", file=sys.stderr, flush=True)
        return super().forward(x)

def loud():
    return torch.nn.Sequential(*(Loud(4, 4) for _ in range(200))), torch.randn(2, 4)
"""
BUDGET = "200kB"
"""Between the smallest feasible budget of build()'s model and its plain peak: see test_the_budget_is_between."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Profile, Plan]:
    """A profile of what build() gives, and a plan."""
    model, sample = mlp_stack(3, 16, 64)
    profile = budgetopt.profile(model, sample)
    return profile, budgetopt.solve(profile, BUDGET, time_limit=1)


@pytest.fixture
def folder(made: tuple[Profile, Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: a module with models, profile.json, plan.json, and what is no file of ours."""
    (tmp_path / "given.py").write_text(BUILD)
    (tmp_path / "beside.py").write_text("")
    (tmp_path / "other.json").write_text('{"name": "x"}')
    made[0].save(tmp_path / "profile.json")
    made[1].save(tmp_path / "plan.json")
    monkeypatch.chdir(tmp_path)
    for name in ("given", "beside"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return tmp_path


def run(*arguments: object) -> int:
    return _cli.main([str(argument) for argument in arguments])


def answer(capsys: pytest.CaptureFixture[str], *arguments: object) -> Any:
    """What the command prints with ``--json``."""
    assert run(*arguments, "--json") == 0
    return json.loads(capsys.readouterr().out)


# -- each command ------------------------------------------------------------------------------------


def test_the_budget_is_between(made: tuple[Profile, Plan]) -> None:
    profile, plan = made
    assert plan.drops and plan.predicted.peak_bytes <= 200_000 < profile.peak_bytes


def test_fit_saves_a_plan_that_fit_then_uses(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("given:with_options", "--budget", "135kB", "--allow", "keep", "recompute", "--headroom", "1%")
    assert run("fit", *arguments, "-o", "new.json") == 0
    out, err = capsys.readouterr()
    plan = Plan.load(folder / "new.json")
    assert out == f"{plan}\n" and plan.measured is not None and plan.drops
    assert plan.measured.peak_bytes <= 135_000 - 1350 and plan.profile.fixed.optimizer == 0

    call = err.partition("In your training script: ")[2].strip()
    assert call.startswith("budgetopt.fit(model, sample, '135kB', plan='new.json', allow=('keep', 'recompute')")
    model, sample, options = import_module("given").with_options()
    names = {"budgetopt": budgetopt, "model": model, "sample": sample, **options}
    eval(call, names)
    assert "saved plan reused" in capsys.readouterr().err
    assert budgetopt.plan_of(model) == plan


def test_fit_as_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(
        capsys, "fit", "given:build", "--budget", "220kB", "--no-verify", "--exclude", "1", "--solver", "ilp"
    )
    assert found["file"] is None and found["measured"] is None and found["budget_bytes"] == 220_000
    assert found["exclude"] == ["1"] and found["solver"].startswith("ilp")
    assert isinstance(found["predicted"]["peak_bytes"], int)
    assert {decision["choice"] for region in found["regions"] for decision in region["decisions"]} >= {"recompute"}
    assert "1" not in [region["path"] for region in found["regions"]]


def test_profile(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "profile", "given:build", "-o", "new.json", "--optimizer", "none")
    profile = Profile.load(folder / "new.json")
    assert found["file"] == "new.json" and profile.fixed.optimizer == 0
    parameters = 3 * (2 * 16 + 16 * 64 + 64 + 64 * 16 + 16) * 4
    assert found["fixed"]["parameter"] == parameters and found["resident_bytes"] == parameters + 64 * 16 * 4
    assert found["step_ns"] == profile.step_ns and found["layers"][0]["path"] == ""
    assert run("profile", "given:build", "--device", "h200") == 0
    assert "modelled on h200, not run" in capsys.readouterr().out


def test_solve(made: tuple[Profile, Plan], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    how = ("--allow", "keep", "recompute", "--time-limit", "1")
    assert run("solve", "profile.json", "--budget", "200000", *how, "-o", "new.json") == 0
    plan = Plan.load(folder / "new.json")
    assert capsys.readouterr() == (f"{plan}\n", "")
    assert plan.allow == ("keep", "recompute") and plan.budget_bytes == 200_000 and plan.measured is None
    again = answer(capsys, "solve", "new.json", "--budget", "1GB")  # what the plan was asked holds
    assert again["allow"] == ["keep", "recompute"] and again["budget_bytes"] == 10**9


def test_show(made: tuple[Profile, Plan], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile, plan = made
    for arguments, shown in (
        (("profile.json",), profile),
        (("plan.json",), plan),
        (("plan.json", "--layer", "1"), plan.explain("1")),
    ):
        assert run("show", *arguments) == 0
        assert capsys.readouterr() == (f"{shown}\n", "")
    found = answer(capsys, "show", "plan.json")
    assert found["file"] == "plan.json" and "profile_data" not in found and found["gap"] == plan.gap
    assert [region["path"] for region in found["regions"]] == [region.path for region in plan.regions]
    assert answer(capsys, "show", "profile.json")["peak_bytes"] == profile.peak_bytes
    assert answer(capsys, "show", "plan.json", "--layer", "1")["explanation"] == plan.explain("1")


def test_frontier(made: tuple[Profile, Plan], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    how = ("--points", "2", "--time-limit", "1", "--allow", "keep", "recompute")
    files = [answer(capsys, "frontier", name, *how) for name in ("profile.json", "plan.json")]
    assert files[0]["source"] == "profile.json" and files[0]["plain_peak_bytes"] == made[0].peak_bytes
    low, high = files[0]["points"]
    assert files[1]["points"] == files[0]["points"]
    assert low["budget_bytes"] < high["budget_bytes"] and high["overhead"] == 0 < low["extra_ns"]
    assert run("frontier", "given:build", "--points", "2", "--solver", "greedy") == 0
    out = capsys.readouterr().out
    assert "what each byte of budget buys" in out and " 0.00%" in out and "said by build" not in out


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="matplotlib is not installed")
def test_frontier_drawn(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    how = ("--points", "2", "--solver", "greedy", "--plot")
    points = answer(capsys, "frontier", "profile.json", *how, "out.svg")["points"]
    drawn = (folder / "out.svg").read_text()
    for point in points:
        assert f"<!-- {budgetopt._units.show_bytes(point['budget_bytes'])} -->" in drawn
    assert run("frontier", "profile.json", *how, "out.gif") == 1


def test_measure(made: tuple[Profile, Plan], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = answer(capsys, "measure", "given:build", "--steps", "2")
    assert plain["plan"] is None and plain["budget_bytes"] is None and len(plain["losses"]) == 2
    assert run("solve", "profile.json", "--budget", BUDGET, "--allow", "keep", "recompute", "-o", "new.json") == 0
    capsys.readouterr()
    planned = answer(capsys, "measure", "given:build", "--plan", "new.json", "--steps", "1")
    assert planned["plan"] == "new.json" and planned["budget_bytes"] == 200_000
    assert planned["peak_bytes"] <= 200_000 < plain["peak_bytes"]
    assert planned["losses"][0] == plain["losses"][0] and planned["resident_bytes"] == plain["resident_bytes"]
    assert run("measure", "given:build", "--plan", "new.json", "--optimizer", "none", "--steps", "1") == 0
    assert "within the plan's budget of 200 kB" in capsys.readouterr().out


def test_measure_does_not_ask_to_measure(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("solve", "profile.json", "--budget", "215kB", "--allow", "keep", "fp16", "-o", "half.json") == 0
    assert Plan.load(folder / "half.json").halves
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run("measure", "given:build", "--plan", "half.json", "--steps", "1") == 0
    assert "the plan's budget of 215 kB" in capsys.readouterr().out


# -- what is wrong -----------------------------------------------------------------------------------

WRONG: list[tuple[str, str]] = [
    ("fit given:build --budget 8", "budget='8' has no unit"),
    ("fit given:build --budget 8GB --allow zip", "no such choice 'zip'"),
    ("fit given:build --budget 8GB --solver magic", "solver='magic' is not one of"),
    ("fit given:build --budget 8GB -o no/plan.json", "can't write 'no/plan.json': choose a folder that exists"),
    ("fit given:build --budget 8GB -o .", "-o '.' is a folder"),
    ("fit given:build --budget 8GB -o profile.json", "'profile.json' is a profile, and a plan is wanted"),
    ("fit given:build --budget 8GB -o other.json", "'other.json' is not of budgetopt"),
    ("fit given --budget 8GB", "'given' names no function: give module:build"),
    ("fit given: --budget 8GB", "'given:' names no function: give module:build"),
    ("fit given:ending --budget 8GB", "'given:ending' ended the program, sys.exit(3)"),
    ("fit given:build --budget 20kB --solver greedy", "InfeasibleBudgetError: no plan fits 20.0 kB"),
    ("fit given:build --budget 8GB --headroom 9GB", "leaves nothing of the budget"),
    ("profile given:build --device abacus", "device='abacus' is not one of"),
    ("profile given:build --optimizer magic", "'magic'"),
    ("profile given:build -o no/profile.json", "can't write 'no/profile.json'"),
    ("solve missing.json --budget 8GB", "can't read 'missing.json': No such file"),
    ("solve given.py --budget 8GB", "'given.py' is no JSON"),
    ("solve profile.json --budget 80%", "needs a device that tells its memory"),
    ("solve profile.json --budget 8GB -o profile.json", "is the file that is read: give another name"),
    ("show other.json", "'other.json' is not of budgetopt"),
    ("show profile.json --layer 1", "'profile.json' is a profile, and a plan is wanted"),
    ("show plan.json --layer 9", "the model has no layer '9'"),
    ("frontier plan.json --device t4", "--device t4 is for a model (module:build)"),
    ("frontier plan.json --optimizer sgd", "--optimizer sgd is for a model (module:build)"),
    ("measure given:build --plan profile.json", "'profile.json' is a profile, and a plan is wanted"),
    ("largest-batch profile.json", "'profile.json' is a profile, and a plan is wanted"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG)
def test_what_is_wrong_is_told_and_nothing_is_written(
    arguments: str, message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.read_bytes() for path in folder.iterdir()}
    assert run(*arguments.split()) == 1
    out, err = capsys.readouterr()
    told = err.splitlines()[-1]
    assert out == "" and told.startswith("budgetopt: ") and message in told and "Traceback" not in err
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize(
    "arguments",
    [
        "fit given:build",
        "fit given:build --budget 8GB --nope",
        "frontier plan.json --points 1",
        "measure given:build --steps 0",
        "solve plan.json --budget 8GB --gap small",
    ],
)
def test_wrong_usage(arguments: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run(*arguments.split())
    out, err = capsys.readouterr()
    assert out == "" and "usage: budgetopt" in err and "Traceback" not in err


@pytest.mark.parametrize(
    ("name", "line", "error"),
    [
        ("given:broken", "return [][3]", "IndexError"),
        ("given:hung_up", "Broken pipe", "BrokenPipeError"),
        ("given:misfit", "tests/models.py", "RuntimeError"),
    ],
)
def test_an_error_of_the_user_s_code(
    name: str, line: str, error: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("fit", name, "--budget", "8GB", "-o", "new.json") == 1
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" in err and line in err and "_commands" not in err
    assert err.splitlines()[-1].startswith(f"budgetopt: {error}: ")
    assert not (folder / "new.json").exists() and sys.stdout is not sys.stderr


# -- stdout, signals ---------------------------------------------------------------------------------


def command(*arguments: str, **how: Any) -> subprocess.Popen[str]:
    """The command in a process of its own, in the working directory."""
    root = str(Path(__file__).parents[1])
    known = {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": root}
    return subprocess.Popen(
        [sys.executable, "-m", "budgetopt", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **known},
        **how,
    )


def test_stdout_has_the_answer_alone(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run("measure", "given:build", "--steps", "1", "--json") == 0
    out, err = capfd.readouterr()
    assert json.loads(out)["peak_bytes"] > 200_000
    assert "said by build" in err and "written by build" in err


def test_ctrl_c(folder: Path) -> None:
    before = sorted(os.listdir(folder))
    default = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
    process = command("fit", "given:loud", "--budget", "1GB", "-o", "new.json", **default)
    assert process.stderr is not None
    for line in process.stderr:
        if line == "forward\n":
            break
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert process.returncode == 130 and out == "" and "Traceback" not in err
    assert err.splitlines()[-1] == "budgetopt: interrupted"
    assert sorted(os.listdir(folder)) == before


def test_a_reader_that_goes_away(folder: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "budgetopt", "show", "profile.json"],
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
    )
    os.close(writing)
    assert done.returncode == _stdout.CLOSED and done.stderr == ""


def test_no_torch_where_no_model_is_run(folder: Path) -> None:
    commands = (
        "solve profile.json --budget 200kB --solver greedy -o new.json",
        "show new.json",
        "show profile.json --json",
        "frontier new.json --points 2 --solver greedy",
        "fits profile.json --budget 200kB --solver greedy",
        "usage new.json",
        "gain new.json --more 50kB --solver greedy",
        "report new.json -o new.html",
    )
    code = "import sys; from budgetopt._cli import main\n"
    code += f"for line in {commands!r}: assert main(line.split()) == 0 and 'torch' not in sys.modules, line\n"
    for name in _cli.COMMANDS:
        code += f"try: main([{name.replace('_', '-')!r}, '--help'])\nexcept SystemExit as end: assert end.code == 0\n"
    code += "assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == "", done.stderr


def test_interrupts_in_this_process(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*arguments: Any, **named: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(_fit, "solve", interrupted)
    before = sorted(os.listdir(folder))
    assert run("fit", "given:build", "--budget", BUDGET, "-o", "new.json") == 130
    out, err = capsys.readouterr()
    assert out == "" and err.endswith("budgetopt: interrupted\n") and sorted(os.listdir(folder)) == before


def test_an_interrupt_that_is_swallowed_is_heeded(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    went_on = False
    try:
        with pytest.raises(KeyboardInterrupt), _interrupts.heeded():
            try:
                signal.raise_signal(signal.SIGINT)
            except BaseException:
                went_on = True
        assert went_on and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


# -- answers -----------------------------------------------------------------------------------------


def test_fits_from_a_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The words of the answer are those of its JSON; a budget over the plain peak, one that needs a plan, one below."""
    plain = Profile.load("profile.json").peak_bytes
    for budget, answer, word in ((2 * plain, "plain", "yes:"), (BUDGET, "planned", "yes, with"), ("20kB", "no", "no:")):
        command = ("fits", "profile.json", "--budget", str(budget), "--solver", "greedy")
        assert run(*command) == 0
        assert capsys.readouterr().out.startswith(word)
        assert run(*command, "--json") == 0
        assert json.loads(capsys.readouterr().out)["answer"] == answer


def test_usage_of_a_model_adds_up(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("usage", "given:build", "--optimizer", "none", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    parts = "parameters gradients optimizer_state optimizer_step buffers sample activations replays temporaries"
    assert sum(found[part] for part in parts.split()) == found["peak_bytes"] and found["optimizer_state"] == 0
    assert found["model"]["bytes"] == found["activations"] > 0


def test_gain_over_a_plan(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ("gain", "plan.json", "--more", "1MB", "--solver", "greedy")
    assert run(*command, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["more_bytes"] == 1_000_000 and found["then"]["answer"] == "plain" != found["now"]["answer"]
    assert all(layer["recomputed_then"] == 0 < layer["recomputed_now"] for layer in found["layers"])
    assert run(*command) == 0
    assert "1.00 MB more" in capsys.readouterr().out


def test_report(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("report", "plan.json", "-o", "page.html", "--plot", "memory.svg") == 0
    assert capsys.readouterr().out == ""
    assert Path("page.html").read_text().lstrip().lower().startswith("<!doctype html>")
    assert Path("memory.svg").read_bytes().startswith(b"<?xml")
    before = sorted(os.listdir())
    assert run("report", "profile.json", "-o", "other.html") == 1
    assert "is a profile, and a plan is wanted" in capsys.readouterr().err
    assert run("report", "plan.json", "-o", "nowhere/page.html") == 1
    assert sorted(os.listdir()) == before


def test_options_for_a_model_are_refused_for_a_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("usage", "plan.json", "--device", "h200") == 1
    assert "--device h200 is for a model" in capsys.readouterr().err


# -- how it reads ------------------------------------------------------------------------------------


def test_the_table_of_commands_names_all_files() -> None:
    files = {path.stem for path in Path(_cli.__file__).with_name("_commands").glob("*.py")} - {"__init__"}
    assert set(_cli.COMMANDS) == files and len(_cli.COMMANDS) == len(files)


@pytest.mark.parametrize("name", _cli.COMMANDS)
def test_help_fits_80_columns(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit, match="0"):
        run(name.replace("_", "-"), "--help")
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert name == "demo" or "\nexamples:\n" in out


def test_tables_are_as_wide_as_the_terminal(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    for line in (
        "frontier profile.json --points 2 --solver greedy",
        "compare profile.json --solvers greedy --shares 0.9",
        "show plan.json",
        "show plan.json --layer 1",
    ):
        assert run(*line.split()) == 0
        out = capsys.readouterr().out
        assert max(map(len, out.splitlines())) <= 80 and "…" not in out, line
    assert run("show", "plan.json", "--json") == 0
    assert json.loads(capsys.readouterr().out)["file"] == "plan.json"


def test_bytes_as_json_prints_them_are_read() -> None:
    assert _options.size("200000") == 200_000
    assert _options.size("8") == "8" and _options.size("8GB") == "8GB"  # 8: of what?
