"""What a loop wastes: the bytes that are named are those that mending frees, counted by the allocator's events."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity
from torch.utils.checkpoint import checkpoint

import budgetopt
from budgetopt import _device
from tests.models import gpt2_small
from tests.outside_meter import _memory_events

Loop = Callable[[nn.Module, Any, torch.optim.Optimizer], Any]
STEPS = 5


def trained() -> tuple[nn.Module, Any, torch.optim.Optimizer]:
    """A model whose gradients and optimizer's state have been there once."""
    model, sample = gpt2_small(2)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    model(**sample).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, sample, optimizer


def left(loop: Loop) -> int:
    """Bytes that are there on top after the loop, with all that it returns, by the allocator's events."""
    model, sample, optimizer = trained()
    gc.collect()
    with torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = loop(model, sample, optimizer)
    total = sum(_memory_events(profiler))
    del kept
    return total


def inspected(loop: Loop, *, optimizer: bool = False) -> dict[str, int]:
    """Bytes by kind, of the loop and the beginning of one more step."""
    model, sample, stepped = trained()
    with budgetopt.inspect(model, stepped if optimizer else None) as found:
        kept = loop(model, sample, stepped)
        if model.training:
            model(**sample)
    del kept
    return {one.kind: one.bytes for one in found.report.findings}


# Waste, and the same loop mended


def holding(model: nn.Module, sample: Any, optimizer: torch.optim.Optimizer) -> Any:
    for _ in range(STEPS):
        out = model(**sample)
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return out


def letting_go(model: nn.Module, sample: Any, optimizer: torch.optim.Optimizer) -> Any:
    for _ in range(STEPS):
        out = model(**sample)
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        del out


def listing(model: nn.Module, sample: Any, optimizer: torch.optim.Optimizer) -> Any:
    losses = []
    for _ in range(STEPS):
        loss = model(**sample).loss
        loss.backward(retain_graph=True)
        losses.append(loss)
        optimizer.zero_grad()
    return losses, loss


def listing_numbers(model: nn.Module, sample: Any, optimizer: torch.optim.Optimizer) -> Any:
    losses = []
    for _ in range(STEPS):
        loss = model(**sample).loss
        loss.backward(retain_graph=True)
        losses.append(loss.item())
        optimizer.zero_grad()
    return losses, loss


def zeros(model: nn.Module, sample: Any, optimizer: torch.optim.Optimizer) -> Any:
    for _ in range(2):
        model(**sample).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


def no_zeros(model: nn.Module, sample: Any, optimizer: torch.optim.Optimizer) -> Any:
    for _ in range(2):
        model(**sample).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def validating(model: nn.Module, sample: Any, optimizer: torch.optim.Optimizer) -> Any:
    model.eval()
    return model(**sample)


@torch.no_grad()
def validating_without(model: nn.Module, sample: Any, optimizer: torch.optim.Optimizer) -> Any:
    model.eval()
    return model(**sample)


def caching(model: nn.Module, sample: Any, optimizer: torch.optim.Optimizer) -> Any:
    return model(**sample, use_cache=True)


def not_caching(model: nn.Module, sample: Any, optimizer: torch.optim.Optimizer) -> Any:
    return model(**sample)


def freezing(model: nn.Module, sample: Any, optimizer: torch.optim.Optimizer) -> Any:
    model(**sample).loss.backward()
    model.get_submodule("transformer.h.0").requires_grad_(False)
    optimizer.step()
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = None


def freezing_whole(model: nn.Module, sample: Any, optimizer: torch.optim.Optimizer) -> Any:
    freezing(model, sample, optimizer)
    for parameter in model.parameters():
        parameter.grad = None


def half_stepped(model: nn.Module, sample: Any, optimizer: torch.optim.Optimizer) -> Any:
    block = set(model.get_submodule("transformer.h.0").parameters())
    optimizer.param_groups[0]["params"] = [p for p in model.parameters() if p not in block]
    for _ in range(2):
        model(**sample).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def half_frozen(model: nn.Module, sample: Any, optimizer: torch.optim.Optimizer) -> Any:
    model.get_submodule("transformer.h.0").requires_grad_(False)
    half_stepped(model, sample, optimizer)


@pytest.mark.parametrize(
    ("kind", "wasteful", "mended"),
    [
        ("held", holding, letting_go),
        ("graphs", listing, listing_numbers),
        ("zero gradients", zeros, no_zeros),
        ("validation", validating, validating_without),
        ("cache", caching, not_caching),
        ("frozen gradients", freezing, freezing_whole),
    ],
)
def test_the_bytes_that_are_named_are_freed(kind: str, wasteful: Loop, mended: Loop) -> None:
    found = inspected(wasteful)
    assert found[kind] == left(wasteful) - left(mended) > 0
    assert kind not in inspected(mended)


def test_gradients_that_nobody_steps() -> None:
    found = inspected(half_stepped, optimizer=True)
    assert set(found) == {"unused gradients"}
    assert found["unused gradients"] == left(half_stepped) - left(half_frozen) > 0
    assert not inspected(half_frozen, optimizer=True) and not inspected(half_stepped)


