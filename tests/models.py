"""Models that the tests train, with random weights: nothing is downloaded, everything is seeded.

Every builder returns ``(model, sample)``, the model in train mode. Building leaves torch's global
random state as it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

Sample: TypeAlias = "Tensor | tuple[Any, ...] | dict[str, Any]"
Built: TypeAlias = "tuple[nn.Module, Any]"


def gpt2(
    layers: int = 12,
    width: int = 768,
    vocabulary: int = 50257,
    batch: int = 8,
    length: int = 256,
    *,
    heads: int | None = None,
    dropout: float = 0.1,
    attention: str = "sdpa",
    seed: int = 0,
) -> Built:
    """transformers' GPT2LMHeadModel; the sample has ``input_ids`` and ``labels`` of (batch, length)."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=layers,
        n_embd=width,
        n_head=heads or max(1, width // 64),
        vocab_size=vocabulary,
        n_positions=length,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation=attention,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = GPT2LMHeadModel(config).train()
        tokens = torch.randint(vocabulary, (batch, length))
    return model, {"input_ids": tokens, "labels": tokens.clone()}


def gpt2_small(layers: int = 3, *, dropout: float = 0.1, attention: str = "sdpa", seed: int = 0) -> Built:
    """GPT-2 of a size for CI: 64 wide, two heads, batch 4 of 32 tokens."""
    return gpt2(layers, 64, 128, 4, 32, heads=2, dropout=dropout, attention=attention, seed=seed)


def resnet(
    depths: tuple[int, ...],
    channels: tuple[int, ...],
    *,
    stem: int,
    layer_type: str,
    batch: int,
    px: int,
    classes: int,
    seed: int = 0,
) -> Built:
    """transformers' ResNetForImageClassification; ``pixel_values`` of (batch, 3, px, px) and ``labels``."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=stem,
        hidden_sizes=list(channels),
        depths=list(depths),
        layer_type=layer_type,
        num_labels=classes,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = ResNetForImageClassification(config).train()
        sample = {"pixel_values": torch.randn(batch, 3, px, px), "labels": torch.randint(classes, (batch,))}
    return model, sample


def resnet50(batch: int = 8, px: int = 224, *, seed: int = 0) -> Built:
    """ResNet-50."""
    return resnet(
        (3, 4, 6, 3),
        (256, 512, 1024, 2048),
        stem=64,
        layer_type="bottleneck",
        batch=batch,
        px=px,
        classes=1000,
        seed=seed,
    )


def resnet_small(depths: tuple[int, ...] = (2, 2), *, seed: int = 0) -> Built:
    """ResNet of a size for CI: basic blocks, 16 channels and up, batch 4 of 32 × 32 pixels."""
    channels = (16, 24, 32, 64)[: len(depths)]
    return resnet(depths, channels, stem=16, layer_type="basic", batch=4, px=32, classes=10, seed=seed)


class Residual(nn.Module):
    """x + dropout(W₂ gelu(W₁ norm(x)))."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))))
        return x + y


class ConvBlock(nn.Module):
    """Convolution and batch norm, then the input added and relu, both in place."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.conv(x))
        y += x
        return nn.functional.relu_(y)


def mlp_stack(depth: int = 4, width: int = 32, batch: int = 128, *, dropout: float = 0.0, seed: int = 0) -> Built:
    """Residual blocks of two linear layers; the sample is one tensor of (batch, width)."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(*(Residual(width, dropout) for _ in range(depth))).train()
        return model, torch.randn(batch, width)


def dropout_stack(depth: int = 4, width: int = 32, batch: int = 128, *, seed: int = 0) -> Built:
    """The MLP stack with dropout: replays need the random numbers of the forward."""
    return mlp_stack(depth, width, batch, dropout=0.25, seed=seed)


def conv_stack(depth: int = 6, channels: int = 8, batch: int = 4, px: int = 12, *, seed: int = 0) -> Built:
    """Convolution, batch norm, in-place add and relu; the sample is one (batch, channels, px, px) tensor."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(*(ConvBlock(channels) for _ in range(depth))).train()
        return model, torch.randn(batch, channels, px, px)


def plain_mlp(depth: int = 3, width: int = 64, batch: int = 32, *, seed: int = 0) -> Built:
    """Linear, relu, linear, relu …: the one whose bytes are derived by hand."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(*(m for _ in range(depth) for m in (nn.Linear(width, width), nn.ReLU()))).train()
        return model, torch.randn(batch, width)


def fresh_batch(sample: Any, seed: int) -> Any:
    """Other data of the same structure, sizes and types.

    Floats are drawn anew. Integers are permuted, all tensors of one size alike: they stay in range, and
    labels that equalled the inputs still do. A tensor that appears twice is still one tensor.
    """
    drawn: dict[int, Tensor] = {}

    def fresh(part: Any) -> Any:
        if isinstance(part, Tensor):
            return drawn.setdefault(id(part), _fresh_tensor(part, seed))
        if isinstance(part, Mapping):
            return {name: fresh(item) for name, item in part.items()}
        if isinstance(part, (tuple, list)):
            return type(part)(fresh(item) for item in part)
        return part

    return fresh(sample)


def _fresh_tensor(tensor: Tensor, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if tensor.is_floating_point():
        return torch.randn(tensor.shape, generator=generator).to(tensor)
    order = torch.randperm(tensor.numel(), generator=generator).to(tensor.device)
    return tensor.reshape(-1)[order].reshape(tensor.shape)
