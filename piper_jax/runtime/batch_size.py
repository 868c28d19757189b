"""Whether a batch is one that a plan takes, and how many rows it has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from piper_jax.errors import RuntimeFault
from piper_jax.tracing.batch_layout import BatchLayout


def checked_batch_size(layout: BatchLayout, values: Sequence[Any], call: str) -> int:
    """The rows of a batch of which ``values`` are the leaves; messages name the user's ``call``.

    Raises:
      RuntimeFault: a leaf has another shape or dtype than the traced one, its rows aside.
    """
    if any(isinstance(v, jax.core.Tracer) for v in values):
        raise RuntimeFault(
            f"{call}: called inside a JAX transformation.",
            help=f"train.{call} runs programs on many devices; call it from Python, without jax.jit or grad.",
        )
    if flat := [p for p, v, s in zip(layout.paths, values, layout.specs, strict=True) if s.shape and not np.shape(v)]:
        raise RuntimeFault(f"{call}: batch leaf {flat[0]} is a scalar.", help="pass arrays [batch, ...], as traced.")
    size = next(np.shape(v)[0] for v, s in zip(values, layout.specs, strict=True) if s.shape)
    for path, value, known, expected in zip(layout.paths, values, layout.specs, layout.specs_at(size), strict=True):
        dtype = jax.dtypes.canonicalize_dtype(getattr(value, "dtype", np.asarray(value).dtype))
        if np.shape(value) != expected.shape or dtype != known.dtype:
            raise RuntimeFault(
                f"{call}: batch leaf {path} is {dtype}{list(np.shape(value))}, "
                f"but {known.dtype}{list(expected.shape)} is expected.",
                help="only dimension 0 may differ from the traced batch; cast, or trace again.",
            )
    return size
