"""The command line and the pure parts of the demo."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from budgetopt import _cli
from budgetopt._errors import InvalidBudgetError


def test_help_and_version_need_no_torch() -> None:
    check = "import sys; sys.argv = ['budgetopt', '--version']; from budgetopt._cli import main"
    check += "\ntry: main()\nexcept SystemExit as end: print(end.code, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, cwd=Path(__file__).parents[1])
    lines = done.stdout.splitlines()
    assert lines[0].startswith("budgetopt 0.") and lines[1] == "0 False", done.stderr


def test_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "budgetopt", "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "demo" in done.stdout


@pytest.mark.parametrize("arguments", [[], ["demo", "--steps", "0"], ["demo", "--steps", "few"], ["fit"]])
def test_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        _cli.main(arguments)
    assert "budgetopt" in capsys.readouterr().err


def test_errors_are_told_not_thrown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from budgetopt import _demo

    def fail(*, steps: int, plan_dir: Path | None) -> None:
        raise InvalidBudgetError(f"budget for {steps} steps in {plan_dir}")

    monkeypatch.setattr(_demo, "demo", fail)
    assert _cli.main(["demo", "--steps", "7", "--plan-dir", "plans"]) == 1
    assert capsys.readouterr().err == "budgetopt: InvalidBudgetError: budget for 7 steps in plans\n"


def test_demo_batches_depend_on_the_step_alone() -> None:
    from budgetopt._demo import BATCH, CONTEXT, batch, python_documentation

    text = python_documentation()
    first, again, other = batch(text, 3), batch(text, 3), batch(text, 4)
    assert first["tokens"].shape == (BATCH, CONTEXT)
    assert torch.equal(first["tokens"], again["tokens"]) and not torch.equal(first["tokens"], other["tokens"])
    assert torch.equal(first["tokens"][:, 1:], first["targets"][:, :-1])  # each byte's target is the next one


@pytest.mark.slow
def test_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _cli.main(["demo", "--steps", "4", "--plan-dir", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert shown.count("all equal") == 2
    assert len(list(tmp_path.glob("plan-*.json"))) == 2
