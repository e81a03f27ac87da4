"""Where even profiling runs out of memory, smaller batches are profiled and scaled; the failure leaves nothing."""

from __future__ import annotations

import re
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import budgetopt
from budgetopt._out_of_memory import is_out_of_memory
from budgetopt._sample import first
from tests.models import Built, conv_stack, gpt2, mlp_stack
from tests.outside_meter import peak_bytes, quiet_environment, resident_bytes
from tests.untouched import everything, refused

EXACT = ("keep", "recompute")
CPU_MESSAGE = "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes."
ERRORS = [torch.OutOfMemoryError("CUDA out of memory."), MemoryError(), RuntimeError(CPU_MESSAGE)]


class Dies(torch.autograd.Function):
    """Nothing in forward; the backward pass raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, error: BaseException) -> Tensor:
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise ctx.error


class Device:
    """A step that runs out of memory for more than `most` examples, after the forward or in the backward pass.

    Attributes:
        sizes: batches that were tried. left: tensors of a step that died; none may live when the next begins.
    """

    def __init__(self, most: int, *, backward: bool = False, error: BaseException = ERRORS[0]) -> None:
        self.most, self.backward, self.error = most, backward, error
        self.sizes: list[int] = []
        self.left: list[weakref.ref[Tensor]] = []

    def step(self, model: Any, x: Tensor) -> Tensor:
        assert not any(reference() is not None for reference in self.left)
        self.sizes.append(len(x))
        out: Tensor = model(x)
        loss = out.square().mean()
        if len(x) > self.most and torch.is_grad_enabled():
            self.left += [weakref.ref(out), weakref.ref(loss)]
            if not self.backward:
                raise type(self.error)(*self.error.args)
            return Dies.apply(loss, type(self.error)(*self.error.args))  # type: ignore[no-untyped-call,no-any-return]
        return loss


def free_step(model: Any, x: Tensor) -> Tensor:
    """The same on a device that has room."""
    loss: Tensor = model(x).square().mean()
    return loss


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("build", [mlp_stack, conv_stack])
def test_scaled_from_two_sizes_that_fit(build: Any, backward: bool, error: BaseException) -> None:
    model, sample = build(batch=64)
    before = everything(model)
    device = Device(20, backward=backward, error=error)
    found = budgetopt.profile(model, sample, step=device.step, optimizer=None)
    assert everything(model) == before
    assert found.scaled_from == (2, 16) and found.batch == 64
    assert set(device.sizes) - {64, 32, 16} <= set(range(1, 20)) and 64 in device.sizes
    whole = budgetopt.profile(model, sample, step=free_step, optimizer=None)
    assert whole.scaled_from == () and whole.fixed == found.fixed and whole.fingerprint == found.fingerprint
    assert [o.name for o in whole.operators] == [o.name for o in found.operators]
    assert found.peak_bytes == pytest.approx(whole.peak_bytes, rel=0.005)
    assert [r.shape for r in whole.regions] == [r.shape for r in found.regions]
    assert "did not fit while profiling: scaled from batches of 2 and 16" in str(found)


def test_fit_says_so_and_the_budget_holds(capfd: pytest.CaptureFixture[str]) -> None:
    """A plan needs no more room than the profile had, so here the step stops dying as soon as it is planned."""
    model, sample = mlp_stack(batch=64)
    device = Device(40)

    def step(model: Any, x: Tensor) -> Tensor:
        planned = budgetopt.plan_of(model) is not None
        return free_step(model, x) if planned else device.step(model, x)

    budget = resident_bytes(model, sample) + round(0.8 * peak_bytes(model, sample, step=free_step))
    budgetopt.fit(model, sample, budget, step=step, allow=EXACT, optimizer=None)
    line = capfd.readouterr().err.splitlines()[-1]
    assert "the batch of 64 did not fit while profiling: scaled from batches of 4 and 32" in line
    plan = budgetopt.plan_of(model)
    assert plan is not None and plan.drops and plan.measured is not None
    assert resident_bytes(model, sample) + peak_bytes(model, sample, step=free_step) <= budget


def test_none_fits() -> None:
    model, sample = mlp_stack(batch=16)
    with refused(model, budgetopt.ProfileError, r"CUDA out of memory.*no two sizes fit\. Give a sample of a smaller"):
        budgetopt.profile(model, sample, step=Device(0).step, optimizer=None)


def test_a_sample_that_can_not_be_cut() -> None:
    model, sample = mlp_stack(batch=1)
    with refused(model, budgetopt.ProfileError, "no batch to cut.*Give a sample of a smaller batch"):
        budgetopt.profile(model, sample, step=Device(0).step, optimizer=None)
    with refused(model, budgetopt.ProfileError, "the first 4 examples can't be measured: a Holder of tensors"):
        budgetopt.profile(model, Holder(torch.zeros(8, 32)), step=dies_on_any, optimizer=None)


class Holder:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def dies_on_any(model: Any, sample: Any) -> Tensor:
    raise MemoryError


def test_other_operators_at_the_other_size() -> None:
    model, sample = mlp_stack(batch=16)
    device = Device(8)

    def step(model: Any, x: Tensor) -> Tensor:
        return device.step(model, x) * (1.0 if len(x) == 8 else torch.ones(()))

    with refused(model, budgetopt.ProfileError, "the first 8 examples can't be measured: it runs other operators on"):
        budgetopt.profile(model, sample, step=step, optimizer=None)


def test_other_errors_are_the_users() -> None:
    assert not is_out_of_memory(RuntimeError("shape mismatch")) and not is_out_of_memory(KeyError("out of memory"))
    model, sample = mlp_stack(batch=16)
    with refused(model, ValueError, "^mine"):
        budgetopt.profile(model, sample, step=Device(0, error=ValueError("mine")).step, optimizer=None)


def test_a_plan_that_dies_is_made_smaller() -> None:
    """Verifying runs out of memory once: the next plan goes without a twentieth of the budget."""
    model, sample = mlp_stack(batch=64)
    planned: list[int] = []

    def step(model: Any, x: Tensor) -> Tensor:
        plan = budgetopt.plan_of(model)
        if plan is not None:
            planned.append(plan.predicted.peak_bytes)
            if len(planned) == 1:
                raise MemoryError
        return free_step(model, x)

    budget = resident_bytes(model, sample) + round(0.9 * peak_bytes(model, sample, step=free_step))
    budgetopt.fit(model, sample, budget, step=step, allow=EXACT, optimizer=None)
    assert planned[1] <= budget - budget // 20 < planned[0] + budget // 20 and len(planned) >= 3


def large() -> Built:
    """Activations of some 150 MB, several times what the child process may have."""
    return gpt2(3, 128, 500, 32, 128)


def profile_under_a_limit(spare: int) -> None:
    """What a child process runs: the data that it may have is limited to `spare` bytes more than it has."""
    import resource

    model, sample = large()
    budgetopt.profile(model, first(sample, 4), optimizer=None)  # loads what is loaded late, makes kernels
    used = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData"))
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = int(used.split()[1]) * 1024 + spare
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    found = budgetopt.profile(model, sample, optimizer=None)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
    whole = budgetopt.profile(model, sample, optimizer=None)
    print(f"scaled from {found.scaled_from}, off by {found.peak_bytes / whole.peak_bytes - 1:.6f}")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts what is mapped on Linux alone")
def test_a_process_that_really_runs_out_of_memory() -> None:
    command = "from tests.test_out_of_memory import profile_under_a_limit; profile_under_a_limit(40_000_000)"
    done = subprocess.run([sys.executable, "-c", command], env=quiet_environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = re.search(r"scaled from \((\d+), (\d+)\), off by (\S+)", done.stdout)
    assert said is not None, done.stdout
    assert int(said[2]) < 32 and abs(float(said[3])) < 0.005
