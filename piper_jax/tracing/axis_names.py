"""Flax's partitioning metadata: the names that a model gives to the dimensions of its parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from flax import nnx
from flax.core import meta

_KEYS = ("out_sharding", "sharding_names", "sharding")
"""Where versions of NNX keep the names."""


def is_boxed(value: Any) -> bool:
    """Whether a value is a parameter of Linen in a box with names, as ``nn.with_partitioning`` makes."""
    return isinstance(value, meta.AxisMetadata)


def axis_names(owner: Any) -> tuple[str | None, ...]:
    """A name for each dimension, None where it has none; empty without metadata.

    Args:
      owner: the box of Linen or the ``nnx.Variable`` that an array lies in, or anything else.
    """
    if isinstance(owner, nnx.Variable):
        metadata = owner.get_metadata()
        names = next((metadata[k] for k in _KEYS if metadata.get(k) is not None), None)
        rules = dict(metadata.get("sharding_rules") or ())
        return _texts(names, rules)
    return _texts(getattr(owner, "names", None) if is_boxed(owner) else None, {})


def _texts(names: Any, rules: Mapping[Any, Any]) -> tuple[str | None, ...]:
    """Names of one dimension that is divided over several axes are joined by spaces."""
    if names is None or isinstance(names, str) or not isinstance(names, Iterable):
        return ()
    found = (rules.get(n, n) if isinstance(n, str) else n for n in names)
    return tuple(n if n is None or isinstance(n, str) else " ".join(map(str, n)) for n in found)
