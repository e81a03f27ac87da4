"""Run a training script as it is, and inspect every model that it calls.

A model is the outermost module with parameters that is called. Whoever calls one for the first time is seen by torch's
hook for all modules, which is taken away while a model runs: its inner modules, and compiled code, do not meet it.
"""

from __future__ import annotations

import gc
import runpy
import sys
import warnings
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from budgetopt._errors import BudgetOptError
from budgetopt._findings import Waste
from budgetopt._inspect import Inspection, watch


class _Enough(BaseException):
    """The calls that were asked for are over. No Exception: loops catch those."""


class Loop:
    """What is seen of the models that a script calls. It keeps none of them, and no optimizer.

    Attributes:
        limit: of the calls of models; the next one ends the script. None: it runs to its end.
    """

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self._calls = 0
        self._depth = 0  # of models that run: one that was called alone before may be a part of another
        self._inspections: list[tuple[str, Inspection]] = []
        self._known: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._stack = ExitStack()
        self._everywhere: Any = None

    def report(self) -> list[tuple[str, Waste]]:
        """The class of each model and what was found, in the order of their first calls."""
        return [(name, inspection.report) for name, inspection in self._inspections]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch in the block."""
        stepped = register_optimizer_step_pre_hook(lambda one, args, kwargs: self._optimizers.add(one))
        self._show()
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Using `torch.compile.module.` when there are global hooks")
                yield
        finally:
            self._hide()
            stepped.remove()
            self._stack.close()

    def _seen(self, module: torch.nn.Module, args: Any) -> None:
        """Some module is called, no model is running."""
        if torch.compiler.is_compiling() or module in self._known or next(module.parameters(), None) is None:
            return
        self._known.add(module)
        # Those that were not stepped yet: without them, what they step would look idle.
        # By type: isinstance would ask objects that pose as others, which warn or load something.
        self._optimizers.update(one for one in gc.get_objects() if issubclass(type(one), Optimizer))
        inspection = Inspection(module, self._optimizers)
        self._inspections.append((type(module).__name__, inspection))
        self._stack.callback(module.register_forward_pre_hook(lambda *_: self._begin()).remove)
        self._begin()  # hooks before a call that are registered during it are called from the next one on
        self._stack.enter_context(watch(inspection, module, args))
        self._stack.callback(module.register_forward_hook(lambda *_: self._end(), always_call=True).remove)

    def _begin(self) -> None:
        if torch.compiler.is_compiling():
            return
        self._hide()
        if self._depth == 0:
            if self._calls == self.limit:
                raise _Enough
            self._calls += 1
        self._depth += 1

    def _end(self) -> None:
        if torch.compiler.is_compiling():
            return
        self._depth -= 1
        if self._depth == 0:
            self._show()

    def _show(self) -> None:
        if self._everywhere is None:
            self._everywhere = register_module_forward_pre_hook(self._seen)

    def _hide(self) -> None:
        if self._everywhere is not None:
            self._everywhere.remove()
            self._everywhere = None


def run(loop: Loop, script: str, arguments: list[str], module: bool) -> None:
    """Run the script as ``python script arguments`` would, or ``python -m`` if it is a module, and watch its loop.

    Raises:
        BudgetOptError: there is no such file or module, or the script ended with another exit status than 0. What it
            raises itself is left as it is.
    """
    if not module and not Path(script).is_file():
        raise BudgetOptError(f"there is no file {script!r}: give a script, or -m and a module")
    before = sys.argv, list(sys.path)
    sys.argv = [script, *arguments]
    sys.path.insert(0, "" if module else str(Path(script).resolve().parent))
    try:
        with loop.watching():
            if module:
                runpy.run_module(script, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(script, run_name="__main__")
    except _Enough:
        return
    except SystemExit as end:
        if end.code not in (None, 0):
            raise BudgetOptError(f"{script!r} ended with exit status {end.code!r}") from end
    finally:
        sys.argv, sys.path[:] = before
