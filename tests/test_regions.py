"""Which modules a plan is written in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import budgetopt
from tests.models import gpt2_small


def regions_of(model: nn.Module, sample: Any) -> list[str]:
    profile = budgetopt.profile(model, sample, optimizer=None)
    return [record.path for record in profile.regions]


class Chain(nn.Module):
    """Saves `links` results of equal size, and next to nothing else."""

    def __init__(self, links: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.links = links

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        for _ in range(self.links):
            x = torch.tanh(x)
        return x


@pytest.mark.parametrize("links", [4, 30])
def test_blocks_that_repeat_are_regions_however_finely_they_save(links: int) -> None:
    model = nn.Sequential(*(Chain(links) for _ in range(3)))
    assert regions_of(model, torch.randn(64, 8)) == ["0", "1", "2"]


def test_blocks_with_nothing_inside_are_not() -> None:
    model = nn.Sequential(*(Chain(1) for _ in range(3)))
    assert regions_of(model, torch.randn(64, 8)) == [""]


def test_transformer_blocks_and_what_is_large_between_them() -> None:
    paths = regions_of(*gpt2_small(2))
    assert {"transformer.h.0", "transformer.h.1"} < set(paths)


def test_each_of_very_many_blocks_is_one_however_little_it_holds() -> None:
    model = nn.Sequential(*(Chain(4) for _ in range(150)))  # each holds less than 1 %
    assert regions_of(model, torch.randn(16, 8)) == [str(number) for number in range(150)]
