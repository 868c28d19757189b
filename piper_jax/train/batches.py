"""Batches of byte sequences, as iterators with a position. Imports no JAX."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from piper_jax.train.corpus import Bytes

Batch = dict[str, NDArray[np.int32]]


class Batches(Protocol):
    """What the training loop draws from.

    Attributes:
      position: the number of batches drawn. Setting it continues from there, whatever was drawn before.
    """

    position: int

    def __iter__(self) -> Iterator[Batch]: ...

    def __next__(self) -> Batch: ...


@dataclass(slots=True, kw_only=True)
class RandomWindows:
    """Endless batches of windows at random places; batch ``position`` depends on the seed and the position alone.

    Attributes:
      text: uint8 ``[bytes]``, longer than ``sequence_length``.
      batch_size, sequence_length: of a batch ``{"tokens", "targets"}``, each int32 ``[batch, length]``; the targets
        are the tokens one byte later.
    """

    text: Bytes
    batch_size: int
    sequence_length: int
    seed: int
    position: int = 0

    def __iter__(self) -> RandomWindows:
        return self

    def __next__(self) -> Batch:
        random = np.random.Generator(np.random.Philox(key=[self.seed, self.position]))
        starts = random.integers(0, len(self.text) - self.sequence_length, self.batch_size)
        self.position += 1
        return windows(self.text, starts, self.sequence_length)


def windows(text: Bytes, starts: NDArray[np.int64], sequence_length: int) -> Batch:
    """The batch of the windows that begin at ``starts``."""
    rows = text[starts[:, None] + np.arange(sequence_length + 1)].astype(np.int32)
    return {"tokens": rows[:, :-1], "targets": rows[:, 1:]}


def held_out_batches(text: Bytes, *, num_batches: int, batch_size: int, sequence_length: int) -> list[Batch]:
    """The same batches every time: windows at even distances over the text, which may overlap in a short one."""
    last = len(text) - sequence_length - 1
    starts = np.linspace(0, last, num_batches * batch_size).astype(np.int64)
    return [windows(text, part, sequence_length) for part in np.split(starts, num_batches)]
