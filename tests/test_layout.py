"""What may import what: the pure core knows no torch, the executor no solver, and nothing goes in circles."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ALLOWED_IN_SOLVERS = sys.stdlib_module_names | {"budgetopt", "pulp", "highspy", "numpy", "pydantic"}
TORCH_FREE = (
    "solvers",
    "_errors",
    "_arguments",
    "_host",
    "_units",
    "_schema",
    "_problem",
    "_plan",
    "_answer",
    "_batch",
    "_explain",
    "_findings",
    "_fits",
    "_frontier",
    "_gain",
    "_numbering",
    "_report",
    "_floor",
    "_reserved",
    "_usage",
    "_given",
    "_comparison",
    "_plot",
    "_slices",
    "_curve",
    "_figure",
    "_html",
    "_sheet",
    "_page",
    "_picture",
    "_as_json",
    "_interrupts",
    "_options",
    "_progress",
    "_source",
    "_stdout",
    "_cli",  # and _commands: see tests/test_commands.py
    "__main__",
)
SOLVER_USERS = {
    "budgetopt",
    "budgetopt._problem",
    "budgetopt._answer",
    "budgetopt._batch",
    "budgetopt._floor",
    "budgetopt._leanest",
    "budgetopt._reserved",
    "budgetopt._solve",
    "budgetopt._fit",
    "budgetopt._fits",
    "budgetopt._frontier",
    "budgetopt._given",
    "budgetopt._comparison",
    "budgetopt._curve",
    "budgetopt._usage",
}
# Kinds of event, size of the codec's buffer, how a file is written.
SHARED_WORDS = {"budgetopt.solvers.problem", "budgetopt.solvers.memory", "budgetopt.solvers.writing"}


def module_name(path: Path) -> str:
    """budgetopt/_fit.py → budgetopt._fit, solvers/ilp.py → budgetopt.solvers.ilp"""
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    if parts[0] == "solvers":
        parts.insert(0, "budgetopt")
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {
    module_name(path): path
    for folder in ("budgetopt", "budgetopt/_commands", "budgetopt/integrations", "solvers", "solvers/*")
    for path in sorted(ROOT.glob(f"{folder}/*.py"))
}


def imports(module: str, *, lazy: bool = True) -> set[str]:
    """Modules named in a file's imports, the type checker's aside; `lazy`: those inside functions as well."""
    tree = ast.parse(SOURCES[module].read_text(encoding="utf-8"))
    package = module if SOURCES[module].name == "__init__.py" else module.rpartition(".")[0]
    return {name for node in _import_nodes(tree, lazy) for name in _imported(node, package)}


def _import_nodes(node: ast.AST, lazy: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        yield node
    elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
        for other in node.orelse:
            yield from _import_nodes(other, lazy)
    elif lazy or not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        for child in ast.iter_child_nodes(node):
            yield from _import_nodes(child, lazy)


def _imported(node: ast.Import | ast.ImportFrom, package: str) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
        return
    base = node.module or ""
    if node.level:
        parts = package.split(".")[: len(package.split(".")) - node.level + 1]
        base = ".".join([*parts, base]) if base else ".".join(parts)
    for alias in node.names:
        whole = f"{base}.{alias.name}"
        yield whole if whole in SOURCES else base


def test_no_import_cycles() -> None:
    graph = {module: imports(module) & SOURCES.keys() - {module} for module in SOURCES}
    if "budgetopt" in graph:  # its names load when asked for
        graph["budgetopt"] = imports("budgetopt", lazy=False) & SOURCES.keys() - {"budgetopt"}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"import cycle: {' <- '.join(error.args[1])}")


def test_solvers_need_the_standard_library_pulp_numpy_and_pydantic_alone() -> None:
    for module in SOURCES:
        if module.startswith("budgetopt.solvers"):
            roots = {name.partition(".")[0] for name in imports(module)}
            inside = {name for name in imports(module) if name.partition(".")[0] == "budgetopt"}
            assert roots <= ALLOWED_IN_SOLVERS, module
            assert all(name.startswith("budgetopt.solvers") for name in inside), (module, inside)


def test_the_executor_knows_no_solver() -> None:
    for module in SOURCES.keys() - SOLVER_USERS:
        if not module.startswith("budgetopt.solvers"):
            found = {other for other in imports(module) if other.startswith("budgetopt.solvers")}
            assert found <= SHARED_WORDS, module


def test_errors_import_nothing() -> None:
    assert imports("budgetopt._errors") == set()


@pytest.mark.parametrize(
    "module", [name for name in SOURCES if name.split(".")[1:2] and name.split(".")[1] in TORCH_FREE]
)
def test_imports_without_torch(module: str) -> None:
    """Also when the package's own __init__ runs first, as it does for every module in it."""
    check = f"import sys, {module}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-W", "error", "-c", check], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "False"


def test_solvers_are_one_folder_seen_from_two_places() -> None:
    link = ROOT / "budgetopt" / "solvers"
    assert link.is_symlink() and link.readlink() == Path("../solvers")
    assert link.resolve() == ROOT / "solvers"
