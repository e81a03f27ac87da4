"""A profile for a batch that did not fit while it was taken, from two that did: no torch, nothing runs."""

from __future__ import annotations

from budgetopt._batch import at_batch
from budgetopt._schema import LayerRecord, Profile, RegionRecord

Shapes = list[tuple[int, ...]]


def scaled(profile: Profile, small_shapes: Shapes, batch: int, sample_bytes: int) -> Profile:
    """The profile as it would be at `batch`; it says from which sizes.

    Args:
        profile: taken at two batch sizes. small_shapes: of its regions' first tensors at the smaller one.
        sample_bytes: of the sample of `batch`.

    Raises:
        BudgetOptError: the profile knows one size only.
    """
    found = at_batch(profile, batch)
    assert profile.smaller is not None
    small, big = profile.smaller.batch, profile.batch
    regions = tuple(
        _region(record, shape, (batch - big) / (big - small))
        for record, shape in zip(profile.regions, small_shapes, strict=True)
    )
    return found.model_copy(
        update={
            "batch": batch,
            "scaled_from": (small, big),
            "fixed": found.fixed.model_copy(update={"sample": sample_bytes}),
            "regions": regions,
            "layers": tuple(_layer(layer, batch / big) for layer in profile.layers),
        }
    )


def _region(record: RegionRecord, small: tuple[int, ...], steps: float) -> RegionRecord:
    """With the shape of its first tensor carried on by `steps` times the difference of the two sizes."""
    if len(small) != len(record.shape):
        return record
    shape = tuple(more + round((more - less) * steps) for less, more in zip(small, record.shape, strict=True))
    return record.model_copy(update={"shape": shape})


def _layer(layer: LayerRecord, ratio: float) -> LayerRecord:
    return layer.model_copy(
        update={
            "activation_bytes": round(layer.activation_bytes * ratio),
            "forward_ns": round(layer.forward_ns * ratio),
        }
    )
