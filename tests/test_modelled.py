"""Steps modelled on devices that are not here: the same events as a measured step, and nothing computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

import budgetopt
from budgetopt import BudgetOptError, Profile, _roofline
from budgetopt._operators import PLAIN, describe
from tests.models import gpt2_small
from tests.untouched import everything
from tests.zoo_runs import MODELS

ALIKE = ("vit", "functions", "gan")
"""Of these, forwards do not look at the data or at whether they are traced."""
aten: Any = torch.ops.aten


def llama(layers: int, device: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=4, vocab_size=100
    )
    with torch.device(device):
        ids = torch.zeros(2, 16, dtype=torch.long)
        return transformers.LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize("name", ALIKE)
def test_records_what_a_measured_step_does(name: str) -> None:
    model, sample = MODELS[name].build(**MODELS[name].small)
    how = {key: value for key, value in MODELS[name].how.items() if key in ("loss", "step")}
    real = budgetopt.profile(model, sample, **how)
    made = budgetopt.profile(model, sample, **how, device="cpu")
    for part in ("fixed", "storages", "handles", "fingerprint", "optimizer_workspace"):
        assert getattr(made, part) == getattr(real, part), part
    assert _operators(made) == _operators(real)
    assert [r.operators for r in made.regions] == [r.operators for r in real.regions]
    assert _held(made) == _held(real)


def _operators(profile: Profile) -> list[Any]:
    return [(o.name, o.ranks, o.region, o.births, o.reads, o.slots, o.blocked, o.rng_bytes) for o in profile.operators]


def _held(profile: Profile) -> list[Any]:
    return [value.model_dump(exclude={"codec_ns"}) for value in profile.values]


def test_a_plan_for_a_modelled_step_keeps_its_budget_on_the_real_one() -> None:
    """Operators' own memory is not in it: there is none to speak of here."""
    model, sample = MODELS["vit"].build(**MODELS["vit"].small)
    made = budgetopt.profile(model, sample, device="cpu", optimizer=None)
    real = budgetopt.profile(model, sample, optimizer=None)
    budget = made.fixed.total + (made.peak_bytes - made.fixed.total) // 2
    plan = budgetopt.solve(made, budget, allow=("keep", "recompute"), time_limit=2)
    budgetopt.apply(model, plan)
    assert plan.predicted.peak_bytes <= budget
    assert budgetopt.measure(model, sample).peak_bytes == pytest.approx(plan.predicted.peak_bytes, rel=0.02)
    assert made.peak_bytes == pytest.approx(real.peak_bytes, rel=0.02)


def test_no_weights_are_needed() -> None:
    real, meta = (budgetopt.profile(*llama(3, device), device="h200") for device in ("cpu", "meta"))
    assert meta.storages == real.storages
    assert meta.events == real.events
    assert meta.fixed == real.fixed
    assert meta.step_ns == real.step_ns > 0
    assert meta.batch == 2
    assert not meta.not_replayable


