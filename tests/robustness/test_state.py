"""State that a forward changes, and that making values again must not change once more."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils import spectral_norm as old_spectral_norm

import budgetopt
from tests.oracle import assert_same, run_steps

from .cases import case
from .sides import How, exactly, planned, replays, same_as_plain


def conv_blocks(norm: Callable[[int], nn.Module], depth: int = 3) -> nn.Sequential:
    blocks = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), norm(8), nn.ReLU()) for _ in range(depth)]
    return nn.Sequential(*blocks)


@exactly
@case("State", "batch norm updates its statistics twice", "exact", threads="pytorch#96136, pytorch#62471")
def test_batch_norm_counts_once(how: How) -> None:
    sample = torch.randn(4, 8, 8, 8)
    plain, model, trace = same_as_plain(conv_blocks(nn.BatchNorm2d), sample, how)
    assert trace.buffers["0.1.num_batches_tracked"] == 3 and replays(model)
    fresh = torch.randn(4, 8, 8, 8)
    with torch.no_grad():
        assert torch.equal(plain.eval()(fresh), model.eval()(fresh))


@pytest.mark.parametrize(
    ("norm", "momentum"), [(nn.BatchNorm2d, None), (nn.BatchNorm2d, 0.3), (nn.InstanceNorm2d, 0.3)]
)
@case("State", "running averages that depend on how often they were updated", "exact")
def test_statistics_that_know_their_count(norm: Any, momentum: float | None) -> None:
    built = conv_blocks(lambda width: norm(width, momentum=momentum, track_running_stats=True))
    _, model, trace = same_as_plain(built, torch.randn(4, 8, 8, 8), "dropped")
    assert replays(model) and not torch.equal(trace.buffers["2.1.running_var"], torch.ones(8))


# -- collectives ---------------------------------------------------------------------------------


@pytest.fixture
def alone() -> Iterator[Any]:
    """A process group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield dist.distributed_c10d._get_default_group()
    dist.destroy_process_group()


class Synchronised(nn.Module):
    """Batch statistics over all processes, as nn.SyncBatchNorm has them on devices that this test lacks."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.running_mean: Tensor
        self.register_buffer("running_mean", torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.detach().mean((0, 2, 3))
        dist.all_reduce(mean)
        self.running_mean.lerp_(mean, 0.1)
        out: Tensor = (x - mean[:, None, None]).tanh() * self.weight[:, None, None]
        return out


@exactly
@case("State", "synchronised batch norm communicates once more", "exact", threads="fairscale#694")
def test_collectives_are_not_run_again(how: How, alone: Any) -> None:
    sample = torch.randn(4, 8, 8, 8)
    model = conv_blocks(Synchronised)
    plain = copy.deepcopy(model)
    planned(model, sample, how)
    counts = []
    for one in (plain, model):
        before = alone._get_sequence_number_for_group()
        trace = run_steps(one, [sample])
        counts.append((trace, alone._get_sequence_number_for_group() - before))
    assert_same(counts[0][0], counts[1][0])
    assert counts[0][1] == counts[1][1] == 9 and replays(model)


@exactly
@case("State", "batch norm is converted to a synchronised one after fit", "exact", threads="fairscale#660")
def test_conversion_after_fit(how: How) -> None:
    sample = torch.randn(4, 8, 8, 8)
    model = conv_blocks(nn.BatchNorm2d)
    plain = copy.deepcopy(model)
    planned(model, sample, how)
    convert: Any = nn.SyncBatchNorm.convert_sync_batchnorm
    plain, model = convert(plain), convert(model)
    assert isinstance(model.get_submodule("0.1"), nn.SyncBatchNorm)
    assert_same(run_steps(plain, [sample]), run_steps(model, [sample]))
    assert replays(model)
    budgetopt.remove(model)
    assert_same(run_steps(plain, [sample]), run_steps(model, [sample]))


# -- side effects --------------------------------------------------------------------------------

METRICS: list[float] = []


class Expert(nn.Module):
    """A block that leaves an auxiliary loss on itself, counts its calls, and logs outside of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.calls = 0
        self.aux_losses: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h: Tensor = self.linear(x).relu()
        self.aux_losses.append(h.pow(2).mean())
        METRICS.append(float(h.detach().mean()))
        return x + h.tanh()


def balanced_loss(model: Any, sample: Tensor) -> Tensor:
    """Reads the auxiliary losses that the forward left, before and after the backward."""
    for block in model:
        block.aux_losses.clear()
    loss: Tensor = model(sample).pow(2).mean() + sum(aux for block in model for aux in block.aux_losses)
    return loss


@exactly
@case("State", "auxiliary losses, counters and metrics double", "exact", threads="OLMo-core#720, torchtitan#1117")
def test_side_effects_happen_once(how: How) -> None:
    experts, options = nn.Sequential(*(Expert() for _ in range(3))), {"step": balanced_loss}
    METRICS.clear()
    plain, model, _ = same_as_plain(experts, torch.randn(32, 16), how, options=options, step=balanced_loss)
    assert replays(model)
    for one in (plain, model):
        for block in one.children():
            assert isinstance(block, Expert)
            assert block.calls == 3 and len(block.aux_losses) == 1
    assert METRICS[-18:-9] == METRICS[-9:]


# -- parametrizations ----------------------------------------------------------------------------

PARAMETRIZED: dict[str, Callable[[nn.Linear], nn.Module]] = {
    "spectral_norm": parametrizations.spectral_norm,
    "spectral_norm by hooks": lambda layer: old_spectral_norm(layer),
    "weight_norm": parametrizations.weight_norm,
    "orthogonal": parametrizations.orthogonal,
}


@pytest.mark.parametrize(("kind", "how"), [*((kind, "dropped") for kind in PARAMETRIZED), ("spectral_norm", "solved")])
@case("State", "power iterations of spectral norm drift", "exact", threads="miles-credit#394, pytorch#7298")
def test_parametrizations_for_many_steps(kind: str, how: How) -> None:
    blocks = [nn.Sequential(PARAMETRIZED[kind](nn.Linear(12, 12)), nn.GELU()) for _ in range(2)]
    _, model, _ = same_as_plain(nn.Sequential(*blocks), torch.randn(48, 12), how, steps=20)
    assert replays(model)
