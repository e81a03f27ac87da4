"""Operators as people combine them: whatever is dropped, gradients are those of plain training, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from tests.forced import Around, by_lot, drop, failures, force, keep
from tests.oracle import assert_same, first_difference, run_steps

Body: TypeAlias = Callable[[Tensor], Any]
BODIES: dict[str, Body] = {}
MODELS: dict[str, Callable[[], nn.Module]] = {}


def body(function: Body) -> Body:
    """A pattern: a function of a hidden (4, 6) tensor that requires grad."""
    BODIES[function.__name__] = function
    return function


def model(function: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """A pattern with parameters: builds a module that takes a (4, 6) tensor."""
    MODELS[function.__name__] = function
    return function


def square_mean(out: Any) -> Tensor:
    """A loss whose gradient differs in every element."""
    found: Tensor = (out.abs() * out.abs()).mean() if out.is_complex() else (out * out).mean()
    return found


# -- writes in place: a value is one version of one storage --------------------------------------


@body
def version_read_before_write(h: Tensor) -> Tensor:
    y = h * 1
    z = y.exp()
    y.add_(1)
    return z * y.sin()


@body
def three_versions_each_read(h: Tensor) -> Tensor:
    y = h * 1
    a = y.exp()
    y.mul_(2)
    b = y.sigmoid()
    y.add_(h)
    return a * b * y.tanh()


@body
def relu_(h: Tensor) -> Tensor:
    return F.relu_(h * 2).exp()


@body
def silu_(h: Tensor) -> Tensor:
    return F.silu(h * 2, inplace=True).exp()


@body
def chain_of_inplace_activations(h: Tensor) -> Tensor:
    y = h.clone()
    for activation in (F.elu_, F.leaky_relu_, F.hardtanh_, torch.tanh_, torch.sigmoid_):
        y = activation(y * 1.5)
    return y * y


@body
def dropout_(h: Tensor) -> Tensor:
    return F.dropout(h * 1, 0.5, inplace=True).exp()


@body
def masked_fill_on_view(h: Tensor) -> Tensor:
    y = h * 1
    y[:, 1:4].masked_fill_(h[:, 1:4] > 0, 0.5)
    return y.exp()


@body
def slice_copy_(h: Tensor) -> Tensor:
    out = torch.zeros_like(h)
    out[:2] = h[2:].sin()
    out[2:].copy_(h[:2].exp())
    return out.exp()


@body
def index_put_(h: Tensor) -> Tensor:
    out = h.new_zeros(4, 6)
    rows, columns = torch.tensor([0, 2, 3]), torch.tensor([1, 1, 5])
    out[rows, columns] = h[rows, columns].exp()
    out.index_put_((rows,), h[rows] * 2, accumulate=True)
    return out.sin() * out


@body
def scatter_and_index_add_(h: Tensor) -> Tensor:
    index = torch.tensor([[0, 1, 2, 3, 0, 1]] * 2)
    out = torch.zeros_like(h).scatter_add_(0, index, h[:2].exp())
    return out.index_add_(0, torch.tensor([1, 1]), h[2:]).sin() * out


@body
def add_itself_(h: Tensor) -> Tensor:
    y = h * 1
    y.add_(y)
    return y.exp()


@body
def overlapping_writes_between_views(h: Tensor) -> Tensor:
    y = h * 1
    a = y[:2].exp()
    y[1:3] = y[:2] + 1
    b = y.t().tanh()
    y.t()[0].mul_(3)
    return a.sum() * b.t() * y.cos()


@body
def out_argument(h: Tensor) -> Tensor:
    with torch.no_grad():
        buffer = torch.empty_like(h)
        torch.mul(h, 3, out=buffer)
        torch.sin(buffer, out=buffer)
    return h * buffer * (h + buffer).exp()


@body
def foreach_writes(h: Tensor) -> Tensor:
    parts = [h[:2] * 1, h[2:] * 1]
    with torch.no_grad():
        scales = torch._foreach_exp([p.detach() for p in parts])
        torch._foreach_mul_(scales, 2.0)
    return torch.cat([p * s for p, s in zip(parts, scales, strict=True)]).sin()


# -- views, layouts, types ----------------------------------------------------------------------


@body
def chunk_and_cat(h: Tensor) -> Tensor:
    a, b = h.chunk(2, dim=1)
    return torch.cat([a.exp(), b * a, torch.stack([a, b], 2).flatten(1)], dim=1).sin()


@body
def split_unbind_select(h: Tensor) -> Any:
    first, *rest = h.unbind(0)
    return torch.stack([first.exp() * r for r in rest]).split([1, 2])[1].sin() * h[0, 2]  # type: ignore[no-untyped-call]


@body
def expand(h: Tensor) -> Tensor:
    return (h[:1].expand(4, 6) * h).exp() * h[:, :1].sigmoid().expand(-1, 6)


@body
def transpose_and_permute(h: Tensor) -> Tensor:
    y = h.view(2, 2, 6).permute(2, 0, 1)
    return (y.exp() @ y.transpose(1, 2).sin()).contiguous().view(6, 4)


@body
def strided_and_reshaped(h: Tensor) -> Tensor:
    y = h.exp()
    return y.as_strided((3, 4), (2, 3), 1).sin() * y.t().reshape(-1)[::2].view(3, 4) * y.unfold(0, 4, 1).sum()


@body
def channels_last(h: Tensor) -> Tensor:
    y = h.view(1, 2, 2, 6).contiguous(memory_format=torch.channels_last)
    return F.max_pool2d(F.conv2d(y, y.detach()[:, :, :1, :1].repeat(2, 1, 1, 1)).relu(), (1, 2)).exp()


@body
def fft_and_conj(h: Tensor) -> Any:
    y = torch.fft.rfft(h)
    product = y * y.conj()
    return torch.fft.irfft(product * torch.exp(y.conj()), n=6) * y.conj().imag.sum()


@body
def complex_views(h: Tensor) -> Tensor:
    y = torch.view_as_complex(h.view(4, 3, 2).exp())
    return y * y.conj() + torch.view_as_real(y * y.conj()).sum() * y.real * y.conj().imag


@body
def zero_dimensions(h: Tensor) -> Any:
    scale = h.sum().sin()
    return h * scale.exp() / (1 + scale * scale) + h.norm()


@body
def zero_size(h: Tensor) -> Tensor:
    nothing = h[:0].exp() * h[:0]
    return torch.cat([nothing, h.sin()]) * (1 + nothing.sum())


@body
def boolean_masks(h: Tensor) -> Tensor:
    mask = h > 0
    y = torch.where(mask, h.exp(), h * h)
    return y * mask.logical_not() + y.masked_fill(mask, 0.25).sin() + h.masked_select(mask).sum()


@body
def dtype_view(h: Tensor) -> Tensor:
    bits = h.detach().exp().view(torch.int32) & -65536
    return h * bits.view(torch.float32) * (h.double() * 3).float().exp()


@body
def other_precisions(h: Tensor) -> Tensor:
    return h.bfloat16().exp().float() * h.half().sin().double().cos().float()


# -- indices and reductions ----------------------------------------------------------------------


@body
def gather_and_take(h: Tensor) -> Tensor:
    index = h.detach().argsort(dim=1)
    return h.exp().gather(1, index) * torch.take_along_dim(h.sin(), index, 1) * h.index_select(0, index[:, 0] % 4)


@body
def cross_entropy(h: Tensor) -> Tensor:
    target = torch.tensor([0, 5, -100, 2])
    return F.cross_entropy(h.exp(), target) * h + F.nll_loss(h.log_softmax(1), h.detach().argmax(1))


@body
def pooling_indices(h: Tensor) -> Tensor:
    y, index = F.max_pool1d(h.exp().unsqueeze(0), 2, return_indices=True)
    return F.max_unpool1d(y, index, [2]).squeeze(0) * h + F.adaptive_max_pool1d(h.sin(), 3).sum()


@body
def cumulative(h: Tensor) -> Tensor:
    return h.cumsum(1).exp() * h.cumprod(0) * h.cummax(1).values * h.logcumsumexp(1)


@body
def topk_and_sort(h: Tensor) -> Tensor:
    values, index = h.exp().topk(3, dim=1)
    return h.sin().gather(1, index) * values * h.sort(dim=1).values[:, :3] * h.max(1, keepdim=True).values


@body
def ctc(h: Tensor) -> Tensor:
    lengths = torch.tensor([4])
    return F.ctc_loss(h.log_softmax(1).unsqueeze(1), torch.tensor([[1, 2]]), lengths, torch.tensor([2])) * h


@body
def linear_algebra(h: Tensor) -> Any:
    square = h.t() @ h + torch.eye(6)
    return torch.linalg.solve(square, h.t()) * torch.linalg.cholesky(square).diagonal().unsqueeze(1) * h.norm()


# -- what is drawn -------------------------------------------------------------------------------


@body
def dropouts(h: Tensor) -> Tensor:
    y = F.alpha_dropout(F.dropout(h * 1, 0.3), 0.3, training=True)
    return torch.feature_dropout(y.view(2, 2, 6), 0.5, True) * F.dropout1d(h.view(2, 2, 6), 0.5).exp()


@body
def bernoulli(h: Tensor) -> Tensor:
    mask = torch.bernoulli(h.detach().sigmoid())
    return h * mask * torch.empty_like(h).bernoulli_(0.5).add(1) * h.exp()


@body
def multinomial(h: Tensor) -> Tensor:
    index = torch.multinomial(h.softmax(1), 2)
    return h.exp().gather(1, index) * h.log_softmax(1).gather(1, index)


@body
def gumbel(h: Tensor) -> Tensor:
    return F.gumbel_softmax(h, hard=True) * h.exp() + F.gumbel_softmax(h * 2)


@body
def noise_factories(h: Tensor) -> Tensor:
    y = h * torch.rand_like(h) * torch.randn(4, 6) * torch.rand(6)
    return y.exp() * h[torch.randperm(4)] * torch.randint(1, 5, (4, 6)) * torch.normal(h.detach(), 1.0)


@body
def distributions(h: Tensor) -> Tensor:
    gamma = torch.distributions.Gamma(h.exp() + 0.5, h.abs() + 0.5).rsample()
    return gamma * torch.distributions.Normal(h, h.exp()).rsample() * torch.distributions.Beta(h.exp(), 2.0).rsample()


@body
def own_generator(h: Tensor) -> Tensor:
    own = torch.Generator().manual_seed(11)
    y = h * torch.rand(4, 6, generator=own) * torch.bernoulli(h.detach().sigmoid(), generator=own)
    torch.rand(3, generator=own)
    return y.exp() * torch.empty_like(h).normal_(generator=own) * y


@body
def own_generator_as_a_positional_argument(h: Tensor) -> Tensor:
    own = torch.Generator().manual_seed(11)
    counts = torch.poisson(h.detach().exp(), generator=own)
    return h * counts * torch.binomial(counts, h.detach().sigmoid(), generator=own).exp()


# -- what autograd is told by hand ---------------------------------------------------------------


class Twice(torch.autograd.Function):
    """Saves an input and an output, one of them twice, and keeps more as attributes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, power: int) -> tuple[Tensor, Tensor]:
        y = x.exp()
        between = y.sin()
        ctx.save_for_backward(x, y, y, between)
        ctx.power, ctx.hidden = power, between * 2
        return y, between

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        x, y, again, between = ctx.saved_tensors
        grad: Tensor = grads[0] * y * ctx.power + grads[1] * again.cos() * y + between * x * ctx.hidden
        return grad, None