def test_sizes_are_those_of_the_devices_allocator() -> None:
    model, sample = llama(2, "meta")
    here, there = (budgetopt.profile(model, sample, device=name) for name in ("cpu", "a100"))
    assert there.storages == tuple(-(-size // 512) * 512 for size in here.storages)
    assert there.fixed.parameter == sum(-(-p.nbytes // 512) * 512 for p in model.parameters())
    assert "modelled on a100" in str(there)


def test_a_plan_of_a_modelled_step_is_tried_before_it_is_trusted() -> None:
    model, sample = gpt2_small()
    made = budgetopt.profile(model, sample, device="cpu")
    assert made.environment.device == "cpu, modelled"
    assert budgetopt.profile(model, sample).environment.device == "cpu"


@pytest.mark.parametrize("device", ["cpu", "h100"])
def test_leaves_no_trace(device: str) -> None:
    model, sample = gpt2_small()
    for parameter in list(model.parameters())[:2]:
        parameter.grad = torch.ones_like(parameter)
    before, parameters = everything(model), list(model.parameters())
    made = budgetopt.profile(model, sample, device=device)
    assert everything(model) == before
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert made.fixed.gradient >= sum(p.nbytes for p in parameters[:2])
    assert len(PLAIN) == 2


class _Fails(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        super().forward(x)
        raise ValueError("no")


def test_an_error_leaves_no_trace() -> None:
    model, x = nn.Sequential(nn.BatchNorm1d(4), _Fails(4, 4)), torch.ones(2, 4)
    before = everything(model)
    with pytest.raises(ValueError, match="no"):
        budgetopt.profile(model, x, device="t4")
    assert everything(model) == before
    assert len(PLAIN) == 2


def test_statistics_do_not_move() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), torch.randn(8, 4)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    budgetopt.profile(model, x, device="rtx4090")
    assert all(torch.equal(before[name], buffer) for name, buffer in model.named_buffers())


@pytest.mark.parametrize("name", ["b200", "", "cuda"])
def test_an_unknown_device_is_named(name: str) -> None:
    model, sample = gpt2_small()
    with pytest.raises(BudgetOptError, match=r"is not one of cpu, a100, h100, h200, rtx4090, t4"):
        budgetopt.profile(model, sample, device=name)


def test_names_are_read_as_people_write_them() -> None:
    for text in ("H200", "RTX 4090", "rtx-4090", "A100"):
        assert _roofline.device(text) is not None, text


class TestRoofline:
    """Times of single calls, against the arithmetic done by hand."""

    def test_a_product_of_matrices_is_bound_by_arithmetic(self) -> None:
        a = torch.ones(2048, 1024)
        out = aten.mm.default(a, a.t())
        assert self._time("a100", aten.mm.default, (a, a.t()), out) == pytest.approx(
            2 * 2048 * 2048 * 1024 / 19.5e12 * 1e9, abs=1
        )

    def test_half_precision_has_its_own_rate(self) -> None:
        a = torch.ones(2048, 2048, dtype=torch.bfloat16)
        out = torch.empty(2048, 2048, dtype=torch.bfloat16)
        moved = 3 * 2 * 2048**2 / 4.8e12 * 1e9
        work = 2 * 2048**3 / 989e12 * 1e9
        assert self._time("h200", aten.mm.default, (a, a), out) == pytest.approx(max(moved, work), abs=1)

    def test_a_sum_is_bound_by_bandwidth(self) -> None:
        x = torch.ones(1 << 24)
        assert self._time("t4", aten.add.Tensor, (x, x), x + x) == pytest.approx(3 * x.nbytes / 0.32e12 * 1e9, abs=1)

    def test_what_is_expanded_is_read_once(self) -> None:
        one, x = torch.ones(1).expand(1 << 24), torch.ones(1 << 24)
        assert self._time("t4", aten.add.Tensor, (x, one), x) == pytest.approx(2 * x.nbytes / 0.32e12 * 1e9, abs=2)

    def test_nothing_is_faster_than_a_launch_and_a_view_takes_no_time(self) -> None:
        x = torch.ones(4)
        assert self._time("h100", aten.add.Tensor, (x, x), x) == 5_000
        assert self._time("h100", aten.view.default, (x, [2, 2]), x) == 0

    def test_attention_counts_as_on_a_gpu(self) -> None:
        q = torch.ones(2, 4, 512, 64)
        out = aten._scaled_dot_product_flash_attention_for_cpu.default(q, q, q)
        work = 2 * 2 * 2 * 4 * 512 * 512 * 64
        took = self._time("a100", aten._scaled_dot_product_flash_attention_for_cpu.default, (q, q, q), out)
        assert took == pytest.approx(work / 19.5e12 * 1e9, rel=0.01)

    def test_this_machine_is_measured(self) -> None:
        here = _roofline.device("cpu")
        assert here is _roofline.device("CPU")
        assert here is not None
        assert min(here.rate, here.bandwidth, here.launch_ns) > 0

    def _time(self, name: str, func: Any, args: Any, out: Any) -> int:
        device = _roofline.device(name)
        assert device is not None
        return device.time_ns(func, describe(func), args, {}, out)
