"""Will it fit, what uses the memory, what would more of it buy: answers from a profile, held against other sources."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
import torch
from torch import nn

import budgetopt
from budgetopt import Plan, Profile
from budgetopt._problem import UNSEEN
from budgetopt._units import show_bytes
from budgetopt._usage import KINDS, LayerUsage
from budgetopt.solvers import Choice
from tests.models import gpt2_small, mlp_stack
from tests.outside_meter import peak_bytes, resident_bytes

EXACT = ("keep", "recompute")


@cache
def profiled() -> Profile:
    return budgetopt.profile(*gpt2_small(2), optimizer=None)


def at(share: float) -> int:
    """A budget with so much of the activation bytes."""
    profile = profiled()
    return profile.fixed.total + round((profile.peak_bytes - profile.fixed.total) * share)


@cache
def planned() -> Plan:
    return budgetopt.solve(profiled(), at(0.6), allow=EXACT, solver="greedy")


def every(layer: LayerUsage) -> Iterator[LayerUsage]:
    yield layer
    for one in layer.layers:
        yield from every(one)


# What uses my memory?


class Head(nn.Module):
    """Almost everything is the logarithm of the softmax over 2000 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
        self.head = nn.Linear(16, 2000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.log_softmax(self.head(self.body(x)), -1)


def test_the_parts_are_those_that_can_be_counted_by_hand() -> None:
    """64 rows of fp32. The peak is in the softmax's backward pass, before any parameter has a gradient."""
    wide, narrow = 64 * 2000 * 4, 64 * 16 * 4
    profile = budgetopt.profile(Head(), torch.randn(64, 8), loss=torch.sum, optimizer=None)
    found = budgetopt.usage(profile, depth=None)
    assert "_log_softmax_backward_data" in found.peak_at
    assert found.parameters == (8 * 16 + 16 + 16 * 2000 + 2000) * 4
    assert found.sample == 64 * 8 * 4
    assert found.gradients == found.optimizer_state == found.buffers == found.replays == 0
    # Saved: what relu and log_softmax give back. Held beside it: the loss.
    assert {layer.path: layer.own_bytes for layer in every(found.model) if layer.own_bytes} == {
        "": wide + 4,
        "body.1": narrow,
    }
    # The softmax's gradient, and what it is made of: a single 1, and that spread out.
    assert found.temporaries == 2 * wide + 4
    assert found.peak_bytes == found.parameters + found.sample + found.activations + found.temporaries


def test_an_optimizers_step_can_be_the_peak() -> None:
    """Adagrad's step takes a few copies of the parameters, and hardly anything is saved for one example."""
    model, x = nn.Linear(512, 512, bias=False), torch.randn(1, 512)
    found = budgetopt.usage(budgetopt.profile(model, x, optimizer="adagrad"))
    assert found.peak_at.startswith("optimizer.step")
    copy = 512 * 512 * 4
    assert found.parameters == found.gradients == copy and copy <= found.optimizer_state <= copy + 8
    assert found.optimizer_step >= copy and found.temporaries <= 4  # the loss's own gradient


def test_the_parts_add_up_to_the_measured_peak() -> None:
    model, sample = gpt2_small(2)
    found = budgetopt.usage(profiled())
    assert sum(getattr(found, kind) for kind in KINDS) == found.peak_bytes == profiled().peak_bytes
    measured = resident_bytes(model, sample) + peak_bytes(model, sample)
    assert abs(found.peak_bytes - measured) <= 200


@pytest.mark.parametrize("depth", [0, 2, 3, None])
def test_layers_add_up_at_every_depth(depth: int | None) -> None:
    found = budgetopt.usage(profiled(), depth=depth)
    layers = list(every(found.model))
    assert sum(layer.own_bytes for layer in layers) == found.activations == found.model.bytes
    assert all(layer.bytes == layer.own_bytes + sum(one.bytes for one in layer.layers) for layer in layers)
    deepest = max(layer.path.count(".") + 1 if layer.path else 0 for layer in layers)
    assert deepest == (5 if depth is None else depth)


def test_the_last_block_is_half_gone_at_the_peak_and_the_first_is_whole() -> None:
    """The backward pass begins at the end: what the first block saved is there, counted by hooks on a plain model."""
    model, sample = gpt2_small(2)
    inside: list[str] = []
    saved: dict[int, int] = {}
    block = model.get_submodule("transformer.h.0")
    block.register_forward_pre_hook(lambda *_: inside.append("h.0"))
    block.register_forward_hook(lambda *_: inside.clear())
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    outside = set()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            if inside and storage.data_ptr() not in outside:
                saved[storage.data_ptr()] = storage.nbytes()
            outside.add(storage.data_ptr()) if not inside else None
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(**sample)
    given = 4 * 32 * 64 * 4  # the block's input, which its first norm saves, was made by the embedding's dropout
    blocks = {layer.path: layer.bytes for layer in every(budgetopt.usage(profiled(), depth=3).model)}
    assert blocks["transformer.h.0"] in (sum(saved.values()) - given, sum(saved.values()))
    assert 0 < blocks["transformer.h.1"] < blocks["transformer.h.0"]
    del output


def test_usage_of_a_plan_is_that_of_its_own_peak() -> None:
    found = budgetopt.usage(planned())
    assert sum(getattr(found, kind) for kind in KINDS) == found.peak_bytes == planned().predicted.peak_bytes
    assert found.activations < budgetopt.usage(profiled()).activations


def test_the_table_names_the_kinds_and_large_layers() -> None:
    table = str(budgetopt.usage(profiled()))
    for word in ("parameters", "activations", "temporaries", "transformer.h.0 (GPT2Block)", "at the peak"):
        assert word in table
    assert "optimizer" not in table


@pytest.mark.parametrize("depth", [-1, True, "2"])
def test_a_depth_is_a_number_of_levels(depth: object) -> None:
    with pytest.raises(budgetopt.BudgetOptError, match="depth="):
        budgetopt.usage(profiled(), depth=depth)  # type: ignore[arg-type]


# Will it fit?


def test_the_plain_step_fits_from_its_peak_on() -> None:
    edge = profiled().peak_bytes + UNSEEN
    found = budgetopt.fits(profiled(), edge)
    assert found and found.answer == "plain" and found.extra_ns == 0 and found.peak_bytes == profiled().peak_bytes
    assert "yes: the plain step" in str(found)
    below = budgetopt.fits(profiled(), edge - 1, allow=EXACT, solver="greedy")
    assert below and below.answer == "planned" and below.peak_bytes is not None and below.peak_bytes < edge - UNSEEN


def test_with_a_plan_at_its_price() -> None:
    found = budgetopt.fits(profiled(), at(0.6), allow=EXACT, solver="greedy")
    predicted = planned().predicted
    assert (found.answer, found.peak_bytes, found.extra_ns) == ("planned", predicted.peak_bytes, predicted.extra_ns)
    assert f"{predicted.overhead:+.1%}" in str(found) and "gradients exact" in str(found)
    assert found.plain_peak_bytes == profiled().peak_bytes and found.minimum_bytes is None


def test_where_nothing_fits_the_smallest_budget_does() -> None:
    found = budgetopt.fits(profiled(), profiled().fixed.total, allow=EXACT, solver="greedy")
    assert not found and found.answer == "no" and found.minimum_bytes is not None and found.overhead is None
    assert str(found).startswith("no: nothing fits") and "parameters" in found.set_by
    assert budgetopt.fits(profiled(), found.minimum_bytes, allow=EXACT, solver="greedy").answer == "planned"


def test_keep_alone_means_the_plain_step() -> None:
    found = budgetopt.fits(profiled(), at(0.9), allow=("keep",), solver="greedy")
    assert not found and found.minimum_bytes == profiled().peak_bytes + UNSEEN


def test_a_plan_is_asked_as_it_was_and_headroom_comes_off() -> None:
    plan = planned()
    assert budgetopt.fits(plan, at(0.6), solver="greedy").extra_ns == plan.predicted.extra_ns  # allow is the plan's
    spare = at(1.0) + UNSEEN
    assert budgetopt.fits(plan, spare).answer == "plain"
    assert budgetopt.fits(plan, spare, headroom=1024, solver="greedy").answer == "planned"


def test_a_model_that_is_on_no_device_yet() -> None:
    with torch.device("meta"):
        model, x = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)), torch.empty(64, 1024)
    profile = budgetopt.profile(model, x, device="h200", optimizer="sgd")
    assert budgetopt.fits(profile, "141GB").answer == "plain"
    assert budgetopt.fits(profile, "10MB").answer == "no"  # 33.6 MB of parameters
    found = budgetopt.usage(profile)
    assert found.parameters == (2 * 1024 * 4096 + 4096 + 1024) * 4 and "modelled on" in str(found)


