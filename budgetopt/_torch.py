"""Every private torch interface that the executor needs, in one place and checked at import.

But for :mod:`budgetopt._switches`, nothing else in the package names an underscore attribute of torch. Each
function says what it is for and, where a public way exists, what the slower way would be.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _python_dispatch as _dispatch_module
from torch.utils._python_dispatch import TorchDispatchMode as _Mode
from torch.utils._python_dispatch import _disable_current_modes

__all__ = [
    "CPU",
    "MODELLED",
    "FakeTensor",
    "TorchDispatchMode",
    "alias",
    "alias_below",
    "bare",
    "calm",
    "copy_storage",
    "counter",
    "eager",
    "functorch_active",
    "hooks_enabled",
    "is_compiled",
    "is_compiled_function",
    "is_zero",
    "look_modelled",
    "mark",
    "modelling",
    "neg_view",
    "outer_hooks",
    "pop_hooks",
    "profiler_running",
    "push_hooks",
    "replaying",
    "storage_uses",
    "tracing",
    "unseen",
    "without_bytes",
]

_C: Any = torch._C
_python_dispatch: Any = _dispatch_module
_NEEDED = (
    "_current_graph_task_id",
    "_AutoDispatchBelowAutograd",
    "_DisableAutocast",
    "_ExcludeDispatchKeyGuard",
    "_are_functorch_transforms_active",
    "_dispatch_key_parse",
    "_dispatch_tls_is_dispatch_key_excluded",
    "_dispatch_tls_is_dispatch_key_included",
    "_dispatch_tls_set_dispatch_key_excluded",
    "_is_tracing",
    "_len_torch_dispatch_stack",
    "_len_torch_function_stack",
    "_storage_Use_Count",
    "_vmapmode_decrement_nesting",
    "_vmapmode_increment_nesting",
)
_missing = [name for name in _NEEDED if not hasattr(_C, name)]
if _missing:
    raise ImportError(f"budgetopt needs torch interfaces that torch {torch.__version__} lacks: {_missing}")


def required(name: str) -> Any:
    """A private function of torch.

    Raises:
        ImportError: this torch lacks it.
    """
    if not hasattr(_C, name):
        raise ImportError(f"budgetopt needs a torch interface that torch {torch.__version__} lacks: {name}")
    return getattr(_C, name)


TorchDispatchMode: Any = _Mode
"""Untyped in torch."""


def bare(mode: Any) -> Any:
    """Class decorator for dispatch modes: torch's wrapper around ``__torch_dispatch__`` comes off.

    It keeps dynamo from tracing the method, at the price of two Python calls per operator and of importing
    dynamo; telling dynamo's frame evaluator to leave the method's code and its callees alone costs nothing.
    Where that can't be told, the wrapper stays.
    """
    raw = getattr(mode.__torch_dispatch__, "__wrapped__", None)
    if raw is not None and _skip(raw):
        mode.__torch_dispatch__ = raw
    return mode


def _skip(function: Any) -> bool:
    """Have dynamo's frame evaluator leave a function and all that it calls alone; whether that can be told."""
    frames: Any = getattr(_C._dynamo, "eval_frame", None)
    if not hasattr(frames, "set_code_exec_strategy"):
        return False
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    return True


Function = TypeVar("Function", bound=Callable[..., Any])
Result = TypeVar("Result")


def eager(function: Function) -> Function:
    """Decorator for what torch.compile must not look into: it breaks the graph there and runs it as it is.

    ``torch.compiler.disable`` does the same, but imports dynamo, which takes seconds.
    """
    marked: Any = function
    _skip(function)
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = "budgetopt plans this layer: its operators are recorded one by one"
    return function


_is_excluded: Callable[[Any], bool] = _C._dispatch_tls_is_dispatch_key_excluded
_exclude: Callable[[Any, bool], None] = _C._dispatch_tls_set_dispatch_key_excluded
_PYTHON = _C.DispatchKey.Python
_ONLY_PYTHON = _C.DispatchKeySet(_PYTHON)
_VMAP = _C._dispatch_key_parse("VmapMode")
_IN_PLACE = _C.DispatchKey.ADInplaceOrView
CPU: Any = _C._autograd.DeviceType.CPU

functorch_active: Callable[[], bool] = _C._are_functorch_transforms_active
tracing: Callable[[], bool] = _C._is_tracing
"""Whether ``torch.jit.trace`` is watching."""
hooks_enabled: Callable[[], bool] = _C._autograd._saved_tensors_hooks_is_enabled
_set_versions: Callable[[Any, Any], None] = _C._autograd._unsafe_set_version_counter


class Modelled(threading.local):
    """The mode under which this thread models a step; None while tensors have bytes."""

    mode: Any = None


MODELLED = Modelled()


@contextmanager
def modelling() -> Iterator[None]:
    """What :func:`without_bytes` makes inside belongs to one of torch's FakeTensorModes."""
    before, MODELLED.mode = MODELLED.mode, FakeTensorMode(allow_non_fake_inputs=True)
    try:
        yield
    finally:
        MODELLED.mode = before


