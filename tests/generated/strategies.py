"""How hypothesis draws descriptions: small ones first, so that failures shrink to a line."""

from __future__ import annotations

from hypothesis import strategies as st

from tests.generated.functions import KINDS
from tests.generated.grammar import (
    JOINS,
    Autocast,
    Branch,
    Checkpointed,
    Fn,
    Frozen,
    Hooked,
    Layer,
    Model,
    NoGrad,
    Part,
    Repeat,
    Residual,
    Seq,
)
from tests.generated.layers import LAYERS
from tests.generated.steps import STEPS


def words(behind: bool) -> st.SearchStrategy[Part]:
    """Functions and layers, each kind as likely as any; with bytes written `behind` the dispatcher's back if asked."""
    functions = [
        st.sampled_from([Fn(name) for name in table]) for kind, table in KINDS.items() if behind or kind != "behind"
    ]
    layers = [st.sampled_from([Layer(name) for name in table]) for table in LAYERS.values()]
    return st.one_of(*layers, *functions)


def _larger(inner: st.SearchStrategy[Part]) -> st.SearchStrategy[Part]:
    return st.one_of(
        st.lists(inner, min_size=2, max_size=4).map(lambda found: Seq(*found)),
        st.builds(Residual, inner, st.booleans()),
        st.builds(Branch, inner, inner, st.sampled_from(list(JOINS))),
        st.builds(Repeat, inner),
        st.builds(Frozen, inner),
        st.builds(Autocast, inner, st.booleans()),
        st.builds(Checkpointed, inner, st.booleans()),
        st.builds(Hooked, inner),
        st.builds(NoGrad, inner),
    )


def models(behind: bool = False, scale: int = 1) -> st.SearchStrategy[Model]:
    """Models of up to a dozen layers or so; batch, length and width each `scale` times as large."""
    part = st.recursive(words(behind), _larger, max_leaves=6)
    return st.builds(
        Model,
        body=st.lists(part, min_size=1, max_size=4).map(lambda found: Seq(*found)),
        batch=st.integers(2, 4).map(scale.__mul__),
        length=st.sampled_from([2 * scale, 4 * scale]),
        width=st.sampled_from([4 * scale, 8 * scale]),
        stem=st.sampled_from(["linear", "linear", "embedding", "none"]),
        output=st.sampled_from(["tensor", "tuple", "dict", "loss"]),
        outer=st.sampled_from([False, False, False, True]),
        train=st.sampled_from([*["plain"] * 4, *STEPS]),
    )