@pytest.mark.parametrize("call", [budgetopt.fits, budgetopt.gain, lambda p, b: budgetopt.usage(p)])
def test_what_is_no_profile_is_refused(call: object) -> None:
    with pytest.raises(budgetopt.BudgetOptError, match=r"make one with budgetopt\.profile"):
        call(nn.Linear(2, 2), "8GB")  # type: ignore[operator]


# What would more memory buy?


def test_more_memory_keeps_more() -> None:
    more = at(0.8) - at(0.6)
    found = budgetopt.gain(planned(), more, solver="greedy")
    then = budgetopt.solve(profiled(), at(0.8), allow=EXACT, solver="greedy")
    assert found.now.extra_ns == planned().predicted.extra_ns
    assert found.then.extra_ns == then.predicted.extra_ns and found.then.budget_bytes == at(0.8)
    assert found.saved_ns == planned().predicted.extra_ns - then.predicted.extra_ns > 0
    for layer in found.layers:
        assert layer.recomputed_now == dropped(planned(), layer.path)
        assert layer.recomputed_then == dropped(then, layer.path)
        assert layer.recomputed_now != layer.recomputed_then and layer.path in str(found)
    assert sum(layer.recomputed_now - layer.recomputed_then for layer in found.layers) == sum(
        dropped(planned(), region.path) - dropped(then, region.path) for region in profiled().regions
    )