def without_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the CPU that looks like `tensor`, which may be on the meta device, and takes no memory."""
    mode = MODELLED.mode
    if tensor.device.type != "meta":
        made: torch.Tensor = mode.from_tensor(tensor)
        return made
    made = FakeTensor(mode, tensor.detach(), torch.device("cpu"))
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made.requires_grad_(tensor.requires_grad)


def look_modelled(storage: torch.UntypedStorage, dtype: torch.dtype, geometry: tuple[Any, Any, Any]) -> torch.Tensor:
    """A tensor without bytes of (shape, stride, offset) over a storage without bytes."""
    shape, stride, offset = geometry
    with _disable_current_modes():
        seen = torch.empty(0, dtype=dtype, device="meta").set_(storage, offset, shape, stride)
    made: torch.Tensor = FakeTensor(MODELLED.mode, seen, torch.device("cpu"))
    return made


def _alias_modelled(tensor: torch.Tensor) -> torch.Tensor:
    with _disable_current_modes(), _C._AutoDispatchBelowAutograd():
        made: torch.Tensor = torch.ops.aten.detach.default(tensor)
    _set_versions((made,), (tensor._version,))
    return made


class _Uncounted:
    """In the place of a version counter: one of a tensor without bytes can't be had without the tensor."""

    def __init__(self, version: int) -> None:
        self._version = version


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """A detached alias of `tensor` that shares its storage and version counter; no mode sees it made.

    For use outside ``__torch_dispatch__``; inside it, :func:`alias_below`.
    """
    if type(tensor) is FakeTensor:
        return _alias_modelled(tensor)
    python = _is_excluded(_PYTHON)
    try:  # before the first change: Ctrl-C may come as soon as it is made
        _exclude(_PYTHON, True)
        return tensor.detach()
    finally:
        _exclude(_PYTHON, python)


def alias_below(tensor: torch.Tensor) -> torch.Tensor:
    """:func:`alias` for use inside ``__torch_dispatch__``.

    There the key that makes a detached tensor share its version counter is excluded: a plain ``detach()``
    would get a counter of its own, and later writes would go unseen.
    """
    in_place = _is_excluded(_IN_PLACE)
    try:
        _exclude(_IN_PLACE, False)
        return alias(tensor)
    finally:
        _exclude(_IN_PLACE, in_place)


def counter(tensor: torch.Tensor) -> Any:
    """The version counter of `tensor` without its bytes: an alias whose data was let go."""
    if type(tensor) is FakeTensor:
        return _Uncounted(tensor._version)
    in_place = _is_excluded(_IN_PLACE)
    try:
        _exclude(_IN_PLACE, False)
        held = alias(tensor)
        with unseen():
            held.data = torch.empty(0, device=held.device)
        return held
    finally:
        _exclude(_IN_PLACE, in_place)


def unseen() -> AbstractContextManager[None]:
    """Operators of our own that no dispatch mode on the stack shall see. Made by torch: Ctrl-C finds no gap in it."""
    guard: AbstractContextManager[None] = _C._ExcludeDispatchKeyGuard(_ONLY_PYTHON)
    return guard


def storage_uses(storage: torch.UntypedStorage) -> int:
    """How many tensors refer to `storage` now (its own Python object, which counts too, left out)."""
    return int(_C._storage_Use_Count(storage._cdata)) - 1


