"""How low budgets may be, beside layer checkpointing, and how near predictions are on the way there. By hand::

    python -m tests.floors --size full -k gpt2 llama

Tables, in bytes. The first: the plain peak, the peak where every layer is checkpointed, budgetopt's smallest
feasible budget with exact choices, and that budget ÷ the checkpointed peak. The second: budgets evenly spaced from the
smallest one to the plain peak, each fitted on a copy, verified, and measured on other data by the outside meter.
With ``--fp16``, a third: the smallest budget with fp16 that fit accepts, by its bound on the gradients' error, what the
error is, and that budget ÷ the one with exact choices.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

import budgetopt
from budgetopt import InfeasibleBudgetError, OverBudgetError, Plan
from tests.deep_models import DEEP, DenseLayer, Layer, Transition
from tests.outside_meter import peak_bytes, resident_bytes
from tests.plans import ALL
from tests.zoo_runs import MODELS, Case, case

NAMES = ("gpt2", "bert", "vit", "llama", *DEEP)
OWN_LAYERS = (Layer, DenseLayer, Transition)
BUDGETS = 10


@dataclass(frozen=True)
class Floor:
    """Smallest peaks of one model, in bytes: of the plain step, with layer checkpointing, as budgetopt says.

    `checkpointed` is None where the model has no layers that could be.
    """

    name: str
    plain: int
    checkpointed: int | None
    least: int

    @property
    def ratio(self) -> float:
        """The smallest feasible budget ÷ the checkpointed peak; 0 where there is none."""
        return self.least / self.checkpointed if self.checkpointed else 0.0


@dataclass(frozen=True)
class Point:
    """One budget, in bytes; `measured` is on other data, `refused` where fit said that its plan does not hold."""

    budget: int
    predicted: int = 0
    measured: int = 0
    refused: str = ""

    @property
    def off(self) -> float:
        """|predicted - measured| ÷ budget."""
        return abs(self.predicted - self.measured) / self.budget


def floor(made: Case) -> Floor:
    """The three peaks of a model."""
    layered, peak = checkpointed(copy.deepcopy(made.built[0])), None
    if layered is not None:
        resident = resident_bytes(layered, made.built[1])
        peak = resident + peak_bytes(layered, made.built[1], **MODELS[made.name].how)
    return Floor(made.name, made.resident + made.above, peak, made.least.minimum)


def checkpointed(model: Any) -> Any:
    """The model with every layer checkpointed: as transformers and diffusers do, or by torch's own function.

    None if it has no such layers.
    """
    how: dict[str, Any] = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):  # its name since the other one is deprecated
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=how)
    elif hasattr(model, "enable_gradient_checkpointing"):
        model.enable_gradient_checkpointing()
    elif hasattr(model, "gradient_checkpointing_enable"):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)
    else:
        layers = [module for module in model.modules() if isinstance(module, OWN_LAYERS)]
        if not layers:
            return None
        for layer in layers:
            layer.forward = partial(checkpoint, layer.forward, **how)  # type: ignore[method-assign]
    return model


def points(made: Case, least: int, count: int = BUDGETS, **options: float) -> Iterator[Point]:
    """`count` budgets from the least one to the plain peak, each fitted, verified and measured."""
    top = made.resident + made.above
    batch = made.batches(1)[0]
    for number in range(count):
        budget = least + (top - least) * number // (count - 1)
        try:
            model, plan = _lowest(made, budget, verify=True, **options)
        except OverBudgetError as error:
            yield Point(budget, refused=str(error))
            continue
        yield Point(plan.budget_bytes, plan.predicted.peak_bytes, made.peak(model, batch))


def _lowest(made: Case, budget: int, **options: Any) -> tuple[Any, Plan]:
    """A copy fitted at a budget, or at the smallest one that this solve finds."""
    try:
        return made.fitted(budget, **options)
    except InfeasibleBudgetError as infeasible:
        return made.fitted(infeasible.minimum, **options)


@dataclass(frozen=True)
class Rounded:
    """The smallest budget with fp16, in bytes; what was measured there, and the error of the gradients."""

    budget: int
    measured: int
    error: float
    between: bool


def rounded(made: Case, **options: float) -> Rounded:
    """Fit at the smallest budget with fp16; where its error is too large, at the smallest exact one."""
    least = made.least.minimum
    try:
        budgetopt.solve(made.profile, made.profile.fixed.total + 1)
    except InfeasibleBudgetError as infeasible:
        least = min(least, infeasible.minimum)
    try:
        model, plan = _lowest(made, least, allow=ALL, verify=True, **options)
    except OverBudgetError:
        model, plan = _lowest(made, made.least.minimum, allow=ALL, verify=True, **options)
    error = 0.0 if plan.measured is None else plan.measured.grad_error or 0.0
    return Rounded(plan.budget_bytes, made.peak(model, made.batches(1)[0]), error, plan.rounds_between)


def rounded_row(name: str, found: Rounded, exact: int) -> str:
    """A line of the third table."""
    what = "also between layers" if found.between else ""
    ratio = found.budget / exact
    return f"| {name} | {found.budget:,} | {found.measured:,} | {found.error:.1e} | {what} | {ratio:.4f} |"


def floor_row(found: Floor) -> str:
    """A line of the first table."""
    layered, ratio = (f"{found.checkpointed:,}", f"{found.ratio:.4f}") if found.checkpointed else ("", "")
    return f"| {found.name} | {found.plain:,} | {layered} | {found.least:,} | {ratio} |"


def point_row(name: str, found: Point) -> str:
    """A line of the second table."""
    if found.refused:
        return f"| {name} | {found.budget:,} | {found.refused} |"
    over = max(0, found.measured - found.budget)
    return f"| {name} | {found.budget:,} | {found.predicted:,} | {found.measured:,} | {found.off:.4%} | {over:,} |"


def main() -> None:
    """Print rows as they come: a model at full size takes minutes."""
    parser = argparse.ArgumentParser(description="Smallest budgets, and predictions against measurements.")
    parser.add_argument("-k", nargs="+", choices=MODELS, default=list(NAMES), dest="names", metavar="MODEL")
    parser.add_argument("--size", choices=("small", "full"), default="small")
    parser.add_argument("--budgets", type=int, default=BUDGETS, help="per model; 0: the first table alone")
    parser.add_argument("--time-limit", type=float, default=10.0, help="seconds for the solver, per budget")
    parser.add_argument("--fp16", action="store_true", help="the third table, too")
    options = parser.parse_args()
    torch.manual_seed(0)
    floors = []
    print("| model | plain | layers checkpointed | smallest budget | ÷ checkpointed |\n| --- | --- | --- | --- | --- |")
    for name in options.names:
        floors.append(floor(case(name, options.size)))
        print(floor_row(floors[-1]), flush=True)
    if options.fp16:
        print("\n| model | smallest budget with fp16 | measured | error | fp16 | ÷ exact |")
        print("| --- | --- | --- | --- | --- | --- |")
        for each in floors:
            made = case(each.name, options.size)
            print(rounded_row(each.name, rounded(made, time_limit=options.time_limit), each.least), flush=True)
    if options.budgets < 2:
        return
    print("\n| model | budget | predicted | measured | off | over |\n| --- | --- | --- | --- | --- | --- |")
    for found in floors:
        made = case(found.name, options.size)
        for point in points(made, found.least, options.budgets, time_limit=options.time_limit):
            print(point_row(found.name, point), flush=True)


if __name__ == "__main__":
    main()
