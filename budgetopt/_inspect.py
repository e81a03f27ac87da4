"""Look at a user's own training loop from the model's root, and name what it wastes.

A hook before and one after each call of the model see all there is to see: what of earlier calls is still there, which
gradients are there, what the call saved. Storages and graphs are only watched (weakly), so that looking keeps
nothing alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from budgetopt import _device, _graph
from budgetopt._errors import BudgetOptError
from budgetopt._findings import Finding, Kind, Waste
from budgetopt._fixed import require_module
from budgetopt._operators import parts

_SMALL = 1024
"""Bytes under which nothing is told: a loss that lives on until the next one takes its name is no waste."""
_FRAGMENTS = 64 << 20
"""Bytes reserved for nothing under which fragmentation is not told."""
_GRAPHS = 4
"""Graphs that are all still there make a pile."""


@contextmanager
def inspect(model: torch.nn.Module, optimizer: Optimizer | Collection[Optimizer] | None = None) -> Iterator[Inspection]:
    """Watch the training loop in the block, and name the usual waste: ``print(found)`` afterwards.

    A few steps are enough, validation included. Named are, each in bytes and with the line that mends it: outputs and
    graphs of earlier steps that are still held, validation without ``no_grad``, gradients that are set to zero instead
    of None or belong to frozen parameters, a generation cache in training, fragmentation (CUDA). What was packed by
    hooks (planned layers, checkpointing) or by a loss function outside of the model is not counted.

    Args:
        model: the module that the loop calls, wrapped or compiled if it is.
        optimizer: that of the loop, or all of them: gradients of what none of them steps are named, too.

    Yields:
        the inspection; its `report` says what was found so far. The block ends without hooks on the model.

    Raises:
        BudgetOptError: the model is no module, or the optimizer none.
    """
    require_module(model)
    found = Inspection(model, _all_of(optimizer))
    with watch(found, model):
        yield found


def watch(found: Inspection, model: torch.nn.Module, begun: Any = None) -> ExitStack:
    """Watch the model until what is returned is closed, and keep it no longer than others do.

    `begun`: arguments of a call that has begun already, so that the new hook is too late for it.
    """
    hooks = ExitStack()
    hooks.callback(found._close)
    hooks.callback(model.register_forward_pre_hook(found._before, with_kwargs=True).remove)
    hooks.callback(model.register_forward_hook(found._after, with_kwargs=True).remove)
    if begun is not None:
        found._before(model, begun, {})
    return hooks


def _all_of(optimizer: Any) -> list[Optimizer]:
    """The optimizers, none if nobody names them."""
    if optimizer is None:
        return []
    several = list(optimizer) if isinstance(optimizer, (list, tuple, set)) else [optimizer]
    for one in several:
        if not isinstance(one, Optimizer):
            raise BudgetOptError(f"optimizer={one!r} is no torch.optim.Optimizer: give that of the loop, or None")
    return several


class _Call:
    """One call of the model that made a graph.

    Attributes:
        done: a backward pass reached its outputs. saved: bytes that its graph saved on top of the outputs.
        unused: bytes of gradients that its backward pass makes for nobody. references: of what it made. graph: dead
            when the graph is.
    """

    def __init__(self, training: bool) -> None:
        self.training = training
        self.done = False
        self.saved = 0
        self.unused = 0
        self.references: list[tuple[weakref.ref[torch.UntypedStorage], int]] = []
        self.graph: weakref.ref[_Mark] | None = None

    @property
    def alive(self) -> bool:
        """Whether the graph is."""
        return self.graph is not None and self.graph() is not None

    def there(self) -> dict[int, int]:
        """Bytes of what it made and is still there, by identity of the storage."""
        found = ((reference(), size) for reference, size in self.references)
        return {id(storage): size for storage, size in found if storage is not None}


class _Mark:
    """Hangs on a graph's first nodes, dies with them, and is told of a backward pass."""

    def __init__(self, call: _Call) -> None:
        self._call = call

    def __call__(self, gradients: Any) -> None:
        self._call.done = True


