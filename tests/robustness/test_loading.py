"""Data that other processes load."""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import budgetopt
from tests.models import dropout_stack
from tests.oracle import assert_same, run_steps

from .cases import case
from .sides import How, exactly, planned


class Rows(Dataset[Tensor]):
    """Made in the workers; `fits` there too, as a data set may that runs a model of its own."""

    def __init__(self, rows: int, fits: bool = False) -> None:
        self.rows, self.fits = rows, fits

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> Tensor:
        if self.fits and index == 0:
            torch.set_num_threads(1)
            model, sample = dropout_stack(depth=2)
            budgetopt.fit(model, sample, "1GB", optimizer=None)
            model(sample).sum().backward()
        return torch.randn(32, generator=torch.Generator().manual_seed(index))


def batches(fits: bool, context: str) -> list[Any]:
    loader = DataLoader(Rows(384, fits), batch_size=128, num_workers=2, multiprocessing_context=context)
    return list(loader)


@pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("fits", [False, True])
@exactly
@case("Company", "workers of a DataLoader are forked from a process that planned", "exact", threads="pulp#671")
def test_workers(how: How, fits: bool) -> None:
    model, sample = dropout_stack()
    plain = copy.deepcopy(model)
    planned(model, sample, how)
    found = batches(fits, "fork")
    assert_same(run_steps(plain, found), run_steps(model, found))