class Doubled(torch.autograd.Function):
    """Writes its input in place and says so."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.mul_(2)
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:
        found: Tensor = grads[0] * ctx.saved_tensors[0]
        return found


@body
def custom_function(h: Tensor) -> Any:
    y, between = Twice.apply(h * 1, 3)  # type: ignore[no-untyped-call]
    return y * between.exp() * Doubled.apply(h * 1).sin()  # type: ignore[no-untyped-call]


@body
def tensor_in_forward(h: Tensor) -> Tensor:
    y = h * torch.tensor([1.0, 2, 3, 4, 5, 6])
    return y.exp() * torch.tensor(0.5) + torch.tensor([[2.0]]) * torch.as_tensor([3.0] * 6) * y.sin()


@body
def constants_that_come_and_go(h: Tensor) -> Tensor:
    """Short-lived outside tensors: their storages' identities are used again by values of the region."""
    for i in range(6):
        h = h + torch.tensor([float(i), 1, 2, 3, 4, 5]).expand(4, 6)
        h = h.sin().exp().cos()
    return h


@body
def from_numpy(h: Tensor) -> Tensor:
    y = h * torch.from_numpy(np.arange(6, dtype=np.float32))
    return y.exp() * torch.from_numpy(np.full((4, 6), 0.5, dtype=np.float32)).sin()


