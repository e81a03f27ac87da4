"""The comparison itself: children that take their steps in turn."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from examples.benchmark.ways import CONTROL, PLAIN, Way

KEEP_ALL = str(1 << 40)
QUIET_MALLOC = {"MALLOC_MMAP_THRESHOLD_": KEEP_ALL, "MALLOC_TRIM_THRESHOLD_": KEEP_ALL, "MALLOC_TOP_PAD_": str(1 << 26)}
"""glibc keeps what it has: with its defaults a step spends much of its time in page faults."""
ENVIRONMENT = QUIET_MALLOC | {"TORCHINDUCTOR_COMPILE_THREADS": "1"}  # workers would stay, and take memory


class ChildError(Exception):
    """A way failed in its process; the text is the last line that it wrote."""


@dataclass
class Child:
    """A process of its own for one way, and what it measured."""

    name: str
    process: subprocess.Popen[str]
    log: Path
    facts: dict[str, Any] = field(default_factory=dict)
    step_ns: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def ask(self, question: str, *arguments: Any) -> dict[str, Any]:
        """The answer; raises ChildError if the process ended instead."""
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps([question, *arguments]) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()  # it writes the traceback after it has closed its answers
            raise ChildError(self.log.read_text().strip().splitlines()[-1])
        answer: dict[str, Any] = json.loads(line)
        return answer

    def set_up(self) -> Child:
        """Prepare; measure its peak and its gradients."""
        for question in ("prepare", "peak", "gradients"):
            self.facts |= self.ask(question)
        return self


@dataclass
class Comparison:
    """One model, every way: ours at shares of the activation bytes, peers, and ours at the peak of each peer.

    `tell` is called with a text as each stage begins. `at_once`: so many peers and ours at their peaks are there at the
    same time, beside a plain one and its control; all processes together would need a large machine.
    """

    model: str
    size: str
    device: str
    folder: Path
    tell: Callable[[str], None]
    at_once: int = 3
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    controls: list[dict[str, Any]] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    children: dict[str, Child] = field(default_factory=dict)

    def run(self, peers: list[Way], shares: list[float], warm_up: int, rounds: int) -> dict[str, Any]:
        """Everything measured, as JSON: bytes and nanoseconds, ratios to plain in the same round."""
        if shares:
            self._together([], shares, warm_up, rounds)
        for first in range(0, len(peers), self.at_once):
            self._together(peers[first : first + self.at_once], [], warm_up, rounds)
        return {
            "noise": max(abs(row["ratio"] - 1) for row in self.controls),
            "plain": self.rows[PLAIN],
            "controls": self.controls,
            "shares": {at(share): self.rows.get(at(share)) for share in shares},
            "peers": {peer.name: self.rows.get(peer.name) for peer in peers},
            "matched": {peer.name: self.rows.get(matched(peer.name)) for peer in peers},
            "failed": self.failed,
        }

    def _together(self, peers: list[Way], shares: list[float], warm_up: int, rounds: int) -> None:
        """These in turn, beside plain and its control."""
        self.children = {}
        with ExitStack() as stack:
            for way in (Way(PLAIN, "as_it_is"), Way(CONTROL, "as_it_is"), *peers):
                self._add(stack, way)
            for name, budget in self._budgets(peers, shares).items():
                self._add(stack, Way(name, "planned", [budget, str(self.folder / f"{self.model}.json")]))
            self._step_in_turn(warm_up, rounds)
            plain = self.children[PLAIN]
            gradients = torch.load(plain.facts["path"])
            rows = {name: _row(child, plain, gradients) for name, child in self.children.items()}
        self.controls.append(rows.pop(CONTROL))
        self.rows = rows | self.rows

    def _budgets(self, peers: list[Way], shares: list[float]) -> dict[str, int]:
        """For ours: shares of the activation bytes, and what each peer took."""
        plain = self.children[PLAIN].facts
        activations = plain["peak_bytes"] - plain["resident_bytes"]
        budgets = {at(share): plain["resident_bytes"] + round(share * activations) for share in shares}
        there = [peer.name for peer in peers if peer.name in self.children]
        return budgets | {matched(name): self.children[name].facts["peak_bytes"] for name in there}

    def _add(self, stack: ExitStack, way: Way) -> None:
        self.tell(f"{self.model}: {way.name}")
        child = stack.enter_context(self._process(way))
        try:
            self.children[way.name] = child.set_up()
        except ChildError as error:
            self.failed[way.name] = str(error)

    @contextmanager
    def _process(self, way: Way) -> Iterator[Child]:
        number = len(self.children) + len(self.failed)
        task = {"model": self.model, "size": self.size, "device": self.device, "folder": str(self.folder)}
        task |= {"number": number, "way": way.way, "argument": way.argument}
        log = self.folder / f"{self.model}-{number}.log"
        with log.open("w") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-m", "examples.benchmark.child", json.dumps(task)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env=os.environ | ENVIRONMENT,
            )
            try:
                yield Child(way.name, process, log)
            finally:
                process.kill()
                process.communicate()

    def _step_in_turn(self, warm_up: int, rounds: int) -> None:
        """Each round begins with another child, and has the same random numbers for all."""
        names = list(self.children)
        for number in range(warm_up + rounds):
            self.tell(f"{self.model}: round {number + 1} of {warm_up + rounds}")
            first = number % len(names)
            for name in names[first:] + names[:first]:
                answer = self.children[name].ask("step", number)
                self.children[name].losses.append(answer["loss"])
                if number >= warm_up:
                    self.children[name].step_ns.append(answer["step_ns"])


def at(share: float) -> str:
    """The row of ours at a share of the activation bytes."""
    return f"budgetopt at {share:.0%} of the activations"


def matched(name: str) -> str:
    """The row of ours at this peer's peak."""
    return f"budgetopt at the peak of: {name}"


def _row(child: Child, plain: Child, gradients: dict[str, torch.Tensor]) -> dict[str, Any]:
    ratios = [own / other for own, other in zip(child.step_ns, plain.step_ns, strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
    own = torch.load(child.facts["path"])
    return {
        "resident_bytes": child.facts["resident_bytes"],
        "peak_bytes": child.facts["peak_bytes"],
        "prepare_ns": child.facts["prepare_ns"],
        "step_ns": child.step_ns,
        "median_step_ns": round(statistics.median(child.step_ns)),
        "ratio": statistics.median(ratios),
        "quartiles": [low, high],
        "loss_error": max(abs(own / exact - 1) for own, exact in zip(child.losses, plain.losses, strict=True)),
        "gradient_error": _error(own, gradients),
    }


def _error(own: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> float:
    """‖g - g*‖ ÷ ‖g*‖ over all parameters; 0 means bit for bit."""
    if own.keys() == exact.keys() and all(torch.equal(own[name], exact[name]) for name in exact):
        return 0.0
    off = sum(float((own[name].double() - exact[name].double()).square().sum()) for name in exact)
    return float((off / sum(float(g.double().square().sum()) for g in exact.values())) ** 0.5)
