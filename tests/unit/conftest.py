"""What tests of models share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def quick_compiles() -> Iterator[None]:
    """Programs that are compiled once and run once: XLA may skip the optimizations that cost compile time."""
    import jax

    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
