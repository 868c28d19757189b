"""One long text, cut into windows of equal length that are shuffled. Imports no JAX."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from piper_jax.data.batches import Batch, check_identity

Text = NDArray[np.int32] | NDArray[np.uint8]


@dataclass(slots=True, kw_only=True)
class ShuffledWindows:
    """Endless batches of the windows of a text: each once an epoch, in another order every time.

    Windows do not overlap; up to ``sequence_length`` tokens at the end of the text are in none. An epoch that does not
    end with a batch goes on in the next one, with the first windows of the next epoch.

    Attributes:
      text: tokens, ``[length]``, more than ``sequence_length``.
      order: position in the run -> number of a window.
      identity: what ``position`` depends on.
      rows: of the batch, that are wanted; others may be zeros. None means all.
      position: windows given so far.
    """

    text: Text
    batch_size: int
    sequence_length: int
    order: Callable[[int], int]
    identity: Mapping[str, Any] = field(default_factory=dict)
    rows: Sequence[int] | None = None
    position: int = 0

    def __next__(self) -> Batch:
        rows = range(self.batch_size) if self.rows is None else self.rows
        chosen = np.array([self.order(self.position + row) for row in rows], np.int64)
        self.position += self.batch_size
        found = windows_at(self.text, chosen * self.sequence_length, self.sequence_length)
        if self.rows is None:
            return found
        batch = {name: np.zeros((self.batch_size, self.sequence_length), np.int32) for name in found}
        for name, values in found.items():
            batch[name][list(rows)] = values
        return batch

    def state(self) -> dict[str, Any]:
        return {**self.identity, "position": self.position}

    def restore(self, state: Mapping[str, Any]) -> None:
        check_identity(state, self.identity)
        self.position = state["position"]


def num_windows(text: Text, sequence_length: int) -> int:
    """How many windows a text has, each with a target after its last token."""
    return (len(text) - 1) // sequence_length


def windows_at(text: Text, starts: NDArray[np.int64], sequence_length: int) -> Batch:
    """The batch of the windows that begin at ``starts``; targets are the tokens one later."""
    rows = text[starts[:, None] + np.arange(sequence_length + 1)].astype(np.int32)
    return {"tokens": rows[:, :-1], "targets": rows[:, 1:]}


def held_out_windows(text: Text, *, num_batches: int, batch_size: int, sequence_length: int) -> list[Batch]:
    """The same batches every time: windows at even distances over the text, which may overlap in a short one."""
    last = len(text) - sequence_length - 1
    starts = np.linspace(0, last, num_batches * batch_size).astype(np.int64)
    return [windows_at(text, part, sequence_length) for part in np.split(starts, num_batches)]