@body
def autocast_inside(h: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y = (h @ h.t()).exp()
        with torch.autocast("cpu", enabled=False):
            y = y.float() @ h
        return (y @ h.t()).float().sin()


@body
def changing_grad_mode(h: Tensor) -> Tensor:
    with torch.no_grad():
        scale = h.exp() + h.sin()
        with torch.enable_grad():
            y = h * scale
    with torch.inference_mode():
        (h * 2).exp_()
    return y.exp() * h.detach().requires_grad_().exp()


@body
def backward_inside(h: Tensor) -> Tensor:
    with torch.enable_grad():
        leaf = h.detach().requires_grad_()
        energy = (leaf.exp() * leaf.sin()).sum()
        (force,) = torch.autograd.grad(energy, leaf)
    (slope,) = torch.autograd.grad((h.exp() * h).sum(), h, create_graph=True)
    return h * force + slope.sin()


# -- modules -------------------------------------------------------------------------------------


class Picks(nn.Module):
    """One of a module's several results."""

    def __init__(self, inner: nn.Module, prepare: Callable[[Tensor], tuple[Any, ...]]) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.inner = inner
        self.prepare = prepare

    def forward(self, x: Tensor) -> Any:
        out = self.inner(*self.prepare(self.first(x)))
        return out[0] if isinstance(out, tuple) else out


def alone(x: Tensor) -> tuple[Tensor, ...]:
    return (x,)


def sequence(x: Tensor) -> tuple[Tensor, ...]:
    return (x.view(2, 2, 6),)


def three_sequences(x: Tensor) -> tuple[Tensor, ...]:
    return (x.view(2, 2, 6),) * 3


def image(x: Tensor) -> tuple[Tensor, ...]:
    return (x.view(2, 2, 2, 3),)


@model
def lstm() -> nn.Module:
    return Picks(nn.LSTM(6, 5, num_layers=2, dropout=0.5, bidirectional=True), sequence)


@model
def gru() -> nn.Module:
    return Picks(nn.GRU(6, 5, batch_first=True), sequence)


@model
def attention() -> nn.Module:
    return Picks(nn.MultiheadAttention(6, 2, dropout=0.2, batch_first=True), three_sequences)


@model
def transformer_layer() -> nn.Module:
    return Picks(nn.TransformerEncoderLayer(6, 2, 8, dropout=0.3, batch_first=True), sequence)


@model
def batch_norm() -> nn.Module:
    return nn.Sequential(Picks(nn.BatchNorm2d(2), image), nn.ReLU(inplace=True), nn.BatchNorm2d(2, momentum=None))


@model
def batch_norm_in_eval() -> nn.Module:
    return Picks(nn.Sequential(nn.BatchNorm2d(2), nn.Sigmoid(), nn.BatchNorm2d(2, affine=False)), image)


@model
def instance_and_group_norm() -> nn.Module:
    norms = (nn.InstanceNorm2d(2, affine=True, track_running_stats=True), nn.GroupNorm(2, 2))
    return Picks(nn.Sequential(*norms, nn.Sigmoid()), image)


@model
def layer_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.RMSNorm(6), nn.GELU())


