"""What the executor must know about one dispatched operator, found once from its schema."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch

from budgetopt import _torch

PLAIN: Final = {torch.Tensor, torch.nn.Parameter}
"""Only these very types are recorded: the type of a subclass must survive, so it is left alone.

While a step is modelled, torch's tensors without bytes are among them (:mod:`budgetopt._modelled`).
"""

_aten: Any = torch.ops.aten
UNNUMBERED: Final = frozenset(
    {_aten.detach.default, _aten.lift_fresh.default, _aten.alias.default, torch.ops.prim.device.default}
)
"""Operators that hooks or modes add and drop between two runs of the same code: never counted."""

_CAST: Final = _aten._to_copy.default
_BATCH_NORMS: Final = ("native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update")
_BATCH_NORMS_CUDA: Final = ("cudnn_batch_norm", "miopen_batch_norm")
_UNSEEN: Final = ("set_", "resize", "record_stream", "_local_scalar_dense", "rrelu_with_noise", "_efficientzerotensor")
_UNWRITTEN: Final = {"mkldnn_rnn_layer": frozenset({3})}
"""Results of which the operator leaves bytes unwritten: oneDNN's workspace. Its backward can't read those, or a
plain step's gradients would be random; so they are not compared."""
EMPTY: Final = ("aten.empty", "aten.new_empty")
"""Operators that leave their result unwritten."""
_FIRST_STATISTIC: Final = 3
_SECOND_STATISTIC: Final = 4
_TRAINING: Final = 5


class Info:
    """Facts of one operator.

    Attributes:
        name: ``"aten.addmm.default"``.
        call: what runs it (the builtin below the overload object, one Python frame less).
        skip: a view or an unnumbered operator: it makes no value.
        opaque: why it can't be replayed at all, or "".
        random: it draws from a generator. generator: its schema takes one.
        written: positions and names of the arguments it writes.
        batch_norm: it updates running statistics that its schema does not declare.
        cast: a dtype cast; one of a leaf that requires grad lives in autocast's cache.
        pieces: it cuts a storage into tensors that do not share a version counter.
        empty: it returns bytes that nothing wrote.
        unwritten: slots of results in which some bytes stay unwritten; two runs differ there.
    """

    __slots__ = (
        "arguments",
        "batch_norm",
        "call",
        "cast",
        "empty",
        "generator",
        "name",
        "opaque",
        "pieces",
        "random",
        "skip",
        "unwritten",
        "written",
    )

    def __init__(self, func: Any) -> None:
        schema = getattr(func, "_schema", None)
        self.name = str(func)
        self.call = getattr(func, "_op", func)
        self.skip = func in UNNUMBERED
        self.cast = func is _CAST
        self.opaque = ""
        self.pieces = False
        self.random = self.generator = self.batch_norm = self.empty = False
        self.unwritten: frozenset[int] = frozenset()
        self.written: tuple[tuple[int, str], ...] = ()
        self.arguments: tuple[str, ...] = ()
        if schema is None:
            self.opaque = "a higher-order operator"
            return
        arguments = schema.arguments
        self.arguments = tuple(a.name for a in arguments)
        self.written = tuple(
            (i, a.name) for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write
        )
        self.skip = self.skip or (bool(func.is_view) and not self.written)
        self.random = torch.Tag.nondeterministic_seeded in func.tags
        self.generator = any(a.name == "generator" for a in arguments)
        base = schema.name.rpartition("::")[2]
        self.batch_norm = base in _BATCH_NORMS or base in _BATCH_NORMS_CUDA
        self.empty = self.name.startswith(EMPTY)
        self.unwritten = _UNWRITTEN.get(base, frozenset())
        self.pieces = func.namespace == "aten" and base.startswith("unsafe_")
        self.opaque = _why_opaque(func, base, bool(self.written))

    def scratch(self, args: tuple[Any, ...]) -> bool:
        """Whether a replay must run on scratch statistics instead of the module's own."""
        return self.batch_norm and len(args) > _TRAINING and bool(args[_TRAINING])

    @staticmethod
    def statistics() -> tuple[int, int]:
        """Positions of the running statistics in a batch norm's arguments."""
        return _FIRST_STATISTIC, _SECOND_STATISTIC


def _why_opaque(func: Any, base: str, writes: bool) -> str:
    if func.namespace in ("c10d", "_c10d_functional", "fsdp", "symm_mem"):
        return "communication between processes"
    if func.namespace not in ("aten", "prims") and writes:
        return "a custom operator that writes to its arguments"
    if base.startswith(_UNSEEN):
        return "it changes or reads what the dispatcher does not see"
    return ""


INFOS: dict[Any, Info] = {}


def describe(func: Any) -> Info:
    """The facts of `func`, from the cache after the first time."""
    info = INFOS.get(func)
    if info is None:
        info = INFOS[func] = Info(func)
    return info


def is_plain(tensor: torch.Tensor) -> bool:
    """A strided tensor of no special kind, whose storage is all there is to it."""
    return (
        type(tensor) in PLAIN
        and tensor.layout is torch.strided
        and not (tensor.is_nested or tensor.is_quantized or tensor.is_inference() or _torch.is_zero(tensor))
        and tensor.device.type != "meta"
    )


_COMPRESSED: Final[dict[Any, tuple[str, str]]] = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}


def parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors that hold its bytes: itself, indices and values, what a subclass wraps; none if not known."""
    if is_plain(tensor):
        return [tensor]
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in _COMPRESSED:
        return [*(getattr(tensor, name)() for name in _COMPRESSED[tensor.layout]), tensor.values()]
    flatten = getattr(tensor, "__tensor_flatten__", None)
    inner = [] if flatten is None else [getattr(tensor, name) for name in flatten()[0]]
    return [part for one in inner if isinstance(one, torch.Tensor) for part in parts(one)]


def is_leaf_cast(info: Info, args: tuple[Any, ...]) -> bool:
    """A cast of a parameter: autocast caches its result, so whether it runs depends on earlier calls."""
    return info.cast and args[0].requires_grad and args[0].is_leaf


def tensors(tree: Any) -> Iterator[torch.Tensor]:
    """All tensors in arguments or results: operators nest them in lists and tuples only."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from tensors(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from tensors(item)


def ranks(args: Any) -> str:
    """The numbers of dimensions of the tensors among an operator's arguments, as text: ``"122"``."""
    return "".join(str(tensor.dim()) for tensor in tensors(args))


def written_tensors(info: Info, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> list[torch.Tensor]:
    """The tensors among the arguments that the operator writes, in schema order."""
    found: list[torch.Tensor] = []
    for position, name in info.written:
        if position < len(args):
            found.extend(tensors(args[position]))
        elif kwargs and name in kwargs:
            found.extend(tensors(kwargs[name]))
    return found
