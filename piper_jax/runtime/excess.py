"""Rows that found no room on the device of their experts: an error, never a drop."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from piper_jax.errors import RuntimeFault, counted
from piper_jax.lowering.context import Context
from piper_jax.lowering.keys import Key
from piper_jax.lowering.token_layouts import UNASSIGNED

IN_FLIGHT = 2


@dataclass(slots=True)
class ExcessRows:
    """Counts of the last runs, looked at once they are there, so that no step waits for the one before it.

    What ran with too little room has NaN for a loss and for all that follows from it.
    """

    pending: deque[tuple[Context, dict[Key, Any]]] = field(default_factory=deque)

    def add(self, context: Context, counts: dict[Key, Any]) -> None:
        """Remembers the counts of a run."""
        if counts:
            self.pending.append((context, counts))

    def check(self, *, wait: bool = False) -> None:
        """Raises for a run that had too little room.

        Args:
          wait: for all runs; otherwise for those that have ended, and those with ``IN_FLIGHT`` after them.

        Raises:
          RuntimeFault: names the operation and a bound that is large enough.
        """
        while self.pending:
            context, found = self.pending[0]
            if not (wait or len(self.pending) > IN_FLIGHT or all(v.is_ready() for v in found.values())):
                return
            self.pending.popleft()
            for key, count in found.items():
                if (most := float(np.asarray(count).max())) > 0:
                    self.pending.clear()
                    raise _no_room(context, key.item[1], round(most))


def is_excess(key: Key) -> bool:
    """Whether a register counts rows without room."""
    return key.kind == "metric" and isinstance(key.item, tuple) and key.item[0] == "excess"


def _no_room(context: Context, op: str, excess: int) -> RuntimeFault:
    if excess > UNASSIGNED:
        return RuntimeFault(
            f"step: {counted(excess - UNASSIGNED, 'row')} of a slice belong to no expert of {op}: its sizes add up to "
            "less than its rows; the loss and the state are NaN.",
            help="let sizes cover all rows (what is left out goes to some expert, with weight 0), and go on from an "
            "earlier state.",
        )
    found = context.dispatch_of(op)
    assert found is not None
    assert found.bound is not None
    needed = found.bound + excess
    enough = -(-1000 * needed * found.num_parts // found.rows) / 1000
    return RuntimeFault(
        f"step: {needed} rows of a slice go to the same device's experts of {op}, which has room for {found.bound}; "
        "the loss and the state are NaN.",
        help=f"use row_bound={enough:g} or more (math.inf: room for all), and go on from an earlier state.",
    )
