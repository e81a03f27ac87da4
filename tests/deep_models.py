"""Deep models: hundreds of layers, each a small part of the whole.

Each builder returns ``(model, sample)`` as those of :mod:`tests.models` do. :data:`DEEP` is a table like the
zoo's, with a size for CI and a full one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.models import Built, gpt2
from tests.zoo import Entry
from tests.zoo_models import squared_loss


class Layer(nn.Module):
    """x + W gelu(norm(x)): the stream, and twice its bytes inside that are cheap to make again.

    So are the layers of the 1,000-layer net of Chen et al. 2016 (arXiv:1604.06174): dropping what is inside saves two
    thirds, and only dropping parts of the stream as well gets below that.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(F.gelu(self.norm(x)))
        return x + y


def deep_residual(layers: int = 1000, width: int = 64, batch: int = 8, length: int = 256) -> Built:
    """Residual layers in one sequence; the sample is one tensor, (batch, length, width)."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(*(Layer(width) for _ in range(layers))).train()
        return model, torch.randn(batch, length, width)


def deep_transformer(layers: int, width: int, vocabulary: int, batch: int, length: int) -> Built:
    """GPT-2, deep and narrow, with dropout; the sample has ``input_ids`` and ``labels`` of (batch, length)."""
    return gpt2(layers, width, vocabulary, batch, length, heads=2)


class DenseLayer(nn.Module):
    """The input, and after it ``growth`` more channels computed from it: the input is written out once more."""

    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv1 = nn.Conv2d(channels, 4 * growth, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(4 * growth)
        self.conv2 = nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(F.relu(self.norm1(x)))
        return torch.cat((x, self.conv2(F.relu(self.norm2(y)))), 1)


class Transition(nn.Module):
    """Half as many channels, half as many pixels a side."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(channels)
        self.conv = nn.Conv2d(channels, channels // 2, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.avg_pool2d(self.conv(F.relu(self.norm(x))), 2)


def densenet(blocks: tuple[int, ...], growth: int, batch: int, px: int, classes: int = 10) -> Built:
    """DenseNet (Huang et al. 2017); 6-12-24-16 and growth 32 is DenseNet-121. ``pixels`` and ``labels``."""
    channels = 2 * growth
    stem = (nn.Conv2d(3, channels, 7, 2, 3, bias=False), nn.BatchNorm2d(channels), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(*stem)
        for number, depth in enumerate(blocks):
            if number:
                model.append(Transition(channels))
                channels //= 2
            model.append(nn.Sequential(*(DenseLayer(channels + i * growth, growth) for i in range(depth))))
            channels += depth * growth
        model.extend((nn.BatchNorm2d(channels), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()))
        model.append(nn.Linear(channels, classes))
        return model.train(), {"pixels": torch.randn(batch, 3, px, px), "labels": torch.randint(classes, (batch,))}


def classifying_step(model: Any, sample: Any) -> Tensor:
    """Cross entropy of the labels."""
    return F.cross_entropy(model(sample["pixels"]), sample["labels"])


DEEP: dict[str, Entry] = {
    "deep residual": Entry(
        deep_residual,
        {"layers": 120, "width": 32, "batch": 2, "length": 32},
        {"layers": 1000, "width": 64, "batch": 8, "length": 256},
        loss=squared_loss,
    ),
    "deep transformer": Entry(
        deep_transformer,
        {"layers": 16, "width": 32, "vocabulary": 64, "batch": 2, "length": 16},
        {"layers": 96, "width": 64, "vocabulary": 512, "batch": 4, "length": 128},
    ),
    "densenet": Entry(
        densenet,
        {"blocks": (3, 4, 3), "growth": 8, "batch": 4, "px": 64},
        {"blocks": (6, 12, 24, 16), "growth": 32, "batch": 8, "px": 64},
        step=classifying_step,
    ),
}
