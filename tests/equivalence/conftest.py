"""Programs here are compiled once and run a few times: XLA may skip the optimizations that cost compile time."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True, scope="module")
def quick_compiles(request: pytest.FixtureRequest) -> Iterator[None]:
    """Modules with ``OPTIMIZED = True`` look at the compiled text, so they compile as a user would."""
    jax.config.update("jax_disable_most_optimizations", not getattr(request.module, "OPTIMIZED", False))
    yield
    jax.config.update("jax_disable_most_optimizations", False)
