"""What an autograd graph holds: the storages that it saved, and the parameters that it ends in. Nothing is unpacked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any, NamedTuple

import torch

from budgetopt._operators import parts

_NAMES: dict[type, tuple[str, ...]] = {}


class Held(NamedTuple):
    """Storages by their identity, and leaf tensors by theirs."""

    storages: dict[int, torch.UntypedStorage]
    leaves: dict[int, torch.Tensor]


def held(tensors: Iterable[torch.Tensor], inputs: Iterable[torch.Tensor] = ()) -> Held:
    """What the graph behind `tensors` holds, up to that of `inputs`.

    A value that hooks have packed (a planned layer, checkpointing, offloading) is not looked at: unpacking it would
    run the forward again.
    """
    found = Held({}, {})
    seen = {one.grad_fn for one in inputs if one.grad_fn is not None}
    waiting = [one.grad_fn for one in tensors if one.grad_fn is not None]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        for saved in _saved(node):
            for storage in storages(saved):
                found.storages[id(storage)] = storage
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, torch.Tensor):
            found.leaves[id(leaf)] = leaf
        waiting += [following for following, _ in node.next_functions if following is not None]
    return found


def storages(tensor: torch.Tensor) -> list[torch.UntypedStorage]:
    """Those that hold a tensor's bytes."""
    return [part.untyped_storage() for part in parts(tensor)]


def within(tree: Any) -> list[torch.Tensor]:
    """Tensors in what a model takes or gives, of whatever kind; objects may refer to each other in circles."""
    found: list[torch.Tensor] = []
    seen: dict[int, Any] = {}
    waiting = [tree]
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen[id(one)] = one  # the object, too: its identity must not be used again
        if isinstance(one, torch.Tensor):
            found.append(one)
        elif isinstance(one, Mapping):
            waiting += one.values()
        elif isinstance(one, (list, tuple, set)):
            waiting += one
        elif not callable(one) and not isinstance(one, ModuleType):
            waiting += getattr(one, "__dict__", {}).values()
    return found


def _saved(node: Any) -> Iterator[torch.Tensor]:
    kind = type(node)
    if kind not in _NAMES:
        _NAMES[kind] = tuple(name for name in dir(node) if name.startswith("_raw_saved_"))
    for name in _NAMES[kind]:
        raw = getattr(node, name)
        for one in raw if isinstance(raw, (tuple, list)) else (raw,):
            if getattr(one, "unpack_hook", None) is None:
                tensor = getattr(one, "data", None)
                if isinstance(tensor, torch.Tensor):
                    yield tensor
