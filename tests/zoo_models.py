"""The zoo's own models: written by hand, for what no library's model stands for.

Each builder returns ``(model, sample)`` as those of :mod:`tests.models` do; the steps beside them are what
``budgetopt.fit`` takes as ``step=``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.models import Built, Residual, gpt2


class RecurrentLanguageModel(nn.Module):
    """Embedding, a stack of nn.LSTM layers, a linear head."""

    def __init__(self, vocabulary: int, width: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, layers, dropout=0.1, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.lstm(self.embed(tokens))[0])
        return out


def lstm(vocabulary: int, width: int, layers: int, batch: int, length: int) -> Built:
    """The sample is one tensor of tokens, (batch, length)."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = RecurrentLanguageModel(vocabulary, width, layers).train()
        return model, torch.randint(vocabulary, (batch, length))


def next_token_step(model: Any, tokens: Tensor) -> Tensor:
    """Cross entropy of every token given those before it."""
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


class GanPair(nn.Module):
    """A generator and a discriminator of convolutions, each with batch norm; itself it has no forward."""

    def __init__(self, channels: int, doublings: int, latent: int) -> None:
        super().__init__()
        top = channels * 2**doublings
        grow: list[nn.Module] = [nn.ConvTranspose2d(latent, top, 4), nn.BatchNorm2d(top), nn.ReLU(inplace=True)]
        shrink: list[nn.Module] = [nn.Conv2d(3, channels, 3, padding=1), nn.LeakyReLU(0.2, inplace=True)]
        for level in range(doublings):
            wide, narrow = top // 2**level, top // 2 ** (level + 1)
            grow += [nn.ConvTranspose2d(wide, narrow, 4, 2, 1), nn.BatchNorm2d(narrow), nn.ReLU(inplace=True)]
            narrow, wide = channels * 2**level, channels * 2 ** (level + 1)
            shrink += [nn.Conv2d(narrow, wide, 4, 2, 1), nn.BatchNorm2d(wide), nn.LeakyReLU(0.2, inplace=True)]
        self.generator = nn.Sequential(*grow, nn.Conv2d(channels, 3, 3, padding=1), nn.Tanh())
        self.discriminator = nn.Sequential(*shrink, nn.Conv2d(top, 1, 4), nn.Flatten())


def gan(channels: int, doublings: int, latent: int, batch: int) -> Built:
    """Images of 4 · 2^doublings pixels a side; the sample is a pair of real images and latent noise."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = GanPair(channels, doublings, latent).train()
        side = 4 * 2**doublings
        return model, (torch.randn(batch, 3, side, side), torch.randn(batch, latent, 1, 1))


def adversarial_step(model: Any, sample: Any) -> Tensor:
    """Both losses in one scalar: the generator's passes through a discriminator whose weights are constants."""
    real, noise = sample
    fake = model.generator(noise)
    on_real, on_fake = model.discriminator(real), model.discriminator(fake.detach())
    frozen = {name: weight.detach() for name, weight in model.discriminator.named_parameters()}
    fooled = torch.func.functional_call(model.discriminator, frozen, fake)
    return F.softplus(-on_real).mean() + F.softplus(on_fake).mean() + F.softplus(-fooled).mean()


class TwoTowers(nn.Module):
    """An image tower, a text tower, and the temperature between them."""

    def __init__(self, width: int, depth: int, vocabulary: int, pixels: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, pixels // 8, pixels // 8)
        self.image = nn.Sequential(*(Residual(width, 0.1) for _ in range(depth)))
        self.embed = nn.Embedding(vocabulary, width)
        self.text = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True), depth, enable_nested_tensor=False
        )
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, pixels: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        image = self.image(self.patches(pixels).flatten(2).transpose(1, 2)).mean(1)
        text = self.text(self.embed(tokens)).mean(1)
        return F.normalize(image, dim=-1), F.normalize(text, dim=-1)


def two_towers(width: int, depth: int, vocabulary: int, pixels: int, batch: int, length: int) -> Built:
    """The sample is a mapping with ``pixels`` and ``tokens``."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = TwoTowers(width, depth, vocabulary, pixels).train()
        images, tokens = torch.randn(batch, 3, pixels, pixels), torch.randint(vocabulary, (batch, length))
        return model, {"pixels": images, "tokens": tokens}


def contrastive_step(model: Any, sample: Any) -> Tensor:
    """Cross entropy over the batch, of images against texts and of texts against images."""
    image, text = model(sample["pixels"], sample["tokens"])
    scores = model.scale.exp() * image @ text.T
    own = torch.arange(len(scores))
    return (F.cross_entropy(scores, own) + F.cross_entropy(scores.T, own)) / 2


class OnlyParameters(nn.Module):
    """Transformer blocks as plain functions of one module's own parameters: there is no submodule."""

    SHAPES = (("qkv", 3, 1), ("out", 1, 1), ("up", 4, 1), ("down", 1, 4))

    def __init__(self, depth: int, width: int, heads: int) -> None:
        super().__init__()
        self.depth, self.heads = depth, heads
        for layer in range(depth):
            for name, rows, columns in self.SHAPES:
                weight = torch.randn(rows * width, columns * width) * (columns * width) ** -0.5
                self.register_parameter(f"{name}{layer}", nn.Parameter(weight))

    def forward(self, x: Tensor) -> Tensor:
        for layer in range(self.depth):
            qkv, out, up, down = (getattr(self, f"{name}{layer}") for name, _, _ in self.SHAPES)
            x = x + F.dropout(_attend(_norm(x), qkv, self.heads) @ out.T, 0.1)
            x = x + F.dropout(F.gelu(_norm(x) @ up.T) @ down.T, 0.1)
        return x


def _norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:])


def _attend(x: Tensor, weight: Tensor, heads: int) -> Tensor:
    q, k, v = (x @ weight.T).view(*x.shape[:2], 3, heads, -1).permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)


def functions(depth: int, width: int, heads: int, batch: int, length: int) -> Built:
    """The sample is one tensor, (batch, length, width)."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return OnlyParameters(depth, width, heads).train(), torch.randn(batch, length, width)


def squared_loss(output: Tensor) -> Tensor:
    """Mean square of the output."""
    return output.square().mean()


class Adapted(nn.Module):
    """A frozen layer plus a trained correction of low rank, which starts small but not at zero."""

    def __init__(self, base: nn.Module, inputs: int, outputs: int, rank: int) -> None:
        super().__init__()
        self.base = base
        self.dropout = nn.Dropout(0.05)
        self.down = nn.Linear(inputs, rank, bias=False)
        self.up = nn.Linear(rank, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.up(self.down(self.dropout(x)))
        return out


def gpt2_adapted(layers: int, width: int, vocabulary: int, batch: int, length: int, rank: int) -> Built:
    """GPT-2, frozen but for corrections of rank ``rank`` on each block's joint projection."""
    model, sample = gpt2(layers, width, vocabulary, batch, length)
    model.requires_grad_(False)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        for block in model.transformer.h:  # type: ignore[union-attr]
            block.attn.c_attn = Adapted(block.attn.c_attn, width, 3 * width, rank)
    return model.train(), sample
