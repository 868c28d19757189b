"""What a batch is, and what gives batches. Imports no JAX."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from piper_jax.config import DataSection
from piper_jax.errors import ConfigError

Batch = dict[str, NDArray[np.int32]]

NO_TARGET = -1
"""In ``targets``: nothing to predict there, so no loss."""


class Batches(Protocol):
    """Endless global batches, which depend on the data, the seed and the state alone, on no number of processes."""

    def __next__(self) -> Batch: ...

    def state(self) -> dict[str, Any]:
        """Where the next batch begins, as plain JSON."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from a state, whatever was drawn before.

        Raises:
          ConfigError: it is the state of other data.
        """
        ...


def batch_names(section: DataSection) -> tuple[str, ...]:
    """The arrays of a batch, each int32 ``[batch, length]``."""
    return ("tokens", "targets") + (("segment_ids", "positions") if section.packing == "documents" else ())


def check_identity(state: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    """Raises a ConfigError where a saved state belongs to other data than ``identity``."""
    wrong = [
        f"{key}: {state.get(key)!r} then, {value!r} now" for key, value in identity.items() if state.get(key) != value
    ]
    if wrong:
        raise ConfigError(
            "data: the run was saved with other data, so its position means nothing here.",
            detail=wrong,
            help="give the same files, tokenizer and seed, or begin in another folder.",
        )


def num_targets(batch: Batch) -> int:
    """How many tokens of a batch are predicted."""
    return int((batch["targets"] != NO_TARGET).sum())