def copy_storage(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """A new storage with the same bytes."""
    copy: torch.UntypedStorage = storage.clone()  # type: ignore[no-untyped-call]
    return copy


def outer_hooks() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """The saved-tensor hooks that are in force around the caller, if any."""
    pair = _C._autograd._top_saved_tensors_default_hooks(True)
    return pair if pair is None else (pair[0], pair[1])


def take_off(pack: Callable[..., Any]) -> None:
    """Take off the saved-tensor hooks in force, if they are these."""
    pair = _C._autograd._top_saved_tensors_default_hooks(True)
    if pair is not None and pair[0] is pack:
        pop_hooks()


_FLAGS = [
    name
    for name in (
        "_is_in_torch_dispatch_mode",
        "_is_in_non_infra_torch_dispatch_mode",
        "_is_in_any_mode_without_ignore_compile_internals",
    )
    if hasattr(_python_dispatch, name)
]


def modes() -> tuple[int, list[bool]]:
    """How many dispatch modes are on, and what torch notes of them."""
    return int(_C._len_torch_dispatch_stack()), [getattr(_python_dispatch, name) for name in _FLAGS]


def back_to(before: tuple[int, list[bool]]) -> None:
    """Take off the modes that came after :func:`modes` said so, and note what torch noted then."""
    now = modes()
    if now == before:
        return
    for _ in range(now[0] - before[0]):
        _python_dispatch._pop_mode()
    for name, flag in zip(_FLAGS, before[1], strict=True):
        setattr(_python_dispatch, name, flag)
    tell = getattr(_python_dispatch, "set_is_in_mode_without_ignore_compile_internals", None)
    if tell is not None:
        tell(before[1][-1])


def push_hooks(pack: Callable[..., Any], unpack: Callable[..., Any]) -> None:
    """Put saved-tensor hooks in force, beyond what a with statement can nest."""
    _C._autograd._push_saved_tensors_default_hooks(pack, unpack)


def pop_hooks() -> None:
    """Take off what :func:`push_hooks` put on."""
    _C._autograd._pop_saved_tensors_default_hooks()


def profiler_running() -> bool:
    """Whether a profiler is collecting: starting another would lose what the outer one has."""
    return bool(_C._autograd._profiler_enabled())


def user_profiler_running() -> bool:
    """Whether one is collecting that was started through torch's own classes, as a user does."""
    return profiler_running() and bool(torch.autograd.profiler._is_profiler_enabled)


def attach(tensor: torch.Tensor, mark: object) -> None:
    """Let an object live as long as the node of autograd's graph that made `tensor`."""
    node: Any = tensor.grad_fn
    node.metadata[__name__] = mark


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether other processes hold other parts of it."""
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def in_backward() -> bool:
    """Whether this thread is inside of a backward pass."""
    return bool(_C._current_graph_task_id() != -1)


class MemoryProfiler:
    """The CPU allocator's events and our own marks, and none of the operators' in between.

    ``torch.profiler.profile`` notes each of them, which takes tens of megabytes of the very memory that is measured.
    """

    def __init__(self) -> None:
        kind, options = _C._profiler.ProfilerState.KINETO, _C._profiler._ExperimentalConfig()
        self._config = _C._profiler.ProfilerConfig(kind, False, True, False, False, False, options)
        self._activities = {_C._profiler.ProfilerActivity.CPU}
        self._events: Any = []

    def start(self) -> None:
        """From here on."""
        _C._autograd._prepare_profiler(self._config, self._activities)
        _C._autograd._enable_profiler(self._config, self._activities, {_C._profiler.RecordScope.USER_SCOPE})

    def stop(self) -> None:
        """To here."""
        self._events = _C._autograd._disable_profiler().events()

    def events(self) -> Any:
        """What happened in between: objects with name(), start_ns(), end_ns(), nbytes(), device_type()."""
        return self._events


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether ``torch.compile(module)`` made `module`, or ``module.compile()`` was called on it."""
    frames: Any = sys.modules.get("torch._dynamo.eval_frame")  # loading dynamo takes a second, so never for this
    wrapped = frames is not None and isinstance(module, frames.OptimizedModule)
    return wrapped or getattr(module, "_compiled_call_impl", None) is not None


def is_compiled_function(something: Any) -> bool:
    """Whether ``torch.compile`` made this function."""
    return callable(something) and hasattr(something, "_torchdynamo_orig_callable")


@contextmanager
def mark(name: str) -> Iterator[None]:
    """A named span in the event list of :class:`MemoryProfiler`; no operator, as ``record_function`` would be."""
    span = _C._autograd._record_function_with_args_enter(name)
    try:
        yield
    finally:
        _C._autograd._record_function_with_args_exit(span)


def is_zero(tensor: torch.Tensor) -> bool:
    """A tensor that stands for zeros and has no bytes."""
    return bool(tensor._is_zerotensor())


def neg_view(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` with its negative bit flipped, sharing storage."""
    return torch._neg_view(tensor)


def calm() -> bool:
    """Whether nothing is on that would see or change what we run: no dispatch or function mode, no functorch."""
    return not (_C._len_torch_dispatch_stack() or _C._len_torch_function_stack() or functorch_active())


@contextmanager
def _no_vmap_mode() -> Iterator[None]:
    """Batched gradients run unpack inside vmap's mode, where random operators refuse to run."""
    depth = 0
    # The nesting level is only told by the call that lowers it: raise it once to learn it.
    level = _C._vmapmode_increment_nesting()
    while level > 0:
        level = _C._vmapmode_decrement_nesting()
        depth += 1
    try:
        yield
    finally:
        for _ in range(depth - 1):
            _C._vmapmode_increment_nesting()


def replaying(function: Callable[..., Result], *arguments: Any) -> Result:
    """What a function returns, its operators run as the dispatcher ran them below autograd in forward.

    Whatever is on around backward: no graph is built, autocast, dispatch and function modes and functorch are off.
    Grad mode and default dtype are set per operator by the caller, since kernels read them. Torch's own contexts are
    entered right here: at the door of one written in Python, Ctrl-C would leave the thread below autograd.
    """
    with _C._DisableAutocast(), _C._AutoDispatchBelowAutograd():
        batched = _C._dispatch_tls_is_dispatch_key_included(_VMAP)
        if calm() and not batched:
            return function(*arguments)
        with ExitStack() as stack:
            if batched:
                stack.enter_context(_no_vmap_mode())
            if functorch_active():
                stack.enter_context(temporarily_clear_interpreter_stack())
            if _C._len_torch_dispatch_stack() > 0:
                stack.enter_context(_disable_current_modes())
            stack.enter_context(_C.DisableTorchFunction())
            return function(*arguments)