@model
def spectral_norm() -> nn.Module:
    return nn.Sequential(parametrizations.spectral_norm(nn.Linear(6, 6)), nn.Tanh(), nn.Linear(6, 2))


@model
def weight_norm() -> nn.Module:
    layer = parametrizations.weight_norm(nn.Linear(6, 6))
    return nn.Sequential(layer, nn.Tanh(), parametrizations.orthogonal(nn.Linear(6, 6)), nn.Softplus())


class Attends(nn.Module):
    """Scaled dot product attention without, with masks, causal, and with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(6, 18)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(1, 4, 3, 2, 3).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = F.scaled_dot_product_attention(y, k, v, attn_mask=torch.ones(4, 4, dtype=torch.bool).tril())
        y = F.scaled_dot_product_attention(q, y, v, attn_mask=(q @ k.mT).sin(), dropout_p=0.3)
        return F.scaled_dot_product_attention(q, k, y, dropout_p=0.2)


@model
def sdpa() -> nn.Module:
    return Attends()


class Looks(nn.Module):
    """An embedding looked up by what the input says, its weight tied to the head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 6, padding_idx=1)
        self.bag = nn.EmbeddingBag(6, 6, mode="max")

    def forward(self, x: Tensor) -> Tensor:
        index = x.argsort(1)
        y = self.table(index).sum(1) * self.bag(index)
        return F.cross_entropy(y @ self.table.weight.t(), index[:, 0])


