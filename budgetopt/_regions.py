"""Find the regions of a model: the modules that a plan is written in.

From the root down, the outermost modules that repeat (same class under one parent, called one after
the other: transformer blocks, residual blocks) and together hold at least 1 % of the activation bytes;
between them whole modules that hold as much by themselves. A forward without a backward tells which
modules are called and what autograd would save in each; nothing is held, so it fits wherever an
inference pass does.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from budgetopt import _torch
from budgetopt._operators import PLAIN, is_plain
from budgetopt._schema import LayerRecord, OperatorRecord
from budgetopt._step import Step

LEAST_SHARE = 0.01
COVER = 0.8
LEAST_SAVED = 4
INNER = 0.1


class Survey:
    """What autograd saves in each module: distinct storages' bytes, children included, in bytes.

    Attributes:
        saved: per module, the sizes of the storages first saved inside it. total: bytes of all.
        avoid: modules that do not bear hooks. rounding: those whose result is another under a dispatch mode.
        failed: the innermost module that was left last.
        holds: what is saved stays, for a backward pass inside the forward. asked: there was one, in vain.
    """

    def __init__(
        self, model: torch.nn.Module, resident: set[int], avoid: frozenset[torch.nn.Module], holds: bool
    ) -> None:
        self.saved: dict[torch.nn.Module, list[int]] = {}
        self.total = 0
        self.stack: list[torch.nn.Module] = []
        self.avoid = avoid
        self.rounding: set[torch.nn.Module] = set()
        self.holds = holds
        self.failed: torch.nn.Module | None = None
        self.asked = False
        self._hooked = False
        self._seen: dict[int, weakref.ref[Any]] = {}
        self._resident = resident
        self._inside = set(model.modules())

    def entered(self, module: torch.nn.Module, args: Any) -> None:
        """A module's forward begins."""
        if module in self._inside:
            self.stack.append(module)
            self.saved.setdefault(module, [])
            self.failed = None
            self.look()

    def left(self, module: torch.nn.Module, args: Any, out: Any) -> None:
        """It ends, or an error passes through it; the innermost one comes first."""
        if module in self._inside:
            if self.failed is None:
                self.failed = module
            while self.stack and self.stack.pop() is not module:
                pass
            self.look()

    def look(self, *, off: bool = False) -> None:
        """Have hooks in force except in modules that do not bear them."""
        wanted = not off and not (self.stack and self.stack[-1] in self.avoid)
        if wanted and not self._hooked:
            _torch.push_hooks(self.pack, self.unpack)
        elif self._hooked and not wanted:
            _torch.pop_hooks()
        self._hooked = wanted

    @_torch.eager
    def pack(self, tensor: torch.Tensor) -> Any:
        """Count it; what autograd holds for it is nothing, unless there will be a backward pass."""
        self.count(tensor)
        if not self.holds:
            return None
        return _torch.alias(tensor) if type(tensor) in PLAIN else tensor.detach()

    @_torch.eager
    def unpack(self, packed: Any) -> torch.Tensor:
        """There is a backward pass inside the forward."""
        if packed is None:
            self.asked = True
            raise RuntimeError("the survey's graph has no backward pass")
        tensor: torch.Tensor = packed
        return tensor

    def count(self, tensor: torch.Tensor) -> None:
        if type(tensor) not in PLAIN or not is_plain(tensor):
            return
        storage = tensor.untyped_storage()
        if id(storage) in self._resident:
            return
        known = self._seen.get(id(storage))
        if known is not None and known() is storage:
            return
        self._seen[id(storage)] = weakref.ref(storage)
        self.total += storage.nbytes()
        for module in dict.fromkeys(self.stack):
            self.saved[module].append(storage.nbytes())

    def bytes(self, module: torch.nn.Module) -> int:
        return sum(self.saved.get(module, ()))


class _Rounding(TorchFunctionMode):
    """Notes the modules that call torch.bilinear under autocast.

    Its kernel calls operators that autocast rounds, but none below a dispatch mode, where torch turns autocast off.
    """

    def __init__(self, found: Survey) -> None:
        super().__init__()
        self._found = found

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.bilinear and torch.is_autocast_enabled(args[0].device.type) and self._found.stack:
            self._found.rounding.add(self._found.stack[-1])
        return function(*args, **(kwargs or {}))


