"""One model trained one way, in a process of its own: prepares, runs a step when told, answers in JSON lines."""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from examples.benchmark import ways
from examples.benchmark.models import Built, build


class Trained:
    """The model and how it takes a step: forward and backward from gradients that are None."""

    def __init__(self, task: dict[str, Any]) -> None:
        self.task = task
        self.device = torch.device(task["device"])
        self.built: Built = build(task["model"], task["size"], task["device"])
        self.call: Callable[..., Any] = self.built.model

    def prepare(self) -> dict[str, Any]:
        """Apply the way, and run two steps; how long that took, in nanoseconds."""
        begin = time.perf_counter_ns()
        argument = self.task["argument"]
        self.call = getattr(ways, self.task["way"])(self.built, argument)
        self.step(0)
        taken = time.perf_counter_ns() - begin
        self.step(0)
        return {"prepare_ns": taken}

    def step(self, seed: int) -> dict[str, Any]:
        """One step, in nanoseconds, and its loss."""
        self.built.model.zero_grad(set_to_none=True)
        torch.manual_seed(seed)
        self._wait()
        begin = time.perf_counter_ns()
        loss = self.call(**self.built.sample).loss
        loss.backward()
        self._wait()
        return {"step_ns": time.perf_counter_ns() - begin, "loss": loss.item()}

    def peak(self) -> dict[str, Any]:
        """Peak bytes of a step on top of what is resident (as the allocator counts), and what is resident."""
        self.built.model.zero_grad(set_to_none=True)
        gc.collect()
        resident = self._resident()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            self.step(0)
            return {"resident_bytes": resident, "peak_bytes": resident + torch.cuda.max_memory_allocated() - before}
        with torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            self.step(0)
        return {"resident_bytes": resident, "peak_bytes": resident + max(0, *accumulate(_changes(profiler)))}

    def gradients(self) -> dict[str, Any]:
        """Gradients of the first step, into a file."""
        self.step(0)
        path = Path(self.task["folder"]) / f"{self.task['number']}.pt"
        torch.save({name: p.grad.cpu() for name, p in self.built.model.named_parameters() if p.grad is not None}, path)
        return {"path": str(path)}

    def _resident(self) -> int:
        tensors = [*self.built.model.parameters(), *self.built.model.buffers(), *self.built.sample.values()]
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def _changes(profiler: Any) -> Iterator[int]:
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        yield event.nbytes()


@contextmanager
def answering() -> Iterator[Any]:
    """What libraries print goes to stderr; answers to the parent."""
    with os.fdopen(os.dup(1), "w", buffering=1) as answers:
        os.dup2(2, 1)
        yield answers


def main() -> None:
    """Answer one question a line until there are no more."""
    with answering() as answers:
        trained = Trained(json.loads(sys.argv[1]))
        for line in sys.stdin:
            question, *arguments = json.loads(line)
            print(json.dumps(getattr(trained, question)(*arguments)), file=answers)


if __name__ == "__main__":
    main()
