"""The oracle finds what it is there to find: a difference planted anywhere is named."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.models import (
    Built,
    conv_stack,
    dropout_stack,
    fresh_batch,
    gpt2_small,
    mlp_stack,
    resnet_small,
)
from tests.oracle import Trace, assert_same, first_difference, plain_and_planned, run_steps

BUILDERS: list[Callable[..., Built]] = [mlp_stack, dropout_stack, conv_stack, gpt2_small, resnet_small]


@pytest.mark.parametrize("build", BUILDERS)
def test_a_copy_trains_bit_for_bit_alike(build: Callable[..., Built]) -> None:
    model, sample = build()
    plain, planned = plain_and_planned(model)
    samples = [sample, fresh_batch(sample, 1)]
    trace = run_steps(plain, samples)
    assert_same(trace, run_steps(planned, samples))
    assert all(loss.isfinite() for loss in trace.losses)
    assert all(g is not None and g.isfinite().all() for g in trace.gradients[0].values())


@pytest.mark.parametrize("build", BUILDERS)
def test_building_is_seeded_and_leaves_no_trace(build: Callable[..., Built]) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    (model, sample), (again, _), (other, _) = build(), build(), build(seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    assert_same(run_steps(model, [sample]), run_steps(again, [sample]))
    assert first_difference(run_steps(build()[0], [sample]), run_steps(other, [sample])) is not None


@pytest.fixture(scope="module")
def trace() -> Trace:
    model, sample = conv_stack()
    return run_steps(model, [sample])


def planted(trace: Trace, plant: Callable[[Trace], Any]) -> str | None:
    other = copy.deepcopy(trace)
    plant(other)
    return first_difference(trace, other)


def gradient(trace: Trace, step: int, name: str) -> torch.Tensor:
    found = trace.gradients[step][name]
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("plant", "says"),
    [
        (lambda t: t.losses[1].add_(1), "loss of step 1: 1 of 1 elements differ, the first at 0"),
        (
            lambda t: gradient(t, 2, "1.conv.weight").view(-1)[7].mul_(1.001),
            "gradient of step 2 '1.conv.weight': 1 of 576 elements differ, the first at 7",
        ),
        (lambda t: t.gradients[0].update({"0.conv.weight": None}), "gradient of step 0 '0.conv.weight'"),
        (lambda t: t.buffers["0.norm.num_batches_tracked"].add_(1), "buffer '0.norm.num_batches_tracked'"),
        (lambda t: t.parameters["2.norm.bias"].mul_(-1), "parameter '2.norm.bias': 8 of 8 elements differ"),
        (lambda t: t.parameters.update({"2.norm.bias": torch.zeros(3)}), "parameter '2.norm.bias': (8,) torch.float32"),
        (lambda t: t.rng["torch"].add_(1), "random state 'torch'"),
        (lambda t: t.training.update({"1": False}), "training flag '1': True and False"),
        (lambda t: t.hooks.update({"1": 1}), "hooks '1': 0 and 1"),
        (lambda t: t.state_dict_keys.append("extra"), "state_dict keys"),
        (lambda t: t.buffers.clear(), "buffer '0.norm.running_mean': only in the first"),
        (lambda t: None, None),
    ],
)
def test_names_the_first_difference(trace: Trace, plant: Callable[[Trace], Any], says: str | None) -> None:
    found = planted(trace, plant)
    assert (found is None) == (says is None)
    assert says is None or (found is not None and found.startswith(says)), found


def test_signs_of_zero_differ_and_nan_equals_nan() -> None:
    plus = Trace(losses=[torch.tensor(0.0)], gradients=[{"w": torch.tensor(float("nan"))}])
    minus = Trace(losses=[torch.tensor(-0.0)], gradients=[{"w": torch.tensor(float("nan"))}])
    assert first_difference(plus, plus) is None
    assert first_difference(plus, minus) == "loss of step 0: 1 of 1 elements differ, the first at 0: 0.0 and -0.0"


def test_a_random_number_more_is_found() -> None:
    model, sample = mlp_stack()
    plain, other = plain_and_planned(model)
    other.register_forward_pre_hook(lambda *_: random.random() and None)
    a, b = run_steps(plain, [sample]), run_steps(other, [sample])
    found = first_difference(a, b)
    assert found is not None and found.startswith("random state 'random'")


def test_fresh_batch_keeps_structure_and_range() -> None:
    _, sample = gpt2_small()
    other = fresh_batch(sample, 3)
    assert other["input_ids"].shape == sample["input_ids"].shape
    assert not torch.equal(other["input_ids"], sample["input_ids"])
    assert torch.equal(other["input_ids"], other["labels"])
    assert int(other["input_ids"].max()) < 128
    pair = (torch.randn(4), [torch.randn(4).double()], "text")
    fresh = fresh_batch(pair, 3)
    assert fresh[1][0].dtype == torch.float64 and fresh[2] == "text" and type(fresh) is tuple
