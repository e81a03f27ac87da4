"""Custom autograd functions, as people write them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class SavedTwice(torch.autograd.Function):
    """Its backward asks for the saved tensors twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.sin()
        ctx.save_for_backward(x, y)
        return y * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, y = ctx.saved_tensors
        again, _ = ctx.saved_tensors
        return grad * (y + x.cos() * again)


class NotAnOutput(torch.autograd.Function):
    """It saves what is neither input nor output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        between = x.tanh()
        ctx.save_for_backward(between, between[:, :1])
        return between * between

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        between, part = ctx.saved_tensors
        return grad * 2 * between * (1 - between * between) + 0 * part.sum()


class OnTheContext(torch.autograd.Function):
    """It leaves a tensor on the context, where no hook sees it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.x = x.detach().clone()
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.x.cos()


class Dirty(torch.autograd.Function):
    """It writes to its input and saves that."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.exp_().clamp_(max=3)
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (y,) = ctx.saved_tensors
        return grad * y * (y < 3)


class OwnCheckpoint(torch.autograd.Function):
    """It runs its forward again in the backward, with grad."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin().exp()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            y = leaf.sin().exp()
        (found,) = torch.autograd.grad(y, leaf, grad)
        return found


class NewStyle(torch.autograd.Function):
    """Forward and set-up apart."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.cos()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(inputs[0], output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, y = ctx.saved_tensors
        return -grad * x.sin() + 0 * y


class TwoOutputs(torch.autograd.Function):
    """The second may get no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        a, b = x.sin(), x.square()
        ctx.save_for_backward(x, a)
        return a, b

    @staticmethod
    def backward(ctx: Any, grad_a: Tensor | None, grad_b: Tensor | None) -> Any:
        x, a = ctx.saved_tensors
        found = None if grad_a is None else grad_a * x.cos() + 0 * a
        return found if grad_b is None else (0 if found is None else found) + grad_b * 2 * x
