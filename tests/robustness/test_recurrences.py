"""Recurrent modules: their kernels write to pieces of one storage, one by one."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import budgetopt
from tests.oracle import assert_same, run_steps

from .cases import case
from .sides import replays, same_as_plain

NOTHING: dict[str, Any] = {"optimizer": None}


class Recurrent(nn.Module):
    """Sequences of several lengths, packed."""

    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU]) -> None:
        super().__init__()
        self.cells = nn.ModuleList(kind(8, 8, num_layers=2, dropout=0.2, batch_first=True) for _ in range(2))

    def forward(self, x: Tensor) -> Any:
        for cell in self.cells:
            packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([3, 2, 1]), batch_first=True)
            out, _ = nn.utils.rnn.pad_packed_sequence(cell(packed)[0], batch_first=True)
            x = x + out.sin()
        return x


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@case(
    "Calls and modules",
    "recurrences with dropout on packed sequences",
    "exact",
    threads="fairscale#766, pytorch#15788",
)
def test_recurrent_modules(kind: type[nn.LSTM] | type[nn.GRU]) -> None:
    torch.manual_seed(0)
    _, model, _ = same_as_plain(Recurrent(kind), torch.randn(3, 3, 8), "dropped", options=NOTHING)
    assert replays(model)
    plain = copy.deepcopy(model)
    budgetopt.remove(plain)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", budgetopt.BudgetOptWarning)
        assert_same(run_steps(plain.eval(), [torch.ones(3, 3, 8)]), run_steps(model.eval(), [torch.ones(3, 3, 8)]))
