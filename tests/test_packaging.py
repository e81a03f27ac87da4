"""What is built for a user: the wheel, the sdist, and both in an environment of their own."""

from __future__ import annotations

import email
import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from email.message import Message
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SMOKE = "import budgetopt.solvers, sys; assert 'torch' not in sys.modules; print(budgetopt.__version__)"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel, made from the sdist, and the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "build", "-o", str(folder), str(ROOT)], check=True, capture_output=True)
    return next(folder.glob("*.whl")), next(folder.glob("*.tar.gz"))


def test_the_wheel_has_every_module_once_and_nothing_else(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[0]) as wheel:
        files = [name for name in wheel.namelist() if ".dist-info/" not in name]
        metadata = _metadata(wheel)
    here = {path.relative_to(ROOT).as_posix() for path in (ROOT / "budgetopt").rglob("*.py")}
    here |= {f"budgetopt/solvers/{path.name}" for path in (ROOT / "solvers").glob("*.py")}
    here |= {f"budgetopt/pages/{path.name}" for path in (ROOT / "budgetopt" / "pages").glob("*.html")}
    assert sorted(files) == sorted(here | {"budgetopt/py.typed"})
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["License-File"] == "LICENSE"
    assert "torch>=2.11" in metadata.get_all("Requires-Dist", [])


def test_the_sdist_has_what_the_wheel_is_made_of(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[1]) as sdist:
        names = {name.split("/", 1)[1] for name in sdist.getnames() if "/" in name}
    assert {"LICENSE", "README.md", "pyproject.toml", "solvers/problem.py", "budgetopt/_fit.py"} <= names


@pytest.mark.slow
@pytest.mark.parametrize("kind", [0, 1], ids=["wheel", "sdist"])
def test_it_installs_into_an_empty_environment(built: tuple[Path, Path], tmp_path: Path, kind: int) -> None:
    """The tested torch first: what pip would take for "torch>=2.11" may be a build of several GB."""
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*command: str) -> str:
        done = subprocess.run(
            [str(python), *command], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    run("-m", "pip", "install", "--quiet", "torch==2.13.0", str(built[kind]))
    assert run("-c", SMOKE).strip() == "0.1.0"
    assert run("-m", "budgetopt", "--version").strip() == "budgetopt 0.1.0"
    (tmp_path / "mine.py").write_text(MINE)
    assert run("mine.py").split() == ["True", "True"]


MINE = """
import torch, budgetopt
torch.manual_seed(0)
block = lambda: torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
model, sample = torch.nn.Sequential(*(block() for _ in range(6))), torch.randn(256, 64)
plain = budgetopt.measure(model, sample, steps=1).peak_bytes
budgetopt.fit(model, sample, int(0.8 * plain), optimizer=None, plan="plan.json")
print(budgetopt.measure(model, sample, steps=1).peak_bytes <= int(0.8 * plain))
print(budgetopt.Plan.load("plan.json").drops)
"""


def _metadata(wheel: zipfile.ZipFile) -> Message:
    name = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return email.message_from_bytes(wheel.read(name))