def dropped(plan: Plan, layer: str) -> int:
    """Bytes of saved values of a layer that are recomputed, by the choices of the values themselves."""
    profile = profiled()
    chosen = plan.choices(profile)
    return sum(
        profile.storages[profile.values[v].storage]
        for v in set(profile.handles)
        if profile.values[v].region >= 0 and profile.regions[profile.values[v].region].path == layer
        if chosen[v] == Choice.RECOMPUTE
    )


def test_enough_memory_needs_no_plan() -> None:
    found = budgetopt.gain(planned(), "2GB")
    assert found.then.answer == "plain" and found.saved_ns == planned().predicted.extra_ns
    assert "the plain step fits" in str(found) and {one.recomputed_then for one in found.layers} == {0}
    already = budgetopt.gain(profiled(), "1GB", "4GB")
    assert already.saved_ns == 0 and not already.layers and "fits already" in str(already)


def test_more_memory_from_too_little() -> None:
    less = profiled().fixed.total
    found = budgetopt.gain(profiled(), at(0.8) - less, less, allow=EXACT, solver="greedy")
    assert not found.now and found.then and found.saved_ns is None and "now nothing fits" in str(found)
    still = budgetopt.gain(profiled(), 1024, less, allow=EXACT, solver="greedy")
    assert not still.then and "still nothing fits" in str(still)


def test_a_share_more_is_one_of_the_budget_and_a_profile_needs_a_budget() -> None:
    found = budgetopt.gain(profiled(), "50%", "4GB")
    assert (found.more_bytes, found.then.budget_bytes) == (2_000_000_000, 6_000_000_000)
    with pytest.raises(budgetopt.BudgetOptError, match="a profile has no budget"):
        budgetopt.gain(profiled(), "2GB")
    with pytest.raises(budgetopt.InvalidBudgetError, match="more='2' has no unit"):
        budgetopt.gain(profiled(), "2", "4GB")


# How big can the batch be?


def test_the_largest_batch_of_the_plain_step_is_measured() -> None:
    profile = budgetopt.profile(*mlp_stack(3, 32, 64), optimizer=None)
    budget = profile.peak_bytes * 2
    found = profile.largest_batch(budget, allow=("keep",))
    for batch, fits in ((found, True), (found + 1, False)):
        model, sample = mlp_stack(3, 32, batch)
        assert (resident_bytes(model, sample) + peak_bytes(model, sample) <= budget - UNSEEN) is fits
    planned = budgetopt.solve(profile, budget, allow=EXACT)
    assert profile.largest_batch(budget, allow=EXACT) == planned.largest_batch() > found


# Why is this layer recomputed?


def test_explain_says_why() -> None:
    plan = planned()
    head, *lines = plan.explain("transformer.h.0").splitlines()
    assert f"The plain step needs {show_bytes(profiled().peak_bytes)}, the budget is {show_bytes(at(0.6))}" in head
    assert "are dropped here" in head
    assert any("replays start from it" in line for line in lines if line.split()[0] == "keep")
    last = lines[-1]  # the residual sum, which the next block reads
    assert last.split()[0] == "keep" and "other layers use it" in last


def test_explain_of_a_layer_that_is_left_alone() -> None:
    plan = budgetopt.solve(profiled(), at(0.95), allow=EXACT, solver="greedy")
    planned_layers = {region.path for region in plan.regions}
    alone = next(region.path for region in profiled().regions if region.path not in planned_layers)
    head, *lines = plan.explain(alone).splitlines()
    assert "what is dropped elsewhere is enough" in head
    assert lines and all("without dropping anything in this layer" in line for line in lines)
