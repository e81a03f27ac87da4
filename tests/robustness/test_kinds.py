"""Kinds of tensors that a plan must leave as they are: complex, sparse, nested, without dimensions, elsewhere."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import budgetopt

from .cases import case
from .sides import How, budget, exactly, planned, replays, same_as_plain


class Spectral(nn.Module):
    """Weights multiply frequencies, as Fourier neural operators have it."""

    def __init__(self, width: int = 8, modes: int = 6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width, modes, dtype=torch.cfloat) / width)

    def forward(self, x: Tensor) -> Tensor:
        frequencies = torch.fft.rfft(x)[..., : self.weight.shape[-1]]
        mixed = torch.einsum("bim,iom->bom", frequencies, self.weight) * frequencies.conj()
        out: Tensor = torch.fft.irfft(mixed, n=x.shape[-1])
        return out


@pytest.mark.parametrize("how", ["dropped", "halved", "solved"])
@case("Odd tensors", "a cast drops the imaginary part", "exact", threads="neuraloperator#727, physicsnemo#1738")
def test_complex_values(how: How) -> None:
    """In fp16 as well bit for bit: of real values, but the shape is needed."""
    model: nn.Module = nn.Sequential(*(Spectral() for _ in range(3)))
    sample = torch.randn(4, 8, 16)
    profile = budgetopt.profile(model, sample)
    made = [profile.values[value] for value in set(profile.handles) if value >= 0]
    halves = [v.half_bytes for v in made if profile.operators[v.operator].name != "aten._fft_c2r.default"]
    assert len(halves) >= 5 and not any(halves)
    _, model, _ = same_as_plain(model, sample, how)
    assert how == "halved" or replays(model)


def fitted(model: nn.Module, sample: Any, **options: Any) -> None:
    """Under a small budget, or the one that fit then asks for: what such tensors take shows when a plan is run."""
    allow = ("keep", "recompute")
    wanted = budget(budgetopt.profile(model, sample, **options))
    try:
        budgetopt.fit(model, sample, wanted, allow=allow, **options)
    except budgetopt.InfeasibleBudgetError as error:
        wanted = error.minimum
        budgetopt.fit(model, sample, wanted, allow=allow, **options)
    plan = budgetopt.plan_of(model)
    assert plan is not None and plan.measured is not None and plan.measured.peak_bytes <= wanted


# -- sparse --------------------------------------------------------------------------------------


def adjacency(size: int, layout: torch.layout) -> Tensor:
    dense = torch.eye(size).roll(1, 0) + torch.eye(size) * 0.5
    if layout is torch.sparse_coo:
        return dense.to_sparse()
    found = dense.to_sparse_csr()
    return torch.sparse_csr_tensor(found.crow_indices().clone(), found.col_indices().clone(), found.values().clone())


class Graph(nn.Module):
    """A graph network: the sparse adjacency is a buffer."""

    def __init__(self, size: int, layout: torch.layout) -> None:
        super().__init__()
        self.adjacency: Tensor
        self.register_buffer("adjacency", adjacency(size, layout))
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.sparse.mm(self.adjacency, layer(x).tanh()).sin()
        return x


def dense_gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.to_dense() if p.grad.is_sparse else p.grad for p in model.parameters() if p.grad is not None]


def trained(model: nn.Module, sample: Any, loss: Any = torch.mean) -> tuple[list[Tensor], list[torch.layout]]:
    """Losses and gradients of three steps, and the gradients' layouts."""
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found, layouts = [], []
    for _ in range(3):
        optimizer.zero_grad()
        value = loss(model(*sample) if isinstance(sample, tuple) else model(sample))
        value.backward()
        found += [value.detach(), *(g.clone() for g in dense_gradients(model))]
        layouts += [p.grad.layout for p in model.parameters() if p.grad is not None]
        optimizer.step()
    return found, layouts


def assert_trained_alike(plain: nn.Module, model: nn.Module, sample: Any) -> list[torch.layout]:
    (expected, layouts), (found, same) = trained(plain, sample), trained(model, sample)
    assert layouts == same and len(expected) == len(found)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    return layouts


SPARSE = pytest.mark.filterwarnings("ignore:.*(Sparse|sparse).*:UserWarning")


@SPARSE
@exactly
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=["coo", "csr"])
@pytest.mark.parametrize("place", ["a buffer", "the sample"])
@case("Odd tensors", "bytes of a sparse tensor can't be counted", "exact", threads="pytorch#61928, pytorch#79542")
def test_sparse_matrices(place: str, layout: torch.layout, how: How) -> None:
    size = 100
    model, plain = (_seeded_graph(size, layout if place == "a buffer" else None) for _ in range(2))
    sample: Any = torch.randn(size, 8)
    if place == "the sample":
        sample = adjacency(size, layout), sample
    planned(model, sample, how)
    assert_trained_alike(plain, model, sample)
    assert replays(model)
    fixed = budgetopt.profile(model, sample).fixed
    pointers = 2 * size * 2 if layout is torch.sparse_coo else size + 1 + 2 * size
    assert fixed.buffer + fixed.sample == 8 * pointers + 4 * 2 * size + 4 * size * 8


def _seeded_graph(size: int, layout: torch.layout | None) -> nn.Module:
    """Two of them are equal; torch can't copy a module with a compressed buffer."""
    torch.manual_seed(1)
    return Outside() if layout is None else Graph(size, layout)


