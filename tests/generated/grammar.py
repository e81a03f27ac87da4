"""Descriptions of models: a tree of frozen dataclasses that prints as what builds it again.

::

    Model(body=Seq(Fn("relu_"), Residual(Layer("linear"))), batch=2).build()

Every part takes and gives (batch, length, width), so that any part may stand anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.generated.functions import FUNCTIONS, ROUTED
from tests.generated.layers import BUILDERS


class Applied(nn.Module):
    """A function as a module; the modules that it uses are `inner`."""

    def __init__(self, function: Callable[..., Any], inner: dict[str, nn.Module] | None = None) -> None:
        super().__init__()
        self.function = function
        for name, module in (inner or {}).items():
            self.add_module(name, module)
        self.names = list(inner or ())

    def forward(self, h: Tensor) -> Any:
        return self.function(h, *[getattr(self, name) for name in self.names])


@dataclass(frozen=True)
class Fn:
    """A function without parameters."""

    name: str

    def build(self, width: int) -> nn.Module:
        return Applied(FUNCTIONS[self.name])


@dataclass(frozen=True)
class Layer:
    """A module of torch's, or a small one of ours."""

    name: str

    def build(self, width: int) -> nn.Module:
        return BUILDERS[self.name](width)


@dataclass(frozen=True, init=False, repr=False)
class Seq:
    """One after the other."""

    parts: tuple[Part, ...]

    def __init__(self, *parts: Part) -> None:
        object.__setattr__(self, "parts", parts)

    def __repr__(self) -> str:
        return f"Seq({', '.join(map(repr, self.parts))})"

    def build(self, width: int) -> nn.Module:
        return nn.Sequential(*[part.build(width) for part in self.parts])


@dataclass(frozen=True)
class Residual:
    """``h + body(h)``, or written into ``h``."""

    body: Part
    in_place: bool = False

    def build(self, width: int) -> nn.Module:
        add = Tensor.add_ if self.in_place else torch.add
        return Applied(lambda h, body: add(h, body(h)), {"body": self.body.build(width)})


@dataclass(frozen=True)
class Branch:
    """Two parts of the same input, joined."""

    a: Part
    b: Part
    join: str = "add"

    def build(self, width: int) -> nn.Module:
        join = JOINS[self.join]
        return Applied(lambda h, a, b: join(a(h), b(h)), {"a": self.a.build(width), "b": self.b.build(width)})


def _interleaved(a: Tensor, b: Tensor) -> Tensor:
    return torch.stack([a, b], -1).flatten(-2)[..., : a.size(-1)]


JOINS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "mul": lambda a, b: a * b.tanh(),
    "cat": lambda a, b: torch.cat([a, b], 1)[:, 1 : a.size(1) + 1],
    "stack": lambda a, b: torch.stack([a, b]).amax(0),
    "interleave": _interleaved,
    "mul_": lambda a, b: (a * 1).mul_(b),
}


@dataclass(frozen=True)
class Repeat:
    """The same module twice in a row."""

    body: Part

    def build(self, width: int) -> nn.Module:
        return Applied(lambda h, body: body(body(h)), {"body": self.body.build(width)})


@dataclass(frozen=True)
class Frozen:
    """Its parameters don't require grad."""

    body: Part

    def build(self, width: int) -> nn.Module:
        return self.body.build(width).requires_grad_(False)


@dataclass(frozen=True)
class Autocast:
    """An island of bfloat16, or of no autocast; what comes out is float32."""

    body: Part
    enabled: bool = True

    def build(self, width: int) -> nn.Module:
        def run(h: Tensor, body: nn.Module) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=self.enabled):
                out: Tensor = body(h)
            return out.float()

        return Applied(run, {"body": self.body.build(width)})


@dataclass(frozen=True)
class Checkpointed:
    """A part that torch itself runs again."""

    body: Part
    reentrant: bool = False

    def build(self, width: int) -> nn.Module:
        return Applied(
            lambda h, body: checkpoint(body, h, use_reentrant=self.reentrant), {"body": self.body.build(width)}
        )


@dataclass(frozen=True)
class Hooked:
    """A part under saved-tensor hooks of the user's."""

    body: Part

    def build(self, width: int) -> nn.Module:
        def run(h: Tensor, body: nn.Module) -> Any:
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach() * 1, lambda t: t):
                return body(h)

        return Applied(run, {"body": self.body.build(width)})


@dataclass(frozen=True)
class NoGrad:
    """A part without grad that scales ``h``."""

    body: Part

    def build(self, width: int) -> nn.Module:
        def run(h: Tensor, body: nn.Module) -> Tensor:
            with torch.no_grad():
                gate: Tensor = body(h.clone())
            return h * gate.sigmoid()

        return Applied(run, {"body": self.body.build(width)})


Part: TypeAlias = "Fn | Layer | Seq | Residual | Branch | Repeat | Frozen | Autocast | Checkpointed | Hooked | NoGrad"


class Whole(nn.Module):
    """Stem, body and head."""

    def __init__(self, stem: nn.Module, body: nn.Module, head: nn.Module, output: str, outer: bool) -> None:
        super().__init__()
        self.stem = stem
        self.body = body
        self.head = head
        self.output = output
        self.outer = outer

    def forward(self, x: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.outer):
            h = self.body(self.stem(x))
            out = self.head(h)
        if self.output == "tuple":
            return out, [h.sin(), h.argmax(-1)]
        if self.output == "dict":
            return {"logits": out, "hidden": h}
        if self.output == "loss":
            return {"loss": out.float().square().mean(), "hidden": h}
        return out


@dataclass(frozen=True)
class Model:
    """A whole model, the shape of its sample, and how it is trained.

    Attributes:
        stem: "linear", "embedding" (the sample is of integers), or "none": the body gets the sample itself.
        output: "tensor", "tuple", "dict", or "loss", a dict with a loss. outer: autocast around everything.
        train: see ``tests.generated.check.STEPS``.
    """

    body: Part
    batch: int = 2
    length: int = 2
    width: int = 4
    stem: str = "linear"
    output: str = "tensor"
    outer: bool = False
    train: str = "plain"

    def build(self) -> nn.Module:
        """The same weights every time."""
        torch.manual_seed(1)
        stems: dict[str, nn.Module] = {
            "linear": nn.Linear(self.width, self.width),
            "embedding": nn.Embedding(10, self.width),
            "none": nn.Identity(),
        }
        head = nn.Linear(self.width, 3)
        return Whole(stems[self.stem], self.body.build(self.width), head, self.output, self.outer)

    def sample(self, seed: int, batch: int | None = None) -> Tensor:
        """A batch of data that follows the seed."""
        generator = torch.Generator().manual_seed(seed)
        shape = (batch or self.batch, self.length)
        if self.stem == "embedding":
            return torch.randint(10, shape, generator=generator)
        return torch.randn(*shape, self.width, generator=generator)

    def names(self) -> set[str]:
        """Of all functions and layers, and of all classes of parts."""
        return {getattr(part, "name", type(part).__name__) for part in parts(self.body)}

    def routed(self) -> bool:
        """Whether sizes, or what runs, follow the data."""
        return bool(self.names() & ROUTED)


def parts(part: Any) -> Iterator[Any]:
    """A part and all those in it."""
    yield part
    for field in fields(part):
        inner = getattr(part, field.name)
        for each in inner if isinstance(inner, tuple) else (inner,):
            if hasattr(each, "build"):
                yield from parts(each)
