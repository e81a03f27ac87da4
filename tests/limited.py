"""Train under a limit that the operating system enforces; a process of its own, which prints JSON.

As a script, with :data:`QUIET` in the environment: ``python -m tests.limited plain GPT2 STEPS``, ``… fit GPT2 SHARE
PLAN``, ``… planned GPT2 WHAT_FIT_PRINTED PLAN STEPS``; ``GPT2`` are the arguments of the builder.
:mod:`tests.test_real_limit` says what is done here and why.
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
EXACT = ("keep", "recompute")
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


def fitted(training: Training, share: float, plan: str) -> dict[str, Any]:
    """Make the plan for a share of the activation bytes and save it."""
    above = peak_bytes(training.model, training.sample, hold_output=False)  # as `step` has it
    parameters = sum(p.untyped_storage().nbytes() for p in training.model.parameters())
    sample = sum(t.untyped_storage().nbytes() for t in training.sample.values())
    activations = round(share * above)
    budget = 3 * parameters + sample + activations  # with two moments; gradients are among the activation bytes
    budgetopt.fit(training.model, training.sample, budget, allow=EXACT, optimizer="adamw", plan=plan)
    return {"budget": budget, "above": above, "activations": activations}


def planned(training: Training, found: dict[str, Any], plan: str, steps: int) -> dict[str, Any]:
    """Take the saved plan and one step, place the limit, train on; then that limit and others on single steps."""
    budgetopt.fit(training.model, training.sample, found["budget"], allow=EXACT, optimizer="adamw", plan=plan)
    training.step(0)
    warm = _data_bytes()
    enough, plenty = warm + found["activations"] + SLACK, warm + found["above"] + SLACK
    _limit(enough)
    for number in range(1, steps):
        training.step(number)
    _limit(warm + found["activations"] * 7 // 8)
    ends = {"planned, an eighth less": training.dies()}
    _limit(enough)
    ends["planned"] = training.dies()
    budgetopt.remove(training.model)
    ends["plain"] = training.dies()
    _limit(warm + found["above"] * 7 // 8)
    ends["plain, an eighth less than it takes"] = training.dies()
    _limit(plenty)
    ends["plain, with what it takes"] = training.dies()
    return {"losses": training.losses, "warm": warm, **ends}


def _data_bytes() -> int:
    """What the limit counts: private writable mappings (VmData)."""
    gc.collect()
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmData: this needs Linux")


def _limit(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (size, resource.RLIM_INFINITY))


def main(role: str, arguments: str, *rest: str) -> None:
    """Print what was found."""
    training = Training(json.loads(arguments))
    if role == "plain":
        found = plain(training, int(rest[0]))
    elif role == "fit":
        found = fitted(training, float(rest[0]), rest[1])
    else:
        found = planned(training, json.loads(rest[0]), rest[1], int(rest[2]))
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
