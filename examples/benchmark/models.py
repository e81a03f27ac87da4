"""The models that are compared: transformers' own, from their configs, with random weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn


class Built(NamedTuple):
    """A model in train mode, its sample (keyword arguments, labels among them), and its repeated blocks in order."""

    model: Any
    sample: dict[str, Any]
    blocks: list[nn.Module]


LANGUAGE = {"large": (8, 512, 4, 256, 2000), "medium": (8, 384, 2, 256, 2000), "small": (3, 64, 4, 32, 128)}
"""Layers, width, batch, length, vocabulary."""


def gpt2(size: str) -> Built:
    """GPT-2, dropout 0.1."""
    from transformers import GPT2Config, GPT2LMHeadModel

    layers, width, batch, length, vocabulary = LANGUAGE[size]
    config = GPT2Config(
        n_layer=layers,
        n_embd=width,
        n_head=width // 32,
        vocab_size=vocabulary,
        n_positions=length,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config).train()
    return Built(model, _tokens(vocabulary, batch, length), list(model.transformer.h))


def llama(size: str) -> Built:
    """Llama, two query heads to a key head."""
    from transformers import LlamaConfig, LlamaForCausalLM

    layers, width, batch, length, vocabulary = LANGUAGE[size]
    config = LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_attention_heads=width // 32,
        num_key_value_heads=width // 64,
        vocab_size=vocabulary,
        max_position_embeddings=length,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).train()
    return Built(model, _tokens(vocabulary, batch, length), list(model.model.layers))


def vit(size: str) -> Built:
    """ViT."""
    from transformers import ViTConfig, ViTForImageClassification

    layers, width, batch, pixels = {"large": (12, 384, 8, 224), "medium": (8, 384, 8, 160), "small": (3, 64, 4, 64)}[
        size
    ]
    config = ViTConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        intermediate_size=4 * width,
        num_attention_heads=width // 32,
        image_size=pixels,
        num_labels=10,
    )
    model = ViTForImageClassification(config).train()
    return Built(model, _images(batch, pixels), list(model.vit.layers))


def resnet50(size: str) -> Built:
    """ResNet-50; the small one has two stages of two bottleneck blocks."""
    from transformers import ResNetConfig, ResNetForImageClassification

    batch, pixels = {"large": (16, 128), "medium": (8, 112), "small": (4, 64)}[size]
    config = ResNetConfig(num_labels=10)
    if size == "small":
        config = ResNetConfig(num_labels=10, embedding_size=16, hidden_sizes=[32, 64], depths=[2, 2])
    model = ResNetForImageClassification(config).train()
    blocks = [block for stage in model.resnet.encoder.stages for block in stage.layers]
    return Built(model, _images(batch, pixels), blocks)


MODELS: dict[str, Callable[[str], Built]] = {"gpt2": gpt2, "llama": llama, "vit": vit, "resnet50": resnet50}


def build(name: str, size: str, device: str) -> Built:
    """The same weights and the same sample in every process."""
    torch.manual_seed(0)
    built = MODELS[name](size)
    built.model.to(device)
    return built._replace(sample={key: value.to(device) for key, value in built.sample.items()})


def _tokens(vocabulary: int, batch: int, length: int) -> dict[str, Any]:
    tokens = torch.randint(vocabulary, (batch, length))
    return {"input_ids": tokens, "labels": tokens.clone()}


def _images(batch: int, pixels: int) -> dict[str, Any]:
    return {"pixel_values": torch.randn(batch, 3, pixels, pixels), "labels": torch.randint(10, (batch,))}
