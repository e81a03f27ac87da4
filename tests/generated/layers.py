"""The grammar's words with parameters or buffers: modules from (batch, length, width) to the same shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm


class Turned(nn.Module):
    """A module that wants (batch, width, length)."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, h: Tensor) -> Tensor:
        out: Tensor = self.inner(h.transpose(1, 2))
        return out.transpose(1, 2)


class AsImage(nn.Module):
    """A module that wants (batch, width, height, 2), of the channels-last kind if asked."""

    def __init__(self, inner: nn.Module, channels_last: bool = False) -> None:
        super().__init__()
        self.inner = inner
        self.layout = torch.channels_last if channels_last else torch.contiguous_format

    def forward(self, h: Tensor) -> Tensor:
        image = h.transpose(1, 2).reshape(h.size(0), h.size(2), -1, 2).contiguous(memory_format=self.layout)
        out: Tensor = self.inner(image)
        return out.flatten(2).transpose(1, 2)


class First(nn.Module):
    """The first output of a module, called with its input once or thrice."""

    def __init__(self, inner: nn.Module, times: int = 1, **options: Any) -> None:
        super().__init__()
        self.inner = inner
        self.times = times
        self.options = options

    def forward(self, h: Tensor) -> Tensor:
        out: Tensor = self.inner(*[h] * self.times, **self.options)[0]
        return out


class Paired(nn.Module):
    """A product of two. In float32: autocast would cast inside of it, though not where any dispatch mode is on."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Bilinear(width, width, width)

    def forward(self, h: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            out: Tensor = self.inner(h.float(), h.float().sin())
        return out


class Embedded(nn.Module):
    """Learned vectors chosen by what is largest."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(width, width)

    def forward(self, h: Tensor) -> Tensor:
        out: Tensor = self.table(h.argmax(-1))
        return out * h


class Scaled(nn.Module):
    """A bare parameter, used through a view."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, width))

    def forward(self, h: Tensor) -> Tensor:
        return h * self.scale.view(1, 1, -1).expand_as(h)


class ComplexScaled(nn.Module):
    """A complex parameter on the spectrum."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.polar(torch.ones(width), torch.linspace(0, 1, width)))

    def forward(self, h: Tensor) -> Tensor:
        return torch.real(torch.fft.ifft(torch.fft.fft(h, dim=1) * self.scale, dim=1))


class RunningMean(nn.Module):
    """A buffer that is updated in place and then read."""

    mean: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, h: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(h.detach().mean((0, 1)), alpha=0.1)
        return (h - self.mean) * (h - self.mean).sigmoid()


class ReadThenWritten(nn.Module):
    """A buffer whose old content autograd needs nothing of, and whose replay does."""

    seen: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("seen", torch.ones(width))

    def forward(self, h: Tensor) -> Tensor:
        y = (h + self.seen).sin()
        with torch.no_grad():
            self.seen.add_(0.125)
        return y * y


class Replaced(nn.Module):
    """A buffer that is a new tensor after every call, and a counter."""

    last: Tensor
    calls: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(width))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, h: Tensor) -> Tensor:
        old, self.last = self.last, h.detach().mean((0, 1))
        self.calls += 1
        return h.tanh() * (1 + old) / self.calls


class Ring(nn.Module):
    """A buffer of which each call writes another row."""

    rows: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("rows", torch.ones(2, width))
        self.at = 0

    def forward(self, h: Tensor) -> Tensor:
        self.at = 1 - self.at
        self.rows[self.at] = h.detach().amax((0, 1))
        return h * self.rows.clone().sigmoid().mean(0)


