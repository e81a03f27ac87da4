"""What is predicted, and what training then takes."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import budgetopt
from tests.models import mlp_stack
from tests.oracle import assert_same, run_steps
from tests.outside_meter import peak_bytes, resident_bytes, state_bytes

from .cases import case
from .sides import EXACT, How, budget, exactly, planned


@case("Prediction", "a resumed run has its optimizer's state from the first step", "exact", threads="Megatron-LM#4638")
def test_adam_fresh_and_resumed() -> None:
    model, sample = mlp_stack()
    fresh = torch.optim.AdamW(model.parameters())
    before = budgetopt.profile(model, sample, optimizer=fresh)
    other = copy.deepcopy(model)
    trained = torch.optim.AdamW(other.parameters())
    other(sample).square().mean().backward()
    trained.step()
    other.zero_grad()
    resumed = torch.optim.AdamW(model.parameters())
    resumed.load_state_dict(trained.state_dict())
    after = budgetopt.profile(model, sample, optimizer=resumed)
    assert before.fixed == after.fixed and before.peak_bytes == after.peak_bytes
    assert state_bytes(resumed) == after.fixed.optimizer
    limit = budget(after)
    budgetopt.fit(model, sample, limit, optimizer=resumed, allow=EXACT)
    taken = (
        resident_bytes(model, sample) + state_bytes(resumed) + peak_bytes(model, sample, warmup=0, optimizer=resumed)
    )
    assert taken <= limit


@case("Prediction", "an unknown name of an optimizer", "refused")
def test_an_optimizer_nobody_knows() -> None:
    model, sample = mlp_stack()
    with pytest.raises(budgetopt.ProfileError, match=r"'adamx'.*pass the\s+instance"):
        budgetopt.fit(model, sample, "1GB", optimizer="adamx")
    assert budgetopt.plan_of(model) is None


class Text(nn.Module):
    """Tokens to logits, of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(32, 50)

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.head(self.layers(self.embed(tokens)))


def tokens(batch: int, length: int) -> torch.Tensor:
    return torch.randint(50, (batch, length), generator=torch.Generator().manual_seed(batch * length))


@exactly
@case("Prediction", "the last batch is ragged, lengths vary, gradients accumulate", "exact",
      threads="torchtune#1654, DiffSinger#327")  # fmt: skip
def test_ragged_batches(how: How) -> None:
    model = Text()
    plain = copy.deepcopy(model)
    planned(model, tokens(8, 64), how)
    samples = [tokens(*shape) for shape in ((8, 64), (3, 64), (1, 64), (8, 17), (8, 96), (1, 1))]
    with pytest.warns(budgetopt.BudgetOptWarning) as said:
        trace = run_steps(model, samples, steps=6)
    assert_same(run_steps(plain, samples, steps=6), trace)
    larger = [str(one.message) for one in said if "larger than planned" in str(one.message)]
    assert len(larger) == 1 and "peak" in larger[0]


@exactly
@case("Prediction", "several small batches before one optimizer step", "exact")
def test_accumulation(how: How) -> None:
    model = Text()
    plain = copy.deepcopy(model)
    planned(model, tokens(8, 64), how)

    def four(model: nn.Module, sample: Any) -> torch.Tensor:
        for part in sample[:-1]:
            model(part).square().mean().backward()
        loss: torch.Tensor = model(sample[-1]).square().mean()
        return loss

    sample = [torch.randint(50, (8, 64)) for _ in range(4)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trace = run_steps(model, [sample], step=four)
    assert_same(run_steps(plain, [sample], step=four), trace)


@case("Prediction", "memory that nobody can see", "exact", threads="pytorch#29554, pytorch#18853")
def test_headroom_is_left_free() -> None:
    model, sample = mlp_stack()
    profile = budgetopt.profile(model, sample, optimizer=None)
    limit = budget(profile, 0.7)
    budgetopt.fit(model, sample, limit + 100_000, headroom=100_000, optimizer=None, allow=EXACT)
    plan = budgetopt.plan_of(model)
    assert plan is not None and plan.measured is not None
    assert plan.headroom_bytes == 100_000 and plan.measured.peak_bytes <= limit
    assert peak_bytes(model, sample) + resident_bytes(model, sample) <= limit
