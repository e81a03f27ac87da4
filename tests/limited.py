"""Train under a limit that the operating system enforces; a process of its own, which prints JSON.

As a script: ``python -m tests.limited plain|planned ARGUMENTS_OF_GPT2 SHARE STEPS``, with :data:`QUIET` in the
environment. :mod:`tests.test_real_limit` says what is done here and why.
"""

from __future__ import annotations

import gc
import json
import resource
import sys
from pathlib import Path
from typing import Any

import torch

import budgetopt
from tests.models import fresh_batch, gpt2
from tests.outside_meter import peak_bytes

QUIET = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "0",
    "MALLOC_TOP_PAD_": "0",
    "MALLOC_ARENA_MAX": "1",
    "OMP_NUM_THREADS": "1",
}
"""malloc maps what is large by itself and gives it back at free: what is counted is what is in use."""
SLACK = 4 << 20
"""Bytes that the step's tensors don't explain: page ends, the heap of small blocks, Python's objects."""


class Training:
    """GPT-2 and AdamW; every step is on other data."""

    def __init__(self, arguments: list[int]) -> None:
        self.model, self.sample = gpt2(*arguments)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.losses: list[str] = []

    def step(self, number: int) -> None:
        """One optimizer step; gradients are None before and after."""
        torch.manual_seed(number)
        loss = self.model(**fresh_batch(self.sample, number)).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.losses.append(loss.item().hex())

    def dies(self) -> str:
        """The error of a step that the memory does not suffice for; empty if it does. No weight is changed."""
        error = ""
        try:
            self.model(**self.sample).loss.backward()
        except (RuntimeError, MemoryError) as caught:
            error = f"{type(caught).__name__}: {caught}"
        self.optimizer.zero_grad(set_to_none=True)
        return error


def plain(training: Training, steps: int) -> dict[str, Any]:
    """Without limit and plan."""
    for number in range(steps):
        training.step(number)
    return {"losses": training.losses}


def planned(training: Training, share: float, steps: int) -> dict[str, Any]:
    """Fit, take one step, place the limit, train on; then the same limit on other steps, and other limits."""
    above = peak_bytes(training.model, training.sample, hold_output=False)  # as `step` has it
    there = 4 * sum(p.untyped_storage().nbytes() for p in training.model.parameters())  # gradients, both moments
    sample = sum(t.untyped_storage().nbytes() for t in training.sample.values())
    activations = round(share * above)
    budget = there + sample + activations
    budgetopt.fit(training.model, training.sample, budget, allow=("keep", "recompute"), optimizer="adamw")
    training.step(0)
    warm = _data_bytes()
    _limit(warm + activations + SLACK)
    for number in range(1, steps):
        training.step(number)
    found: dict[str, Any] = {"losses": training.losses, "above": above, "activations": activations, "warm": warm}
    _limit(warm + activations * 9 // 10)
    found["planned, a tenth less"] = training.dies()
    _limit(warm + activations + SLACK)
    found["planned"] = training.dies()
    budgetopt.remove(training.model)
    found["plain"] = training.dies()
    _limit(warm + above * 9 // 10)
    found["plain, a tenth less than it takes"] = training.dies()
    _limit(warm + above + SLACK)
    found["plain, with what it takes"] = training.dies()
    return found


def _data_bytes() -> int:
    """What the limit counts: private writable mappings (VmData)."""
    gc.collect()
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmData: this needs Linux")


def _limit(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (size, resource.RLIM_INFINITY))


def main(role: str, arguments: str, share: str, steps: str) -> None:
    """Print what was found."""
    training = Training(json.loads(arguments))
    found = plain(training, int(steps)) if role == "plain" else planned(training, float(share), int(steps))
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