@contextmanager
def module_hooks(model: torch.nn.Module, entered: Any, left: Any) -> Iterator[None]:
    """Call `entered(module, args)` and `left(module, args, out)` around every module's forward.

    Compiled parts are left alone: hooks would become part of what is compiled.
    """
    compiled = compiled_parts(model)
    handles = []
    try:
        for module in model.modules():
            if module not in compiled:
                handles.append(module.register_forward_pre_hook(entered, prepend=True))
                handles.append(module.register_forward_hook(left, always_call=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


def compiled_parts(model: torch.nn.Module) -> set[torch.nn.Module]:
    """The modules that torch.compile was called on, and what is inside them."""
    return {part for module in model.modules() if _torch.is_compiled(module) for part in module.modules()}


def uncompiled(model: torch.nn.Module, paths: Iterable[str]) -> list[str]:
    """Modules of these regions that hold or are run by a function that torch.compile made: it runs uncompiled there."""
    return [
        name
        for path in paths
        for name, module in model.get_submodule(path).named_modules(prefix=path)
        if any(map(_torch.is_compiled_function, [type(module).forward, *vars(module).values()]))
    ]


def survey(model: torch.nn.Module, step: Step, resident: set[int]) -> Survey:
    """Run the forward and note what would be saved where.

    Modules in which torch forbids saved-tensor hooks (``torch.func.grad`` does) are found by its error and
    left out in another run. So is it that a step goes backward itself, as for a gradient penalty: then what
    autograd saves has to be held.
    """
    avoid: frozenset[torch.nn.Module] = frozenset()
    holds = False
    while True:
        found = Survey(model, resident, avoid, holds)
        try:
            with module_hooks(model, found.entered, found.left), _Rounding(found):
                found.look()
                step.forward(model)
            return found
        except RuntimeError as error:
            if found.asked and not holds:
                holds = True
                continue
            if "saved tensor hooks" not in str(error) or found.failed is None or found.failed in avoid:
                raise
            avoid = avoid | {found.failed}
        finally:
            found.look(off=True)


def find_regions(model: torch.nn.Module, found: Survey) -> list[str]:
    """Paths of the modules to plan, disjoint, in the order of the module tree."""
    if not found.total:
        return []
    names = {module: path for path, module in model.named_modules()}
    units = [unit for unit in _split(model, found) if _plannable(unit, found)]
    if not units and _plannable(model, found):
        units = [model]
    if model not in units:
        units += _between(model, set(units), found)
    order = {module: i for i, module in enumerate(names)}
    return [names[module] for module in sorted(units, key=order.__getitem__)]


def _split(module: torch.nn.Module, found: Survey) -> list[torch.nn.Module]:
    """The repeated units inside `module`, taken apart further where their own units cover them."""
    units: list[torch.nn.Module] = []
    alike: dict[type, list[torch.nn.Module]] = {}
    for child in _called_children(module, found):
        alike.setdefault(type(child), []).append(child)
    # A kind of child is weighed as a whole: each of a thousand layers holds a thousandth.
    enough = {kind for kind, all_of in alike.items() if _hold_enough(all_of, found)}
    for child in _called_children(module, found):
        if type(child) not in enough:
            continue
        inner = _split(child, found)
        if inner and sum(found.bytes(unit) for unit in inner) >= COVER * found.bytes(child):
            units += inner
        elif len(alike[type(child)]) > 1 and _rich(child, found):
            units.append(child)
        else:
            units += inner
    return units


def _between(module: torch.nn.Module, units: set[torch.nn.Module], found: Survey) -> list[torch.nn.Module]:
    """The largest modules that hold at least the least share and no unit."""
    rest: list[torch.nn.Module] = []
    for child in _called_children(module, found):
        if child in units or not _hold_enough([child], found):
            continue
        if units.isdisjoint(child.modules()) and _plannable(child, found):
            rest.append(child)
        else:
            rest += _between(child, units, found)
    return rest


def _called_children(module: torch.nn.Module, found: Survey) -> Iterator[torch.nn.Module]:
    """Children that have a forward of their own; lists and dictionaries of modules are looked through."""
    for child in module.children():
        if child in found.saved:
            yield child
        else:
            yield from _called_children(child, found)


def _hold_enough(modules: Iterable[torch.nn.Module], found: Survey) -> bool:
    return sum(map(found.bytes, modules)) >= LEAST_SHARE * found.total


def _plannable(module: torch.nn.Module, found: Survey) -> bool:
    """Nothing inside forbids hooks, computes other bits under hooks or a mode, as TorchScript does, or is compiled."""
    return not any(
        part in found.avoid
        or part in found.rounding
        or isinstance(part, torch.jit.ScriptModule)
        or _torch.is_compiled(part)
        for part in module.modules()
    )


def _rich(module: torch.nn.Module, found: Survey) -> bool:
    """Enough is saved inside that there is something to decide besides its input and output.

    By what all but the two largest storages hold together, not by their number: experts, recurrences and wide
    models with dropout save many small ones.
    """
    sizes = sorted(found.saved[module])
    return len(sizes) >= LEAST_SAVED and sum(sizes[:-2]) >= INNER * sum(sizes)


def storages_of(tensors: Any) -> dict[int, torch.UntypedStorage]:
    """Distinct storages of plain tensors, by identity."""
    found = (t.untyped_storage() for t in tensors if t is not None and is_plain(t))
    return {id(storage): storage for storage in found}


def layers(model: torch.nn.Module, found: Survey, operators: list[OperatorRecord]) -> list[LayerRecord]:
    """What people read of a profile: activation bytes and forward time per module, children included."""
    times: dict[str, int] = {}
    for operator in operators:
        if not operator.backward:
            parts = operator.module.split(".") if operator.module else []
            for depth in range(len(parts) + 1):
                path = ".".join(parts[:depth])
                times[path] = times.get(path, 0) + operator.time_ns
    return [
        LayerRecord(
            path=path,
            kind=type(module).__name__,
            activation_bytes=found.bytes(module),
            forward_ns=times.get(path, 0),
        )
        for path, module in model.named_modules()
        if module in found.saved
    ]
