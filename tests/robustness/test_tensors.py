"""Which tensors are saved, how they lie in memory, and what they count: shared, viewed, tied, strided."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import budgetopt
from tests.forced import Around

from .cases import case
from .near import near_plain
from .sides import How, exactly, planned, replays, same_as_plain

ROWS = 40
BARE: dict[str, Any] = {"optimizer": None}


def saved_bytes(profile: budgetopt.Profile) -> int:
    """Of the distinct storages that regions saved."""
    storages = {profile.values[value].storage for value in profile.handles}
    return sum(profile.storages[storage] for storage in storages)


def predicted_and_measured(model: nn.Module, sample: Any) -> tuple[int, int]:
    plan = budgetopt.plan_of(model)
    assert plan is not None
    model.zero_grad()
    return plan.predicted.peak_bytes, budgetopt.measure(model, sample).peak_bytes


# -- what is saved and counted -------------------------------------------------------------------


class Tied(nn.Module):
    """An embedding whose weight is the head's as well, a convolution, a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 12)
        self.conv = nn.Conv1d(ROWS, ROWS, 3, padding=1)
        self.frozen = nn.Linear(12, 12).requires_grad_(False)
        self.head = nn.Linear(12, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.frozen(self.conv(self.embed(tokens).sin())).tanh())
        return out


def forward_storages(profile: budgetopt.Profile) -> set[int]:
    return {profile.storages[v.storage] for v in profile.values if v.region >= 0}


@pytest.mark.parametrize("how", ["dropped", "halved", "solved"])
@case("Odd tensors", "weights are taken for activations", "exact", threads="pytorch#64729, trl#4247")
def test_weights_are_not_activations(how: How) -> None:
    model, tokens = Tied(), torch.randint(50, (2, ROWS))
    profile = budgetopt.profile(model, tokens, optimizer="sgd")
    own = {p.numel() * 4 for p in model.parameters()}
    assert profile.fixed.parameter == 4 * (50 * 12 + ROWS * ROWS * 3 + ROWS + 12 * 12 + 12)
    assert not own & forward_storages(profile)
    places = [p.data_ptr() for p in model.parameters()]
    if how == "halved":
        near_plain(model, tokens, 1e-2, options=BARE)
        predicted, measured = predicted_and_measured(model, tokens)
        assert abs(predicted - measured) < 0.02 * predicted
    else:
        same_as_plain(model, tokens, how)
    assert [p.data_ptr() for p in model.parameters()] == places and model.head.weight is model.embed.weight


class OneHidden(nn.Module):
    """Three layers read one tensor; a fourth result is cut into views."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.a, self.b = nn.Linear(12, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        q, k, v = self.qkv(h).chunk(3, dim=-1)
        out: Tensor = (q * k).sigmoid() * v + self.a(h) + self.b(h)
        return out


@exactly
@case("Odd tensors", "one tensor saved by several operators counts several times", "exact", threads="ColossalAI#1619")
def test_shared_tensors_count_once(how: How) -> None:
    """Saved: the hidden tensor, what is cut in three, and the gate."""
    sample = torch.randn(ROWS, 12)
    profile = budgetopt.profile(OneHidden(), sample)
    assert len(profile.handles) >= 8 and saved_bytes(profile) == ROWS * 4 * (16 + 48 + 16)
    _, model, _ = same_as_plain(OneHidden(), sample, how, options=BARE)
    predicted, measured = predicted_and_measured(model, sample)
    assert predicted == measured


@pytest.mark.parametrize("how", ["dropped", "halved", "solved"])
@case("Odd tensors", "a small view keeps all of a large tensor", "exact", threads="safetensors#379")
def test_a_view_counts_as_its_storage(how: How) -> None:
    model, sample = Around(lambda h: h.exp()[:2, :3].sin()), torch.randn(400, 6)
    profile = budgetopt.profile(model, sample)
    assert saved_bytes(profile) == 400 * 6 * 4
    if how == "halved":
        near_plain(model, sample, 1e-2, options=BARE)
    else:
        same_as_plain(model, sample, how, options=BARE)
    predicted, measured = predicted_and_measured(model, sample)
    assert abs(predicted - measured) < 0.02 * predicted


# -- how it lies in memory -----------------------------------------------------------------------

SEEN: list[Any] = []


class Probe(torch.autograd.Function):
    """Multiplies two tensors, and tells how what was saved looks in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        for t in ctx.saved_tensors:
            look = (t.shape, t.stride(), t.storage_offset(), t.untyped_storage().nbytes(), t.dtype, t.device)
            SEEN.append((*look, t.requires_grad, t.is_leaf, t.is_conj(), t.is_neg(), type(t)))
        x, y = ctx.saved_tensors
        return gradients[0] * y.conj(), gradients[0] * x.conj()


