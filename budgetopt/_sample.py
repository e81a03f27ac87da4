"""Look into samples of any shape."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """Tensors in a sample: nested mappings, sequences and objects with attributes are looked through."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for item in tree.values():
            yield from tensors_in(item)
    elif isinstance(tree, (list, tuple, set)):
        for item in tree:
            yield from tensors_in(item)
    elif hasattr(tree, "__dict__") and not isinstance(tree, (type, torch.nn.Module)):
        yield from tensors_in(vars(tree))


def batch_of(sample: Any) -> int:
    """The batch size: the first dimension that all tensors of the sample share; 0 if they share none."""
    sizes = {tensor.shape[0] if tensor.dim() else 0 for tensor in tensors_in(sample)}
    return sizes.pop() if len(sizes) == 1 else 0


def changed(sample: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A sample with every tensor changed that is in mappings, lists and tuples; what else holds tensors stays."""
    if isinstance(sample, torch.Tensor):
        return change(sample)
    if isinstance(sample, Mapping):
        return {key: changed(item, change) for key, item in sample.items()}
    if type(sample) in (list, tuple):
        return type(sample)(changed(item, change) for item in sample)
    return sample


def first(sample: Any, count: int) -> Any:
    """The first `count` examples of a sample of tensors in mappings, lists and tuples, as views.

    Raises:
        TypeError: it holds tensors in something else, which can't be rebuilt.
    """
    if isinstance(sample, torch.Tensor):
        return sample[:count].detach().requires_grad_(sample.requires_grad)
    if isinstance(sample, dict):
        return {key: first(item, count) for key, item in sample.items()}
    if type(sample) in (list, tuple):
        return type(sample)(first(item, count) for item in sample)
    if any(True for _ in tensors_in(sample)):
        raise TypeError(f"a {type(sample).__name__} of tensors can't be cut to fewer examples")
    return sample
