"""The user's loss function: where it is written, how it is called, and what it may return."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from piper_jax.errors import TraceError
from piper_jax.planning.history import at_line
from piper_jax.tracing.annotations import NUMBERS
from piper_jax.tracing.model_state import ModelState


def place_of(loss_fn: Callable[..., Any]) -> str:
    """``loss_fn at train.py:12``, of the function under ``functools.partial``, ``jax.jit`` and the like."""
    return at_line(*_written(loss_fn))


def _written(loss_fn: Callable[..., Any]) -> tuple[str, str]:
    """Name, and ``file.py:line`` or "" where it has no source."""
    function: Any = loss_fn
    while inner := getattr(function, "func" if isinstance(function, functools.partial) else "__wrapped__", None):
        function = inner
    called = function if hasattr(function, "__code__") else inspect.unwrap(type(function).__call__)
    code = getattr(called, "__code__", None)
    line = f"{Path(code.co_filename).name}:{code.co_firstlineno}" if code is not None else ""
    return getattr(function, "__name__", type(function).__name__), line


def wants_key(loss_fn: Callable[..., Any]) -> bool:
    """Whether the loss function takes a third argument, the random key of the slice."""
    try:
        parameters = list(inspect.signature(loss_fn).parameters.values())
    except (TypeError, ValueError):
        return False
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len([p for p in positional if p.default is p.empty]) >= 3 or (
        len(positional) >= 3 and positional[2].name in ("rng", "key", "rngs")
    )


def require_loss(loss_fn: Callable[..., Any]) -> None:
    """Raises TraceError for a function that does not take parameters and a batch."""
    try:
        signature = inspect.signature(loss_fn)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*[None] * (3 if wants_key(loss_fn) else 2))
    except TypeError:
        name, line = _written(loss_fn)
        raise TraceError(
            f"trace: {at_line(f'{name}{signature}', line)} does not take (params, batch) or (params, batch, rng).",
            help="give further arguments defaults, or bind them with functools.partial.",
        ) from None


def call_loss(loss_fn: Callable[..., Any], state: ModelState, values: Sequence[Any], batch: Any, key: Any) -> Any:
    """The loss function on one slice: its key is folded into the model's own random streams too.

    Returns:
      ``(result of loss_fn, the parameters or the module that it was given)``.
    """
    values = list(values)
    for i in state.rng_keys:
        fold = jax.random.fold_in
        for _ in values[i].shape:
            fold = jax.vmap(fold, (0, None))
        values[i] = fold(values[i], jax.random.bits(key))
    built = state.build(values)
    return loss_fn(built, batch, key) if wants_key(loss_fn) else loss_fn(built, batch), built


def require_scalar(place: str, name: str, value: Any) -> None:
    """Raises TraceError if a part of what the loss function at ``place`` returned is no scalar that can be a loss."""
    what = "loss" if name == "loss" else f"WeightedLoss.{name}"
    if not isinstance(value, NUMBERS):
        forgotten = "; is a return missing?" if value is None else "."
        raise TraceError(
            f"trace: {place} returned a {type(value).__name__} as its {what}{forgotten}",
            help="return loss, (loss, aux) or piper.WeightedLoss(total, weight), with scalar losses.",
        )
    shape, dtype = jnp.shape(value), jnp.result_type(value)
    if shape != () or not jnp.issubdtype(dtype, jnp.floating):
        raise TraceError(
            f"trace: the {what} of {place} is {dtype}{list(shape)}, not a floating-point scalar.",
            help="reduce it, for example with .mean(), or return (loss, aux) with a scalar loss.",
        )


def require_output(place: str, path: str, value: Any) -> None:
    """Raises TraceError if an auxiliary output of the loss function at ``place`` is no array."""
    if not isinstance(value, (jax.Array, np.ndarray, np.generic, int, float, complex)):
        raise TraceError(
            f"trace: the auxiliary output {path or 'aux'} of {place} is a {type(value).__name__}, not an array.",
            help="return numbers and arrays only; a plan combines them over microbatches and replicas.",
        )
