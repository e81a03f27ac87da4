"""``budgetopt inspect``: a script runs as it does without, and what its loop wastes is told for each of its models."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from torch.nn.modules import module as torch_module

from budgetopt import _cli, _loop, _units

WASTEFUL = """
import sys
import torch
import beside

assert __name__ == "__main__" and sys.argv[1:] == ["--epochs", "2"], sys.argv
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
loss_of = torch.nn.MSELoss()
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for step in range(4):
    optimizer.zero_grad(set_to_none=False)
    out = model(torch.randn(32, 64))
    loss_of(out, torch.zeros(32, 64)).backward()
    optimizer.step()
print(model[0].weight.sum().item())
"""
WEIGHTS = 2 * (64 * 64 + 64) * 4
OUTPUT = 32 * 64 * 4

ADVERSARIES = """
import torch
from torch import nn

maker, judge = nn.Sequential(nn.Linear(32, 64), nn.ReLU()), nn.Linear(64, 1)
optimizers = [torch.optim.SGD(each.parameters(), 0.01) for each in (judge, maker)]
for step in range(3):
    fake = maker(torch.randn(512, 32))
    judge(fake.detach()).mean().backward()
    optimizers[0].step()
    optimizers[0].zero_grad()
    judge(fake).mean().backward()
    optimizers[1].step()
    for each in optimizers:
        each.zero_grad()
    del fake
"""

PARTS = """
import torch
from torch import nn

model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
model[0](torch.randn(2, 8))
for step in range(3):
    try:
        model(torch.randn(2, 9))
    except RuntimeError:
        pass
    model(torch.randn(2, 8)).sum().backward()
nn.Linear(8, 8)(torch.randn(2, 8))
"""

COMPILED = """
import torch

model = torch.compile(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()), backend="eager", fullgraph=True)
optimizer = torch.optim.SGD(model.parameters(), 0.01)  # of its own: those of other tests may still be there
for step in range(3):
    out = model(torch.randn(64, 64))
    out.sum().backward()
    model.zero_grad()
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A script beside a module that it imports, in another folder than one is in."""
    (tmp_path / "beside.py").write_text("")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.delitem(sys.modules, "beside", raising=False)
    path = tmp_path / "train.py"
    path.write_text(WASTEFUL)
    return path


def found(script: Path, text: str, limit: int | None = None) -> list[tuple[str, int, list[str]]]:
    """Class, calls and kinds of waste of each model that the script calls."""
    script.write_text(text)
    loop = _loop.Loop(limit)
    _loop.run(loop, str(script), [], module=False)
    return [(name, waste.calls, [one.kind for one in waste.findings]) for name, waste in loop.report()]


def test_waste_is_told_and_the_script_runs_as_without(script: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = [str(script), "--epochs", "2"]
    plain = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=True).stdout
    before = list(sys.argv), list(sys.path), sys.modules["__main__"]
    assert _cli.main(["inspect", *arguments]) == 0
    out, err = capfd.readouterr()
    assert out.startswith("Sequential: found in 4 calls of the model:\n") and err == plain
    assert f"{_units.show_bytes(WEIGHTS)}: gradients are filled with zeros" in out
    assert f"{_units.show_bytes(OUTPUT)}: outputs of an earlier step" in out
    assert (sys.argv, sys.path, sys.modules["__main__"]) == before
    assert not torch_module._global_forward_pre_hooks


def test_json(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _cli.main(["inspect", "--json", str(script), "--epochs", "2"]) == 0
    answer = json.loads(capsys.readouterr().out)
    (model,) = answer["models"]
    assert (answer["script"], model["model"], model["calls"]) == (str(script), "Sequential", 4)
    assert [(one["kind"], one["bytes"]) for one in model["findings"]] == [("zero gradients", WEIGHTS), ("held", OUTPUT)]
    assert all(one["what"] and one["mend"] for one in model["findings"])


def test_models_apart(script: Path) -> None:
    assert found(script, ADVERSARIES) == [("Sequential", 3, []), ("Linear", 6, [])]


def test_a_part_that_was_called_alone_and_calls_that_fail(script: Path) -> None:
    # The part is called alone once, then by its model; the last layer is seen, though calls before it failed.
    models = [(name, calls) for name, calls, _ in found(script, PARTS)]
    assert models == [("Linear", 1 + 6), ("Sequential", 6), ("Linear", 1)]


def test_compiled(script: Path) -> None:
    assert found(script, COMPILED) == [("OptimizedModule", 3, ["held"])]


def test_the_calls_that_are_asked_for(script: Path) -> None:
    text = ADVERSARIES.replace("range(3)", "range(10**9)")
    assert found(script, text, limit=7) == [("Sequential", 3, []), ("Linear", 4, [])]


def test_models_are_not_kept(script: Path) -> None:
    text = (
        "import gc, torch, weakref\n"
        "model = torch.nn.Linear(8, 8)\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "model(torch.randn(2, 8)).sum().backward()\n"
        "optimizer.step()\n"
        "gone = weakref.ref(model), weakref.ref(optimizer)\n"
        "del model, optimizer\n"
        "gc.collect()\n"
        "assert [one() for one in gone] == [None, None]\n"
    )
    assert found(script, text) == [("Linear", 1, [])]


def test_a_module(script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(script.parent)
    assert _cli.main(["inspect", "--calls", "2", "-m", "train", "--epochs", "2"]) == 0
    assert capsys.readouterr().out.startswith("Sequential: found in 2 calls")


@pytest.mark.parametrize(
    ("end", "status", "said"),
    [
        ("raise ValueError('theirs')", 1, "ValueError: theirs (not an error of budgetopt's"),
        ("sys.exit('no data')", 1, "ended with exit status 'no data'"),
        ("raise KeyboardInterrupt", 130, "budgetopt: interrupted"),
    ],
)
def test_what_was_found_before_the_end(
    script: Path, capsys: pytest.CaptureFixture[str], end: str, status: int, said: str
) -> None:
    script.write_text(WASTEFUL + end)
    assert _cli.main(["inspect", str(script), "--epochs", "2"]) == status
    out, err = capsys.readouterr()
    assert not out and said in err and "found in 4 calls" in err
    assert "_loop.py" not in err and not torch_module._global_forward_pre_hooks


@pytest.mark.parametrize("end", ["sys.exit()", "sys.exit(0)"])
def test_scripts_that_end_well(script: Path, capsys: pytest.CaptureFixture[str], end: str) -> None:
    script.write_text(WASTEFUL + end)
    assert _cli.main(["inspect", str(script), "--epochs", "2"]) == 0
    assert "found in 4 calls" in capsys.readouterr().out


def test_bad_input(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _cli.main(["inspect", str(script.with_name("nothing.py"))]) == 1
    assert "there is no file" in capsys.readouterr().err
    script.write_text("print(torch) if False else None\n")
    assert _cli.main(["inspect", str(script)]) == 0
    assert capsys.readouterr().out == "nothing seen, the script called no module that has parameters\n"
    with pytest.raises(SystemExit) as end:
        _cli.main(["inspect", "--calls", "0", str(script)])
    assert end.value.code == 2


def test_gradients_that_nobody_steps(script: Path) -> None:
    text = (
        "import torch\n"
        "model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))\n"
        "optimizer = torch.optim.SGD(model[1].parameters(), 0.1)\n"
        "for step in range(3):\n"
        "    model(torch.randn(2, 64)).sum().backward()\n"
        "    optimizer.step()\n"
        "    model.zero_grad()\n"
    )
    assert found(script, text) == [("Sequential", 3, ["unused gradients"])]
