"""The same main path on a CUDA device; skipped where there is none."""

from __future__ import annotations

import copy

import pytest
import torch

import budgetopt
from budgetopt import _device
from tests.models import conv_stack, gpt2_small

pytestmark = pytest.mark.cuda


def test_budget_and_gradients() -> None:
    model, sample = gpt2_small(dropout=0.0)
    model.cuda()
    sample = {name: tensor.cuda() for name, tensor in sample.items()}
    plain = budgetopt.measure(model, sample)
    budget = plain.resident_bytes + round(0.8 * (plain.peak_bytes - plain.resident_bytes))
    reference = copy.deepcopy(model)
    budgetopt.fit(model, sample, budget, allow=("keep", "recompute"), optimizer=None)
    assert budgetopt.measure(model, sample).peak_bytes <= budget
    for each in (reference, model):
        each(**sample).loss.backward()
    for p, q in zip(reference.parameters(), model.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None
        torch.testing.assert_close(p.grad, q.grad)


def test_batch_norm_statistics_move_once() -> None:
    model, sample = conv_stack()
    model.cuda()
    plain = copy.deepcopy(model)
    plan = budgetopt.solve(budgetopt.profile(model, sample.cuda(), optimizer=None), "1GB", allow=("keep", "recompute"))
    budgetopt.apply(model, plan)
    for each in (plain, model):
        each(sample.cuda()).square().mean().backward()
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(buffer, dict(model.named_buffers())[name])


def test_checksum_sees_every_byte() -> None:
    values = torch.arange(1 << 16, dtype=torch.uint8, device="cuda")
    before = _device.checksum(values.untyped_storage())
    values[12345] ^= 1
    assert _device.checksum(values.untyped_storage()) != before
