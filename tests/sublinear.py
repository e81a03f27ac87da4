"""What a 1,000-layer residual net costs in a fraction of its activation bytes, as Chen et al. 2016 asked. By hand::

    python -m tests.sublinear --layers 1000 --width 1024 --batch 1 --length 256 --shares 0.1429 0.05

Gradients are there from the start, so that activations alone make the peak. In one process, interleaved: the plain
step, itself again as a control, every layer checkpointed by ``torch.utils.checkpoint``, and a plan for each share of
the plain step's activation bytes. A line per kind: its measured share, the median time of a step, that ÷ the plain
one, what was predicted, and whether loss and gradients are bit for bit the plain ones.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

import budgetopt
from budgetopt import Plan
from tests.deep_models import deep_residual
from tests.floors import checkpointed
from tests.outside_meter import allocated_peak
from tests.zoo_models import squared_loss
from tests.zoo_runs import EXACT

COMPARED = 200
"""Parameters whose gradients are compared: all of them would take as much memory once more."""


class Net:
    """The model, and one step of it under any plan."""

    def __init__(self, layers: int, width: int, batch: int, length: int) -> None:
        self.model, self.sample = deep_residual(layers, width, batch, length)
        self.layered = checkpointed(deep_residual(layers, width, batch, length)[0])
        for mine, theirs in zip(self.model.parameters(), self.layered.parameters(), strict=True):
            theirs.data = mine.data
        self.clear()
        self.profile = budgetopt.profile(self.model, self.sample, loss=squared_loss, optimizer=None)
        self.activations = self.profile.peak_bytes - self.profile.fixed.total

    def clear(self) -> None:
        """Gradients of zero, in both models the same."""
        for mine, theirs in zip(self.model.parameters(), self.layered.parameters(), strict=True):
            mine.grad = torch.zeros_like(mine) if mine.grad is None else mine.grad.zero_()
            theirs.grad = mine.grad

    def plan(self, share: float) -> Plan:
        """For a share of the activation bytes."""
        budget = self.profile.fixed.total + round(share * self.activations)
        return budgetopt.solve(self.profile, budget, allow=EXACT)

    @contextmanager
    def under(self, kind: str | Plan) -> Iterator[torch.nn.Module]:
        """The model as one kind of step wants it, its gradients cleared."""
        self.clear()
        if isinstance(kind, str):
            yield self.layered if kind == "checkpointed" else self.model
            return
        budgetopt.apply(self.model, kind)
        try:
            yield self.model
        finally:
            budgetopt.remove(self.model)

    def step(self, model: torch.nn.Module) -> float:
        """Seconds; the output is held throughout, as it is while profiling."""
        start = time.perf_counter()
        output = model(self.sample)
        torch.autograd.backward(squared_loss(output))
        return time.perf_counter() - start

    def share(self, kind: str | Plan) -> float:
        """Measured peak of a step, as a share of the activation bytes."""
        with self.under(kind) as model:
            return allocated_peak(lambda: self.step(model)) / self.activations

    def gradients(self, kind: str | Plan) -> list[torch.Tensor]:
        """Of the first parameters, after one step."""
        with self.under(kind) as model:
            self.step(model)
        return [p.grad.clone() for p in list(self.model.parameters())[:COMPARED] if p.grad is not None]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="A deep residual net in a fraction of its activation bytes.")
    for name, size in (("layers", 1000), ("width", 1024), ("batch", 1), ("length", 256), ("rounds", 3), ("threads", 2)):
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--shares", type=float, nargs="+", default=[1 / 7, 0.05])
    parser.add_argument("--touched", type=int, default=12, help="GiB of heap that are touched first")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    pages = [torch.ones(1 << 18) for _ in range(options.touched << 10)]  # no step pays for pages never used before
    del pages
    net = Net(options.layers, options.width, options.batch, options.length)
    print(f"{net.activations:,} activation bytes, {net.profile.fixed.total:,} resident", flush=True)
    kinds: dict[str, str | Plan] = {"plain": "plain", "control": "plain", "checkpointed": "checkpointed"}
    kinds |= {f"planned for {share:.4f}": net.plan(share) for share in options.shares}
    exact = net.gradients("plain")
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(options.rounds):
        for name, kind in kinds.items():
            with net.under(kind) as model:
                times[name].append(net.step(model))
    plain = statistics.median(times["plain"])
    for name, kind in kinds.items():
        seconds = statistics.median(times[name])
        predicted = f"predicted x{1 + kind.predicted.overhead:.3f}" if isinstance(kind, Plan) else ""
        same = all(map(torch.equal, exact, net.gradients(kind)))
        share = net.share(kind)
        print(f"| {name} | {share:.4f} | {seconds:.3f} s | x{seconds / plain:.3f} | {predicted} | {same} |", flush=True)


if __name__ == "__main__":
    main()