def test_each_loop_has_one_fault_alone() -> None:
    for kind, wasteful in (("held", holding), ("zero gradients", zeros), ("validation", validating)):
        assert set(inspected(wasteful)) == {kind}
    assert set(inspected(listing)) == {"graphs", "held"}  # the list, and the last loss of its own


def test_sums_of_losses_pile_up_graphs() -> None:
    def loop(model: nn.Module, sample: Any, optimizer: torch.optim.Optimizer) -> Any:
        total: Any = 0
        for _ in range(STEPS):
            loss = model(**sample).loss
            loss.backward()
            total += loss
            optimizer.zero_grad()
        return total

    assert set(inspected(loop)) == {"graphs"}


# Loops with nothing to find


class Clean:
    """Each method is a loop that wastes nothing."""

    @staticmethod
    def step(model: nn.Module, sample: Any, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(STEPS):
            loss = model(**sample).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    @staticmethod
    def accumulation(model: nn.Module, sample: Any, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(3):
            for _ in range(3):
                (model(**sample).loss / 3).backward()
            optimizer.step()
            optimizer.zero_grad()

    @staticmethod
    def two_forwards(model: nn.Module, sample: Any, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(STEPS):
            first = model(**sample)
            second = model(**sample)
            (first.loss + (first.logits - second.logits).square().mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
            del first, second

    @staticmethod
    def averaged(model: nn.Module, sample: Any, optimizer: torch.optim.Optimizer) -> None:
        average = copy.deepcopy(model).eval()
        for _ in range(3):
            Clean.step(model, sample, optimizer)
            with torch.no_grad():
                for mean, now in zip(average.parameters(), model.parameters(), strict=True):
                    mean.lerp_(now, 0.1)
                average(**sample)

    @staticmethod
    def validation(model: nn.Module, sample: Any, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(2):
            Clean.step(model.train(), sample, optimizer)
            model.eval()
            with torch.no_grad():
                kept = [model(**sample).logits for _ in range(2)]
            del kept

    @staticmethod
    def in_eval_mode(model: nn.Module, sample: Any, optimizer: torch.optim.Optimizer) -> None:
        Clean.step(model.eval(), sample, optimizer)

    @staticmethod
    def numbers(model: nn.Module, sample: Any, optimizer: torch.optim.Optimizer) -> None:
        losses, total = [], 0.0
        for _ in range(STEPS):
            loss = model(**sample).loss
            loss.backward()
            losses.append(loss.detach())
            total += loss.item()
            optimizer.zero_grad()


CLEAN = ["step", "accumulation", "two_forwards", "averaged", "validation", "in_eval_mode", "numbers"]


@pytest.mark.parametrize("name", CLEAN)
def test_nothing_is_found_in_a_clean_loop(name: str) -> None:
    model, sample, optimizer = trained()
    with budgetopt.inspect(model, optimizer) as found:
        getattr(Clean, name)(model, sample, optimizer)
    assert str(found).startswith("nothing found in ") and found.report.calls >= STEPS


def test_nothing_is_found_in_adversaries() -> None:
    generator = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 256))
    judge = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))
    optimizers = [torch.optim.Adam(each.parameters()) for each in (generator, judge)]

    def step() -> None:
        fake = generator(torch.randn(64, 32))
        (judge(torch.randn(64, 256)).mean() - judge(fake.detach()).mean()).backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
        judge(fake).mean().backward()
        optimizers[0].step()
        for each in optimizers:
            each.zero_grad()

    with budgetopt.inspect(generator, optimizers) as first, budgetopt.inspect(judge, optimizers) as second:
        for _ in range(STEPS):
            step()
    assert not first.report.findings and not second.report.findings
    assert first.report.calls == STEPS and second.report.calls == 3 * STEPS


class Carrying(nn.Module):
    """A recurrent layer, and a table that is no buffer and is saved by every graph."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(64, 64, batch_first=True)
        self.table = torch.randn(16, 16, 64)

    def forward(self, x: torch.Tensor, state: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        y, state = self.cell(x, state)
        return (y * self.table).mean(), state


def test_a_state_that_is_carried_over_and_constants_are_no_waste() -> None:
    model, state = Carrying(), None
    with budgetopt.inspect(model) as found:
        for _ in range(STEPS):
            loss, state = model(torch.randn(16, 16, 64), state)
            loss.backward()
            state = state.detach()
            model.zero_grad()
    assert not found.report.findings


# What it leaves


class Checkpointed(nn.Module):
    """Runs its forward again when what it saved is unpacked."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
        self.runs = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def run(x: torch.Tensor) -> torch.Tensor:
            self.runs += 1
            y: torch.Tensor = self.body(x)
            return y

        y: torch.Tensor = checkpoint(run, x, use_reentrant=False)
        return y.mean()


def test_what_hooks_packed_is_not_unpacked() -> None:
    model = Checkpointed()
    with budgetopt.inspect(model) as found:
        for step in range(1, 4):
            loss = model(torch.randn(64, 64, requires_grad=True))
            assert model.runs == 2 * step - 1
            loss.backward()
            assert model.runs == 2 * step
            model.zero_grad()
    assert not found.report.findings


def test_a_planned_model_trains_as_it_did() -> None:
    plain, sample, _ = trained()
    model = copy.deepcopy(plain)
    profile = budgetopt.profile(model, sample, optimizer=None)
    plan = budgetopt.solve(profile, profile.peak_bytes * 4 // 5, allow=("keep", "recompute"), solver="greedy")
    budgetopt.apply(model, plan)
    with budgetopt.inspect(model) as found:
        for each in (plain, model):
            torch.manual_seed(0)
            each(**sample).loss.backward()
    pairs = zip(plain.parameters(), model.parameters(), strict=True)
    assert plan.drops and all(p.grad is not None and q.grad is not None and p.grad.equal(q.grad) for p, q in pairs)
    assert not found.report.findings


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_left_behind(fails: bool) -> None:
    model, sample, _ = trained()
    loss = None
    try:
        with budgetopt.inspect(model) as found:
            loss = model(**sample).loss
            if fails:
                raise KeyError("in the loop")
    except KeyError:
        assert fails
    assert not model._forward_hooks and not model._forward_pre_hooks
    assert not model._forward_hooks_with_kwargs and not model._forward_pre_hooks_with_kwargs
    gone = weakref.ref(found)
    del found
    gc.collect()
    assert gone() is None and loss is not None
    loss.backward()


def test_looking_keeps_nothing_alive() -> None:
    def loop(model: nn.Module, sample: Any, optimizer: torch.optim.Optimizer) -> Any:
        with budgetopt.inspect(model):
            Clean.step(model, sample, optimizer)
            loss = model(**sample).loss
            loss.backward()
        return loss

    def bare(model: nn.Module, sample: Any, optimizer: torch.optim.Optimizer) -> Any:
        Clean.step(model, sample, optimizer)
        loss = model(**sample).loss
        loss.backward()
        return loss

    assert left(loop) == left(bare)


def test_circles_in_an_output_are_walked_once() -> None:
    class Circle(nn.Module):
        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            output: dict[str, Any] = {"y": x * x}
            output["self"] = output
            return output

    model = Circle()
    with budgetopt.inspect(model) as found:
        for _ in range(3):
            output = model(torch.randn(64, 64, requires_grad=True))
            output["y"].sum().backward()
            gc.collect()  # the circles of the steps before
    assert {one.kind: one.bytes for one in found.report.findings} == {"held": 64 * 64 * 4}


# How it is told


def test_the_module_that_the_loop_calls_is_the_one_to_inspect() -> None:
    model = nn.Linear(64, 64)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with budgetopt.inspect(model) as inner, budgetopt.inspect(compiled) as outer:  # type: ignore[arg-type]
        for _ in range(3):
            output = compiled(torch.randn(64, 64))
            output.sum().backward()
    assert inner.report.calls == 0 and "was not called" in str(inner)
    assert outer.report.calls == 3 and [one.kind for one in outer.report.findings] == ["held"]
    assert outer.report.findings[0].bytes == 64 * 64 * 4


def test_findings_are_told_with_bytes_and_the_mend() -> None:
    model, sample, optimizer = trained()
    with budgetopt.inspect(model, optimizer) as found:
        zeros(model, sample, optimizer)
    size = sum(p.numel() * 4 for p in model.parameters())
    (one,) = found.report.findings
    assert (one.kind, one.bytes, one.calls) == ("zero gradients", size, 1)
    assert budgetopt._units.show_bytes(size) in str(found) and "zero_grad(set_to_none=True)" in str(found)
    assert f'"bytes":{size}' in found.report.model_dump_json()


def test_the_allocator_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 900 << 20)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 700 << 20)
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    cuda = _device._BACKENDS["cuda"]
    assert cuda.fragmented(torch.device("cuda")) == 200 << 20
    monkeypatch.setitem(_device._BACKENDS, "cpu", cuda)
    with budgetopt.inspect(nn.Linear(2, 2)) as found:
        pass
    assert [(one.kind, one.bytes) for one in found.report.findings] == [("fragmentation", 200 << 20)]
    assert "expandable_segments:True" in str(found)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert cuda.fragmented(torch.device("cuda")) == 0


def bad() -> Iterator[tuple[Any, Any, str]]:
    yield "model", None, "the model is of type str"
    yield nn.Linear(2, 2), "adamw", "optimizer='adamw'"
    yield nn.Linear(2, 2), [torch.nn.ReLU()], "is no torch.optim.Optimizer"


@pytest.mark.parametrize(("model", "optimizer", "message"), list(bad()))
def test_bad_input(model: Any, optimizer: Any, message: str) -> None:
    with pytest.raises(budgetopt.BudgetOptError, match=message), budgetopt.inspect(model, optimizer):
        pass