@model
def embedding() -> nn.Module:
    return Looks()


class Averages(nn.Module):
    """Updates a buffer of its own and reads it; rebinds another; `num` counts in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("last", torch.zeros(6))
        self.num = 0
        self.mean: Tensor
        self.last: Tensor

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x).tanh()
        with torch.no_grad():
            self.mean.mul_(0.9).add_(y.mean(0), alpha=0.1)
            self.last = y.amax(0)
        self.num += 1
        return ((y - self.mean) * (1 + self.last)).exp() / self.num


@model
def moving_average() -> nn.Module:
    return Averages()


@model
def convolutions() -> nn.Module:
    layers = (nn.Conv2d(2, 3, 2, padding=1), nn.SiLU(inplace=True), nn.ConvTranspose2d(3, 2, 2), nn.Hardswish())
    return Picks(nn.Sequential(*layers, nn.Upsample(scale_factor=2, mode="bilinear"), nn.AvgPool2d(2)), image)


# -- the tests -----------------------------------------------------------------------------------

PATTERNS: dict[str, Callable[[], nn.Module]] = {
    **{name: (lambda f=f: Around(f)) for name, f in BODIES.items()},  # type: ignore[misc]
    **MODELS,
}
SNAPSHOT = ("moving_average", "instance_and_group_norm")
"""The step writes to an outside tensor that a replay reads: the small one has to be copied."""

each_pattern = pytest.mark.parametrize("name", PATTERNS)


def trained(name: str) -> tuple[nn.Module, nn.Module, Tensor]:
    """Plain, planned, sample."""
    torch.manual_seed(3)
    built = PATTERNS[name]().train()
    for module in built.modules():
        if name == "batch_norm_in_eval":
            module.eval()
    return copy.deepcopy(built), built, torch.randn(4, 6)


@each_pattern
def test_everything_dropped(name: str) -> None:
    plain, planned, sample = trained(name)
    (region,) = force(planned, drop, snapshot=name in SNAPSHOT)
    assert_same(
        run_steps(plain, [sample], loss=square_mean, steps=2), run_steps(planned, [sample], loss=square_mean, steps=2)
    )
    assert (region.counters.calls, region.counters.broken) == (2, 0)
    assert region.counters.replayed > 0


@each_pattern
@pytest.mark.parametrize("snapshot", [False, True])
def test_every_replayed_value_is_proven(name: str, snapshot: bool) -> None:
    plain, planned, sample = trained(name)
    regions = force(planned, drop, verify=True, snapshot=snapshot or name in SNAPSHOT)
    assert_same(
        run_steps(plain, [sample], loss=square_mean, steps=1), run_steps(planned, [sample], loss=square_mean, steps=1)
    )
    assert failures(regions) == set()
    assert regions[0].counters.proven > 0


@each_pattern
def test_choices_by_lot(name: str) -> None:
    for seed in range(4):
        plain, planned, sample = trained(name)
        regions = force(planned, by_lot(seed), verify=True, snapshot=name in SNAPSHOT)
        assert_same(
            run_steps(plain, [sample], loss=square_mean, steps=1),
            run_steps(planned, [sample], loss=square_mean, steps=1),
        )
        assert failures(regions) == set()


@each_pattern
def test_everything_kept_through_the_hooks(name: str) -> None:
    plain, planned, sample = trained(name)
    (region,) = force(planned, keep, snapshot=name in SNAPSHOT)
    assert_same(
        run_steps(plain, [sample], loss=square_mean, steps=1), run_steps(planned, [sample], loss=square_mean, steps=1)
    )
    assert region.counters.replayed == 0


# -- written behind the dispatcher's back --------------------------------------------------------


def numpy_into_empty(h: Tensor) -> Tensor:
    scale = torch.empty_like(h)
    scale.detach().numpy()[:] = np.arange(24, dtype=np.float32).reshape(4, 6)
    return h * scale * (h * scale).exp()


def numpy_over_a_result(h: Tensor) -> Tensor:
    scale = h.detach() * 1
    scale.numpy()[:] = 0.5
    return (h * scale).exp()


def rrelu(h: Tensor) -> Tensor:
    return F.rrelu(h * 1, training=True).exp()


def data_written_after_saving(h: Tensor) -> Tensor:
    """``.data`` is written without a new version: plain autograd uses what is there and says nothing."""
    y = h.exp()
    z = y.sin()
    y.data.mul_(2)
    return z + y


UNSEEN = "a write that is not through the saved tensor or a view of it is taken for one to another piece of its storage"


@pytest.mark.parametrize(
    "hidden",
    [
        numpy_into_empty,
        numpy_over_a_result,
        rrelu,
        data_written_after_saving,
    ],
)
def test_unseen_writes_are_never_silently_wrong(hidden: Body) -> None:
    """The executor kept what it could not make again, or verifying says what differs, or backward raises."""
    planned = Around(hidden)
    plain, sample = Around(hidden), torch.randn(4, 6)
    regions = force(planned, drop, verify=True)
    expected = run_steps(plain, [sample], steps=1)
    try:
        difference = first_difference(expected, run_steps(planned, [sample], steps=1))
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
    else:
        assert difference is None or failures(regions)


# -- what is on around forward and backward ------------------------------------------------------


def factories(h: Tensor) -> Tensor:
    """Operators whose type depends on the default one."""
    integer = torch.arange(6)
    scale = torch.ones(6) * 0.1 + integer * 0.3
    return (h * scale).exp() * (integer / 7).sin()


def test_default_type_changed_before_backward() -> None:
    gradients = []
    for choose in (None, drop):
        model = Around(factories)
        if choose is not None:
            force(model, choose)
        loss = square_mean(model(torch.ones(4, 6)))
        torch.set_default_dtype(torch.float64)
        try:
            loss.backward()  # type: ignore[no-untyped-call]
            assert torch.get_default_dtype() is torch.float64
        finally:
            torch.set_default_dtype(torch.float32)
        gradients.append(model.weight.grad)
    assert gradients[0] is not None and gradients[1] is not None
    assert torch.equal(gradients[0], gradients[1])


@pytest.mark.parametrize("forward", [False, True])
@pytest.mark.parametrize("backward", [False, True])
def test_autocast_around(forward: bool, backward: bool) -> None:
    gradients = []
    for choose in (None, drop):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 2))
        if choose is not None:
            force(model, choose)
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16, enabled=forward):
                first, second = model(torch.ones(4, 6)), model(torch.zeros(4, 6))  # the second finds the cache warm
            loss = square_mean(first.float()) + square_mean(second.float() - 1)
            with torch.autocast("cpu", torch.bfloat16, enabled=backward):
                loss.backward()  # type: ignore[no-untyped-call]
        gradients.append([p.grad for p in model.parameters()])
    for plain, planned in zip(*gradients, strict=True):
        assert plain is not None and planned is not None
        assert torch.equal(plain, planned)
