"""Comparison by the table of tolerances. A leaf is compared whole: its largest difference by its largest value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from piper_jax.runtime import reference
from piper_jax.runtime.whole_program import at_64_bits

ROUNDING_STEPS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """Largest difference of a leaf, as a fraction of its largest value.

    Attributes:
      relative: of losses, gradients, optimizer leaves, parameters, and of the change of parameters.
      epsilon: rounding of the parameters' dtype; a change of a parameter cannot be known better than
        ``ROUNDING_STEPS`` times this fraction of the parameter.
    """

    relative: float
    epsilon: float


EPSILONS = {"float64": 2.3e-16, "float32": 1.2e-7, "bfloat16": 1.2e-7}  # bfloat16: parameters in float32
TOLERANCES = {
    name: Tolerance(relative=relative, epsilon=EPSILONS[name]) for name, relative in reference.TOLERANCES.items()
}


def assert_close(found: Any, expected: Any, tolerance: Tolerance, what: str, *, floor: Any = None) -> None:
    """Every leaf of ``found`` is that of ``expected``.

    Args:
      floor: a pytree of absolute differences that are rounding of something else, one for each leaf; none by default.
    """
    left, right = (jax.tree_util.tree_leaves_with_path(t) for t in (found, expected))
    assert [jax.tree_util.keystr(p) for p, _ in left] == [jax.tree_util.keystr(p) for p, _ in right], what
    floors = [0.0] * len(left) if floor is None else jax.tree.leaves(floor)
    faults = []
    for (path, a), (_, b), absolute in zip(left, right, floors, strict=True):
        a, b = (_numbers(v) for v in (a, b))
        assert a.shape == b.shape, f"{what} {jax.tree_util.keystr(path)}: shapes {a.shape} and {b.shape}"
        assert np.isfinite(a).all() == np.isfinite(b).all(), f"{what} {jax.tree_util.keystr(path)}: not finite"
        scale, difference = np.abs(b).max(initial=0.0), np.abs(a - b).max(initial=0.0)
        if not difference <= tolerance.relative * scale + absolute:
            faults.append(f"{what} {jax.tree_util.keystr(path)}: {difference:.2e} of {scale:.2e}")
    assert not faults, "\n".join(faults)


def assert_moved(found: Any, expected: Any, start: Any, tolerance: Tolerance, what: str) -> None:
    """Every leaf moved from ``start`` as far as in ``expected``, up to rounding of the leaf itself."""
    change = [jax.tree.map(lambda b, s: _numbers(b) - _numbers(s), tree, start) for tree in (found, expected)]
    rounding = jax.tree.map(lambda s: ROUNDING_STEPS * tolerance.epsilon * np.abs(_numbers(s)).max(initial=0.0), start)
    assert_close(*change, tolerance, f"{what} (change)", floor=rounding)


def _numbers(value: Any) -> np.ndarray:
    if isinstance(value, jax.Array) and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    return at_64_bits(value)
