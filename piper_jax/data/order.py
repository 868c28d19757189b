"""The order of records: a permutation for each epoch, by seed and epoch alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

ROUNDS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ShuffledEpochs:
    """Position in an endless run over all records -> number of a record.

    Positions ``[e * size, (e + 1) * size)`` are epoch ``e``, in which every record comes once. Any position is found
    without those before it, by grain's index shuffle (a cipher on ``[0, size)``), so nothing is stored.

    Attributes:
      size: how many records there are, from 1.
    """

    size: int
    seed: int

    def __call__(self, position: int) -> int:
        from grain.experimental import index_shuffle

        epoch, index = divmod(position, self.size)
        return index_shuffle(index, max_index=self.size - 1, seed=_seed_of_epoch(self.seed, epoch), rounds=ROUNDS)


@lru_cache(maxsize=16)
def _seed_of_epoch(seed: int, epoch: int) -> int:
    return int(np.random.SeedSequence([seed, epoch]).generate_state(1)[0])