class Inspection:
    """What was seen of a loop so far.

    Attributes:
        report: as a :class:`Waste`, exact bytes.
    """

    def __init__(self, model: torch.nn.Module, optimizers: Collection[Optimizer]) -> None:
        self._model = weakref.ref(model)
        self._optimizers = optimizers
        self._calls: list[_Call] = []
        self._count = 0
        self._ended = False  # the graph of a call whose backward pass is over
        self._piled = False
        self._found: dict[Kind, Finding] = {}
        self._suspects: tuple[dict[int, int], dict[int, int]] = ({}, {})  # of the last call, of those before it
        self._handles: list[Any] = []

    @property
    def report(self) -> Waste:
        """What was found, the largest first."""
        return Waste(calls=self._count, findings=tuple(sorted(self._found.values(), key=lambda one: -one.bytes)))

    def __str__(self) -> str:
        return str(self.report)

    # The model's hooks

    def _before(self, module: Any, args: Any, kwargs: Any) -> None:
        """A call begins."""
        if torch.compiler.is_compiling():
            return
        self._count += 1
        self._suspects = ({}, {})
        if torch.is_grad_enabled():
            given = _identities(_graph.within((args, kwargs)))
            self._look_at_gradients()
            self._look_back({*given, *self._own()})

    def _after(self, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        """It ends with `output`."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        inputs, outputs = _graph.within((args, kwargs)), _graph.within(output)
        graph = _graph.held(outputs, inputs)
        here = {*_identities(inputs), *self._own()}
        made = {i: s for i, s in {**graph.storages, **_storages(outputs)}.items() if i not in here}
        self._settle(made)
        if not any(one.grad_fn is not None for one in outputs):
            return
        new = made.keys() - graph.storages.keys()  # what attention saved of a cache would be there without it
        cache = {i: s for i, s in _storages(_graph.within(_cache(output))).items() if i in new}
        if module.training:
            self._tell("cache", _size(cache))
        call = _Call(module.training)
        call.references = [(weakref.ref(s), _bytes(s)) for i, s in made.items() if i not in cache]
        call.saved = _size(made) - _size(_storages(outputs), made)
        call.unused = self._unused(graph.leaves)
        self._follow(call, outputs)

    def _close(self) -> None:
        """The loop is over."""
        for call in self._calls:
            self._judge(call, over=True)
        for handle in self._handles:
            handle.remove()
        self._calls, self._handles = [], []
        for device in {p.device for p in self._parameters()}:
            if _device.supported(device):
                self._tell("fragmentation", _device.backend(device).fragmented(device), _FRAGMENTS)

    # What is there when a call begins

    def _look_at_gradients(self) -> None:
        grads = [(p, p.grad) for p in self._parameters() if p.grad is not None]
        self._tell("frozen gradients", sum(_size(_storages([g])) for p, g in grads if not p.requires_grad))
        stepped = self._stepped()
        live = [g for p, g in grads if p.requires_grad and id(p) in stepped]
        if all(not part.any() for g in live for part in parts(g)):
            self._tell("zero gradients", _size(_storages(live)))

    def _look_back(self, here: Collection[int]) -> None:
        """What of earlier calls is still there, though their backward pass is over. `here`: what has a use."""
        for call in self._calls:
            self._judge(call)
        done = [call for call in self._calls if call.done]
        self._ended = self._ended or not all(call.alive for call in done)
        if not self._piled and not self._ended and len(done) >= _GRAPHS:
            self._piled = True
            self._found.pop("held", None)  # so far, it was the pile as well
        self._calls = [call for call in self._calls if call.alive or call.there()]
        *before, last = [{i: n for i, n in call.there().items() if i not in here} for call in done] or [{}]
        self._suspects = last, {i: n for one in before for i, n in one.items() if i not in last}

    def _settle(self, made: Collection[int]) -> None:
        """What the new call saved as well is a constant of the model; the rest of what was there is held."""
        last, before = (sum(n for i, n in one.items() if i not in made) for one in self._suspects)
        self._suspects = ({}, {})
        if self._piled:
            self._tell("graphs", before, 0)
            self._tell("held", last)
        else:
            self._tell("held", last + before)

    def _judge(self, call: _Call, over: bool = False) -> None:
        """What became of a call; once it is known, it is told."""
        if call.done and call.training:
            self._tell("unused gradients", call.unused)
            call.unused = 0
        if not call.training and not call.done and (over or not call.alive):
            self._tell("validation", call.saved)
            call.saved = 0

    # What a call made

    def _own(self) -> set[int]:
        model = self._model()
        return set() if model is None else _identities([*model.parameters(), *model.buffers()])

    def _parameters(self) -> list[torch.nn.Parameter]:
        """The model's, none when it is gone."""
        model = self._model()
        return [] if model is None else list(model.parameters())

    def _stepped(self) -> set[int]:
        """Parameters that are stepped: all, if nobody says which. Loops add groups as they go."""
        if not self._optimizers:
            return {id(p) for p in self._parameters()}
        return {id(p) for one in self._optimizers for group in one.param_groups for p in group["params"]}

    def _unused(self, leaves: Mapping[int, torch.Tensor]) -> int:
        """Bytes of the gradients that the graph gives to the model's parameters which nobody steps."""
        stepped = self._stepped()
        idle = [p for p in self._parameters() if id(p) in leaves and id(p) not in stepped]
        return sum(_device.rounded(p.device, p.numel() * p.element_size()) for p in idle)

    def _follow(self, call: _Call, outputs: Iterable[torch.Tensor]) -> None:
        mark = _Mark(call)
        nodes = {one.grad_fn for one in outputs if one.grad_fn is not None}
        self._handles += [node.register_prehook(mark) for node in nodes]
        call.graph = weakref.ref(mark)
        self._calls.append(call)

    def _tell(self, kind: Kind, size: int, least: int = _SMALL) -> None:
        if size < least:
            return
        known = self._found.get(kind)
        calls = known.calls + 1 if known else 1
        self._found[kind] = Finding(kind=kind, bytes=max(size, known.bytes if known else 0), calls=calls)


def _cache(output: Any) -> Any:
    """The generation cache in an output of transformers' kind."""
    found = output.get("past_key_values") if isinstance(output, Mapping) else None
    return getattr(output, "past_key_values", None) if found is None else found


def _storages(tensors: Iterable[torch.Tensor]) -> dict[int, torch.UntypedStorage]:
    return {id(storage): storage for tensor in tensors for storage in _graph.storages(tensor)}


def _identities(tensors: Iterable[torch.Tensor]) -> set[int]:
    return set(_storages(tensors))


def _size(storages: Mapping[int, torch.UntypedStorage], among: Collection[int] | None = None) -> int:
    """Bytes, of those with an identity `among` some."""
    return sum(_bytes(storage) for i, storage in storages.items() if among is None or i in among)


def _bytes(storage: torch.UntypedStorage) -> int:
    return _device.rounded(storage.device, storage.nbytes())