class Outside(nn.Module):
    """The sparse matrix comes with the sample."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, pattern: Tensor, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.sparse.mm(pattern, layer(x).tanh()).sin()
        return x


@SPARSE
@pytest.mark.parametrize("how", ["dropped", "halved", "solved"])
@case("Odd tensors", "sparse gradients become dense", "exact", threads="pytorch#80496, pytorch#16667")
def test_sparse_gradients_stay_sparse(how: How) -> None:
    model = nn.Sequential(nn.Embedding(500, 8, sparse=True), nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Flatten())
    tokens = torch.randint(500, (6, 10))
    plain = copy.deepcopy(model)
    planned(model, tokens, how, optimizer="sgd")
    if how != "halved":
        assert torch.sparse_coo in assert_trained_alike(plain, model, tokens)
    else:
        (expected, layouts), (found, same) = trained(plain, tokens), trained(model, tokens)
        assert layouts == same and all(torch.allclose(a, b, 1e-2, 1e-3) for a, b in zip(expected, found, strict=True))


@SPARSE
@case("Odd tensors", "gradients that fit finds are sparse", "exact")
def test_fit_puts_sparse_gradients_back() -> None:
    model: Any = nn.Sequential(nn.Embedding(500, 8, sparse=True), nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8))
    tokens = torch.randint(500, (6, 10))
    model(tokens).mean().backward()
    before = [p.grad for p in model.parameters()]
    copies = [g.clone() for g in before]
    fitted(model, tokens, optimizer="sgd")
    after = [p.grad for p in model.parameters()]
    assert all(a is b and a.layout == c.layout for a, b, c in zip(after, before, copies, strict=True))
    assert all(torch.equal(a.to_dense(), c.to_dense()) for a, c in zip(after, copies, strict=True))


# -- nested, tiny, elsewhere ---------------------------------------------------------------------


class Ragged(nn.Module):
    """Rows of several lengths in one nested tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        offsets = torch.tensor([0, 7, 20, x.shape[0]])
        rows: Any = torch.nested.nested_tensor_from_jagged(self.a(x).tanh(), offsets)
        out: Tensor = self.b((rows.sin() * rows).values()).sigmoid()
        return out


@exactly
@pytest.mark.filterwarnings("ignore:.*(nested|The PyTorch API of).*:UserWarning")
@case("Odd tensors", "nested tensors have no one storage", "exact")
def test_nested_tensors(how: How) -> None:
    model, sample = nn.Sequential(*(Ragged() for _ in range(2))), torch.randn(60, 8)
    plain = copy.deepcopy(model)
    if how == "solved":
        fitted(model, sample)
    else:
        planned(model, sample, how)
    assert_trained_alike(plain, model, sample)
    assert how == "solved" or replays(model)


class Scalars(nn.Module):
    """Numbers as tensors without dimensions, empty tensors, and one on a device without data."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.elsewhere: Tensor
        self.register_buffer("elsewhere", torch.zeros(1000, 1000, device="meta"), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.linear(x)
        temperature = self.scale.exp() * torch.tensor(2.0, dtype=torch.float64) + h.norm().sin()
        nothing = h[:0].exp() * h[:0]
        out = torch.cat([nothing, h.tanh() / temperature]) * (1 + nothing.sum()) + 3
        return out * (self.elsewhere.shape[0] / 1000)


@pytest.mark.parametrize("how", ["dropped", "halved", "solved"])
@case("Odd tensors", "scalars, empty tensors, and tensors on a second device", "exact", threads="torchtune#2456")
def test_scalars_and_tensors_elsewhere(how: How) -> None:
    model, sample = nn.Sequential(*(Scalars() for _ in range(2))), torch.randn(64, 8)
    assert budgetopt.profile(model, sample).fixed.buffer == 0
    if how == "halved":
        plain = copy.deepcopy(model)
        planned(model, sample, how)
        for one in (plain, model):
            one(sample).mean().backward()
        for p, q in zip(plain.parameters(), model.parameters(), strict=True):
            assert p.grad is not None and q.grad is not None and torch.allclose(p.grad, q.grad, 1e-2, 1e-4)
    else:
        plain = copy.deepcopy(model)
        planned(model, sample, how)
        assert_trained_alike(plain, model, sample)
        assert replays(model)


@exactly
@case("Odd tensors", "numbers that Python wraps are saved nowhere", "exact", threads="pytorch#134754")
def test_wrapped_numbers(how: How) -> None:
    class Numbers(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            h = super().forward(x)
            return (2.5 * h).exp().clamp(max=3.0) / 7 + F.softplus(h, beta=0.5) ** 1.5

    _, model, _ = same_as_plain(nn.Sequential(Numbers(8, 8), Numbers(8, 8)), torch.randn(64, 8), how)
    assert replays(model)


class Quantised(nn.Module):
    """Counts in a quantised buffer that every forward writes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(12, 12), nn.GELU(), nn.Linear(12, 12)) for _ in range(2))
        self.seen: Tensor
        self.register_buffer("seen", torch.quantize_per_tensor(torch.zeros(4), 1.0, 0, torch.qint8))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.seen.copy_(torch.quantize_per_tensor(self.seen.dequantize() + 1, 1.0, 0, torch.qint8))
        for layer in self.layers:
            x = x + layer(x).sin()
        return x


@pytest.mark.filterwarnings("ignore:.*quant.*:DeprecationWarning", "ignore:.*quant.*:UserWarning")
@case("Odd tensors", "a quantised buffer is written by the forward", "exact")
def test_quantised_buffers_are_put_back() -> None:
    torch.manual_seed(0)
    model: Any = Quantised()
    planned(model, torch.randn(24, 12), "solved")
    assert model.seen.dequantize().tolist() == [0.0] * 4
    model(torch.randn(24, 12))
    assert model.seen.dequantize().tolist() == [1.0] * 4 and replays(model) == 0
