"""Documents side by side in sequences: tokens, targets, segments and positions. Imports no JAX."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from piper_jax.data.batches import NO_TARGET, Batch
from piper_jax.data.tokenizer import Tokens


def packed(pieces: Sequence[Tokens], *, batch_size: int, sequence_length: int) -> Batch:
    """Fills sequences with pieces of documents, one piece after the other; what is left empty is padding.

    Args:
      pieces: each ``n + 1`` tokens of one document, ``n >= 1``, which become ``n`` tokens with the next one as the
        target. A piece that does not fit into a row goes on in the next one, as a segment of its own there.

    Returns:
      int32 ``[batch, length]`` each: ``tokens``; ``targets``, ``-1`` where there is none; ``segment_ids``, 1, 2, ...
      in each row, 0 for padding; ``positions`` within the segment, from 0.
    """
    lengths = np.array([len(piece) - 1 for piece in pieces], np.int64)
    filled, shape = int(lengths.sum()), (batch_size, sequence_length)
    tokens, targets = np.zeros(shape, np.int32), np.full(shape, NO_TARGET, np.int32)
    document = np.full(shape, len(pieces), np.int32)
    if filled:
        tokens.flat[:filled] = np.concatenate([piece[:-1] for piece in pieces])
        targets.flat[:filled] = np.concatenate([piece[1:] for piece in pieces])
        document.flat[:filled] = np.repeat(np.arange(len(pieces)), lengths)
    begins = np.ones(shape, np.bool_)
    begins[:, 1:] = document[:, 1:] != document[:, :-1]
    places = np.arange(sequence_length, dtype=np.int32)
    positions = places - np.maximum.accumulate(np.where(begins, places, 0), axis=1)
    segments = np.cumsum(begins, axis=1, dtype=np.int32) * (targets != NO_TARGET)
    return {"tokens": tokens, "targets": targets, "segment_ids": segments, "positions": positions}