class ParallelWeights(nn.Module):
    """Weights stacked on the way, and written in place to a buffer of the call's own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.parts = nn.ParameterList([torch.eye(width) * (i + 1) / 2 for i in range(2)])

    def forward(self, h: Tensor) -> Tensor:
        weight = torch.stack(list(self.parts)).mean(0)
        out = torch.zeros_like(h)
        out += h @ weight
        out.add_(h.sin() @ weight.t())
        return out


Builder = Callable[[int], nn.Module]
LAYERS: dict[str, dict[str, Builder]] = {
    "linear": {
        "linear": lambda w: nn.Linear(w, w),
        "linear_without_bias": lambda w: nn.Linear(w, w, bias=False),
        "mlp": lambda w: nn.Sequential(nn.Linear(w, 2 * w), nn.ReLU(inplace=True), nn.Linear(2 * w, w)),
        "bilinear": Paired,
        "scaled": Scaled,
        "embedding": Embedded,
        "parallel_weights": ParallelWeights,
        "weight_norm": lambda w: weight_norm(nn.Linear(w, w)),
        "spectral_norm": lambda w: spectral_norm(nn.Linear(w, w)),
        "complex_scaled": ComplexScaled,
    },
    "conv": {
        "conv1d": lambda w: Turned(nn.Conv1d(w, w, 3, padding=1)),
        "conv1d_grouped": lambda w: Turned(nn.Conv1d(w, w, 1, groups=2, bias=False)),
        "conv2d": lambda w: AsImage(nn.Conv2d(w, w, 3, padding=1)),
        "conv2d_channels_last": lambda w: AsImage(nn.Conv2d(w, w, 3, padding=1, padding_mode="circular"), True),
        "conv_transposed": lambda w: Turned(nn.ConvTranspose1d(w, w, 3, padding=1)),
        "conv_relu_": lambda w: Turned(nn.Sequential(nn.Conv1d(w, w, 3, padding=1), nn.ReLU(inplace=True))),
    },
    "norm": {
        "layer_norm": lambda w: nn.LayerNorm(w),
        "layer_norm_without": lambda w: nn.LayerNorm(w, elementwise_affine=False),
        "rms_norm": lambda w: nn.RMSNorm(w),
        "group_norm": lambda w: Turned(nn.GroupNorm(2, w)),
        "batch_norm": lambda w: Turned(nn.BatchNorm1d(w)),
        "batch_norm2d": lambda w: AsImage(nn.BatchNorm2d(w, momentum=None)),
        "batch_norm_without": lambda w: Turned(nn.BatchNorm1d(w, track_running_stats=False)),
        "batch_norm_frozen": lambda w: Turned(nn.BatchNorm1d(w).eval()),
        "instance_norm": lambda w: Turned(nn.InstanceNorm1d(w, affine=True, track_running_stats=True)),
    },
    "dropout": {
        "dropout": lambda w: nn.Dropout(0.4),
        "dropout_in_place": lambda w: nn.Dropout(0.4, inplace=True),
        "dropout2d": lambda w: AsImage(nn.Dropout2d(0.3)),
    },
    "attention": {
        "attention": lambda w: First(nn.MultiheadAttention(w, 2, batch_first=True), 3, need_weights=False),
        "attention_weights": lambda w: First(nn.MultiheadAttention(w, 2, dropout=0.2, batch_first=True), 3),
        "encoder": lambda w: nn.TransformerEncoderLayer(w, 2, 2 * w, dropout=0.1, batch_first=True),
        "encoder_first": lambda w: nn.TransformerEncoderLayer(w, 2, w, 0.0, "gelu", batch_first=True, norm_first=True),
    },
    "recurrent": {
        "gru": lambda w: First(nn.GRU(w, w, batch_first=True)),
        "lstm": lambda w: First(nn.LSTM(w, w, batch_first=True)),
        "rnn": lambda w: First(nn.RNN(w, w, 2, batch_first=True, dropout=0.2)),
    },
    "buffer": {
        "running_mean": RunningMean,
        "read_then_written": ReadThenWritten,
        "replaced": Replaced,
        "ring": Ring,
    },
}


BUILDERS: dict[str, Builder] = {name: build for table in LAYERS.values() for name, build in table.items()}
