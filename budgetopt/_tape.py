"""Write down one training step as events: every operator, birth, death and handle, as the plain step has them.

The step itself runs under a drop-all policy (it must fit where the plain step does not), so whatever
our own records hold is left out here: a storage counts as dead when only they refer to it.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from budgetopt import _device, _torch
from budgetopt._codec import WIDE
from budgetopt._draft import Draft, Storage, Watch
from budgetopt._engine import Edge
from budgetopt._operators import EMPTY, PLAIN, Info, describe, is_plain, ranks, tensors, written_tensors
from budgetopt._record import SNAPSHOT_LIMIT
from budgetopt._schema import OperatorRecord, ValueRecord
from budgetopt.solvers.problem import OUTSIDE, Kind

RNG_BYTES = {"cpu": 5056, "cuda": 16}
"""Bytes of one generator state."""


Price = Callable[[Any, Info, Any, Any, Any], int]
"""Nanoseconds of a call: of the function, what is known of it, its arguments by position and by name, its results."""


@_torch.bare
class Tape(_torch.TorchDispatchMode):  # type: ignore[misc]
    """The event log of one step; entered at the root, under the regions' recorders.

    Attributes:
        mark: notes the time and memory of a call, by name; without it a clock does, or `price` says.
        sizes: bytes per storage. drafts: the operators. values, handles, events: as in a profile.
        leaf_gradients: storages of what leaves (parameters, mostly) receive, before and after it is summed.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """As the recorder's: compiled parts stay compiled."""
        return True

    def __init__(
        self,
        device: torch.device,
        resident: set[int],
        mark: Callable[[str], Any] | None = None,
        price: Price | None = None,
    ) -> None:
        super().__init__()
        self.device = device
        self.resident = resident
        self.mark = mark
        self.price = price
        self.sizes: list[int] = []
        self.drafts: list[Draft] = []
        self.values: list[dict[str, Any]] = []
        self.handles: list[int] = []
        self.events: list[tuple[int, int]] = []
        self.dtypes: dict[int, torch.dtype] = {}
        self.region = OUTSIDE
        self.module = ""
        self.backward = False
        self.leaves: set[int] = set()
        self.leaf_gradients: set[int] = set()
        self.closed = False
        self._index: dict[int, int] = {}
        self._storages: list[Storage] = []
        self._held: set[int] = set()
        self._ours: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._watches: dict[tuple[int, int], Watch] = {}
        self._waiting: dict[Edge, list[int]] = {}
        self._dropped: set[int] = set()

    # -- operators -------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func` and write it down."""
        info = describe(func)
        kwargs = kwargs or {}
        if self.closed:
            return info.call(*args, **kwargs)
        self._poll()
        draft = Draft(info.name, self.region, self.module, self.backward)
        draft.ranks = ranks(args)
        self._note_arguments(draft, info, args, kwargs)
        name = f"@{len(self.drafts)}"
        if self.price is not None:
            out = info.call(*args, **kwargs)
            draft.time_ns = self.price(func, info, args, kwargs, out)
        elif self.mark is None:
            _device.backend(self.device).synchronise(self.device)
            start = time.perf_counter_ns()
            out = info.call(*args, **kwargs)
            _device.backend(self.device).synchronise(self.device)
            draft.time_ns = time.perf_counter_ns() - start
        else:
            with self.mark(name):
                out = info.call(*args, **kwargs)
        self._note_results(draft, info, args, kwargs, out)
        if info.skip and not draft.births:
            return out
        if info.skip:
            draft.time_ns = 0
        self.events.append((Kind.RUN, len(self.drafts)))
        self.drafts.append(draft)
        return out

    def _note_arguments(self, draft: Draft, info: Info, args: Any, kwargs: Any) -> None:
        statistics = {id(args[i]) for i in info.statistics() if args[i] is not None} if info.scratch(args) else ()
        for tensor in tensors([args, kwargs]):
            if type(tensor) not in PLAIN or not is_plain(tensor) or id(tensor) in statistics:
                continue
            storage = tensor.untyped_storage()
            index = self._find(storage)
            if index == OUTSIDE and not self._is_fixed(storage):
                index = self._born(storage, draft)  # made where no dispatcher looks: by C++ or from numpy
            if self.region != OUTSIDE and not info.skip:
                self._note_read(draft, tensor, index)

    def _note_read(self, draft: Draft, tensor: torch.Tensor, index: int) -> None:
        value = self._storages[index].value if index != OUTSIDE else OUTSIDE
        if index != OUTSIDE and value == OUTSIDE:
            value = self._new_value(index, OUTSIDE, OUTSIDE, tensor.dtype)
        if value != OUTSIDE:
            draft.reads.append(value)
        if value == OUTSIDE or self.values[value]["region"] != self.region:
            key = (id(tensor.untyped_storage()), tensor._version)
            if key not in self._watches:
                self._watches[key] = Watch(tensor)
            draft.watched.append(self._watches[key])

    def _note_results(self, draft: Draft, info: Info, args: Any, kwargs: Any, out: Any) -> None:
        written = written_tensors(info, args, kwargs) if info.written else []
        for slot, tensor in enumerate([*written, *tensors(out)]):
            if type(tensor) not in PLAIN or not is_plain(tensor):
                continue
            storage = tensor.untyped_storage()
            index, new = self._find(storage), False
            if index == OUTSIDE:
                if self._is_fixed(storage) or storage.nbytes() == 0:
                    continue
                index, new = self._born(storage, draft), True
            if (new or slot < len(written)) and not info.skip:
                previous = self._storages[index].value
                if previous != OUTSIDE:
                    self.values[previous]["last"] = False
                value = self._new_value(index, self.region, len(self.drafts), tensor.dtype, previous)
                draft.slots.append((slot, value))

    def _new_value(self, storage: int, region: int, operator: int, dtype: torch.dtype, previous: int = OUTSIDE) -> int:
        number = len(self.values)
        self.values.append(
            {"storage": storage, "region": region, "operator": operator, "previous": previous, "last": True}
        )
        self.dtypes[number] = dtype
        self._storages[storage].value = number
        return number

    # -- storages --------------------------------------------------------------------------------

    def _find(self, storage: torch.UntypedStorage) -> int:
        index = self._index.get(id(storage), OUTSIDE)
        if index != OUTSIDE:
            reference = self._storages[index].reference
            if reference is None or reference() is not storage:
                return OUTSIDE
        return index

    def _is_fixed(self, storage: torch.UntypedStorage) -> bool:
        """Whether it is no storage of the plain step's own: resident, or made again by us for autograd."""
        ours = self._ours.get(id(storage))
        return id(storage) in self.resident or (ours is not None and ours() is storage)

    def _born(self, storage: torch.UntypedStorage, draft: Draft) -> int:
        index = len(self.sizes)
        self.sizes.append(_device.rounded(self.device, storage.nbytes()))
        entry = Storage()
        entry.reference = weakref.ref(storage, lambda _: self._died(index))
        self._storages.append(entry)
        self._index[id(storage)] = index
        draft.births.append(index)
        return index

    def _died(self, index: int) -> None:
        entry = self._storages[index]
        self._held.discard(index)
        if entry.alive and not self.closed:
            entry.alive = False
            entry.died_at = len(self.events)
            self.events.append((Kind.DIE, index))

    def _poll(self) -> None:
        """Storages that only our own aliases keep alive are dead to the user."""
        for index in tuple(self._held):
            entry = self._storages[index]
            storage = entry.reference() if entry.reference is not None else None
            # Asked before every operator, of what may be a thousand storages: most have other users as well.
            if storage is None or _torch.storage_uses(storage) > len(entry.aliases):
                continue
            entry.aliases = [a for a in entry.aliases if a() is not None]
            if _torch.storage_uses(storage) == len({id(a()) for a in entry.aliases}):
                self._died(index)

    # -- what recorders and regions tell ---------------------------------------------------------

    def entered(self, region: int) -> None:
        """A region's forward begins."""
        self._poll()
        self.region = region
        self.events.append((Kind.ENTER, region))

    def left(self) -> None:
        """It ends."""
        self._poll()
        self.events.append((Kind.EXIT, self.region))
        self.region = OUTSIDE

    def recorded(self, why_not: str, rng: bool) -> None:
        """The last operator was numbered by its recorder; `why_not` says why it can't be replayed."""
        draft = self.drafts[-1]
        draft.blocked = why_not
        draft.rng = RNG_BYTES.get(self.device.type, 0) if rng else 0

    def holding(self, storage: torch.UntypedStorage, alias: torch.Tensor) -> None:
        """We hold `storage` through `alias`."""
        index = self._find(storage)
        if index != OUTSIDE and self._storages[index].alive:
            self._storages[index].aliases.append(weakref.ref(alias))
            self._held.add(index)

    def crossing(self, storage: torch.UntypedStorage) -> bool:
        """Whether another region than the one that runs made what `storage` holds now."""
        index = self._find(storage)
        value = self._storages[index].value if index != OUTSIDE else OUTSIDE
        return value != OUTSIDE and self.values[value]["region"] not in (OUTSIDE, self.region)

    def packed(self, storage: torch.UntypedStorage) -> int:
        """Autograd saved a value of a region."""
        self._poll()
        index = self._find(storage)
        number = len(self.handles)
        value = self._storages[index].value
        self.handles.append(value)
        self._unwritten(self.values[value]["operator"])
        self.events.append((Kind.PACK, number))
        return number

    def _unwritten(self, operator: int) -> None:
        """Autograd saved what `operator` made: an ``empty`` that nobody was seen to fill can't be made again."""
        if operator != OUTSIDE and self.drafts[operator].name.startswith(EMPTY):
            self.drafts[operator].blocked = "what it made is filled where the dispatcher does not see it"

    def unpacked(self, handle: int, storage: torch.UntypedStorage) -> None:
        """The backward pass asked for it and got `storage`."""
        if self._find(storage) == OUTSIDE:
            self._ours[id(storage)] = weakref.ref(storage)
        if not self.closed:
            self.events.append((Kind.UNPACK, handle))

    def died(self, handle: int) -> None:
        """Autograd let go of it."""
        if not self.closed:
            self.events.append((Kind.HANDLE_DIE, handle))

    def received(self, node: int, gradients: Any) -> None:
        """A node of the graph is about to run: gradients that nobody saw being made are sums of others."""
        self._poll()
        draft = Draft("autograd.sum", OUTSIDE, "", True)
        for slot, storage in _storages_of(gradients):
            terms = self._waiting.pop((node, slot), [])
            if node in self.leaves:
                self.leaf_gradients.update(terms, [self._find(storage)])
            if self._find(storage) == OUTSIDE and not self._is_fixed(storage) and not self._in_place(storage, terms):
                # Its two terms were there as well while it was made.
                draft.workspace += 2 * self.sizes[self._born(storage, draft)]
        if draft.births:
            self.events.append((Kind.RUN, len(self.drafts)))
            self.drafts.append(draft)

    def delivered(self, edges: Sequence[Edge], gradients: Any) -> None:
        """A node gave them; each waits for the node that its edge leads to."""
        for slot, storage in _storages_of(gradients):
            index = self._find(storage)
            if index != OUTSIDE and slot < len(edges):
                self._waiting.setdefault(edges[slot], []).append(index)

    def _in_place(self, storage: torch.UntypedStorage, terms: list[int]) -> bool:
        """The plain step writes a sum into the first of its terms that nobody else holds: let that one live on.

        It is the first that died, for here the engine held it alone as well.
        """
        size = _device.rounded(self.device, storage.nbytes())
        gone = [i for i in terms if not self._storages[i].alive and self.sizes[i] == size]
        if not gone:
            return False
        index = min(gone, key=lambda i: self._storages[i].died_at)
        entry = self._storages[index]
        self._dropped.add(entry.died_at)
        entry.alive = True
        entry.reference = weakref.ref(storage, lambda _: self._died(index))
        self._index[id(storage)] = index
        return True

    def forward_ended(self) -> None:
        """The loss is there; what follows is the backward pass."""
        self._poll()
        self.backward = True
        self.events.append((Kind.FORWARD_END, 0))

    def close(self) -> None:
        """Nothing that happens from here on belongs to the step."""
        self._poll()
        self.events.append((Kind.BACKWARD_END, 0))
        self.events = [event for i, event in enumerate(self.events) if i not in self._dropped]
        self.closed = True

    def release(self) -> None:
        """Cut the links that weak references' callbacks close into a circle."""
        self._storages.clear()
        self._watches.clear()
        self.drafts.clear()

    # -- results ---------------------------------------------------------------------------------

    def operators(self, spans: dict[str, int]) -> list[OperatorRecord]:
        """The operators, with their workspace from the meter's spans (bytes above the level at the start)."""
        return [self._operator(i, draft, spans.get(f"@{i}", 0)) for i, draft in enumerate(self.drafts)]

    def _operator(self, index: int, draft: Draft, span: int) -> OperatorRecord:
        blocked = draft.blocked
        moved = [watch for watch in draft.watched if watch.moved()]
        if any(watch.nbytes > SNAPSHOT_LIMIT for watch in moved):
            blocked = "it reads a tensor from outside that the step writes to"
        elif moved and not blocked:
            draft.snapshot = True
        return OperatorRecord(
            name=draft.name,
            ranks=draft.ranks,
            module=draft.module,
            region=draft.region,
            backward=draft.backward,
            time_ns=draft.time_ns,
            workspace=draft.workspace or max(0, span - sum(self.sizes[s] for s in draft.births)),
            rng_bytes=draft.rng,
            births=tuple(draft.births),
            reads=tuple(draft.reads),
            slots=tuple(draft.slots),
            blocked=blocked,
            snapshot=draft.snapshot,
        )

    def value_records(self, codec_ns: Callable[[int], int]) -> list[ValueRecord]:
        """The values; fp16 is offered where the type is wider than 16 bits."""
        records = []
        for number, value in enumerate(self.values):
            size = self.sizes[value["storage"]]
            width = self.dtypes[number].itemsize
            half = size * 2 // width + width if self.dtypes[number] in WIDE else 0  # and the scale, one number
            records.append(ValueRecord(**value, half_bytes=half, codec_ns=codec_ns(size) if half else 0))
        return records


def _storages_of(gradients: Any) -> Iterator[tuple[int, torch.UntypedStorage]]:
    """The storages of those that are plain tensors and have any bytes, with their positions."""
    for slot, tensor in enumerate(gradients):
        if type(tensor) in PLAIN and is_plain(tensor) and tensor.untyped_storage().nbytes():
            yield slot, tensor.untyped_storage()
