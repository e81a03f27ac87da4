"""The grammar's words without parameters: functions from (batch, length, width) to the same shape.

Each calls torch as people do; width and length are even, and of four elements at least.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.generated import autograd_functions as own

Function = Callable[[Tensor], Tensor]


def _half_slices(h: Tensor) -> Tensor:
    middle = h.size(1) // 2
    return torch.cat([h[:, middle:].relu(), h[:, :middle]], dim=1)


def _gated(h: Tensor) -> Tensor:
    a, b = h.chunk(2, dim=-1)
    return torch.cat([a * b.sigmoid(), b.tanh()], dim=-1)


def _pieces_in_place(h: Tensor) -> Tensor:
    pieces = torch.unsafe_chunk(h * 1.5, 2, dim=-1)
    return torch.cat([pieces[0].relu_(), pieces[1].exp()], dim=-1).clamp(max=4)


def _unbound(h: Tensor) -> Tensor:
    return torch.stack([part.sin() * (i + 1) for i, part in enumerate(h.unbind(1))], dim=1)


def _strided(h: Tensor) -> Tensor:
    h = h.contiguous()
    return h + torch.as_strided(h, h.shape, (0, *h.stride()[1:])).sin()


def _slice_written(h: Tensor) -> Tensor:
    h = h * 1
    h[:, :1] = h[:, 1:2] * 2
    return h.exp().clamp(max=3)


def _slice_in_place(h: Tensor) -> Tensor:
    h = h.clone()
    torch.relu_(h[:, :1])
    h[..., 1:].mul_(0.5)
    return h * h.sigmoid()


def _versions(h: Tensor) -> Tensor:
    y = h * 1
    z = y.exp().clamp(max=3)
    y.add_(1)
    return z * y.cos()


def _indexed_put(h: Tensor) -> Tensor:
    h = h.clone()
    h[:, torch.tensor([0, 1])] = torch.tensor(0.5)
    h.index_put_((torch.tensor([0]), torch.tensor([1])), torch.tensor(1.5), accumulate=True)
    return h.sin()


def _filled_step_by_step(h: Tensor) -> Tensor:
    out = torch.empty_like(h)
    for i in range(h.size(1)):
        out[:, i] = h[:, i].tanh()
    return out * out


def _unfolded(h: Tensor) -> Tensor:
    return h + h.unfold(1, 2, 1).prod(-1).mean(1, keepdim=True)


def _self_attended(h: Tensor) -> Tensor:
    return torch.bmm(torch.softmax(torch.bmm(h, h.transpose(1, 2)) / 4, -1), h)


def _in_heads(h: Tensor) -> Tensor:
    return h.view(*h.shape[:2], 2, -1).transpose(1, 2)


def _attended(h: Tensor) -> Tensor:
    q, k, v = (_in_heads(part) for part in (h, h.sin(), h.tanh()))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(h.shape)


def _attended_with_dropout(h: Tensor) -> Tensor:
    q = _in_heads(h)
    return F.scaled_dot_product_attention(q, q, q.sin(), dropout_p=0.3).transpose(1, 2).flatten(2)


def _pooled(h: Tensor) -> Tensor:
    return F.interpolate(F.max_pool1d(h.transpose(1, 2), 2), size=h.size(1)).transpose(1, 2) + h


def _maximal(h: Tensor) -> Tensor:
    values, indices = h.max(dim=1, keepdim=True)
    return h * values.sigmoid() + indices


def _sorted(h: Tensor) -> Tensor:
    values, order = h.sort(dim=-1)
    return values * values.sin() + order


def _embedded(h: Tensor) -> Tensor:
    table = torch.linspace(-1, 1, h.size(-1) * h.size(-1)).view(h.size(-1), h.size(-1))
    return h * F.embedding(h.argmax(-1), table)


def _gathered(h: Tensor) -> Tensor:
    return h.gather(1, h.argsort(dim=1)).sin() + h


def _top(h: Tensor) -> Tensor:
    values, indices = h.topk(2, dim=-1)
    return h + torch.zeros_like(h).scatter_add(-1, indices, values.exp().clamp(max=3))


def _selected(h: Tensor) -> Tensor:
    chosen = h[h > 0]
    return h * (chosen.square().sum() / (chosen.numel() + 1)).tanh()


def _masked(h: Tensor) -> Tensor:
    return torch.where(h > 0, h.square(), h.sin()).masked_fill(h.abs() < 0.1, 0.1)


def _masked_in_place(h: Tensor) -> Tensor:
    h = h * 1
    mask = h.detach() < 0
    h.masked_fill_(mask, 0.2)
    return h.square() * mask.logical_not()


def _counted(h: Tensor) -> Tensor:
    kinds = torch.bucketize(h.detach(), torch.tensor([-0.5, 0.5]))
    return h * F.one_hot(kinds, 3).float().matmul(torch.tensor([0.5, 1.0, 2.0]))


def _added_at(h: Tensor) -> Tensor:
    where = torch.arange(h.size(1)) // 2
    return h.sin() + torch.zeros_like(h).index_add(1, where, h.cos())


def _spectral(h: Tensor) -> Tensor:
    found: Tensor = torch.fft.irfft(torch.fft.rfft(h, dim=1) * torch.tensor(0.5 + 0.5j), n=h.size(1), dim=1)
    return found


def _amplitude(h: Tensor) -> Tensor:
    return torch.abs(torch.fft.fft(h, dim=-1)).log1p()


def _imaginary(h: Tensor) -> Tensor:
    z = torch.view_as_complex(h.reshape(*h.shape[:2], -1, 2))
    w = z.conj().imag * z.real
    return torch.cat([w, (z * z.conj()).real], dim=-1)


def _conjugate_saved(h: Tensor) -> Tensor:
    z = torch.complex(h, h.sin())
    return (z.conj() * z.exp().conj()).real.tanh()


def _noisy(h: Tensor) -> Tensor:
    return h * (1 + torch.rand_like(h))


def _coins(h: Tensor) -> Tensor:
    return h.sin() * torch.bernoulli(torch.full_like(h, 0.5))


def _normal_in_place(h: Tensor) -> Tensor:
    return h * torch.empty_like(h).normal_().abs().clamp(max=2)


def _shuffled(h: Tensor) -> Tensor:
    return h[:, torch.randperm(h.size(1))].sin()


def _drawn(h: Tensor) -> Tensor:
    chosen = torch.multinomial(h.detach().softmax(-1).flatten(0, 1), 2).view(*h.shape[:2], 2)
    return h + h.gather(-1, chosen).sin().sum(-1, keepdim=True)


def _own_generator(h: Tensor) -> Tensor:
    return h * torch.rand(h.shape, generator=torch.Generator().manual_seed(7))


def _python_random(h: Tensor) -> Tensor:
    return h.sin() * random.random() if random.random() < 0.7 else h.cos()


def _numpy_random(h: Tensor) -> Tensor:
    return h.sin() * torch.from_numpy(np.random.rand(*h.shape).astype(np.float32))


def _numpy_constant(h: Tensor) -> Tensor:
    return (h * torch.from_numpy(np.linspace(-1, 1, h.size(-1), dtype=np.float32))).sin()


def _through_numpy(h: Tensor) -> Tensor:
    return h * torch.from_numpy(np.tanh(h.detach().numpy())).sin()


def _numpy_into_empty(h: Tensor) -> Tensor:
    scale = torch.empty(h.size(-1))
    scale.numpy()[:] = np.arange(h.size(-1), dtype=np.float32) / 4
    return h * scale.sin()


def _numpy_over_a_result(h: Tensor) -> Tensor:
    scale = h.detach() * 1
    scale.numpy()[:] = 0.5
    return h * scale


def _branching(h: Tensor) -> Tensor:
    return h.sin() * h if h.detach().mean() > 0 else h.tanh().exp()


def _caught(h: Tensor) -> Tensor:
    try:
        return torch.matmul(h.sin(), torch.ones(h.size(-1) + 1, 2))
    except RuntimeError:
        return h.cos() * h


def _gradless(h: Tensor) -> Tensor:
    with torch.no_grad():
        gate = (h.sin() + 1).sqrt()
    return h * gate


def _penalised_inside(h: Tensor) -> Tensor:
    with torch.enable_grad():
        y = h.detach().requires_grad_()
        (slope,) = torch.autograd.grad(y.sin().mul(y).sum(), y)
    return h * slope


def _vmapped(h: Tensor) -> Tensor:
    return torch.tanh(torch.func.vmap(lambda row: row.sin() * row.sum())(h))


def _func_grad(h: Tensor) -> Tensor:
    return torch.mul(h.tanh(), torch.func.grad(lambda y: y.cos().sum())(h.detach()))


ACTIVATIONS: dict[str, Function] = {
    "relu": torch.relu,
    "relu_": torch.relu_,
    "gelu": F.gelu,
    "silu": F.silu,
    "silu_": lambda h: F.silu(h, inplace=True),
    "tanh": torch.tanh,
    "tanh_": torch.tanh_,
    "sigmoid_": torch.sigmoid_,
    "leaky_": lambda h: F.leaky_relu(h, 0.1, inplace=True),
    "elu_": lambda h: F.elu(h, inplace=True),
    "hardswish_": lambda h: F.hardswish(h, inplace=True),
    "softplus": F.softplus,
    "softmax": lambda h: h.softmax(-1),
    "log_softmax": lambda h: h.log_softmax(1),
    "exp": lambda h: h.tanh().exp(),
    "square": lambda h: h.clamp(-2, 2) ** 2,
    "clamp_": lambda h: h.clamp_(-1, 1),
    "mul_": lambda h: h.mul_(0.5),
    "add_": lambda h: h.add_(h, alpha=0.5),
    "prelu": lambda h: F.prelu(h, torch.full((1,), 0.2)),
    "rrelu": lambda h: F.rrelu(h, training=True),
    "normalized": lambda h: F.normalize(h, dim=-1),
    "double": lambda h: h.double().sin().float(),
    "lerp": lambda h: torch.lerp(h, h.sin(), 0.3),
    "cumulated": lambda h: h.sin().cumsum(1) / 4,
    "variance": lambda h: (h - h.mean(-1, keepdim=True)) / (h.var(-1, keepdim=True) + 0.1).sqrt(),
    "glu": lambda h: F.glu(torch.cat([h, h.sin()], -1)),
    "self_attended": _self_attended,
    "attended": _attended,
    "attended_with_dropout": _attended_with_dropout,
    "pooled": _pooled,
}
VIEWS: dict[str, Function] = {
    "transpose": lambda h: h.transpose(1, 2).softmax(-1).transpose(1, 2),
    "reshape": lambda h: h.reshape(h.size(0), -1).tanh().view_as(h),
    "half_slices": _half_slices,
    "expand": lambda h: h * h.mean(1, keepdim=True).expand_as(h),
    "flip": lambda h: h.flip(1) * h,
    "roll": lambda h: h.roll(1, dims=1).exp().clamp(max=3),
    "gated": _gated,
    "pieces_in_place": _pieces_in_place,
    "stacked": lambda h: torch.stack([h, h.sin()]).prod(0),
    "unbound": _unbound,
    "strided": _strided,
    "slice_written": _slice_written,
    "slice_in_place": _slice_in_place,
    "versions": _versions,
    "indexed_put": _indexed_put,
    "filled_step_by_step": _filled_step_by_step,
    "unfolded": _unfolded,
    "einsum": lambda h: torch.einsum("bld,bme->bld", h, h.sin()) / 4,
    "detached": lambda h: h * h.detach().sin(),
}
INDICES: dict[str, Function] = {
    "maximal": _maximal,
    "sorted": _sorted,
    "embedded": _embedded,
    "gathered": _gathered,
    "top": _top,
    "selected": _selected,
    "masked": _masked,
    "masked_in_place": _masked_in_place,
    "counted": _counted,
    "added_at": _added_at,
}
COMPLEX: dict[str, Function] = {
    "spectral": _spectral,
    "amplitude": _amplitude,
    "imaginary": _imaginary,
    "conjugate_saved": _conjugate_saved,
}
RANDOM: dict[str, Function] = {
    "noisy": _noisy,
    "coins": _coins,
    "normal_in_place": _normal_in_place,
    "shuffled": _shuffled,
    "drawn": _drawn,
    "own_generator": _own_generator,
    "python_random": _python_random,
    "numpy_random": _numpy_random,
    "dropout": F.dropout,
    "dropout_": lambda h: F.dropout(h, 0.3, inplace=True),
    "dropout1d": lambda h: F.dropout1d(h.transpose(1, 2)).transpose(1, 2),
    "alpha_dropout": lambda h: F.alpha_dropout(h, 0.3, training=True),
    "gumbel": lambda h: F.gumbel_softmax(h, hard=True) * h,
}
FLOW: dict[str, Function] = {
    "numpy_constant": _numpy_constant,
    "through_numpy": _through_numpy,
    "branching": _branching,
    "caught": _caught,
    "gradless": _gradless,
    "penalised_inside": _penalised_inside,
    "vmapped": _vmapped,
}
OWN: dict[str, Function] = {
    "saved_twice": own.SavedTwice.apply,
    "not_an_output": own.NotAnOutput.apply,
    "on_the_context": own.OnTheContext.apply,
    "dirty": lambda h: own.Dirty.apply(h * 1),  # type: ignore[no-untyped-call]
    "own_checkpoint": own.OwnCheckpoint.apply,
    "new_style": own.NewStyle.apply,
    "two_outputs": lambda h: own.TwoOutputs.apply(h)[0],  # type: ignore[no-untyped-call]
    "both_outputs": lambda h: torch.add(*own.TwoOutputs.apply(h)),  # type: ignore[no-untyped-call]
}
BEHIND: dict[str, Function] = {
    "numpy_into_empty": _numpy_into_empty,
    "numpy_over_a_result": _numpy_over_a_result,
    "func_grad": _func_grad,
}
"""Bytes written behind the dispatcher's back, and what bears no hooks: only profiling and verifying find out."""

KINDS = {
    "activation": ACTIVATIONS,
    "view": VIEWS,
    "index": INDICES,
    "complex": COMPLEX,
    "random": RANDOM,
    "flow": FLOW,
    "own": OWN,
    "behind": BEHIND,
}
FUNCTIONS: dict[str, Function] = {name: f for table in KINDS.values() for name, f in table.items()}
ROUTED = frozenset({"selected", "branching", "python_random"})
"""Their sizes, or what runs, follow the data."""
