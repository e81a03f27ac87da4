"""Steps of well-known models at full size, modelled and kept as compressed problem files. By hand, all or some::

    python -m tests.recorded
    python -m tests.recorded vgg16 unet

No weights are in memory and nothing is computed (``budgetopt.profile(..., device=...)``), so any machine makes them, in
seconds each. Batches are those that papers on rematerialization report: MONeT's (Shah et al. 2021) for the four
convolutional ones. The optimizer is SGD with momentum there, AdamW elsewhere.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import budgetopt
from budgetopt.solvers import save_problem
from tests.deep_models import deep_residual
from tests.models import gpt2
from tests.zoo_models import squared_loss

FOLDER = Path(__file__).parent / "solvers" / "recorded"


class Vgg16(nn.Module):
    """Simonyan and Zisserman 2014, configuration D, with the classifier's dropout; returns the loss."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inputs = 3
        for outputs in (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0):
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU()] if outputs else [nn.MaxPool2d(2)]
            inputs = outputs or inputs
        self.features = nn.Sequential(*layers)
        rest = [nn.Linear(512 * 49, 4096), nn.ReLU(), nn.Dropout(), nn.Linear(4096, 4096), nn.ReLU(), nn.Dropout()]
        self.classifier = nn.Sequential(*rest, nn.Linear(4096, classes))

    def forward(self, pixels: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.classifier(self.features(pixels).flatten(1)), labels)


class Twice(nn.Sequential):
    """Two convolutions of a U-Net, each with a ReLU."""

    def __init__(self, inputs: int, outputs: int) -> None:
        first = nn.Conv2d(inputs, outputs, 3, padding=1)
        super().__init__(first, nn.ReLU(), nn.Conv2d(outputs, outputs, 3, padding=1), nn.ReLU())


class UNet(nn.Module):
    """Ronneberger et al. 2015, with padding; returns the loss."""

    def __init__(self, width: int = 64, classes: int = 2) -> None:
        super().__init__()
        sizes = [width << level for level in range(5)]
        self.down = nn.ModuleList(Twice(a, b) for a, b in zip([3, *sizes], sizes, strict=False))
        ups = list(zip(sizes[:0:-1], sizes[-2::-1], strict=True))
        self.up = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, stride=2) for a, b in ups)
        self.merge = nn.ModuleList(Twice(a, b) for a, b in ups)
        self.last = nn.Conv2d(width, classes, 1)

    def forward(self, pixels: Tensor, labels: Tensor) -> Tensor:
        x, kept = pixels, []
        for level, block in enumerate(self.down):
            x = block(x if level == 0 else F.max_pool2d(x, 2))
            kept.append(x)
        for up, merge, beside in zip(self.up, self.merge, kept[-2::-1], strict=True):
            x = merge(torch.cat([beside, up(x)], 1))
        return F.cross_entropy(self.last(x), labels)


class Recording(NamedTuple):
    """What to record: a builder of (model, sample) on the meta device, and how its step runs."""

    build: Callable[[], tuple[nn.Module, Any]]
    device: str
    optimizer: str = "adamw"
    how: Mapping[str, Any] = MappingProxyType({})


def _images(
    batch: int, height: int, width: int, names: tuple[str, str] = ("pixel_values", "labels")
) -> dict[str, Tensor]:
    return dict(zip(names, (torch.zeros(batch, 3, height, width), torch.zeros(batch, dtype=torch.long)), strict=True))


def _resnet50() -> tuple[nn.Module, Any]:
    from transformers import ResNetConfig, ResNetForImageClassification

    return ResNetForImageClassification(ResNetConfig(num_labels=1000)), _images(184, 224, 224)


def _mobilenet() -> tuple[nn.Module, Any]:
    from transformers import MobileNetV2Config, MobileNetV2ForImageClassification

    return MobileNetV2ForImageClassification(MobileNetV2Config(num_labels=1000)), _images(272, 224, 224)


def _vit_large() -> tuple[nn.Module, Any]:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096, num_labels=1000
    )
    return ViTForImageClassification(config), _images(32, 224, 224)


def _vgg16() -> tuple[nn.Module, Any]:
    return Vgg16(), _images(176, 224, 224, ("pixels", "labels"))


def _unet() -> tuple[nn.Module, Any]:
    labels = torch.zeros(11, 416, 608, dtype=torch.long)
    return UNet(), {"pixels": torch.zeros(11, 3, 416, 608), "labels": labels}


def _llama() -> tuple[nn.Module, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    tokens = torch.zeros(1, 4096, dtype=torch.long)
    model = LlamaForCausalLM(LlamaConfig(use_cache=False)).to(torch.bfloat16)
    return model, {"input_ids": tokens, "labels": tokens}


RECORDINGS = {
    "gpt2_124m": Recording(lambda: gpt2(batch=16, length=1024, dropout=0.0), "h200"),
    "gpt2_xl": Recording(lambda: gpt2(48, 1600, batch=4, length=1024, heads=25, dropout=0.0), "h200"),
    "llama_7b": Recording(_llama, "h200"),
    "resnet50": Recording(_resnet50, "a100", "sgd+momentum"),
    "vgg16": Recording(_vgg16, "a100", "sgd+momentum"),
    "unet": Recording(_unet, "a100", "sgd+momentum"),
    "mobilenet_v2": Recording(_mobilenet, "a100", "sgd+momentum"),
    "vit_l": Recording(_vit_large, "h200"),
    "residual_1000": Recording(lambda: deep_residual(1000, 1024, 32, 256), "h200", how={"loss": squared_loss}),
}


def record(name: str) -> budgetopt.Profile:
    """The profile of one of them."""
    one = RECORDINGS[name]
    with torch.device("meta"):
        model, sample = one.build()
    return budgetopt.profile(model.train(), sample, device=one.device, optimizer=one.optimizer, **one.how)


def path_of(name: str) -> Path:
    """Where its problem is kept."""
    return FOLDER / f"{name}.json.gz"


def main() -> None:
    """Record, keep, and say what was found."""
    parser = argparse.ArgumentParser(description="Model steps of well-known models and keep them as problems.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(RECORDINGS)}; by default all")
    for name in parser.parse_args().names or RECORDINGS:
        start = time.perf_counter()
        found = record(name)
        problem = found.problem(found.peak_bytes)
        save_problem(problem, path_of(name))
        figures = f"{len(problem.operators)} operators, {len(problem.regions)} regions, peak {found.peak_bytes:,} bytes"
        fixed = f"{found.fixed.total:,} of them fixed, step {found.step_ns / 1e6:,.0f} ms modelled on {found.modelled}"
        print(f"{name}: {figures}, {fixed}; {time.perf_counter() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main()
