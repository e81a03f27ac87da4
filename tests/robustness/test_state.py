"""State that a forward changes, and that making values again must not change once more."""

from __future__ import annotations

import torch
from torch import nn

from .cases import case
from .sides import How, exactly, replays, same_as_plain


@exactly
@case("State", "batch norm updates its statistics twice", "exact", threads="pytorch#96136, pytorch#62471")
def test_batch_norm_counts_once(how: How) -> None:
    layers = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(3)]
    sample = torch.randn(4, 8, 8, 8)
    plain, model, trace = same_as_plain(nn.Sequential(*layers), sample, how)
    assert trace.buffers["0.1.num_batches_tracked"] == 3 and replays(model)
    fresh = torch.randn(4, 8, 8, 8)
    with torch.no_grad():
        assert torch.equal(plain.eval()(fresh), model.eval()(fresh))
