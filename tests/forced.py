"""Make the executor do what no plan would: drop everything, choose by lot, store everything in fp16.

::

    plain, planned = plain_and_planned(model)
    region, = force(planned, drop)              # the whole model is one region
    assert_same(run_steps(plain, [sample]), run_steps(planned, [sample]))
    assert region.counters.replayed
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from budgetopt._apply import Region, install
from budgetopt.solvers.problem import Choice

Chooser: TypeAlias = Callable[[Any, Tensor], Choice]
"""From an operator's facts and one of its results to what becomes of the result."""


class Forced:
    """A policy whose every answer is the chooser's."""

    def __init__(self, script: Any, choose: Chooser, snapshot: bool) -> None:
        self.script = script
        self.verify = False
        self.snapshot = snapshot
        self.choose = choose

    def unplanned(self, info: Any, tensor: Tensor) -> int:
        """The chooser's word."""
        return int(self.choose(info, tensor))


def drop(info: Any, tensor: Tensor) -> Choice:
    """Everything is made again, integers and masks as well."""
    return Choice.RECOMPUTE


def keep(info: Any, tensor: Tensor) -> Choice:
    """Everything is kept, but through the executor's hooks."""
    return Choice.KEEP


def halve(info: Any, tensor: Tensor) -> Choice:
    """Floats are stored in fp16, the rest is kept."""
    return Choice.FP16 if tensor.is_floating_point() else Choice.KEEP


def by_lot(seed: int) -> Chooser:
    """Keep or drop, each value for itself; the same seed tosses the same coins."""
    coin = random.Random(seed)
    return lambda info, tensor: coin.choice((Choice.KEEP, Choice.RECOMPUTE))


def force(
    model: nn.Module,
    choose: Chooser,
    paths: Sequence[str] = ("",),
    *,
    verify: bool = False,
    snapshot: bool = False,
) -> list[Region]:
    """Install a region on each module of `paths` in which `choose` decides everything.

    Args:
        verify: compare every value that is made again with what was dropped; see :func:`failures`.
        snapshot: copy small outside tensors that replays read, as the profiler does.
    """
    regions = []
    for path in paths:
        region = Region(path, [None], drops=[True])
        region.policy = partial(Forced, choose=choose, snapshot=snapshot)  # pickles, as a lambda would not
        region.verify = verify
        regions.append(region)
    install(model, None, regions)
    return regions


def failures(regions: Sequence[Region]) -> set[tuple[int, int]]:
    """(operator's position, slot) of what verifying found to differ from what was dropped."""
    return {failure for region in regions for _, call in region.watched for failure in call.failures}


class Around(nn.Module):
    """A function of a hidden tensor as a model: ``body(x @ weight)``, so that the region makes what `body` reads."""

    def __init__(self, body: Callable[[Tensor], Any], width: int = 6) -> None:
        super().__init__()
        self.body = body
        self.weight = nn.Parameter(torch.randn(width, width, generator=torch.Generator().manual_seed(5)) / 2)

    def forward(self, x: Tensor) -> Any:
        return self.body(x @ self.weight)