def looks(h: Tensor) -> Tensor:
    multiply: Any = Probe.apply
    y = h.sigmoid().view(2, 2, ROWS // 4, 6)
    last = y.contiguous(memory_format=torch.channels_last)
    parts = [multiply(y.transpose(1, 3), y.transpose(1, 3).sin()), multiply(last, last.cos())]
    parts += [multiply(y[:, :, 1:, ::2], y[:1, :, 1:, ::2].expand(2, -1, -1, -1)), multiply(y[0, 0, 0], y[1, 1, 0, 2])]
    parts.append(multiply(h.sin(), h.sin().detach()))
    z = torch.view_as_complex(h.cos().view(-1, 2))
    parts.append(multiply(z.conj(), z * 2).abs() + multiply(z.conj().imag, z.real))
    return torch.stack([part.sum() for part in parts])


@pytest.mark.parametrize("how", ["dropped", "halved", "solved"])
@case("Odd tensors", "strides, offsets or flags of a saved tensor are lost", "exact", threads="pytorch#186396")
def test_saved_tensors_look_as_in_plain(how: How) -> None:
    SEEN.clear()
    plain, model, sample = Around(looks), Around(looks), torch.randn(ROWS, 6)
    plain(sample).mean().backward()
    expected = SEEN.copy()
    planned(model, sample, how)
    SEEN.clear()
    model(sample).mean().backward()
    assert expected == SEEN and len(expected) == 14
    if how == "halved":
        assert near_plain(plain, sample, 1e-2, steps=1) > 0
    else:
        assert plain.weight.grad is not None and model.weight.grad is not None
        assert torch.equal(plain.weight.grad, model.weight.grad) and replays(model)


class Names(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The operators that run, and the strides of what they read."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.detach.default:  # plain unpacks one, and that makes no copy
            self.found.append((str(func), [tuple(t.stride()) for t in args if isinstance(t, Tensor)]))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("how", ["dropped", "halved", "solved"])
@case("Odd tensors", "channels_last is lost, or copied back and forth", "exact", threads="pytorch#68430, ComfyUI#3932")
def test_channels_last_without_copies(how: How) -> None:
    blocks = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU()) for _ in range(2)]
    model: Any = nn.Sequential(*blocks, nn.MaxPool2d(2))
    model = model.to(memory_format=torch.channels_last)
    sample = torch.randn(3, 8, 8, 8).contiguous(memory_format=torch.channels_last)
    plain = copy.deepcopy(model)
    if how == "halved":
        near_plain(model, sample, 1e-2)
    else:
        same_as_plain(model, sample, how)
    logs = []
    for one in (plain, model):
        one.zero_grad()
        loss = one(sample).mean()
        with Names() as names:
            loss.backward()
        logs.append(names.found)
    assert logs[0] == logs[1] and logs[0]


# -- what is not to be rounded -------------------------------------------------------------------


class Indices(nn.Module):
    """Indices above what fp16 can count, masks, targets, pooling, gathering."""

    def __init__(self, rows: int = 70_000) -> None:
        super().__init__()
        self.embed = nn.Embedding(rows, 4)
        self.head = nn.Linear(4, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        shifted = tokens * 2 + 1  # made inside: above 2048, fp16 has even numbers only
        h = self.embed(shifted)
        h = h + F.max_pool1d(h, 2).repeat(1, 1, 2).masked_fill(h > 0, 0.25)
        h = h.gather(1, shifted.argsort(1)[..., None].expand(-1, -1, 4)) * h[:, tokens[0] % h.size(1)]
        out: Tensor = self.head(h.tanh()).flatten(0, 1)
        return F.cross_entropy(out, shifted.flatten() % 5) + F.nll_loss(out.log_softmax(1), out.detach().argmax(1))


def rows_with_gradient(model: Any) -> list[int]:
    found: list[int] = model.embed.weight.grad.abs().sum(1).nonzero().flatten().tolist()
    return found


@pytest.mark.parametrize("how", ["dropped", "halved", "solved"])
@case("Odd tensors", "indices are rounded, and gradients land in other rows", "exact", threads="torchtitan#3513")
def test_indices_stay_whole(how: How) -> None:
    tokens = torch.randint(1000, 34_000, (4, 12))
    model: Any = Indices()
    whole: Callable[[Any], Tensor] = lambda out: out  # noqa: E731
    if how == "halved":
        near_plain(model, tokens, 1e-2, options={"loss": whole}, loss=whole)
    else:
        same_as_plain(model, tokens, how, options={"loss": whole}, loss=whole)
    model.zero_grad()
    model(tokens).backward()
    assert rows_with_gradient(model) == sorted({2 * t + 1 for t in tokens.flatten().tolist()})
