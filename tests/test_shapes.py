"""Other shapes than the sample's: a plan made for a padded batch, run on every shape that training meets.

Planned at batch 8, padded; run unpadded, on part of a batch, on one example, on shorter texts. Gradients are
those of the plain model bit for bit, the peak is within the budget and no more than the plain step's; where other
operators run, at least half of the saving that the plan makes on its own shape remains.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch

import budgetopt
from budgetopt import _apply
from tests.models import Built, gpt2
from tests.oracle import assert_same, run_steps
from tests.outside_meter import peak_bytes, resident_bytes
from tests.zoo import bert, llama

VOCABULARY = 300
LAYERS = 4
WIDTH = 64
LENGTHS = {"short": (64, 25), "full": (256, 100)}
SHAPES = ["planned", "unpadded", "batch 3", "batch 1", "batch 1 unpadded", "shorter", "shorter unpadded"]


def build(name: str, length: int) -> Any:
    """A small model that takes texts of up to `length` tokens."""
    if name == "gpt2":
        return gpt2(LAYERS, WIDTH, VOCABULARY, 8, length, heads=4)[0]
    return {"bert": bert, "llama": llama}[name](WIDTH, LAYERS, VOCABULARY, 8, length)[0]


def texts(batch: int, length: int, *, padded: bool, seed: int = 0) -> dict[str, torch.Tensor]:
    """Tokens; padded: every row but the first ends in padding that the loss leaves out."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        tokens = torch.randint(1, VOCABULARY, (batch, length))
        ends = torch.randint(length // 2, length, (batch, 1))
    if not padded:
        return {"input_ids": tokens, "labels": tokens.clone()}
    ends[0] = length
    mask = (torch.arange(length) < ends).long()
    return {"input_ids": tokens * mask, "attention_mask": mask, "labels": torch.where(mask > 0, tokens, -100)}


def shaped(shape: str, lengths: tuple[int, int]) -> dict[str, torch.Tensor]:
    """The sample of a name in SHAPES, of other data than the planned one."""
    batch = next((n for n in (1, 3) if f"batch {n}" in shape), 8)
    return texts(batch, lengths["shorter" in shape], padded="unpadded" not in shape, seed=5)


@cache
def planned(name: str, size: str) -> tuple[Any, Any, int, float]:
    """The plain model, the planned one, the budget, and the share of the activation bytes that the plan saves."""
    length = LENGTHS[size][0]
    plain, sample = build(name, length), texts(8, length, padded=True)
    resident, above = resident_bytes(plain, sample), peak_bytes(copy.deepcopy(plain), sample)
    budget = resident + above // 2
    model = copy.deepcopy(plain)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        budgetopt.fit(model, sample, budget, allow=("keep", "recompute"), optimizer=None, time_limit=2)
    return plain, model, budget, 1 - peak_bytes(copy.deepcopy(model), sample) / above


def regions(model: Any) -> Iterator[_apply.Region]:
    for module in model.modules():
        forward = vars(module).get("forward")
        if isinstance(forward, _apply.PlannedForward):
            yield forward.region


def check(name: str, size: str, shape: str) -> None:
    plain, model, budget, saving = planned(name, size)
    sample = shaped(shape, LENGTHS[size])
    probe = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "budgetopt: .* ran other operators")
        above, without = peak_bytes(probe, sample), peak_bytes(copy.deepcopy(plain), sample)
        assert_same(run_steps(copy.deepcopy(plain), [sample]), run_steps(copy.deepcopy(model), [sample]))
    resident = resident_bytes(plain, sample)
    assert resident + above <= budget
    assert resident + above <= 1.01 * (resident + without)
    counters = [region.counters for region in regions(probe)]
    assert all(c.replayed and not c.broken for c in counters)
    differing = sum(c.differing for c in counters)
    assert 1 - above / without >= saving / 2
    found, lost = sum(c.matched for c in counters), sum(c.unmatched for c in counters)
    assert not differing or found > lost  # beyond the first difference, most operators still are the planned ones
    if shape == "planned" or (shape, name) in (
        (s, n) for s in ("batch 3", "shorter") for n in ("gpt2", "bert", "llama")
    ):
        assert not differing
    print(
        f"\n{name} {size} {shape}: budget {budget}, plain {resident + without}, planned {resident + above}, "
        f"{(1 - above / without) / saving:.0%} of the planned saving, {differing} calls differ, {found} operators "
        f"found again, {lost} not"
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_other_shapes(name: str, shape: str) -> None:
    check(name, "short", shape)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_other_shapes_at_256(name: str, shape: str) -> None:
    check(name, "full", shape)


def test_several_samples_are_planned_for_the_worst(capfd: pytest.CaptureFixture[str]) -> None:
    plain = build("gpt2", 32)
    small, large = texts(4, 16, padded=True), texts(4, 32, padded=False)
    resident = resident_bytes(plain, large)
    budget = resident + peak_bytes(copy.deepcopy(plain), large) * 6 // 10
    model = copy.deepcopy(plain)
    budgetopt.fit(model, small, budget, samples=[large], allow=("keep", "recompute"), optimizer=None, solver="greedy")
    plan = budgetopt.plan_of(model)
    assert plan is not None and plan.drops and plan.measured is not None
    assert plan.profile.regions[0].shape[:2] == (4, 32)
    for sample in (small, large):
        probe = copy.deepcopy(model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert resident_bytes(probe, sample) + peak_bytes(probe, sample) <= budget
            assert_same(run_steps(copy.deepcopy(plain), [sample]), run_steps(copy.deepcopy(model), [sample]))


def test_a_batch_in_the_place_of_samples_is_refused() -> None:
    built: Built = gpt2(1, 32, 64, 2, 8, heads=2)
    with pytest.raises(budgetopt.BudgetOptError, match=r"samples=.*list of further batches"):
        budgetopt.fit(*built, "1GB", samples=built[1])


def test_differing_calls_warn_once() -> None:
    model = copy.deepcopy(planned("gpt2", "short")[1])
    for region in regions(model):
        assert region.notices is not None
        region.notices.differed = False
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2):
            model(**texts(8, 64, padded=False)).loss.backward()
    assert len(seen) == 1 and "ran other operators" in str(seen[0].message)
