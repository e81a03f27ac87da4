"""Look into samples of any shape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
