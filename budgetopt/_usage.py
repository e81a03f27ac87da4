"""What uses the memory of a step at the moment of its peak, by kind and by layer. No torch.

What is there then is asked of the referee, block by block, so the parts add up to its peak, byte for byte.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from budgetopt._errors import BudgetOptError
from budgetopt._floor import Place
from budgetopt._plan import Plan
from budgetopt._problem import describe_event, to_problem
from budgetopt._report import add_columns, new_table, text_of
from budgetopt._schema import Profile, Strict
from budgetopt._units import show_bytes
from budgetopt.solvers.memory import simulate
from budgetopt.solvers.problem import Choice, Problem
from budgetopt.solvers.trace import Name, alive

_SHOWN = 0.005
"""Layers with a smaller share of the activations have no row of their own in the table."""

KINDS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer_state": "optimizer state",
    "optimizer_step": "optimizer's step",
    "buffers": "buffers",
    "sample": "sample",
    "activations": "activations",
    "replays": "made again by replays",
    "temporaries": "temporaries",
}
"""The parts of a :class:`Usage`, and what the table calls them."""


class LayerUsage(Strict):
    """Activation bytes of one layer at the peak.

    Attributes:
        bytes: with those of all layers inside. own_bytes: without those of the `layers` that are listed.
    """

    path: str
    kind: str
    bytes: int
    own_bytes: int
    layers: tuple[LayerUsage, ...] = ()


class Usage(Strict):
    """Bytes at the moment of a step's peak; the parts add up to `peak_bytes` exactly.

    Attributes:
        peak_at: the operator that runs then. gradients: of parameters, those from before the step included.
            optimizer_step: what the optimizer's step takes on top of its state, if the peak is there.
        activations: what the forward pass made (in fp16, as it is stored), `model` says by which layer.
            replays: what a plan made again. temporaries: gradients on their way back, work space of the operator.
        modelled: the device on which the step was modelled: operators' work space is not known then.
    """

    peak_bytes: int
    peak_at: str
    parameters: int = 0
    gradients: int = 0
    optimizer_state: int = 0
    optimizer_step: int = 0
    buffers: int = 0
    sample: int = 0
    activations: int = 0
    replays: int = 0
    temporaries: int = 0
    model: LayerUsage
    modelled: str = ""

    def __str__(self) -> str:
        return _table(self)


def usage(profile: Profile | Plan, *, depth: int | None = 3) -> Usage:
    """What a step's memory consists of at its peak: of the plain step, or of the planned one for a plan. Nothing runs.

    Args:
        depth: how far down layers are listed, the model itself being 0; None for all. What is deeper counts for the
            layer that it is in.

    Raises:
        BudgetOptError: the profile is none, or the depth is no number of 0 or more.
    """
    if depth is not None and (isinstance(depth, bool) or not isinstance(depth, int) or depth < 0):
        raise BudgetOptError(f"depth={depth!r}: give 0 for the model as a whole, a number of levels, or None for all")
    if isinstance(profile, Plan):
        step = profile.profile
        choices, segments = profile.choices(step), profile.segments(step)
    elif isinstance(profile, Profile):
        step, choices, segments = profile, [Choice.KEEP] * len(profile.values), ()
    else:
        raise BudgetOptError(f"profile={profile!r} is no Profile: make one with budgetopt.profile(model, sample)")
    problem = to_problem(step, 0)
    found = simulate(problem, choices, segments)
    sums = _Sums(step, problem, found.peak_event)
    for name, size in alive(problem, choices, found.peak_event, segments).items():
        sums.add(name, size)
    return Usage(
        peak_bytes=found.peak,
        peak_at=describe_event(step, found.peak_event),
        model=_tree(step, sums.layers, depth),
        modelled=step.modelled,
        **sums.kinds,
    )


class _Sums:
    """Bytes by kind, and of activations by layer.

    Args:
        event: the moment that is looked at.
    """

    def __init__(self, profile: Profile, problem: Problem, event: int) -> None:
        self._profile, self._problem, self._place = profile, problem, Place(profile, problem)
        self._space = "optimizer_step" if event == len(profile.events) else "temporaries"
        fixed = profile.fixed
        self.layers: dict[str, int] = {}
        self.kinds = {kind: 0 for kind in KINDS} | {
            "parameters": fixed.parameter,
            "gradients": fixed.gradient,
            "optimizer_state": fixed.optimizer,
            "buffers": fixed.buffer,
            "sample": fixed.sample,
        }

    def add(self, name: Name, size: int) -> None:
        """Count a block that is there at the moment."""
        kind = self._kind(name)
        self.kinds[kind] += size
        if kind == "activations":
            layer = self._profile.operators[self._maker(name)].module
            self.layers[layer] = self.layers.get(layer, 0) + size

    def _kind(self, name: Name) -> str:
        """By the word that the floor of a budget has for the block."""
        what = name[0]
        if what in ("half", "late", "state"):  # the last: of a random generator, for a replay
            return "activations"
        if what in ("made", "again", "decoded"):
            return "replays"
        if what != "storage":
            return self._space
        word = self._place.word(name)
        if word == "gradients of parameters":
            return "gradients"
        return "temporaries" if word == "gradients on their way back" else "activations"

    def _maker(self, name: Name) -> int:
        """The operator that makes a block, or whose generator's state it is."""
        what, number = name
        if what == "state":
            return number
        maker = self._place.maker(number) if what == "storage" else self._problem.values[number].operator
        assert maker is not None  # storages of a step are born in one of its operators
        return maker


