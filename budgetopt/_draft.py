"""What a tape notes of operators and storages while the step runs."""

from __future__ import annotations

import weakref

import torch

from budgetopt import _torch
from budgetopt.solvers.problem import OUTSIDE


class Draft:
    """An operator while it is being written down."""

    __slots__ = ("backward", "births", "blocked", "module", "name", "ranks", "reads", "region", "rng", "snapshot",
                 "slots", "time_ns", "watched", "workspace")  # fmt: skip

    def __init__(self, name: str, region: int, module: str, backward: bool) -> None:
        self.name = name
        self.ranks = ""
        self.region = region
        self.module = module
        self.backward = backward
        self.time_ns = 0
        self.births: list[int] = []
        self.reads: list[int] = []
        self.slots: list[tuple[int, int]] = []
        self.blocked = ""
        self.snapshot = False
        self.rng = 0
        self.workspace = 0
        self.watched: list[Watch] = []


class Watch:
    """An outside tensor that a region read, to see afterwards whether the step wrote to it."""

    __slots__ = ("counter", "nbytes", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.counter = _torch.counter(tensor)
        self.version = tensor._version
        self.nbytes = tensor.untyped_storage().nbytes()

    def moved(self) -> bool:
        """Whether it was written to since."""
        return bool(self.counter._version != self.version)


class Storage:
    """A storage that the step made; `died_at`: the position of its death among the events."""

    __slots__ = ("alive", "aliases", "died_at", "reference", "value")

    def __init__(self) -> None:
        self.alive = True
        self.died_at = -1
        self.value = OUTSIDE
        self.aliases: list[weakref.ref[torch.Tensor]] = []
        self.reference: weakref.ref[torch.UntypedStorage] | None = None
