"""Values that hold the rows of the batch."""

from __future__ import annotations

from collections.abc import Iterator

from piper_jax.ir.dag import Dag
from piper_jax.ir.nodes import Value


def values_by_row(dag: Dag) -> Iterator[tuple[Value, int]]:
    """Values that have a multiple of the batch's rows, and how many.

    Tensors dispatched to experts are none: their places grow with the batch, by a factor and rounded up.
    """
    dispatched = {
        v for e in dag.data for v in e.values if any(end.EP is not None and end.op in dag.ops for end in (e.src, e.dst))
    }
    for name, value in dag.values.items():
        if value.batch_dim is not None and name not in dispatched:
            yield value, value.shape[value.batch_dim]