def _tree(profile: Profile, own: Mapping[str, int], depth: int | None) -> LayerUsage:
    """Layers with activations, as they lie in each other; parents come before their children in the fingerprint."""
    kinds: dict[str, str] = dict(profile.fingerprint["modules"])
    shown: dict[str, int] = {}
    for path, size in own.items():
        at = path if depth is None else ".".join(path.split(".")[:depth])
        shown[at] = shown.get(at, 0) + size
    inside: dict[str, list[str]] = {}
    for path in dict.fromkeys(above for one in shown for above in _chain(one)):
        if path:
            inside.setdefault(path.rpartition(".")[0], []).append(path)
    order = {path: at for at, path in enumerate(kinds)}

    def layer(path: str) -> LayerUsage:
        below = tuple(layer(child) for child in sorted(inside.get(path, ()), key=lambda p: order.get(p, 0)))
        mine = shown.get(path, 0)
        size = mine + sum(one.bytes for one in below)
        return LayerUsage(path=path, kind=kinds.get(path, ""), bytes=size, own_bytes=mine, layers=below)

    return layer("")


def _chain(path: str) -> Iterator[str]:
    """A path and all above it: ``a.b``, ``a`` and the model's own."""
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""


def _table(usage: Usage) -> str:
    table = new_table("memory at the peak of the step")
    rows = []
    for kind, word in KINDS.items():
        size = getattr(usage, kind)
        if size:
            rows.append((word, show_bytes(size), f"{size / usage.peak_bytes:.1%}"))
        if kind == "activations":
            for depth, layer in _shown(usage.model, 1, _SHOWN * size):
                label = "  " * depth + (f"{layer.path} ({layer.kind})" if layer.kind else layer.path)
                rows.append((label, show_bytes(layer.bytes), f"{layer.bytes / usage.peak_bytes:.1%}"))
    add_columns(table, ("what", "bytes", "share"), rows, ())
    foot = (
        f"{show_bytes(usage.peak_bytes)} at {usage.peak_at}\n"
        "activations are listed by the layer that made them, with all inside it; small ones have no row"
    )
    if usage.modelled:
        foot += f"\nmodelled on {usage.modelled}, not run: operators' own memory is not known"
    return text_of(table) + foot


def _shown(layer: LayerUsage, depth: int, least: float) -> Iterator[tuple[int, LayerUsage]]:
    for one in layer.layers:
        if one.bytes >= max(1, least):
            yield depth, one
            yield from _shown(one, depth + 1, least)
